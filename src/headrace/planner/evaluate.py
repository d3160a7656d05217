"""One simulated setting with everything that tables show of it: wall time with bands, dollars, what binds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from headrace.planner.assemble import CostBook, parts
from headrace.planner.closed import Estimate
from headrace.planner.constants import Constants
from headrace.planner.cost import EngineCost, HandOffCost, TrainerCost
from headrace.planner.draws import Draws
from headrace.planner.estimate import HAND_OFF_SHARE, Estimator
from headrace.planner.facts import Grade
from headrace.planner.memory import MemoryFit
from headrace.planner.outcome import Metrics
from headrace.planner.setting import Setting
from headrace.planner.sim_trace import Trace
from headrace.planner.simulate import simulate
from headrace.planner.spec import PlanSpec

ERROR_OF_GRADE: dict[Grade, float] = {"measured": 0.08, "fitted": 0.20, "spec": 0.35, "guess": 0.7}
"""Relative error (one standard deviation) of a step's time by the grade of what it rests on. fitted: 20 % of a
leave-one-row-out fit to NeMo RL's table (PLANNER 2.5 b); spec: its untuned error; measured: a run's own laws; guess:
within a factor of two, mostly."""
IDLE = 0.05
"""A trainer that waits less than this is busy."""
FULL = 0.93
"""Generation that needs at least this share of the step is what limits it."""


class Wall(NamedTuple):
    """Seconds of the whole run that are not exceeded with probability 50, 90 and 99 %."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A setting, what the closed forms said, and what the simulation showed."""

    setting: Setting
    estimate: Estimate
    metrics: Metrics
    engine: EngineCost
    trainer: TrainerCost
    hand_off: HandOffCost
    generator_fit: MemoryFit
    trainer_fit: MemoryFit
    usd_per_step: float
    """Of a batch."""
    usd_per_mtok: float
    """Per million trained response tokens."""
    usd: float
    """Of the whole run at its P50."""
    wall_s: Wall
    """To spec.steps batches, whatever the optimizer steps in each."""
    error_frac: float
    """One standard deviation of the whole run's time over its P50: calibration and spread of steps."""
    binding: str
    """closed.BINDINGS."""

    @property
    def samples_per_s(self) -> float:
        return self.metrics.samples_per_s

    def finishes_by(self, seconds: float) -> float:
        """Probability that the run takes at most so long."""
        if seconds <= 0.0:
            return 0.0
        if self.error_frac == 0.0:
            return float(seconds >= self.wall_s.p50)
        return NormalDist().cdf(math.log(seconds / self.wall_s.p50) / self.error_frac)


def evaluate(
    book: CostBook,
    estimator: Estimator,
    setting: Setting,
    estimate: Estimate,
    draws: Draws,
    *,
    steps: int,
    trace: Trace | None = None,
) -> Evaluated:
    """Simulate `steps` batches, a third of them as warm-up. Raises PlanError where a rollout does not fit."""
    spec = book.spec
    warm_up = max(1, min(steps // 3, setting.max_lag_steps + 2)) if steps > 1 else 0
    metrics = simulate(parts(book, setting), draws, steps=steps, warm_up=warm_up, seed=spec.seed, trace=trace)
    usd_per_s = book.usd_per_s(setting)
    step_s = metrics.step_s_mean
    error = relative_error(calibration_error(book), metrics.step_s, spec.steps)
    p50 = step_s * spec.steps
    high, higher = (p50 * math.exp(NormalDist().inv_cdf(q) * error) for q in (0.9, 0.99))
    tok_per_s = metrics.trained_tok_per_s
    return Evaluated(
        setting=setting,
        estimate=estimate,
        metrics=metrics,
        engine=book.engine(setting.gen_tp),
        trainer=book.trainer_of(setting),
        hand_off=book.hand_off_of(setting),
        generator_fit=book.generator_fit(setting.gen_tp),
        trainer_fit=book.trainer_fit(setting),
        usd_per_step=usd_per_s * step_s,
        usd_per_mtok=usd_per_s / tok_per_s * 1e6 if tok_per_s > 0 else 0.0,
        usd=usd_per_s * p50,
        wall_s=Wall(p50, high, higher),
        error_frac=error,
        binding=binding_of(estimator, setting, estimate, metrics),
    )


def evaluate_setting(
    spec: PlanSpec, setting: Setting, constants: Constants, *, steps: int, trace: Trace | None = None
) -> Evaluated:
    """One setting of `spec` by itself. Raises PlanError where the spec or the setting cannot work."""
    book = CostBook(spec, constants)
    estimator = Estimator(book)
    (estimate,) = estimator.all([setting])
    return evaluate(book, estimator, setting, estimate, book.draws(), steps=steps, trace=trace)


def calibration_error(book: CostBook) -> float:
    """Relative error of a step's time from the weakest grade of decode and training."""
    basis = book.basis()
    return max(ERROR_OF_GRADE[basis[term].grade] for term in ("decode", "training"))


def relative_error(calibration: float, step_s: tuple[float, ...], batches: int) -> float:
    """Of the run's time: calibration, and the spread of steps in the run's own sum and in the simulated mean.

    The sum of n steps is about normal; its relative spread is cv / sqrt(n), that of the mean of k simulated ones
    cv / sqrt(k). Steps count as independent.
    """
    if len(step_s) < 2:
        return calibration
    cv = stdev(step_s) / fmean(step_s)
    return math.sqrt(calibration**2 + cv**2 * (1.0 / batches + 1.0 / len(step_s)))


def binding_of(estimator: Estimator, setting: Setting, estimate: Estimate, metrics: Metrics) -> str:
    """What the simulation was bound by. Modes that take turns keep the closed form's word: it knows the parts."""
    if setting.mode != "pipeline":
        return estimate.binding
    if metrics.trainer_idle_frac < IDLE:
        publishing = metrics.trainer_shares.get("hand_off", 0.0)
        return "hand-off" if publishing > HAND_OFF_SHARE else "training"
    if estimate.gen_s < FULL * metrics.step_s_mean:
        return "lag bound"
    if metrics.generator_shares.get("paused", 0.0) > HAND_OFF_SHARE:
        return "hand-off"
    engines = estimator.decoders(setting)
    away = metrics.tool_mean / max(metrics.tool_mean + metrics.running_mean, 1e-12)
    return estimator.generation_words(setting.gen_tp, engines, metrics.running_mean / engines, away)
