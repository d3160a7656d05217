"""What a run folder says about costs: laws of the engine's steps, the trainer's batches and the hand-off, and lengths.

The engine's steps were measured by the engine itself (ProfileRecord), the trainer's by the loop (StepRecord). The first
steps of a run compile and fill the pipeline; medians and a warm-up keep them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.flow.events import MemberEnded
from headrace.flow.stimulus import read_log as read_stimuli
from headrace.telemetry.log import read_log
from headrace.telemetry.records import ProfileRecord, RunSummary, StepRecord

WARM_UP_STEPS = 2
"""Steps of a run that are left out: pipeline fill and compilation."""
DISTINCT = 1.3
"""Largest batch over smallest from which a fixed cost can be fitted."""
MIN_STEPS = 3
"""A law needs at least so many steps after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """What one run showed, not yet fitted: `calibrate` fits several runs together."""

    run: str
    generator_threads: int
    trainer_threads: int
    decode_points: tuple[tuple[int, int, float, float], ...]
    """(running requests, steps, mean sum of contexts in tokens, median seconds of a step)."""
    prefill_points: tuple[tuple[int, float], ...]
    """(prompt tokens, seconds)."""
    batch_points: tuple[tuple[int, float], ...]
    """(tokens of a batch that the trainer computed, seconds of training)."""
    optim_s: float
    """Median seconds of the optimizer's part of a batch; 0 where it was not measured."""
    publish_s: float
    transfer_s: float
    """From published to swapped, the pause left out."""
    pause_s: float
    prompt_tok: float
    response_tok: float
    response_max_tok: int
    sigma: float
    """Standard deviation of the logarithm of response lengths."""
    sigma_within: float
    """The same inside groups."""
    zero_signal_frac: float
    step_s: tuple[float, ...]
    """Wall time of each step after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients of a law, all >= 0, and its mean absolute relative error on the points it was fitted to."""

    coefficients: tuple[float, ...]
    error_frac: float


def measure_run(folder: Path) -> RunMeasurement:
    """Read one finished run. Raises DataError that says what is missing."""
    records = read_log(folder)
    every_step = [r for r in records if isinstance(r, StepRecord)]
    steps = every_step[WARM_UP_STEPS:]
    profile = next((r for r in reversed(records) if isinstance(r, ProfileRecord)), None)
    summary = next((r for r in reversed(records) if isinstance(r, RunSummary)), None)
    if profile is None or summary is None:
        raise DataError(f"{folder} has no engine profile: the run has not finished, or an older version made it")
    if len(steps) < MIN_STEPS:
        raise DataError(
            f"{folder} has {len(steps)} steps after a warm-up of {WARM_UP_STEPS}; a law needs at least {MIN_STEPS}"
        )
    if not profile.decode or not steps[0].batch_tok:
        raise DataError(f"{folder}: its engine did not measure its steps, or its log names no batch tokens")
    lengths = group_lengths(folder)
    sigma, within = _spread(lengths)
    filtered, ended = summary.groups.get("filtered_zero_signal", 0), sum(summary.groups.values())
    return RunMeasurement(
        run=str(folder),
        generator_threads=profile.generator_threads,
        trainer_threads=profile.trainer_threads,
        decode_points=profile.decode,
        prefill_points=profile.prefill,
        batch_points=tuple((step.batch_tok, step.train_s) for step in steps),
        optim_s=median(step.optim_s for step in steps),
        publish_s=median(step.publish_s for step in steps),
        transfer_s=max(0.0, median(step.land_s - step.pause_s for step in steps)),
        pause_s=median(step.pause_s for step in steps),
        prompt_tok=sum(step.prompt_tok_mean for step in steps) / len(steps),
        response_tok=float(np.mean([n for group in lengths for n in group])),
        response_max_tok=max(n for group in lengths for n in group),
        sigma=sigma,
        sigma_within=within,
        zero_signal_frac=filtered / max(1, ended),
        step_s=tuple(b.time_s - a.time_s for a, b in pairwise(every_step[WARM_UP_STEPS - 1 :])),
    )


