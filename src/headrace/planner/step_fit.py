"""Fit a few constants to published RL steps and predict the steps that were left out.

What predicts is the product itself: `Estimator` (or `simulate`) on the costs of a row's spec and setting. Six numbers
are free: how much slower decoding is than in serving for dense and mixture-of-experts models, the rate at which all but
matrix products holds up training of both, and the overhead of an optimizer step. A row never takes part in the fit
that predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headrace.errors import PlanError
from headrace.planner.assemble import CostBook, parts
from headrace.planner.closed import Estimate
from headrace.planner.constants import Constants, builtin
from headrace.planner.estimate import Estimator
from headrace.planner.fixtures_data import RunRow, RunTerms
from headrace.planner.simulate import simulate

Floats = NDArray[np.float64]
StepSeconds = Callable[[RunTerms, Constants], float]

MEASURED_ROLLOUTS = 1536
"""As many, at least, count in a simulated mean."""
NO_OTHER_RATE = 1e21
"""Training held up by nothing but its matrix products."""
USUAL_MFU = 0.40
"""What planners assume that never saw an RL trainer."""
SMALL_LOG = 0.1
"""Errors below it weigh quadratically, larger ones linearly, so that one odd row does not bend the fit."""
RIDGE = 0.05
"""Pull of each logarithm toward the seeds, in rows' worth: decides only what the rows leave open."""
STEP_LOG = 0.05
MOST_LOG = 0.7
"""Longest move of a logarithm in one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstants:
    """The six free numbers, named as in Constants."""

    rollout_factor_dense: float = 1.2
    rollout_factor_moe: float = 1.6
    train_rate_dense: float = 400e12
    train_rate_moe: float = 150e12
    fixed_s: float = 2.0
    fixed_s_per_gb: float = 0.02

    def logs(self) -> Floats:
        return np.log([getattr(self, name) for name in NAMES])

    @staticmethod
    def from_logs(logs: Floats) -> StepConstants:
        return StepConstants(**dict(zip(NAMES, np.exp(logs).tolist(), strict=True)))

    def constants(self, base: Constants) -> Constants:
        """`base` with these numbers in place; every fact that moves is graded as fitted."""
        values = {name: getattr(self, name) for name in NAMES} | {"train_eff": builtin().train_eff.value}
        return replaced(base, values, "fit to published RL steps", name="published-steps")


NAMES = tuple(field.name for field in fields(StepConstants))
PUBLISHED = StepConstants(**{name: getattr(builtin(), name).value for name in NAMES})
"""The built-in ones, which are fitted to all published steps. Only where fits start from."""


def replaced(base: Constants, values: dict[str, float], source: str, *, name: str) -> Constants:
    """`base` with other values; unit stays, source and grade say where they come from."""
    facts = {
        key: getattr(base, key).__class__(
            value=value, unit=getattr(base, key).unit, source=source, date=base.date, grade="fitted"
        )
        for key, value in values.items()
    }
    return base.model_copy(update={"name": name, **facts})


def untuned(base: Constants | None = None) -> Constants:
    """Constants that have seen serving rows but no RL step: the usual MFU, no overhead."""
    values = {"train_eff": USUAL_MFU, "train_rate_dense": NO_OTHER_RATE, "train_rate_moe": NO_OTHER_RATE}
    values |= {"rollout_factor_dense": 1.0, "rollout_factor_moe": 1.0, "fixed_s": 0.0, "fixed_s_per_gb": 0.0}
    return replaced(base or builtin(), values, "usual", name="untuned")


@cache
def _first_book(run: RunTerms) -> CostBook:
    return CostBook(run.spec(), builtin())


def book_of(run: RunTerms, constants: Constants) -> CostBook:
    """Costs of a run; its lengths are worked out once."""
    return _first_book(run).with_constants(constants)


def estimate(run: RunTerms, constants: Constants) -> Estimate:
    """Closed forms of a run. Raises PlanError where it does not fit, with its model and chips."""
    book = book_of(run, constants)
    if book.engine(run.gen_tp).kv_capacity_tok <= run.prompt_tok:
        raise PlanError(
            f"{run.model} in {run.precision} leaves no room for KV entries on an engine of {run.gen_tp} {run.gpu} "
            f"that may use {run.mem_frac:.0%} of memory; take more chips per engine or a narrower number format"
        )
    return Estimator(book).all([run.setting()])[0]


def closed_step_s(run: RunTerms, constants: Constants) -> float:
    """Seconds of a step by the closed forms."""
    return estimate(run, constants).step_s


def simulated_step_s(run: RunTerms, constants: Constants) -> float:
    """Seconds of a step by the simulator: the mean of a few after warm-up (taking turns needs none)."""
    book = book_of(run, constants)
    in_flight = math.ceil(run.setting().max_running / run.samples)
    warm_up = 0 if run.mode == "sync" else 1 + in_flight
    # rollouts that start together end together: a whole round, at least
    steps = warm_up + max(in_flight, math.ceil(MEASURED_ROLLOUTS / run.samples))
    return simulate(parts(book, run.setting()), book.draws(), steps=steps, warm_up=warm_up).step_s_mean


def anchored(rows: Sequence[RunRow], constants: Constants) -> StepSeconds:
    """Closed forms times what the simulator differs by at `constants`, per row: cheap enough to fit with."""
    ratio = {row.run: simulated_step_s(row.run, constants) / closed_step_s(row.run, constants) for row in rows}
    return lambda run, moved: ratio[run] * closed_step_s(run, moved)


def scorable(rows: Sequence[RunRow]) -> list[RunRow]:
    """Rows whose step seconds are published and not excluded."""
    return [row for row in rows if "step_s" in row.scored]


def log_errors(rows: Sequence[RunRow], found: StepConstants, base: Constants, step_s: StepSeconds) -> Floats:
    """ln(predicted / published) of each row."""
    constants = found.constants(base)
    return np.array([math.log(step_s(row.run, constants) / row.published["step_s"]) for row in rows])


def slopes(rows: Sequence[RunRow], logs: Floats, at: Floats, base: Constants, step_s: StepSeconds) -> Floats:
    """(rows, 6) derivative of the log errors `at` by the logarithm of each free number."""
    columns = []
    for i in range(len(NAMES)):
        moved = logs.copy()
        moved[i] += STEP_LOG
        columns.append((log_errors(rows, StepConstants.from_logs(moved), base, step_s) - at) / STEP_LOG)
    return np.stack(columns, axis=1)


def loss(errors: Floats, logs: Floats, seeds: Floats) -> float:
    """Sum of errors, rounded off near zero, and the pull toward the seeds."""
    return float(np.sum(np.sqrt(errors**2 + SMALL_LOG**2)) + 0.5 * RIDGE * np.sum((logs - seeds) ** 2))


def move(errors: Floats, jacobian: Floats, logs: Floats, seeds: Floats) -> Floats:
    """One reweighted Gauss-Newton step."""
    weights = 1.0 / np.sqrt(errors**2 + SMALL_LOG**2)
    normal = (jacobian * weights[:, None]).T @ jacobian + (RIDGE + 1e-3) * np.eye(len(NAMES))
    gradient = (jacobian * weights[:, None]).T @ errors + RIDGE * (logs - seeds)
    return np.clip(-np.linalg.solve(normal, gradient), -MOST_LOG, MOST_LOG)


def fit(
    rows: Sequence[RunRow],
    base: Constants,
    *,
    start: StepConstants | None = None,
    step_s: StepSeconds = closed_step_s,
    rounds: int = 8,
) -> StepConstants:
    """Least absolute log errors of `rows` over the six numbers. Raises PlanError for fewer rows than numbers."""
    if len(rows) < len(NAMES):
        raise PlanError(f"{len(rows)} steps cannot fix {len(NAMES)} constants")
    seeds = StepConstants().logs()
    logs = (start or StepConstants()).logs()
    errors = log_errors(rows, StepConstants.from_logs(logs), base, step_s)
    for _ in range(rounds):
        delta = move(errors, slopes(rows, logs, errors, base, step_s), logs, seeds)
        before = loss(errors, logs, seeds)
        for _ in range(4):
            tried = log_errors(rows, StepConstants.from_logs(logs + delta), base, step_s)
            if loss(tried, logs + delta, seeds) < before:
                break
            delta = delta / 3
        else:
            break
        logs, errors = logs + delta, tried
        if before - loss(errors, logs, seeds) < 1e-3:
            break
    return StepConstants.from_logs(logs)


def left_out_fits(
    rows: Sequence[RunRow],
    base: Constants,
    whole: StepConstants,
    *,
    step_s: StepSeconds = closed_step_s,
    key: Callable[[RunRow], object] = lambda row: row.name,
) -> list[StepConstants]:
    """For each row the fit to all rows with another `key`, from one linearisation at the fit to all.

    Gauss-Newton steps without the row's error and slope: it does not pull on what predicts it.
    """
    seeds, logs = StepConstants().logs(), whole.logs()
    errors = log_errors(rows, whole, base, step_s)
    jacobian = slopes(rows, logs, errors, base, step_s)
    keys = [key(row) for row in rows]
    found = {}
    for name in dict.fromkeys(keys):
        others = np.array([other != name for other in keys])
        here = logs.copy()
        for _ in range(20):
            now = errors[others] + jacobian[others] @ (here - logs)
            here = here + move(now, jacobian[others], here, seeds)
        found[name] = StepConstants.from_logs(np.clip(here, logs - MOST_LOG, logs + MOST_LOG))
    return [found[name] for name in keys]


def held_out_fits(
    rows: Sequence[RunRow],
    base: Constants,
    whole: StepConstants,
    *,
    key: Callable[[RunRow], str],
    step_s: StepSeconds = closed_step_s,
    rounds: int = 3,
) -> list[StepConstants]:
    """For each row the fit to the rows with another `key` (a whole model family held out)."""
    fits = {
        name: fit([r for r in rows if key(r) != name], base, start=whole, step_s=step_s, rounds=rounds)
        for name in sorted({key(row) for row in rows})
    }
    return [fits[key(row)] for row in rows]


def percent_errors(rows: Sequence[RunRow], predicted: Sequence[float]) -> Floats:
    """100 * (predicted / published - 1)."""
    published = np.array([row.published["step_s"] for row in rows])
    return np.asarray(100.0 * (np.asarray(predicted) / published - 1.0), dtype=np.float64)
