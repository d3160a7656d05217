"""Fit a few constants to published RL steps and predict the steps that were left out.

What predicts is the product itself: `Estimator` (or `simulate`) on the costs of a row's spec and setting. Six numbers
are free: how much slower decoding is than its formula for dense and mixture-of-experts models, the trainer's MFU for
both, and the overhead of an optimizer step. A row never takes part in the fit that predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
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

DECODE_LATENCIES = ("layer_s", "allreduce_s", "a2a_s", "scale_out_s", "step_s")
SERVING_MOE_FACTOR = 1.2
"""Mixture-of-experts decode over its roofline in serving rows alone."""
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
    """The six free numbers."""

    gen_dense: float = 1.2
    """Seconds of a decode step over the formula's, dense models."""
    gen_moe: float = 1.8
    mfu_dense: float = 0.3
    mfu_moe: float = 0.15
    fixed_s: float = 2.0
    """Per optimizer step."""
    fixed_s_per_gb: float = 0.02
    """Per optimizer step and GB of bf16 weights."""

    def logs(self) -> Floats:
        return np.log([getattr(self, name) for name in NAMES])

    @staticmethod
    def from_logs(logs: Floats) -> StepConstants:
        return StepConstants(**dict(zip(NAMES, np.exp(logs).tolist(), strict=True)))

    def constants(self, base: Constants) -> Constants:
        """`base` with these numbers in place; every fact that moves is graded as fitted."""
        values = {
            "mem_eff": base.mem_eff.value / self.gen_dense,
            "flop_eff": base.flop_eff.value / self.gen_dense,
            "net_eff": base.net_eff.value / self.gen_dense,
            "moe_decode_factor": self.gen_moe / self.gen_dense,
            "mfu_dense": self.mfu_dense,
            "mfu_moe": self.mfu_moe,
            "fixed_s": self.fixed_s,
            "fixed_s_per_gb": self.fixed_s_per_gb,
        } | {name: getattr(base, name).value * self.gen_dense for name in DECODE_LATENCIES}
        return replaced(base, values, "fit to published RL steps", name="published-steps")


PUBLISHED = StepConstants(
    gen_dense=1.582, gen_moe=1.809, mfu_dense=0.428, mfu_moe=0.1013, fixed_s=1.776, fixed_s_per_gb=0.0359
)
"""Fit to all 54 published steps, 2026-11-29. Only where fits start from: a few rounds lead to the same place."""
NAMES = ("gen_dense", "gen_moe", "mfu_dense", "mfu_moe", "fixed_s", "fixed_s_per_gb")


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
    values = {"moe_decode_factor": SERVING_MOE_FACTOR, "mfu_dense": USUAL_MFU, "mfu_moe": USUAL_MFU}
    return replaced(base or builtin(), values | {"fixed_s": 0.0, "fixed_s_per_gb": 0.0}, "usual", name="untuned")


@cache
def _first_book(run: RunTerms) -> CostBook:
    return CostBook(run.spec(), builtin())


def book_of(run: RunTerms, constants: Constants) -> CostBook:
    """Costs of a run. Its lengths, which no constant changes and which take most of the time, are worked out once."""
    book = copy(_first_book(run))
    book.constants = constants
    for name, value in vars(book).items():
        if hasattr(value, "cache_clear"):
            setattr(book, name, cache(getattr(book, f"_{name}")))
    return book


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
    steps = warm_up + max(3, in_flight)  # rollouts that start together end together: a whole round, at least
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
