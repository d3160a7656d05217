"""A finished run in the numbers of a plan: the other half of predicted against actual."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from headrace.errors import DataError
from headrace.planner.measure import MIN_STEPS, WARM_UP_STEPS
from headrace.planner.outcome import Metrics
from headrace.telemetry.log import read_log
from headrace.telemetry.records import RunSummary, StepRecord


def metrics_of_run(folder: Path, *, warm_up: int = WARM_UP_STEPS) -> Metrics:
    """What a run did after its first `warm_up` steps. Raises DataError if it has too few steps or no summary."""
    records = read_log(folder)
    every_step = [r for r in records if isinstance(r, StepRecord)]
    summary = next((r for r in reversed(records) if isinstance(r, RunSummary)), None)
    steps = every_step[warm_up:]
    if summary is None:
        raise DataError(f"{folder} has no summary: it is still running or was killed")
    if len(steps) < MIN_STEPS:
        raise DataError(
            f"{folder} has {len(steps)} steps after a warm-up of {warm_up}; at least {MIN_STEPS} are needed"
        )
    step_s = step_times(every_step, warm_up)
    wall_s = sum(step_s)
    samples = sum(step.trained_tok / max(1.0, step.response_tok_mean) for step in steps)
    return Metrics(
        steps=len(steps),
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        trained_tok_per_s=sum(step.trained_tok for step in steps) / wall_s,
        step_s_mean=wall_s / len(step_s),
        step_s_p50=float(np.quantile(step_s, 0.5)),
        step_s_p99=float(np.quantile(step_s, 0.99)),
        step_s=step_s,
        trainer_shares=_shares(steps, step_s),
        generator_shares={name: summary.generator_shares.get(name, 0.0) for name in ("decode", "prefill", "paused")}
        | {"idle": summary.generator_shares.get("blocked", 0.0) + summary.generator_shares.get("idle", 0.0)},
        lag_hist=dict(summary.lag_hist),
        generated_tok=summary.generated_tok,
        trained_tok=summary.trained_tok,
        masked_tok=summary.masked_tok,
        wasted_tok=dict(summary.wasted_tok),
        groups=dict(summary.groups),
    )


def step_times(every_step: Sequence[StepRecord], warm_up: int) -> tuple[float, ...]:
    """Wall seconds of each step after `warm_up` >= 1 of them; evaluations and checkpoints in between count."""
    return tuple(b.time_s - a.time_s for a, b in pairwise(every_step[max(1, warm_up) - 1 :]))


def _shares(steps: Sequence[StepRecord], step_s: Sequence[float]) -> dict[str, float]:
    """The trainer's time over those steps; what is neither waiting nor training is hand-off."""
    wall_s = sum(step_s)
    data_s, bound_s, busy_s = (
        sum(getattr(step, name) for step in steps) for name in ("wait_data_s", "wait_bound_s", "train_s")
    )
    hand_off_s = max(0.0, wall_s - data_s - bound_s - busy_s)
    return {
        "busy": busy_s / wall_s,
        "wait_data": data_s / wall_s,
        "wait_bound": bound_s / wall_s,
        "hand_off": hand_off_s / wall_s,
    }
