"""Which split, which widths, which mode: enumerate, screen with closed forms, simulate the best, rank.

candidates   thousands of settings that are possible           counted: why others are not
estimates    closed forms, about 20 us each                    estimate.py
front        what nothing else beats in time, lag and dollars
simulated    the best few, all on the same rollouts            evaluate.py
ranked       by the objective, within the limits
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import PlanError
from headrace.planner.assemble import CostBook
from headrace.planner.closed import Estimate
from headrace.planner.constants import Constants
from headrace.planner.estimate import Estimator
from headrace.planner.evaluate import Evaluated, evaluate
from headrace.planner.memory import generator_widths
from headrace.planner.recipe import CPU
from headrace.planner.setting import Setting
from headrace.planner.spec import HandOffPolicy, Mode, PlanSpec

GEN_TP = (1, 2, 4, 8, 16, 32)
SEAT_SHARES = (1.0, 0.7, 0.45, 0.25)
"""Of the rollouts that keep every slot busy: fewer at once means lower lag."""
SIM_SEQUENCES = 80_000
"""Rollouts of one search's simulations, in all: about a second."""
MIN_SIM_STEPS = 4
FEW = 3
LONG_PROMPT = 4.0
"""Prompts and tool outputs of a few thousand draws stay below so many means."""
NEAR = 1.15
"""Estimates may miss a limit by so much and are still simulated."""

