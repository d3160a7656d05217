"""What a run reports: one typed record per occasion. Written to metrics.jsonl, shown live, summed up at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BUCKETS = (
    "trained",
    "filtered_zero_signal",
    "dropped_stale",
    "cancelled_oversample",
    "failed_infra",
    "failed_timeout",
    "quarantined",
    "unfinished",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, from asking for the batch to the landing of its weights."""

    kind: str = "step"
    time_s: float
    """Seconds since the run started (this process), at the end of the step."""
    version: int
    """Policy version that this step made."""
    steps: int
    """Steps planned."""
    reward_mean: float
    """Over the trained rollouts."""
    pass_frac: float
    """Share of trained rollouts with reward >= 0.999."""
    response_tok_mean: float
    response_tok_max: int
    lag_mean: float
    """Token-weighted lag of the trained tokens, in steps."""
    lag_max: int
    masked_stale_tok: int
    trained_tok: int
    generated_tok: int
    """Sampled since the previous step record."""
    batch_tok: int = 0
    """Tokens that the trainer computed: responses, and prompts (once for each group where they are shared)."""
    batch_tok2: int = 0
    """Sum of the squares of the samples' lengths (attention's share of the work)."""
    prompt_tok_mean: float = 0.0
    """Over the batch's samples."""
    zero_signal_frac: float
    """Share of groups completed since the previous step that had equal rewards."""
    wait_data_s: float
    """Trainer waited because too few groups were complete."""
    wait_bound_s: float
    """Trainer held although enough groups were complete: an older one was still running."""
    train_s: float
    """Forward, backward and optimizer."""
    optim_s: float = 0.0
    """The optimizer's part of it, which does not depend on the batch."""
    publish_s: float
    land_s: float
    """From published to served by every replica."""
    pause_s: float
    """Decoding stood still for the swap."""
    queue_groups: int
    """Complete groups left waiting after the batch was taken."""
    running_rollouts: int
    production_per_s: float
    """Usable rollouts finished per second, over the sliding window."""
    consumption_per_s: float
    """Rollouts trained per second of busy trainer, over the sliding window."""
    verdict: str
    eta_s: float
    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numerics and loss metrics by their documented names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """What the engine's steps cost, measured in this process of the run. `headrace calibrate` fits laws to it."""

    kind: str = "profile"
    version: int
    generator_threads: int
    trainer_threads: int
    decode: tuple[tuple[int, int, float, float], ...]
    """(running requests, steps, mean sum of contexts in tokens, median seconds of a step)."""
    prefill: tuple[tuple[int, float], ...]
    """(prompt tokens, seconds) of the newest prefills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """Held-out accuracy at a pinned version."""

    kind: str = "eval"
    time_s: float
    version: int
    prompts: int
    """How many were asked: always all held-out prompts."""
    accuracy: float
    """Share of prompts with reward >= 0.999; failures of the infrastructure count as not solved and are listed."""
    reward_mean: float
    outcomes: Mapping[str, int]
    eval_s: float
    response_tok_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The end of a run."""

    kind: str = "summary"
    run_dir: str
    reason: str
    """Why it ended: steps done, time, target reached, interrupted, data ended, failed: ..."""
    steps: int
    version: int
    train_s: float
    total_s: float
    accuracy_before: float | None
    accuracy_after: float | None
    eval_prompts: int
    reward_first: float | None
    reward_last: float | None
    generated_tok: int
    trained_tok: int
    masked_tok: int
    wasted_tok: Mapping[str, int]
    """By reason: the bucket's name, or wasted_restart, retried, late."""
    groups: Mapping[str, int]
    """Admitted prompt attempts by bucket (every bucket, zeros included)."""
    admitted: int
    balanced: bool
    """admitted = sum of the buckets, generated = trained + masked + wasted."""
    lag_hist: Mapping[int, int]
    """Trained tokens by lag."""
    accept_by_length: tuple[float, ...]
    """Share of completed groups that trained, by decile of their mean response length (short to long)."""
    trainer_shares: Mapping[str, float]
    """busy, wait_data, wait_bound, hand_off, idle: shares of training time."""
    generator_shares: Mapping[str, float]
    """decode, prefill, blocked, paused, idle."""
    model_dir: str | None
    """Trained model in Hugging Face layout."""
    resumed_tok: int = 0
    """Part of trained_tok that was trained before the last resume: train_s and rates are of this process."""
    resumed_groups: int = 0
    """The same of groups["trained"]."""
    sync_mode: str = ""
    """delta or full."""
    sync: Mapping[str, float] = field(default_factory=dict)
    """Deliveries of this process, the base excluded: sizes in bytes per version (bytes, full_bytes), ratio = full over
    sent, ratio_to_limit = entropy limit over sent (1 is perfect, 0 not computed), density = changed elements, mean
    seconds per version by part (diff_s encode_s put_s get_s decode_s pause_s apply_s verify_s), counts."""


Record = StepRecord | EvalRecord | ProfileRecord | RunSummary
