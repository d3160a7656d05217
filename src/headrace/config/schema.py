"""Every setting of a run: typed, frozen, strict. Importable without torch.

A field's docstring is its documentation (docs/config.md is generated from it). Derived numbers are properties.
Impossible combinations are refused here, before anything starts, with the fix.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

KEEP_VERSIONS = 8
"""Newest versions whose deltas stay although a newer keyframe is there: more than any landing can be behind."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys are errors, field docstrings are descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), validate_default=True
    )


class ModelConfig(Section):
    """Which model is trained, and in which precision."""

    name: str = "smollm2-135m-instruct"
    """A name from `headrace models list`, or the path of a folder in Hugging Face layout."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Compute and serving precision. Master weights and optimizer state are always float32."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where engine and learner compute; auto takes cuda, then mps, then cpu."""
    system_prompt: str | None = None
    """Replaces the chat template's default system message; "" means none. Unset keeps the template's own."""


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: Annotated[int, Field(ge=0)] = 0
    """0 trains all weights."""
    alpha: Positive = 32.0
    """The adapter's update is scaled by alpha / rank."""
    target: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get adapters."""


class EnvConfig(Section):
    """The task: where prompts come from, how episodes go, how they are scored."""

    kind: str = "reasoning_gym"
    """reasoning_gym, jsonl, dataset (a Hugging Face `datasets` folder on disk), arithmetic_game (multi-turn),
    or "module:attr" of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that kind; checked against its own schema (docs/environments.md)."""
    reward: str = ""
    """"module:function" that scores a rollout, or exact, numeric, contains; empty takes the kind's own."""
    max_turns: Annotated[int, Field(ge=1)] = 1
    """Model calls per rollout at most."""
    eval_prompts: Annotated[int, Field(ge=1)] = 200
    """Held-out prompts; never trained on."""
    rollout_deadline_s: Positive = 600.0
    """Wall-clock limit of one rollout, grading excluded; over it the outcome is `timeout`."""
    grade_deadline_s: Positive = 10.0
    """Wall-clock limit of one reward call; over it its worker is killed and the outcome is `timeout`."""
    grade_workers: Annotated[int, Field(ge=1)] = 1
    """Processes that score rollouts."""


class SamplingConfig(Section):
    """The distribution that rollouts are sampled from; one definition for engine and trainer."""

    temperature: Positive = 1.0
    """Logits are divided by it on both sides."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; training needs 1.0 (see allow_truncation)."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps all; training needs 0 (see allow_truncation)."""
    allow_truncation: bool = False
    """Accept top_p < 1 or top_k > 0 in training although every importance ratio is then biased by the kept mass."""
    max_new_tok: Annotated[int, Field(ge=1)] = 48
    """Tokens per model call at most."""
    stop: tuple[str, ...] = ()
    """Stop strings, beside the model's own end tokens."""

    @model_validator(mode="after")
    def _no_silent_truncation(self) -> Self:
        if (self.top_p < 1.0 or self.top_k > 0) and not self.allow_truncation:
            raise ValueError(
                f"top_p = {self.top_p}, top_k = {self.top_k} truncate the distribution: the engine renormalises over "
                "the kept tokens and the trainer does not, so every ratio is biased by the kept mass. "
                "Use top_p = 1.0 and top_k = 0, or set sampling.allow_truncation = true to accept the bias"
            )
        return self