def group_lengths(folder: Path) -> list[list[int]]:
    """Sampled tokens of every rollout that a run's flow logs name, by group. DataError when there is no log."""
    paths = sorted(folder.glob("stimulus-v*.jsonl"))
    if not paths:
        raise DataError(f"{folder} has no flow log (stimulus-v*.jsonl)")
    groups: dict[str, list[int]] = {}
    for path in paths:
        _, stimuli = read_stimuli(path.read_text(encoding="utf-8").splitlines())
        for stimulus in stimuli:
            event = stimulus.event
            if isinstance(event, MemberEnded) and event.reward is not None:
                groups.setdefault(event.group_id, []).append(max(1, event.generated_tok))
    if not groups:
        raise DataError(f"{folder}: no rollout was scored")
    return list(groups.values())


def fit_decode(points: Sequence[tuple[int, int, float, float]]) -> Fit:
    """step_s = base_s + per_request_s * b + per_context_tok_s * S, weighted by steps (see cost.DecodeTable)."""
    columns = np.array([(1.0, p[0], p[2]) for p in points])
    return _fit(columns, np.array([p[3] for p in points]), np.array([p[1] for p in points], float))


def fit_line(points: Sequence[tuple[int, float]]) -> Fit:
    """seconds = fixed_s + s_per_tok * tok; robust: a second round leaves out the worst tenth."""
    columns = np.array([(1.0, tok) for tok, _ in points], float)
    seconds = np.array([s for _, s in points])
    law = np.array(_fit(columns, seconds, np.ones(len(points))).coefficients)
    kept = np.argsort(np.abs(columns @ law / seconds - 1.0), kind="stable")[: max(2, int(0.9 * len(points)))]
    return _fit(columns[kept], seconds[kept], np.ones(len(kept)))


def fit_batches(points: Sequence[tuple[int, float]], optim_s: float = 0.0) -> Fit:
    """(fixed_s, s_per_tok) of training. Batches of about one size do not tell the two apart: there the optimizer's own
    seconds are the fixed part, and the rest is per token."""
    sizes = [tok for tok, _ in points]
    if max(sizes) >= DISTINCT * min(sizes):
        return fit_line(points)
    slope = max(0.0, median((seconds - optim_s) / tok for tok, seconds in points))
    errors = [abs((optim_s + slope * tok) / seconds - 1.0) for tok, seconds in points]
    return Fit(coefficients=(optim_s, slope), error_frac=sum(errors) / len(errors))


def _fit(columns: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]) -> Fit:
    """Least squared relative error."""
    scale = np.sqrt(weights) / seconds
    law = _non_negative(columns * scale[:, None], seconds * scale)
    error = np.abs(columns @ law / seconds - 1.0)
    return Fit(coefficients=tuple(law.tolist()), error_frac=float(np.average(error, weights=weights)))


def _non_negative(columns: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with coefficients >= 0: the best of all sub-sets of columns (there are at most three)."""
    count = columns.shape[1]
    best, best_error = np.zeros(count), float("inf")
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part, *_ = np.linalg.lstsq(columns[:, chosen], target, rcond=None)
            if (part < 0).any():
                continue
            error = float(((columns[:, chosen] @ part - target) ** 2).sum())
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(count), error
                best[list(chosen)] = part
    return best


def _spread(groups: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Standard deviations of the logarithm of lengths: of all, and inside groups."""
    logs = [np.log(np.array(group, float)) for group in groups]
    everything = np.concatenate(logs)
    centred = np.concatenate([values - values.mean() for values in logs])
    freedom = max(1, len(centred) - len(logs))
    return float(everything.std()), min(float(everything.std()), float(np.sqrt((centred**2).sum() / freedom)))
