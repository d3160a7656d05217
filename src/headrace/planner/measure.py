"""What a run folder says about costs: laws of the engine's steps, the trainer's batches and the hand-off, and lengths.

The engine's steps were measured by the engine itself (ProfileRecord), the trainer's by the loop (StepRecord). The first
steps of a run compile and fill the pipeline; medians and a warm-up keep them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
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
MIN_STEPS = 3
"""A law needs at least so many steps after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """One run's laws. Decode: step_s = base_s + per_request_s * b + per_context_tok_s * S (see cost.DecodeTable)."""

    run: str
    generator_threads: int
    trainer_threads: int
    base_s: float
    per_request_s: float
    per_context_tok_s: float
    prefill_fixed_s: float
    prefill_s_per_tok: float
    train_fixed_s: float
    train_s_per_tok: float
    """Per prompt or response token of the batch's samples."""
    publish_s: float
    transfer_s: float
    """From published to swapped, the pause left out."""
    pause_s: float
    batch_points: tuple[tuple[int, float], ...]
    """(tokens of the batch, seconds of training): several runs are fitted together."""
    prompt_tok: float
    response_tok: float
    response_cap_tok: int
    """Longest response seen."""
    sigma: float
    sigma_within: float
    zero_signal_frac: float
    decode_error_frac: float
    """Mean absolute error of the decode law on its own points."""


def measure_run(folder: Path) -> RunMeasurement:
    """Fit the laws of one finished run. Raises DataError that says what is missing."""
    records = read_log(folder)
    steps = [r for r in records if isinstance(r, StepRecord)][WARM_UP_STEPS:]
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
    base_s, per_request_s, per_context_tok_s, error = _decode_law(profile.decode)
    prefill_fixed_s, prefill_s_per_tok = _line([(float(tok), s) for tok, s in profile.prefill])
    points = tuple((step.batch_tok, step.train_s) for step in steps)
    train_fixed_s, train_s_per_tok = _line([(float(tok), s) for tok, s in points])
    lengths = group_lengths(folder)
    sigma, within = _spread(lengths)
    response_tok = float(np.mean([n for group in lengths for n in group]))
    trained = sum(step.trained_tok for step in steps)
    samples = sum(step.trained_tok / max(1.0, step.response_tok_mean) for step in steps)
    filtered, ended = summary.groups.get("filtered_zero_signal", 0), sum(summary.groups.values())
    return RunMeasurement(
        run=str(folder),
        generator_threads=profile.generator_threads,
        trainer_threads=profile.trainer_threads,
        base_s=base_s,
        per_request_s=per_request_s,
        per_context_tok_s=per_context_tok_s,
        prefill_fixed_s=prefill_fixed_s,
        prefill_s_per_tok=prefill_s_per_tok,
        train_fixed_s=train_fixed_s,
        train_s_per_tok=train_s_per_tok,
        publish_s=median(step.publish_s for step in steps),
        transfer_s=max(0.0, median(step.land_s - step.pause_s for step in steps)),
        pause_s=median(step.pause_s for step in steps),
        batch_points=points,
        prompt_tok=(sum(step.batch_tok for step in steps) - trained) / max(1.0, samples),
        response_tok=response_tok,
        response_cap_tok=max(n for group in lengths for n in group),
        sigma=sigma,
        sigma_within=within,
        zero_signal_frac=filtered / max(1, ended),
        decode_error_frac=error,
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


def fit_batches(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed seconds, seconds per token) of the trainer from the batches of one or several runs."""
    return _line([(float(tok), s) for tok, s in points])


def _decode_law(points: Sequence[tuple[int, int, float, float]]) -> tuple[float, float, float, float]:
    """Non-negative least squares of relative errors on (1, b, S); also the mean absolute relative error."""
    counts = np.array([p[1] for p in points], float)
    columns = np.array([(1.0, p[0], p[2]) for p in points])
    seconds = np.array([p[3] for p in points])
    weights = np.sqrt(counts) / seconds
    law = _non_negative(columns * weights[:, None], seconds * weights)
    error = np.abs(columns @ law / seconds - 1.0)
    return float(law[0]), float(law[1]), float(law[2]), float(np.average(error, weights=counts))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(fixed, slope) >= 0 with least squared relative error, robust to a few outliers: two rounds, the second without
    the worst tenth. (0, 0) without points."""
    kept = [(x, y) for x, y in points if y > 0]
    law = np.zeros(2)
    for keep_frac in (1.0, 0.9):
        if not kept:
            break
        x = np.array([p[0] for p in kept])
        y = np.array([p[1] for p in kept])
        columns = np.stack([np.ones_like(x), x], axis=1)
        law = _non_negative(columns / y[:, None], np.ones_like(y))
        residual = np.abs(columns @ law / y - 1.0)
        order = np.argsort(residual, kind="stable")[: max(2, int(keep_frac * len(kept)))]
        kept = [kept[i] for i in sorted(order.tolist())]
    return float(law[0]), float(law[1])


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