class FlowConfig(Section):
    """The controller: who may start, what the trainer may take. docs/async.md explains each knob with a timeline."""

    mode: Literal["sync", "one_step_off", "pipeline"] = "pipeline"
    """sync: take turns, lag 0. one_step_off: overlap by one batch, lag <= 1, weights swap between batches.
    pipeline: free-running, lag <= max_lag_steps, weights swap between two decode steps."""
    batch_groups: Annotated[int, Field(ge=1)] = 8
    """B: groups (prompts) per optimizer step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G: rollouts per group. Group-relative advantages need at least 2."""
    max_lag_steps: Annotated[int, Field(ge=0)] | None = None
    """eta: largest lag of any trained token in optimizer steps when the batch is taken. Unset: 0 in sync,
    1 in one_step_off, 2 in pipeline."""
    on_bound: Literal["hold", "drop", "carry"] = "hold"
    """When the bound would break: hold = the trainer waits; drop = cancel, count, refill;
    carry = go on, mask the tokens that are too old."""
    max_running: Annotated[int, Field(ge=0)] = 0
    """C: rollouts running at once; 0 = as many as the slots allow."""
    oversample: Annotated[float, Field(ge=0.0, le=4.0)] = 0.0
    """Extra share of groups started; the surplus is cancelled and counted as waste."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a rollout that failed through no fault of the policy is tried again."""
    min_group: Annotated[int, Field(ge=2)] | None = None
    """A group trains with at least this many scored members; unset: max(2, group_size / 2)."""
    zero_signal: Literal["refill", "keep", "stop_after"] = "refill"
    """Groups whose rewards are all equal: refill = replace them, error when the budget is spent; keep = train on
    them; stop_after = replace them until the budget of the batch is spent, then keep."""
    signal_eps: Annotated[float, Field(ge=0.0)] = 1e-6
    """Standard deviation of rewards at or below which a group counts as zero-signal."""
    refill_budget: Annotated[int, Field(ge=1)] | None = None
    """Zero-signal groups per batch before refill gives up; unset: 16 x batch_groups."""

    @property
    def lag_bound(self) -> int:
        """eta, with the mode's default filled in."""
        if self.max_lag_steps is not None:
            return self.max_lag_steps
        return {"sync": 0, "one_step_off": 1, "pipeline": 2}[self.mode]

    @property
    def in_flight(self) -> bool:
        """Weights may swap under running requests."""
        return self.mode == "pipeline"

    @property
    def slots(self) -> int:
        """Groups that may be anywhere between admission and "weights that learned from it have landed"."""
        return math.ceil((self.lag_bound + 1) * self.batch_groups * (1.0 + self.oversample) - 1e-9)

    @property
    def min_scored(self) -> int:
        return self.min_group if self.min_group is not None else max(2, self.group_size // 2)

    @property
    def refill_limit(self) -> int:
        return self.refill_budget if self.refill_budget is not None else 16 * self.batch_groups

    @model_validator(mode="after")
    def _possible(self) -> Self:
        eta = self.lag_bound
        if self.mode == "sync" and eta != 0:
            raise ValueError(
                f"max_lag_steps = {eta} contradicts mode = 'sync' (lag 0); unset it or use mode = 'pipeline'"
            )
        if self.mode == "one_step_off" and eta != 1:
            raise ValueError(f"max_lag_steps = {eta} contradicts mode = 'one_step_off' (lag 1); use mode = 'pipeline'")
        if self.mode == "pipeline" and eta == 0:
            raise ValueError("max_lag_steps = 0 leaves nothing to overlap in mode = 'pipeline'; use mode = 'sync'")
        if self.min_scored > self.group_size:
            raise ValueError(f"min_group = {self.min_scored} is larger than group_size = {self.group_size}")
        if self.max_running and self.max_running < self.group_size:
            raise ValueError(
                f"max_running = {self.max_running} is smaller than group_size = {self.group_size}: members of a group "
                "start together, so nothing could ever start; raise max_running or set 0"
            )
        return self


class CurriculumConfig(Section):
    """Which prompt next."""

    kind: Literal["uniform", "band"] = "uniform"
    """uniform: shuffled epochs. band: prefer pass rates p where p(1-p) is large."""
    explore: Fraction = 0.1
    """Share of picks in `band` that ignore the estimates."""
    retire_at: Annotated[float, Field(gt=0.5, le=1.0)] = 0.95
    """Prompts whose estimated pass rate reaches this are set aside in `band`."""
    revisit_steps: Annotated[int, Field(ge=1)] = 50
    """Retired prompts come back after this many optimizer steps."""


class EngineConfig(Section):
    """The generator."""

    kind: str = "native"
    """native, scripted, or "module:attr" of an engine core factory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a scripted or own engine."""
    max_batch: Annotated[int, Field(ge=1)] = 64
    """Requests decoded together; more wait in the engine's queue."""
    max_context_tok: Annotated[int, Field(ge=16)] = 1024
    """Prompt plus completion of one request at most; bounds the KV memory."""
    kv_on_swap: Literal["keep", "recompute", "flush"] = "keep"
    """KV entries of running requests when weights swap: keep them, recompute them under the new weights,
    or flush = recompute and also forget shared prefixes. Prefixes are never shared across versions."""
    deterministic: bool = False
    """Fixed batch shapes, so that a request's tokens do not depend on what else runs. Slower."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads; 0 = all cores in sync mode, half of them otherwise."""


class OptimConfig(Section):
    """Optimizer, schedule, clipping."""

    lr: Positive = 1e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    eps: Positive = 1e-8
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine end at min_lr_frac x lr at the last step."""
    min_lr_frac: Fraction = 0.0
    """Where linear and cosine end."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Global gradient norm is clipped to it; 0 turns clipping off."""


class LossConfig(Section):
    """Loss, advantage and correction: which pure functions of `trainer` are composed."""

    kind: str = "pg"
    """pg (policy gradient with truncated IS), ppo, cispo, gspo, decoupled_ppo, or "module:attr" of your own."""
    advantage: Literal["dr_grpo", "grpo", "leave_one_out", "batch_norm"] = "dr_grpo"
    """dr_grpo: reward - mean. grpo: also divided by the deviation. leave_one_out: reward - mean of the others.
    batch_norm: reward - group mean, divided by the deviation over the batch."""
    aggregate: Literal["token_mean", "sequence_mean", "prompt_mean"] = "token_mean"
    """token_mean: all tokens weigh the same; sequence_mean: all samples; prompt_mean: all groups."""
    clip_low: Annotated[float, Field(gt=0.0)] = 0.2
    """Lower clip width: ratios below 1 - clip_low (ppo, decoupled_ppo, cispo); gspo wants 3e-4."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    """Upper clip width: ratios above 1 + clip_high; cispo wants about 4, gspo 4e-4."""
    is_cap: Positive = 2.0
    """Cap of the truncated importance weight (pg: current / engine; decoupled_ppo and masks: proximal / engine)."""
    correction: Literal["none", "tis", "mis", "geometric"] = "none"
    """Extra factor from proximal / engine: tis truncates per token at is_cap; mis drops sequences whose product
    leaves [1/is_cap, is_cap]; geometric drops sequences whose geometric mean leaves [1 - geo_width, 1 + geo_width]."""
    geo_width: Positive = 0.01
    """Half width of the geometric mask."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL penalty to the initial model (k2 estimator, a second forward pass)."""
    exact_logp: Literal["off", "sampled", "all"] = "off"
    """Also score tokens with the weights of their own version, rebuilt from the deltas, so that numeric mismatch and
    lag are reported apart (numeric_ratio/*, lag_ratio/*); the loss stays the same. sampled: as many samples of a batch
    as exact_logp_frac allows; all: every one. Takes memory for a second copy of the model and its undo steps."""
    exact_logp_frac: Annotated[float, Field(gt=0.0, le=8.0)] = 0.1
    """Bound on the cost of exact_logp = "sampled": positions that scoring computes, forward only, as a share of those
    of the batch. 0.1 is about 3 % of the training time."""

    @property
    def needs_proximal(self) -> bool:
        """A separate forward pass with the weights at the start of the update is needed."""
        return self.kind in ("ppo", "gspo", "decoupled_ppo") or self.correction != "none"


class TrainerConfig(Section):
    """The learner."""

    kind: str = "torch"
    """torch, scripted, or "module:attr" of a learner factory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a scripted or own learner."""
    micro_batch_tok: Annotated[int, Field(ge=16)] = 4096
    """Token budget of one forward and backward pass; longer samples go alone."""
    head_chunk_tok: Annotated[int, Field(ge=1)] = 1024
    """Rows of logits that exist in float32 at once."""
    share_prompts: bool = True
    """Compute the common prompt of a group once."""
    updates_per_batch: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps that one batch is split into; more than 1 needs a loss with clipping."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads; 0 = all cores in sync mode, the other half otherwise."""


class SyncConfig(Section):
    """How new weights travel from the trainer to the generator."""

    mode: Literal["delta", "full"] = "delta"
    """delta: one base, then only the elements that changed, put in place between two decode steps.
    full: a snapshot of all weights for every version, through a file."""
    store: str = ""
    """Where deltas lie: a folder or any fsspec URL that both roles reach; empty takes a folder of the run folder,
    which goes when the run ends. In a store of your own each run has a folder named by its run id, which stays."""
    keyframe_every: Annotated[int, Field(ge=1)] = 25
    """Versions between two full copies in the store, from which a generator that starts late or again goes on.
    Older versions are deleted with them, so this bounds the store's size too."""
    limit_every: Annotated[int, Field(ge=0)] = 10
    """Versions between two computations of the entropy limit that deltas are compared with, which takes the trainer
    about as long as encoding; 0 = never."""
    verify_every: Annotated[int, Field(ge=1)] = 8
    """Updates between two checks of everything that the generator holds; what an update touches is always checked."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads that encode; 0 = as many as the trainer has."""
    choose: bool = False
    """Deltas take the codec mode and the number of threads, at most `threads`, that should get the next version there
    soonest, by what earlier ones took; otherwise the smallest mode and all threads. For a store behind a fast link. Off
    by default: beside a local store it saves little encoding for far more bytes, and of the generator's side it knows
    only constants."""

    @property
    def deltas(self) -> bool:
        return self.mode == "delta"


class CheckpointConfig(Section):
    """Saving and resuming."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """Save every so many steps, and at the end; 0 = only at the end and on Ctrl-C."""
    keep: Annotated[int, Field(ge=1)] = 1
    """Newest checkpoints kept; an older one goes only after the newer one is complete."""


class EvalConfig(Section):
    """Held-out evaluation inside a run. Greedy, every held-out prompt once, at a pinned version."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Besides before and after training; 0 = only those two."""
    before: bool = True
    """Evaluate the untrained model first."""
    after: bool = True
    """Evaluate at the end."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 = greedy."""


class LaunchConfig(Section):
    """Processes and deadlines."""

    start_deadline_s: Positive = 300.0
    """A role that has not reported ready by then is dumped and the run ends."""
    call_deadline_s: Positive = 600.0
    """Longest wait for a reply of a role."""
    step_deadline_s: Positive = 1800.0
    """Longest wait for a batch; over it the run ends with a dump of who waits for whom."""


class RunConfig(Section):
    """A recipe: everything that a run needs. Same recipe and seed in sync mode give the same run."""

    name: str = "run"
    """Run folders are called runs/NAME-DATE."""
    out: str = "runs"
    """Folder of run folders."""
    seed: int = 0
    """Of prompts, sampling and initialisation."""
    steps: Annotated[int, Field(ge=1)] = 50
    """Optimizer steps."""
    max_train_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Stop after so many seconds of training (evaluation excluded); 0 = no limit."""
    target_accuracy: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Stop when an evaluation inside the run reaches it; 0 = never."""
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    env: EnvConfig = EnvConfig()
    sampling: SamplingConfig = SamplingConfig()
    flow: FlowConfig = FlowConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    engine: EngineConfig = EngineConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    launch: LaunchConfig = LaunchConfig()
    recipe_dir: Path = Path(".")
    """Folder of the recipe file (set by the loader): "module:attr" names and relative paths start there."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.trainer.updates_per_batch > 1 and self.loss.kind in ("pg",):
            raise ValueError(
                f"trainer.updates_per_batch = {self.trainer.updates_per_batch} needs a loss that clips the step: "
                "loss.kind = 'ppo', 'decoupled_ppo', 'cispo' or 'gspo'"
            )
        if self.loss.exact_logp != "off" and not self.sync.deltas:
            raise ValueError(
                f"loss.exact_logp = {self.loss.exact_logp!r} rebuilds old versions from deltas: set sync.mode = 'delta'"
            )
        if self.loss.exact_logp != "off" and self.flow.lag_bound >= KEEP_VERSIONS:
            raise ValueError(
                f"loss.exact_logp = {self.loss.exact_logp!r} can rebuild the newest {KEEP_VERSIONS} versions, "
                f"flow.max_lag_steps = {self.flow.lag_bound} must be below that; set loss.exact_logp = 'off'"
            )
        if self.trainer.updates_per_batch > self.flow.batch_groups:
            raise ValueError(
                f"trainer.updates_per_batch = {self.trainer.updates_per_batch} is larger than "
                f"flow.batch_groups = {self.flow.batch_groups}: a group cannot be split"
            )
        if self.sampling.max_new_tok >= self.engine.max_context_tok:
            raise ValueError(
                f"sampling.max_new_tok = {self.sampling.max_new_tok} leaves no room for a prompt in "
                f"engine.max_context_tok = {self.engine.max_context_tok}"
            )
        return self
