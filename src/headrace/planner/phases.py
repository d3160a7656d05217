"""A plan under drift is a schedule: the best split along the run, and what a split that never moves costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.errors import PlanError
from headrace.planner.assemble import CostBook
from headrace.planner.constants import Constants
from headrace.planner.drift import drift_factors, drift_points
from headrace.planner.estimate import Estimator
from headrace.planner.evaluate import evaluate
from headrace.planner.search import Found, search
from headrace.planner.setting import Setting
from headrace.planner.spec import PlanSpec

REPLAN_FRAC = 0.05
"""Regret from which moving chips is worth a restart."""
FEW = 4
"""Settings that are simulated at each point of the run after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One point of the run."""

    at_frac: float
    length_factor: float
    turns_factor: float
    best: Setting
    best_step_s: float
    static_step_s: float | None
    """Of the setting that is best at the start; None where it does not run any more."""
    regret_frac: float | None
    """How much slower the static setting is here."""
    replan: bool


def phases(spec: PlanSpec, constants: Constants, start: Found, say: Callable[[str], None]) -> tuple[Phase, ...]:
    """The best setting at every drift point, against the one that is best at the start."""
    static = start.best.setting
    found = []
    lean = spec.model_copy(update={"search": spec.search.model_copy(update={"simulate_best": FEW})})
    for at in drift_points(spec.drift):
        length_factor, turns_factor = drift_factors(spec.drift, at)
        say(f"planning {at:.0%} of the run")
        here = start if at == 0.0 else search(lean, constants=constants, at=at)
        best_s = here.best.metrics.step_s_mean
        static_s = start.best.metrics.step_s_mean if at == 0.0 else _step_s(lean, constants, static, at)
        if static_s is not None and static_s < best_s:  # the search simulates few settings; the old one may win
            best, best_s = static, static_s
        else:
            best = here.best.setting
        regret = None if static_s is None else static_s / best_s - 1.0
        found.append(
            Phase(
                at_frac=at,
                length_factor=length_factor,
                turns_factor=turns_factor,
                best=best,
                best_step_s=best_s,
                static_step_s=static_s,
                regret_frac=regret,
                replan=regret is None or regret > REPLAN_FRAC,
            )
        )
    return tuple(found)


def run_s(steps: int, schedule: Sequence[Phase]) -> tuple[float, float | None]:
    """Seconds of the whole run: with the best setting everywhere, and with the first one kept (None where it cannot run
    to the end). Step times are linear between the points."""
    at = [phase.at_frac for phase in schedule]
    best = steps * _mean_over(at, [phase.best_step_s for phase in schedule])
    static = [phase.static_step_s for phase in schedule]
    known = [s for s in static if s is not None]
    return best, steps * _mean_over(at, known) if len(known) == len(static) else None


def _mean_over(at: Sequence[float], values: Sequence[float]) -> float:
    """Mean from 0 to 1 of a function that is linear between its points and constant outside of them."""
    x, y = [0.0, *at, 1.0], [values[0], *values, values[-1]]
    return sum((b - a) * (u + v) / 2 for (a, b), (u, v) in zip(pairwise(x), pairwise(y), strict=True))


def _step_s(spec: PlanSpec, constants: Constants, setting: Setting, at: float) -> float | None:
    """Simulated step time of `setting` at a point of the run; None if it cannot run there."""
    book = CostBook(spec, constants, at=at)
    estimator = Estimator(book)
    try:
        (estimate,) = estimator.all([setting])
        steps = spec.search.sim_steps
        return evaluate(book, estimator, setting, estimate, book.draws(), steps=steps).metrics.step_s_mean
    except PlanError:
        return None
