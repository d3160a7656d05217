"""What to plan for: model, chips, workload, limits. TOML in (`headrace plan SPEC`), or flags, or a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.config.schema import Fraction, Positive, Section

Mode = Literal["sync", "one_step_off", "pipeline"]
HandOffPolicy = Literal["stop", "in_flight", "delta"]
Precision = Literal["bf16", "fp8", "fp4", "fp32"]
Objective = Literal["wall", "usd_per_mtok", "quality"]


class ResponseConfig(Section):
    """Law of response lengths, in tokens, before the cap cuts them."""

    law: Literal["lognormal", "constant", "uniform", "mixture", "file"] = "lognormal"
    """lognormal: prompt and member spread. uniform: 1 to 2 x mean. mixture: short and long component (long_frac,
    long_factor). file: lengths of `path`, one JSON object or number a line (a run folder's rollouts too)."""
    mean_tok: Positive = 2000.0
    """Mean of the law after the cap; the median is solved from it."""
    cap_tok: Annotated[int, Field(ge=1)] = 16384
    """Longest response; what would be longer ends there (sampling.max_new_tok)."""
    sigma: Annotated[float, Field(ge=0.0, le=3.0)] = 1.0
    """Standard deviation of the logarithm of all lengths together (public RL traces: 0.9 to 1.1)."""
    sigma_within: Annotated[float, Field(ge=0.0, le=3.0)] = 0.35
    """The part of it between members of one group; the rest lies between prompts."""
    long_frac: Fraction = 0.0
    """mixture: share of prompts of the long component."""
    long_factor: Annotated[float, Field(ge=1.0)] = 4.0
    """mixture: its median over that of the short one."""
    path: str = ""
    """file: JSONL with a number per line, or objects with `response_tok`, `generated_tok` or `output_length`."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.law == "file" and not self.path:
            raise ValueError("law = 'file' needs path = the JSONL with the lengths")
        if self.law != "file" and self.mean_tok > self.cap_tok:
            raise ValueError(f"mean_tok = {self.mean_tok:g} cannot lie above cap_tok = {self.cap_tok}")
        if self.sigma_within > self.sigma:
            raise ValueError(f"sigma_within = {self.sigma_within:g} is a part of sigma = {self.sigma:g}; lower it")
        return self


class TurnsConfig(Section):
    """Multi-turn episodes: tools and sandboxes between model calls."""

    turns: Annotated[float, Field(ge=1.0)] = 1.0
    """Mean model calls per rollout; above 1 the number is geometric, capped at turns_max."""
    turns_max: Annotated[int, Field(ge=1)] = 64
    """Most model calls."""
    tool_tok: Annotated[float, Field(ge=0.0)] = 0.0
    """Tokens that a tool adds to the context of the next turn, on average."""
    tool_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Mean seconds of a tool call (or of grading, for one turn: see grade_s)."""
    tool_sigma: Annotated[float, Field(ge=0.0)] = 1.0
    """Standard deviation of the logarithm of tool times."""
    start_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds until a rollout's sandbox is ready."""
    grade_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds of grading after the last turn."""
    sandboxes: Annotated[int, Field(ge=0)] = 0
    """Sandboxes at once; 0 = as many as rollouts. Rollouts wait for one before they start."""
    fail_frac: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of rollouts that infrastructure loses (retried, tokens wasted)."""
    keep_kv: bool = True
    """KV entries stay while a tool runs; else the context is prefilled again."""


class DriftConfig(Section):
    """How the workload moves during the run: multipliers at shares of the run, linear between them."""

    preset: Literal["none", "base_zero", "thinking", "agentic", "length_penalised"] = "none"
    """none; base_zero (lengths x4); thinking (x1.3); agentic (GLM-5: lengths x3.8, tool calls 20 -> 51);
    length_penalised (x0.6)."""
    at_frac: tuple[Fraction, ...] = ()
    """Own schedule: ascending shares of the run; overrides the preset."""
    length: tuple[Positive, ...] = ()
    """Multiplier of response lengths at each of them."""
    turns: tuple[Positive, ...] = ()
    """Multiplier of model calls per rollout at each of them; empty = 1."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if list(self.at_frac) != sorted(set(self.at_frac)):
            raise ValueError(f"at_frac = {self.at_frac} must ascend")
        for name in ("length", "turns"):
            given = getattr(self, name)
            if given and len(given) != len(self.at_frac):
                raise ValueError(f"{name} = {given} needs one value for each of at_frac = {self.at_frac}")
        return self


class ClusterConfig(Section):
    """The chips."""

    gpu: str = "h100"
    """Chip name (`headrace plan chips` lists them)."""
    num_gpus: Annotated[int, Field(ge=1)] = 8
    """Chips in all."""
    gpu_generate: str = ""
    """Another chip for generation (a mixed pool): then num_generate of them, and num_gpus are the trainer's."""
    num_generate: Annotated[int, Field(ge=0)] = 0
    """How many of gpu_generate."""
    usd_per_gpu_h: Annotated[float, Field(ge=0.0)] | None = None
    """Price of a chip-hour; unset: the dated table's."""
    mem_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of a generator chip's memory that the engine may use (colocated sync: what the sleeping trainer leaves)."""
    max_seqs: Annotated[int, Field(ge=1)] = 256
    """Most sequences that one engine decodes at once (engine.max_batch)."""


class LimitsConfig(Section):
    """What a plan must keep."""

    max_lag_steps: Annotated[int, Field(ge=0)] = 4
    """Largest lag of a trained token, in optimizer steps; the search tries every smaller one too."""
    lag_p99: Annotated[float, Field(ge=0.0)] = 0.0
    """Largest p99 of the lag; 0 = no limit."""
    usd: Annotated[float, Field(ge=0.0)] = 0.0
    """Budget of the whole run; 0 = no limit."""
    deadline_h: Annotated[float, Field(ge=0.0)] = 0.0
    """Finish within so many hours with probability deadline_p; 0 = no limit."""
    deadline_p: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    """Required probability of the deadline."""


class SearchConfig(Section):
    """What may be chosen. Empty = everything that fits."""

    objective: Objective = "wall"
    """wall: seconds to `steps`. usd_per_mtok: dollars per million trained tokens. quality: wall x staleness penalty."""
    penalty_per_lag: Annotated[float, Field(ge=0.0)] = 0.03
    """quality: further steps needed per step of mean lag, as a share. A guess, and labelled as one."""
    modes: tuple[Mode, ...] = ("sync", "one_step_off", "pipeline")
    """Modes to compare."""
    gen_tp: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Tensor-parallel widths of an engine."""
    train_tp: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Of the trainer."""
    gen_gpus: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Chips that generate."""
    hand_off: tuple[HandOffPolicy, ...] = ()
    """Ways of handing weights over."""
    oversample: tuple[Annotated[float, Field(ge=0.0, le=4.0)], ...] = (0.0,)
    """Extra shares of groups started."""
    update_splits: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """Optimizer steps per batch (the sync period, in optimizer steps)."""
    lend: bool = False
    """Let waiting trainer chips generate (verl's hybrid modes)."""
    simulate_best: Annotated[int, Field(ge=1)] = 8
    """Candidates of the closed forms that are simulated."""
    sim_steps: Annotated[int, Field(ge=2)] = 16
    """Optimizer steps of each simulation."""


class PlanSpec(Section):
    """Everything that a plan depends on."""

    model: str = "qwen3-8b"
    """Name from the table, or a path to a Hugging Face config.json or its folder."""
    precision: Precision = "bf16"
    """Of weights in the engines."""
    train_precision: Literal["bf16", "fp32"] = "bf16"
    """Of the trainer's matrix products."""
    lora: bool = False
    """Train adapters only."""
    steps: Annotated[int, Field(ge=1)] = 200
    """Optimizer steps of the run."""
    batch_groups: Annotated[int, Field(ge=1)] = 64
    """Groups per batch."""
    group_size: Annotated[int, Field(ge=1)] = 16
    """Rollouts per group."""
    prompt_tok: Annotated[int, Field(ge=1)] = 512
    """Mean prompt length."""
    zero_signal_frac: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of groups with equal rewards, which are replaced (SemiAnalysis saw 0.55). 1 = an error."""
    logprob_passes: Annotated[int, Field(ge=0, le=3)] = 0
    """Forward passes of the trainer besides the update (old log-probs, reference)."""
    share_prompts: bool = False
    """The trainer computes the prompt that a group shares once. Headrace's does, most others do not."""
    spec_accept_tok: Annotated[float, Field(ge=1.0)] = 1.0
    """Speculative decoding: accepted tokens per step; 1 = off."""
    spec_draft_frac: Annotated[float, Field(ge=0.0)] = 0.15
    """Speculative decoding: extra time of a step for drafting."""
    prefill_split: Fraction = 0.0
    """Share of generator chips that only prefill (prefill/decode split); 0 = mixed engines."""
    seed: int = 0
    """Of every draw: same seed, same bytes out."""
    calibration: str = ""
    """Name or path of a calibration (`headrace calibrate`); empty: the newest that fits, else the built-in seeds."""
    response: ResponseConfig = ResponseConfig()
    episode: TurnsConfig = TurnsConfig()
    drift: DriftConfig = DriftConfig()
    cluster: ClusterConfig = ClusterConfig()
    limits: LimitsConfig = LimitsConfig()
    search: SearchConfig = SearchConfig()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.zero_signal_frac >= 1.0:
            raise ValueError(
                f"zero_signal_frac = {self.zero_signal_frac:g} filters every group: no batch would ever fill"
            )
        return self

    @property
    def batch_samples(self) -> int:
        """Rollouts per optimizer batch."""
        return self.batch_groups * self.group_size
