"""Closed forms: what a plan does on average, in microseconds. The simulator confirms the best of them.

Letters: B rollouts per optimizer batch, C rollouts at once, q queue capacity in batches, eta the bound on lag,
rho = production / consumption. Arrays go in and out (one entry per candidate) wherever a search screens thousands.
Sources are named at each formula; docs/planner.md derives those that are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from headrace.errors import PlanError
from headrace.planner.cost import EngineCost
from headrace.planner.lengths import LengthLaw
from headrace.planner.normal import Floats

GRID_POINTS = 160
"""Token indices (logarithmic) at which survival is tabulated; 160 keeps integrals within 0.5 % (tests)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the closed forms say about one setting."""

    step_s: float
    """Seconds per batch in steady state."""
    samples_per_s: float
    """Trained rollouts per second."""
    gen_s: float
    """Seconds that generation alone needs for the rollouts of one batch (replacements included)."""
    train_s: float
    """Seconds that the trainer is busy with one batch, publishing included."""
    rho: float
    """Usable production over consumption."""
    trainer_idle_frac: float
    generator_idle_frac: float
    lag_mean: float
    """Steps, token-weighted."""
    usd_per_step: float
    usd_per_mtok: float
    """Dollars per million trained response tokens."""
    slots: int
    """Rollouts that all engines can hold at once: KV and engine.max_batch."""
    binding: str
    """What to widen first; the words of `BINDINGS`."""
    fits: bool = True


BINDINGS = (
    "generation: KV",
    "generation: compute",
    "generation: slots",
    "training",
    "lag bound",
    "tail (sync)",
    "environment",
    "hand-off",
)


# ---- response lengths ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LengthTable:
    """A length law, tabulated: P(L > t) on a logarithmic grid of token indices from 0 to the cap."""

    at_tok: Floats
    """(P,) ascending, first 0, last the cap."""
    survival: Floats
    """(P,) P(L > t)."""
    mean_tok: float
    square_tok2: float
    """E[L^2]."""

    @property
    def resident_tok(self) -> float:
        """Mean tokens behind a running sequence of a stationary engine: E[L^2] / (2 E[L]) (length-biased)."""
        return self.square_tok2 / (2.0 * self.mean_tok)

    @property
    def cap_tok(self) -> float:
        return float(self.at_tok[-1])

    def longest_tok(self, count: float) -> float:
        """Expected longest of `count` (>= 0, may be fractional) independent draws."""
        return token_sum(self.at_tok, alive(self.survival, count))

    def independent(self, longest_tok: float) -> float:
        """How many independent draws have the expected longest `longest_tok`.

        Members of a group resemble each other, so a batch of n rollouts has a shorter tail than n independent ones:
        this is the n to use in formulas for independent draws. At least 1.
        """
        if longest_tok >= self.longest_tok(1e9):
            return 1e9
        return math.exp(solve_ascending(lambda log: self.longest_tok(math.exp(log)), longest_tok, 0.0, math.log(1e9)))


def length_table(law: LengthLaw, points: int = GRID_POINTS) -> LengthTable:
    """Tabulate a law once; everything else reads the table."""
    cap = float(law.cap_tok)
    grid = np.unique(np.concatenate([[0.0], np.geomspace(1.0, cap, points), [max(0.0, cap - 1.0), cap]]))
    survival = law.survival(grid)
    for _ in range(32):  # a law with jumps (a constant, a small file) needs its own points
        coarse = (survival[:-1] - survival[1:] > 0.03) & (np.diff(grid) > 1.0)
        if not coarse.any():
            break
        middle = np.floor((grid[:-1] + grid[1:])[coarse] / 2)
        grid = np.unique(np.concatenate([grid, middle, middle + 1.0]))
        survival = law.survival(grid)
    survival = np.clip(survival, 0.0, 1.0)
    survival[-1] = 0.0
    return LengthTable(grid, survival, float(law.mean_tok), float(law.second_moment()))


def alive(survival: Floats, count: float) -> Floats:
    """P(at least one of `count` independent sequences is longer than t)."""
    with np.errstate(divide="ignore"):
        any_alive: Floats = -np.expm1(count * np.log1p(-survival))
    return any_alive


def token_sum(at_tok: Floats, value: Floats) -> float:
    """Sum of `value` over the token indices 0 to cap - 1, from its grid points (trapezoid rule, first order ends)."""
    return float(np.sum((value[1:] + value[:-1]) * np.diff(at_tok)) + value[0] - value[-1]) / 2


# ---- decode ----------------------------------------------------------------------------------------------------------


class DecodeArrays:
    """A decode table as arrays: step seconds for whole vectors of (running, context)."""

    __slots__ = ("flop_s", "flop_s_per_tok", "index", "mem_s", "mem_s_per_tok", "other_s", "p")

    def __init__(self, engine: EngineCost) -> None:
        table = engine.decode
        self.index = np.arange(len(table.mem_s), dtype=np.float64)
        self.mem_s = np.asarray(table.mem_s)
        self.flop_s = np.asarray(table.flop_s)
        self.other_s = np.asarray(table.other_s)
        self.mem_s_per_tok, self.flop_s_per_tok, self.p = table.mem_s_per_tok, table.flop_s_per_tok, table.p

    def step_s(self, running: ArrayLike, context_tok: ArrayLike) -> Floats:
        """Seconds of a decode step; `running` (>= 1, may be fractional: interpolated), `context_tok` in all."""
        running = np.asarray(running, dtype=np.float64)
        mem_s = np.interp(running, self.index, self.mem_s) + np.asarray(context_tok) * self.mem_s_per_tok
        flop_s = np.interp(running, self.index, self.flop_s) + np.asarray(context_tok) * self.flop_s_per_tok
        high, low = np.maximum(mem_s, flop_s), np.minimum(mem_s, flop_s)
        ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
        step_s: Floats = high * (1.0 + ratio**self.p) ** (1.0 / self.p) + np.interp(running, self.index, self.other_s)
        return step_s

    def compute_bound(self, running: float, context_tok: float) -> bool:
        """Arithmetic takes longer than reading memory."""
        mem_s = float(np.interp(running, self.index, self.mem_s)) + context_tok * self.mem_s_per_tok
        return float(np.interp(running, self.index, self.flop_s)) + context_tok * self.flop_s_per_tok > mem_s


def engine_slots(engine: EngineCost, context_tok: float) -> float:
    """Sequences at once in one engine at a mean resident context: the smaller of the batch limit and KV capacity.

    May be fractional; below 1 the engine cannot hold even one such sequence.
    """
    return min(float(engine.max_running), engine.kv_capacity_tok / max(context_tok, 1.0))


@dataclass(frozen=True, slots=True)
class Steady:
    """Engines in a steady state, one entry per candidate."""

    running: Floats
    """Sequences decoded at once per engine."""
    rollout_s: Floats
    """Seconds on the engine per rollout (decode and its share of prefill), tools not included."""
    rollouts_per_s: Floats
    """One engine's rate."""