Screened = tuple[Setting, Estimate]
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, of how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search."""

    ranked: tuple[Evaluated, ...]
    """Simulated settings within all limits, best first."""
    best_sync: Evaluated | None
    """The fastest synchronous setting, for comparison; None where sync does not fit."""
    front: tuple[Screened, ...]
    """Estimates that nothing beats in step time, lag and dollars at once, fastest first."""
    estimates: tuple[Screened, ...]
    """Every setting that was estimated, in the order of the search."""
    pruned: Mapping[str, int]
    """Possible and impossible settings that were left out, by reason."""

    @property
    def best(self) -> Evaluated:
        return self.ranked[0]

    @property
    def speedup(self) -> float:
        """Best over best synchronous, in samples per second; 1 where there is nothing to compare with."""
        return self.best.samples_per_s / self.best_sync.samples_per_s if self.best_sync else 1.0


def search(
    spec: PlanSpec, *, constants: Constants | None = None, at: float = 0.0, progress: Progress | None = None
) -> Found:
    """The best settings for `spec` at a share `at` of the run (drift).

    Raises PlanError when nothing fits, or when everything that fits breaks a limit; it names what would do.
    """
    book = CostBook(spec, constants, at=at)
    estimator = Estimator(book)
    pruned: Counter[str] = Counter()
    settings = candidates(estimator, pruned)
    if not settings:
        raise _nothing_fits(book, pruned)
    screened = screen(estimator, settings)
    allowed = _within(book, screened, pruned)
    front = pareto_front(allowed)
    pruned["dominated"] += len(allowed) - len(front)
    sync = _best_sync(estimator, screened)
    chosen = _choose(book, front, allowed)
    ranked, sync_run = _simulate(book, estimator, chosen, sync, pruned, progress)
    kept = [each for each in ranked if not _breaks(spec, each)]
    pruned["limits, simulated"] += len(ranked) - len(kept)
    if not kept:
        raise _all_break(spec, ranked)
    return Found(
        ranked=tuple(kept),
        best_sync=sync_run,
        front=tuple(front),
        estimates=tuple(screened),
        pruned={reason: count for reason, count in sorted(pruned.items()) if count},
    )


def screen(estimator: Estimator, settings: Sequence[Setting]) -> list[Screened]:
    """Settings with their closed-form estimates, in the order given."""
    return list(zip(settings, estimator.all(settings), strict=True))


# ---- what is possible ------------------------------------------------------------------------------------------------


def candidates(estimator: Estimator, pruned: Counter[str] | None = None) -> list[Setting]:
    """Every possible setting of the spec, modes in its order. `pruned` counts what is impossible, by reason.

    Raises PlanError for a spec that no setting could satisfy.
    """
    book, pruned = estimator.book, Counter() if pruned is None else pruned
    spec = book.spec
    _check(spec)
    found: dict[Setting, None] = {}
    for mode in spec.search.modes:
        for total in _totals(book):
            found.update(dict.fromkeys(_of_mode(estimator, mode, total, pruned)))
    return list(found)


def _check(spec: PlanSpec) -> None:
    if spec.group_size < 2:
        raise PlanError(f"group_size = {spec.group_size}: advantages inside a group need at least 2 members")
    if not spec.search.modes:
        raise PlanError("search.modes is empty; give at least one of sync, one_step_off, pipeline")
    total = spec.cluster.num_gpus
    for gen_gpus in spec.search.gen_gpus:
        if gen_gpus > total and not spec.cluster.num_generate:
            raise PlanError(f"search.gen_gpus = {gen_gpus} is more than cluster.num_gpus = {total}")
    if spec.limits.max_lag_steps < 1 and "sync" not in spec.search.modes:
        raise PlanError(
            f"limits.max_lag_steps = 0 allows mode 'sync' only, and search.modes = {list(spec.search.modes)}; "
            "raise max_lag_steps to 1 or add 'sync'"
        )


def _totals(book: CostBook) -> Iterator[int]:
    """Chips to use: all; where dollars count, also a half and a quarter of them."""
    total, spec = book.spec.cluster.num_gpus, book.spec
    yield total
    if spec.search.objective == "usd_per_mtok" or spec.limits.usd:
        for part in (2, 4):
            if not book.mixed and total % part == 0 and total // part >= 1:
                yield total // part


def _of_mode(estimator: Estimator, mode: Mode, total: int, pruned: Counter[str]) -> Iterator[Setting]:
    book = estimator.book
    search, limits = book.spec.search, book.spec.limits
    lags = {"sync": [0], "one_step_off": [1], "pipeline": lag_points(limits.max_lag_steps)}[mode]
    lags = [lag for lag in lags if lag <= limits.max_lag_steps]
    if not lags:
        pruned["lag limit"] += 1
        return
    for colocated, gen_gpus, train_gpus in _splits(book, mode, total):
        layout = _layout(book, train_gpus, pruned)
        if layout is None:
            continue
        for gen_tp in search.gen_tp or ((gen_gpus,) if book.gen_chip.name == CPU else GEN_TP):
            if not _engine_fits(book, gen_tp, gen_gpus, pruned):
                continue
            common: dict[str, Any] = {
                "mode": mode,
                "colocated": colocated,
                "gen_gpus": gen_gpus,
                "train_gpus": train_gpus,
                "gen_tp": gen_tp,
                "train_tp": layout[0],
                "train_pp": layout[1],
                "train_ep": layout[2],
            }
            for lag in lags:
                for oversample in search.oversample:
                    yield from _variants(estimator, common, lag, oversample)


def _variants(estimator: Estimator, common: dict[str, Any], lag: int, oversample: float) -> Iterator[Setting]:
    spec = estimator.book.spec
    lent = [0]
    if spec.search.lend and common["mode"] == "pipeline":
        lent += [gpus for gpus in [common["train_gpus"] // common["gen_tp"] * common["gen_tp"]] if gpus]
    for hand_off in _hand_offs(spec, common):
        for lent_gpus in lent:
            for update_split in spec.search.update_splits:
                plain = Setting(
                    **common,
                    max_running=spec.group_size,
                    max_lag_steps=lag,
                    hand_off=hand_off,
                    oversample=oversample,
                    update_split=update_split,
                    lent_gpus=lent_gpus,
                )
                yield from _seated(estimator, plain)


def _seated(estimator: Estimator, setting: Setting) -> Iterator[Setting]:
    """The setting with different numbers of rollouts at once: whole groups, at most what the slots admit."""
    spec = estimator.book.spec
    size = spec.group_size
    most = setting.flow(spec).slots
    seats = estimator.seats(setting.gen_tp, estimator.decoders(setting)) / size
    shares = SEAT_SHARES if setting.mode == "pipeline" else (math.inf, 1.0)
    groups = {max(1, min(most, int(min(share * seats, most)))) for share in shares}
    for count in sorted(groups, reverse=True):
        yield _replace(setting, max_running=count * size)


def _replace(setting: Setting, *, max_running: int) -> Setting:
    fields = {name: getattr(setting, name) for name in Setting.__slots__}
    return Setting(**fields | {"max_running": max_running})


def _hand_offs(spec: PlanSpec, common: Mapping[str, Any]) -> tuple[HandOffPolicy, ...]:
    if spec.search.hand_off:
        return spec.search.hand_off
    if common["mode"] == "pipeline":
        return ("in_flight", "stop", "delta")
    return ("stop",) if common["colocated"] else ("stop", "delta")


def _splits(book: CostBook, mode: Mode, total: int) -> Iterator[tuple[bool, int, int]]:
    """(colocated, generating chips, training chips)."""
    cluster, wanted = book.spec.cluster, book.spec.search.gen_gpus
    if book.mixed:
        for gen_gpus in wanted or (cluster.num_generate,):
            if gen_gpus <= cluster.num_generate:
                yield False, gen_gpus, total
        return
    if mode == "sync" and (not wanted or total in wanted):
        yield True, total, total
    for gen_gpus in wanted or split_points(total):
        if gen_gpus < total:
            yield False, gen_gpus, total - gen_gpus


def split_points(total: int) -> list[int]:
    """Generating chips to try: every number on up to two nodes, half nodes up to 48, whole nodes, about 16 beyond."""
    step = 1 if total <= 16 else 4 if total <= 48 else 8 * max(1, round(total / 128))
    return list(range(step, total, step))


def lag_points(limit: int) -> list[int]:
    """Largest lags to try: every one to 8, then ever wider steps, and the limit."""
    points = list(range(1, min(limit, 8) + 1))
    while points and points[-1] < limit:
        points.append(min(limit, math.ceil(1.4 * points[-1])))
    return points


def _layout(book: CostBook, train_gpus: int, pruned: Counter[str]) -> tuple[int, int, int] | None:
    try:
        return book.layout(train_gpus)
    except PlanError:
        pruned["trainer memory"] += 1
        return None


def _engine_fits(book: CostBook, gen_tp: int, gen_gpus: int, pruned: Counter[str]) -> bool:
    """Engines of this width exist on so many chips, and each holds its longest rollout."""
    if book.gen_chip.name == CPU:  # cores of one machine are threads of one engine, not shards of a model
        divides = gen_tp == gen_gpus
    else:
        divides = gen_gpus % gen_tp == 0 and (not book.shape.heads or book.shape.heads % gen_tp == 0)
    if not divides:
        pruned["divisibility"] += 1
        return False
    work, cap_tok = book.workload, book.spec.response.cap_tok
    longest_tok = cap_tok + LONG_PROMPT * (work.prompt_tok + work.tool_tok)
    if not book.generator_fit(gen_tp).fits or book.engine(gen_tp).kv_capacity_tok < longest_tok:
        pruned["generator memory"] += 1
        return False
    return True


# ---- choosing --------------------------------------------------------------------------------------------------------


def _within(book: CostBook, screened: Sequence[Screened], pruned: Counter[str]) -> list[Screened]:
    """Estimates that keep the limits on dollars and time, or nearly; all if none does (the simulation decides)."""
    spec = book.spec
    limits = spec.limits

    def near(estimate: Estimate) -> bool:
        over_usd = limits.usd and estimate.usd_per_step * spec.steps > NEAR * limits.usd
        late = limits.deadline_h and estimate.step_s * spec.steps > NEAR * limits.deadline_h * 3600
        return not (over_usd or late)

    kept = [(setting, estimate) for setting, estimate in screened if near(estimate)]
    if not kept:
        return list(screened)
    pruned["budget or deadline"] += len(screened) - len(kept)
    return kept


def pareto_front(screened: Sequence[Screened]) -> list[Screened]:
    """What no other setting equals or beats in step time, lag and dollars at once; fastest first."""
    ordered = sorted(screened, key=lambda each: _point(each[1]))
    front: list[Screened] = []
    points = np.empty((0, 3))
    for each in ordered:
        point = np.array(_point(each[1]))
        if not np.any(np.all(points <= point, axis=1)):
            front.append(each)
            points = np.vstack([points, point])
    return front


def _point(estimate: Estimate) -> tuple[float, float, float]:
    # Rounded: of settings that differ by less than the formulas can tell, the first one tried stays.
    return (float(f"{estimate.step_s:.3g}"), round(estimate.lag_mean, 1), float(f"{estimate.usd_per_step:.3g}"))


def _score(spec: PlanSpec, step_s: float, usd_per_mtok: float, lag_mean: float) -> tuple[float, float]:
    """Smaller is better; the second number breaks ties. A batch is a batch: step times order runs of equal length."""
    match spec.search.objective:
        case "wall":
            return step_s, lag_mean
        case "usd_per_mtok":
            return usd_per_mtok, step_s
        case "quality":
            return step_s * (1.0 + spec.search.penalty_per_lag * lag_mean), lag_mean


def _screen_score(spec: PlanSpec, each: Screened) -> tuple[float, float]:
    _, estimate = each
    return _score(spec, estimate.step_s, estimate.usd_per_mtok, estimate.lag_mean)


def _choose(book: CostBook, front: Sequence[Screened], allowed: Sequence[Screened]) -> list[Screened]:
    """Settings to simulate: the best of each kind, then kinds that only the front has, then whatever is next best.

    Where lag_p99 is limited, the first half keeps it for certain because their largest lag does.
    """
    spec = book.spec
    count = spec.search.simulate_best
    by_score = sorted(allowed, key=lambda each: _screen_score(spec, each))
    on_front = {setting for setting, _ in front}
    taken: dict[Setting, Screened] = {}

    def pick(pool: Iterable[Screened], most: int, *, twins: bool) -> None:
        kinds = {_kind(setting) for setting in taken}
        for setting, estimate in pool:
            if len(taken) >= most:
                return
            if setting not in taken and (twins or _kind(setting) not in kinds):
                kinds.add(_kind(setting))
                taken[setting] = (setting, estimate)

    if spec.limits.lag_p99:
        certain = [each for each in by_score if each[0].max_lag_steps <= spec.limits.lag_p99]
        pick(certain, math.ceil(count / 2), twins=False)
    pick(by_score, math.ceil(count / 2), twins=False)
    pick([each for each in by_score if each[0] in on_front], count, twins=False)
    pick(by_score, count, twins=True)
    return list(taken.values())


def _kind(setting: Setting) -> tuple[object, ...]:
    """Settings of one kind differ in lag, seats and hand-off only: in little, mostly."""
    return setting.mode, setting.colocated, setting.gen_gpus, setting.gen_tp


def _best_sync(estimator: Estimator, screened: Sequence[Screened]) -> Screened | None:
    """The fastest synchronous estimate on all chips; searched for even if the spec leaves the mode out."""
    total = estimator.book.spec.cluster.num_gpus
    found = [each for each in screened if each[0].mode == "sync" and each[0].train_gpus + each[0].gen_gpus >= total]
    if not found:
        found = screen(estimator, list(_of_mode(estimator, "sync", total, Counter())))
    return min(found, key=lambda each: each[1].step_s) if found else None


# ---- simulating ------------------------------------------------------------------------------------------------------


def _simulate(
    book: CostBook,
    estimator: Estimator,
    chosen: Sequence[Screened],
    sync: Screened | None,
    pruned: Counter[str],
    progress: Progress | None,
) -> tuple[list[Evaluated], Evaluated | None]:
    """Simulate the chosen settings and the best synchronous one, all on the same rollouts; ranked."""
    spec, draws = book.spec, book.draws()
    count, steps, sync_steps = sim_plan(spec, [setting.max_lag_steps for setting, _ in chosen])
    runs = [(each, sync_steps if each[0].mode == "sync" else steps) for each in chosen[:count]]
    if sync is not None and sync[0] not in [setting for (setting, _), _ in runs]:
        runs.append((sync, sync_steps))
    done: dict[Setting, Evaluated] = {}
    failed: PlanError | None = None
    for number, ((setting, estimate), length) in enumerate(runs):
        if progress is not None:
            progress("simulate", number, len(runs))
        try:
            done[setting] = evaluate(book, estimator, setting, estimate, draws, steps=length)
        except PlanError as exc:
            failed = failed or exc
            pruned["simulation"] += 1
    own = [each for each in done.values() if each.setting.mode in spec.search.modes]
    if not own:
        raise failed or _nothing_fits(book, pruned)
    return sorted(own, key=lambda each: _sim_score(spec, each)), done.get(sync[0]) if sync is not None else None


def sim_plan(spec: PlanSpec, lags: Sequence[int]) -> tuple[int, int, int]:
    """(settings, batches of each, batches of a synchronous one) so that all of it stays near SIM_SEQUENCES rollouts.

    Steps under a bound on lag vary by half their mean, so that a few long simulations say more than many short ones:
    at least FEW settings at full length if possible, else shorter, else fewer. Taking turns varies little. Another turn
    costs the simulator half a rollout.
    """
    samples = spec.batch_samples / (1.0 - spec.zero_signal_frac) * (1.0 + (spec.episode.turns - 1.0) / 2)
    full = spec.search.sim_steps
    sync_steps = min(full, max(2, int(0.1 * SIM_SEQUENCES / samples)))
    rest = SIM_SEQUENCES / samples - sync_steps
    ahead = max(lags, default=0) + 1
    count = int(rest / (full + ahead))
    if count >= min(FEW, len(lags)):
        return min(count, len(lags)), full, sync_steps
    steps = min(full, max(MIN_SIM_STEPS, int(rest / min(FEW, len(lags)) - ahead)))
    return max(1, min(FEW, len(lags), int(rest / (steps + ahead)))), steps, sync_steps


def _sim_score(spec: PlanSpec, found: Evaluated) -> tuple[float, float]:
    return _score(spec, found.metrics.step_s_mean, found.usd_per_mtok, found.metrics.lag_mean)


# ---- limits and errors -----------------------------------------------------------------------------------------------


def _breaks(spec: PlanSpec, found: Evaluated) -> str:
    """Which limit a simulated setting breaks; empty if none."""
    limits = spec.limits
    if limits.lag_p99 and found.metrics.lag_p99 > limits.lag_p99:
        return f"limits.lag_p99 = {limits.lag_p99:g}: its p99 is {found.metrics.lag_p99}"
    if limits.usd and found.usd > limits.usd:
        return f"limits.usd = {limits.usd:,.0f}: it costs {found.usd:,.0f} dollars"
    if limits.deadline_h:
        chance = found.finishes_by(limits.deadline_h * 3600)
        if chance < limits.deadline_p:
            hours = found.wall_s.p50 / 3600
            return (
                f"limits.deadline_h = {limits.deadline_h:g} with probability {limits.deadline_p:.0%}: it takes "
                f"{hours:.1f} h and keeps the deadline with {chance:.0%}"
            )
    return ""


def _all_break(spec: PlanSpec, ranked: Sequence[Evaluated]) -> PlanError:
    limits = spec.limits
    nearest = min(ranked, key=lambda each: each.usd) if limits.usd else ranked[0]
    return PlanError(
        f"nothing keeps every limit. Nearest is {nearest.setting.words()}; it breaks {_breaks(spec, nearest)}"
    )


def _nothing_fits(book: CostBook, pruned: Mapping[str, int]) -> PlanError:
    """The most helpful of the reasons: which side does not fit, and how many chips would do."""
    spec, cluster = book.spec, book.spec.cluster
    gen_gpus = cluster.num_generate or cluster.num_gpus
    try:
        book.layout(cluster.num_gpus)
        generator_widths(
            book.shape,
            book.gen_chip,
            gen_gpus,
            precision=spec.precision,
            mem_frac=cluster.mem_frac,
            max_seqs=cluster.max_seqs,
            context_tok=book.longest_tok + (LONG_PROMPT - 1) * (spec.prompt_tok + book.workload.tool_tok),
            constants=book.constants,
        )
    except PlanError as exc:
        return exc
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(pruned.items()) if count)
    why = f" (left out: {reasons})" if reasons else ""
    hint = "; generation and training on separate chips need at least 2" if cluster.num_gpus < 2 else ""
    return PlanError(
        f"no setting of {spec.model} on {cluster.num_gpus} {book.train_chip.name} is possible{why}{hint}; allow more "
        "of search.modes, search.gen_gpus, search.gen_tp or search.train_tp, or give it more chips"
    )