def steady(
    engine: EngineCost,
    arrays: DecodeArrays,
    *,
    in_system: Floats,
    slots: ArrayLike,
    tok: float,
    context_tok: float,
    prefill_s: ArrayLike,
    away_s: float,
) -> Steady:
    """Continuous batching with `in_system` rollouts per engine, each in turn decoding and away (tools, grading).

    A rollout of `tok` tokens takes tok/accept decode steps; meanwhile the engine prefills for others, prefill_s a
    rollout, so that its time on the engine is tok/accept * T(b, b*context) + b*prefill_s. b solves
    b * (1 + away/on_engine(b)) = in_system, and is cut at `slots` (the others queue).
    """
    steps = tok / engine.accept_tok

    def on_engine_s(running: Floats) -> Floats:
        seconds: Floats = steps * arrays.step_s(running, running * context_tok) + running * np.asarray(prefill_s)
        return seconds

    most = np.minimum(in_system, slots)
    running = most
    if away_s > 0:
        low, high = np.zeros_like(most), most
        for _ in range(32):
            middle = (low + high) / 2
            short = middle * (1.0 + away_s / on_engine_s(np.maximum(middle, 1.0))) < in_system
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        running = high
    at_least_one = np.maximum(running, 1.0)
    rollout_s = on_engine_s(at_least_one)
    return Steady(running, rollout_s, running / rollout_s)


# ---- a batch, one after the other ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchTime:
    """Generating one batch, nothing else going on."""

    wall_s: float
    tail_s: float
    """Of it: the time while less than a tenth of the sequences still run."""
    running: float
    """Mean sequences per engine over it."""


def batch_time(
    engine: EngineCost,
    arrays: DecodeArrays,
    table: LengthTable,
    *,
    sequences: float,
    independent: float,
    prompt_tok: float,
    prefill_s: float,
    shared_tok: float = 0.0,
    seats: float = math.inf,
    until_frac: float = 1.0,
    group_draws: float = 1.0,
) -> BatchTime:
    """Seconds until all of `sequences` per engine are done: the sum over the token index of T(survivors).

    Applied Compute's sum (talk, 2025), with waves: beyond the engine's slots, sequences wait and enter as others end
    (steady state at the mean resident context), then the last ones drain with the residual law. `independent` = how
    many independent draws the whole batch is worth: while any engine still decodes its last sequence the batch is not
    done. `shared_tok`: KV entries per sequence that siblings share; `seats`: sequences at once at most, whatever the
    engine holds. `until_frac` < 1: the batch ends once that share of its groups is complete (over-sampling), a group
    being worth `group_draws` independent draws.
    """
    peak_tok = float(np.max(table.survival * (prompt_tok + table.at_tok)))
    fit = min(seats, engine_slots(engine, peak_tok - shared_tok))
    drained = _drain(arrays, table.at_tok, table.survival, min(sequences, max(fit, 1.0)), independent, prompt_tok)
    waves_s, running_s = 0.0, 0.0
    if sequences <= fit and until_frac < 1.0:
        done = 1.0 - alive(table.survival, group_draws)
        drained = drained.until(table.at_tok, float(np.interp(until_frac, done, table.at_tok)))
    elif sequences > fit:
        held_tok = prompt_tok + table.resident_tok - shared_tok
        slots = max(1.0, min(sequences, seats, engine_slots(engine, held_tok)))
        full_s = float(arrays.step_s(slots, slots * (prompt_tok + table.resident_tok)))
        started = max(slots, sequences * until_frac)  # the surplus waits behind those that make up the batch
        waves_s = (started - slots) * table.mean_tok / slots * full_s
        draws = independent * slots / sequences
        last = _drain(arrays, table.at_tok, _residual(table), slots, draws, prompt_tok + table.resident_tok / 2)
        if waves_s + last.seconds < drained.seconds:
            waves_s = 0.0  # hardly a second wave: the longest rollout decides
        else:
            drained, running_s = last, waves_s * slots
    seconds = waves_s + drained.seconds
    return BatchTime(
        wall_s=seconds / engine.accept_tok + sequences * prefill_s,
        tail_s=drained.tail_s / engine.accept_tok,
        running=(running_s + drained.sequence_s) / max(seconds, 1e-12),
    )


@dataclass(frozen=True, slots=True)
class _Drained:
    """Sequences that started together and end one by one: sums up to each grid point."""

    upto_s: Floats
    upto_tail_s: Floats
    upto_sequence_s: Floats

    @property
    def seconds(self) -> float:
        return float(self.upto_s[-1])

    @property
    def tail_s(self) -> float:
        return float(self.upto_tail_s[-1])

    @property
    def sequence_s(self) -> float:
        return float(self.upto_sequence_s[-1])

    def until(self, at_tok: Floats, end_tok: float) -> _Drained:
        """Stopped at a token index."""
        cut = (np.minimum(each, np.interp(end_tok, at_tok, each)) for each in self._parts())
        return _Drained(*cut)

    def _parts(self) -> tuple[Floats, Floats, Floats]:
        return self.upto_s, self.upto_tail_s, self.upto_sequence_s


def _drain(
    arrays: DecodeArrays, at_tok: Floats, survival: Floats, sequences: float, independent: float, before_tok: float
) -> _Drained:
    """`sequences` per engine start together, `before_tok` tokens of context each."""
    any_alive = alive(survival, independent)
    running = np.maximum(sequences * survival / np.maximum(any_alive, 1e-12), 1.0)  # given that any runs
    step_s = any_alive * arrays.step_s(running, running * (before_tok + at_tok))
    width = np.diff(at_tok)

    def sums(y: Floats) -> Floats:
        out: Floats = np.concatenate([[0.0], np.cumsum((y[1:] + y[:-1]) / 2 * width)]) + y[0] / 2
        return out

    return _Drained(
        upto_s=sums(step_s),
        upto_tail_s=sums(np.where(survival < 0.1, step_s, 0.0)),
        upto_sequence_s=sums(step_s * np.minimum(running, sequences)),
    )


def _residual(table: LengthTable) -> Floats:
    """P(remaining tokens of a running sequence > t) in a stationary engine: the integral of the survival beyond t."""
    steps = (table.survival[1:] + table.survival[:-1]) / 2 * np.diff(table.at_tok)
    beyond = np.concatenate([np.cumsum(steps[::-1])[::-1], [0.0]])
    residual: Floats = beyond / max(float(beyond[0]), 1e-12)
    return residual


# ---- production, consumption, lag ------------------------------------------------------------------------------------


def keep_frac(zero_signal_frac: float, fail_frac: float = 0.0, drop_frac: float = 0.0) -> float:
    """Share of finished rollouts that train: neither filtered, lost nor dropped."""
    keep = (1.0 - zero_signal_frac) * (1.0 - fail_frac) * (1.0 - drop_frac)
    if keep <= 0.0:
        raise PlanError(
            f"nothing is left to train on: zero-signal share {zero_signal_frac:g}, failed share {fail_frac:g}, "
            f"dropped share {drop_frac:g}; each must be below 1"
        )
    return keep


def trainer_idle_frac(rho: ArrayLike, drop_frac: ArrayLike = 0.0) -> Floats:
    """Share of time without data: 1 - rho * (1 - drop), not below 0 (PLANNER 2.5 c)."""
    return np.maximum(0.0, 1.0 - np.asarray(rho) * (1.0 - np.asarray(drop_frac)))


def generator_idle_frac(rho: ArrayLike) -> Floats:
    """Share of generation time held back when admission is bounded: 1 - 1/rho above 1."""
    return np.maximum(0.0, 1.0 - 1.0 / np.maximum(np.asarray(rho, dtype=np.float64), 1.0))


def little_bound(batch: ArrayLike, lag_steps: ArrayLike, time_in_system_s: ArrayLike) -> Floats:
    """Highest rate per second under bounded admission: (eta + 1) * B / E[time in system] (Little's law)."""
    rate: Floats = (np.asarray(lag_steps) + 1.0) * np.asarray(batch) / np.asarray(time_in_system_s)
    return rate


def tailness(group_longest_tok: float, mean_tok: float) -> float:
    """M = E[longest of a group] / E[length] (Applied Compute, July 2026)."""
    return group_longest_tok / mean_tok


def staleness_drop_oldest(
    running: ArrayLike, batch: ArrayLike, queue: ArrayLike, rho: ArrayLike, m: ArrayLike
) -> Floats:
    """Mean lag of a batch's samples with a queue of `queue` batches that drops its oldest (Applied Compute, July 2026).

    C*M / (B*max(1, rho)) steps while the group is generated, and in the queue rho steps below rho = 1 (the batch
    fills), else (2q + rho - 1) / (2 rho).
    """
    c, b, q, ratio = (np.asarray(value, dtype=np.float64) for value in (running, batch, queue, rho))
    waiting = np.where(ratio < 1.0, ratio, (2.0 * q + ratio - 1.0) / (2.0 * np.maximum(ratio, 1e-12)))
    lag: Floats = c * np.asarray(m) / (b * np.maximum(1.0, ratio)) + waiting
    return lag


def throughput_match(train_gpu_s: float, gen_gpu_s: float, keep: float) -> float:
    """N_train / N_generate at which neither waits: a sample's chip-seconds of training over those of generation."""
    return train_gpu_s / (gen_gpu_s / keep)


def solve_ascending(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """x in [low, high] with function(x) = target, for an ascending function; the nearer end where there is none."""
    for _ in range(44):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


# ---- accounts --------------------------------------------------------------------------------------------------------


def train_mfu(params: float, tok: float, seconds: float, chips: int, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation of training `tok` tokens: 6 FLOPs per active parameter and token, attention left out."""
    return 6.0 * params * tok / (seconds * chips * peak_flops_per_s)
