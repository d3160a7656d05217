"""How sure a plan is, what would help it, and what would change it: closed forms at changed inputs.

Ratios of closed-form estimates are applied to simulated numbers: the forms are off by a factor that mostly cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.errors import PlanError
from headrace.planner.assemble import CostBook
from headrace.planner.closed import Estimate
from headrace.planner.constants import Constants, MeasuredLaw, ServingSet
from headrace.planner.estimate import Estimator
from headrace.planner.evaluate import ERROR_OF_GRADE, Evaluated
from headrace.planner.facts import Fact
from headrace.planner.search import Found
from headrace.planner.setting import Setting
from headrace.planner.spec import PlanSpec

Z90 = 1.2816
"""Standard deviations from the median to P90."""
CHOICES = 32
"""Settings among which a changed input may choose another one."""
NODE = 8
"""Chips that are added or moved at once, where there are enough."""
LEAST_GAIN = 0.002
"""Smaller changes are not worth a line."""
CHANGE = 0.02
"""Another setting must be faster by so much to count as another answer: estimates differ by about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """P10, middle, P90."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change of the best plan, and what it does to samples per second."""

    what: str
    gain_frac: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """One uncertain input at a low and a high value."""

    what: str
    low_label: str
    high_label: str
    step_s_low: float | None
    """Step time of the best plan at the low value; None where it cannot run."""
    step_s_high: float | None
    best_low: str
    """The setting that is best then."""
    best_high: str
    changes: bool
    """The best plan would be another one, by more than CHANGE."""


def step_band(best: Evaluated) -> Band:
    """Step time of a simulated setting with its calibration error."""
    mid = best.metrics.step_s_mean
    factor = math.exp(Z90 * best.error_frac)
    return Band(low=mid / factor, mid=mid, high=mid * factor)


def speedup_band(spec: PlanSpec, constants: Constants, found: Found) -> Band:
    """Best over best synchronous when generation, training and the spread of lengths are each off by their own error.

    Corners at P10 and P90 of each input, one at a time and the two speeds together; errors that both settings share
    cancel in the ratio.
    """
    assert found.best_sync is not None
    pair = [found.best.setting, found.best_sync.setting]
    book = CostBook(spec, constants)
    basis = book.basis()
    gen = math.exp(Z90 * ERROR_OF_GRADE[basis["decode"].grade])
    train = math.exp(Z90 * ERROR_OF_GRADE[basis["training"].grade])
    base = _ratio(book, pair)
    ratios = [1.0]
    for gen_factor, train_factor in ((gen, 1 / train), (1 / gen, train), (gen, train), (1 / gen, 1 / train)):
        ratios.append(_ratio(CostBook(spec, slower(constants, gen_factor, train_factor)), pair) / base)
    for changed in (_with_sigma(spec, 0.7), _with_sigma(spec, 1.2)):
        if changed is not None:
            ratios.append(_ratio(CostBook(changed, constants), pair) / base)
    return Band(low=found.speedup * min(ratios), mid=found.speedup, high=found.speedup * max(ratios))


def binding_words(book: CostBook, best: Evaluated) -> str:
    """What limits the best plan, in a sentence with its numbers."""
    setting, metrics, engines = best.setting, best.metrics, best.setting.engines
    running = metrics.running_mean / max(1, engines)
    most = best.engine.max_running
    match best.binding:
        case "generation: KV":
            holds = best.engine.kv_capacity_tok / max(1.0, book.workload.kv_tok(engines))
            return (
                f"generation-bound by KV memory: {min(holds, running):.0f} of {most} slots of an engine are in use, "
                f"its {best.engine.kv_capacity_tok:,} tokens are {metrics.kv_used_frac:.0%} full"
            )
        case "generation: slots":
            return f"generation-bound by slots: {running:.0f} of {most} sequences per engine (cluster.max_seqs)"
        case "generation: compute":
            return f"generation-bound by compute: {running:.0f} sequences per engine already saturate the chips"
        case "training":
            return (
                f"training-bound: the trainer is busy {metrics.trainer_shares.get('busy', 0.0):.0%} of the time at "
                f"{best.trainer.mfu:.0%} MFU; engines idle {metrics.generator_idle_frac:.0%}"
            )
        case "lag bound":
            return (
                f"bound by max_lag_steps = {setting.max_lag_steps}: slots, not chips, limit what is in flight; the "
                f"trainer waits {metrics.trainer_idle_frac:.0%}"
            )
        case "hand-off":
            hand_off_s = best.hand_off.transfer_s + best.hand_off.publish_s
            return f"bound by the hand-off of weights: {hand_off_s:.1f} s a version"
        case _:
            waits = f"the trainer waits {metrics.trainer_idle_frac:.0%}, engines idle {metrics.generator_idle_frac:.0%}"
            return f"bound by {best.binding}: {waits}"


def remedies(spec: PlanSpec, constants: Constants, best: Evaluated) -> tuple[Remedy, ...]:
    """Marginal values: what each change of the best plan would bring, largest first."""
    book = CostBook(spec, constants)
    now = _estimate(book, best.setting)
    found = []
    for what, note, changed_spec, setting in _changes(spec, book, best.setting):
        try:
            other = book if changed_spec is spec else CostBook(changed_spec, constants)
            gain = _estimate(other, setting).samples_per_s / now.samples_per_s - 1.0
        except PlanError:
            continue
        if abs(gain) >= LEAST_GAIN:
            found.append(Remedy(what=what, gain_frac=gain, note=note))
    return tuple(sorted(found, key=lambda r: -r.gain_frac))


def sensitivities(spec: PlanSpec, constants: Constants, found: Found) -> tuple[Sensitivity, ...]:
    """Step time of the best plan, and whether another would be better, at changed inputs; widest swing first."""
    simulated = found.best.metrics.step_s_mean
    choices = _choices(found)
    rows = []
    for what, (low_label, low), (high_label, high) in _inputs(spec, constants):
        ends = [_at(*end, found.best.setting, choices) for end in (low, high)]
        (low_s, low_best, low_changes), (high_s, high_best, high_changes) = ends
        rows.append(
            Sensitivity(
                what=what,
                low_label=low_label,
                high_label=high_label,
                step_s_low=low_s,
                step_s_high=high_s,
                best_low=low_best,
                best_high=high_best,
                changes=low_changes or high_changes,
            )
        )
    return tuple(sorted(rows, key=lambda r: -_swing(r, simulated)))


def slower(constants: Constants, gen_factor: float, train_factor: float, net_factor: float = 1.0) -> Constants:
    """Constants under which generating, training and moving weights take so many times as long."""

    def times(factor: float, *names: str) -> dict[str, Fact]:
        return {name: _scaled(getattr(constants, name), factor) for name in names}

    changed = (
        times(gen_factor, "rollout_factor_dense", "rollout_factor_moe")
        | times(1 / gen_factor, "prefill_eff")
        | times(1 / train_factor, "train_eff", "train_rate_dense", "train_rate_moe")
        | times(train_factor, "fixed_s", "fixed_s_per_gb")
        | times(net_factor, "hand_off_s", "apply_s")
        | times(1 / net_factor, "hand_off_eff", "colocated_eff")
    )
    laws = tuple(_slower_law(law, gen_factor, train_factor, net_factor) for law in constants.laws)
    serving = tuple(_slower_prefill(chosen, gen_factor) for chosen in constants.serving)
    return constants.model_copy(update={**changed, "laws": laws, "serving": serving})


# ---- inside ----------------------------------------------------------------------------------------------------------


def _slower_prefill(chosen: ServingSet, factor: float) -> ServingSet:
    """Decode needs nothing here: rollout factors come on top of every set."""
    if "prefill_eff" not in chosen.facts:
        return chosen
    slowed = chosen.facts | {"prefill_eff": _scaled(chosen.facts["prefill_eff"], 1 / factor)}
    return chosen.model_copy(update={"facts": slowed})


def _slower_law(law: MeasuredLaw, gen_factor: float, train_factor: float, net_factor: float) -> MeasuredLaw:
    factors = {
        "base_s": gen_factor,
        "per_request_s": gen_factor,
        "per_context_tok_s": gen_factor,
        "prefill_s_per_tok": gen_factor,
        "train_fixed_s": train_factor,
        "train_s_per_tok": train_factor,
        "publish_s": net_factor,
        "land_s": net_factor,
        "pause_s": net_factor,
    }
    given = {name: getattr(law, name) for name in factors}
    return law.model_copy(update={n: _scaled(f, factors[n]) for n, f in given.items() if f is not None})


def _scaled(fact: Fact, factor: float) -> Fact:
    return replace(fact, value=fact.value * factor)


def _estimate(book: CostBook, setting: Setting) -> Estimate:
    return Estimator(book).all([setting])[0]


def _ratio(book: CostBook, pair: list[Setting]) -> float:
    best, sync = Estimator(book).all(pair)
    return best.samples_per_s / sync.samples_per_s


def _with_sigma(spec: PlanSpec, factor: float) -> PlanSpec | None:
    response = spec.response
    if response.law not in ("lognormal", "mixture") or response.sigma == 0.0:
        return None
    sigma, within = response.sigma * factor, response.sigma_within * factor
    return spec.model_copy(update={"response": response.model_copy(update={"sigma": sigma, "sigma_within": within})})


def _choices(found: Found) -> dict[Setting, float]:
    """Settings that a changed input may choose, each with simulated over estimated step time (where it was not
    simulated: the best plan's)."""
    known = {e.setting: e.metrics.step_s_mean / e.estimate.step_s for e in found.ranked}
    usual = known[found.best.setting]
    for setting, _ in found.front:
        if len(known) >= CHOICES:
            break
        known.setdefault(setting, usual)
    return known


def _at(
    spec: PlanSpec, constants: Constants, best: Setting, choices: dict[Setting, float]
) -> tuple[float | None, str, bool]:
    """(step time of the best plan, the best setting's words, it is another one) under a changed spec or constants."""
    try:
        estimates = Estimator(CostBook(spec, constants)).all(list(choices))
    except PlanError:
        return None, "", False
    steps_s = {
        setting: estimate.step_s * scale for (setting, scale), estimate in zip(choices.items(), estimates, strict=True)
    }
    winner = min(steps_s, key=lambda setting: steps_s[setting])
    changes = steps_s[winner] < steps_s[best] * (1 - CHANGE)
    return steps_s[best], (winner if changes else best).words(), changes


def _swing(row: Sensitivity, simulated: float) -> float:
    return max((abs(s / simulated - 1.0) for s in (row.step_s_low, row.step_s_high) if s is not None), default=0.0)


End = tuple[str, tuple[PlanSpec, Constants]]


def _inputs(spec: PlanSpec, constants: Constants) -> Iterator[tuple[str, End, End]]:
    """(input, low end, high end): what is least certain in a prediction."""
    response = spec.response
    if response.law != "file":

        def mean(factor: float) -> End:
            tok = min(response.mean_tok * factor, 0.9 * response.cap_tok)
            changed = spec.model_copy(update={"response": response.model_copy(update={"mean_tok": tok})})
            return f"{tok:,.0f} tok", (changed, constants)

        yield "mean response length", mean(0.5), mean(2.0)
    low, high = _with_sigma(spec, 0.5), _with_sigma(spec, 1.25)
    if low is not None and high is not None:
        yield (
            "spread of lengths (sigma)",
            (f"{low.response.sigma:.2f}", (low, constants)),
            (f"{high.response.sigma:.2f}", (high, constants)),
        )
    yield (
        "training time (MFU)",
        ("-30 %", (spec, slower(constants, 1.0, 0.7))),
        ("+30 %", (spec, slower(constants, 1.0, 1.3))),
    )
    yield (
        "decode time (bandwidth)",
        ("-20 %", (spec, slower(constants, 0.8, 1.0))),
        ("+20 %", (spec, slower(constants, 1.2, 1.0))),
    )
    yield (
        "hand-off time",
        ("/ 3", (spec, slower(constants, 1.0, 1.0, 1 / 3))),
        ("x 3", (spec, slower(constants, 1.0, 1.0, 3.0))),
    )
    episode = spec.episode
    if episode.tool_s or episode.grade_s:

        def tools(factor: float) -> tuple[PlanSpec, Constants]:
            changed = episode.model_copy(
                update={"tool_s": episode.tool_s * factor, "grade_s": episode.grade_s * factor}
            )
            return spec.model_copy(update={"episode": changed}), constants

        yield "tool and grading time", ("/ 3", tools(1 / 3)), ("x 3", tools(3.0))


def _changes(spec: PlanSpec, book: CostBook, best: Setting) -> Iterator[tuple[str, str, PlanSpec, Setting]]:
    """(what, note, spec, setting) of every single change that is tried."""
    chip = book.train_chip.name
    if not best.colocated:
        step = max(best.gen_tp, min(NODE, best.gen_gpus, best.train_gpus) // best.gen_tp * best.gen_tp)
        more = best.gen_gpus + step
        seats = round(best.max_running * more / best.gen_gpus / spec.group_size) * spec.group_size
        wider = replace(best, gen_gpus=more, max_running=seats)
        yield f"+{step} {book.gen_chip.name} generating", "", spec, wider
        yield from _trainer_moves(spec, book, best, step, chip)
    seats = min(round(1.5 * best.max_running / spec.group_size), best.flow(spec).slots) * spec.group_size
    if seats > best.max_running:
        yield f"rollouts at once {best.max_running} -> {seats}", "more lag", spec, replace(best, max_running=seats)
    if best.mode == "pipeline":
        lag = best.max_lag_steps + 1
        yield f"max_lag_steps {best.max_lag_steps} -> {lag}", "more off-policy", spec, replace(best, max_lag_steps=lag)
    cluster = spec.cluster
    more_seqs = cluster.model_copy(update={"max_seqs": cluster.max_seqs * 3 // 2})
    wide = spec.model_copy(update={"cluster": more_seqs})
    yield f"cluster.max_seqs {cluster.max_seqs} -> {more_seqs.max_seqs}", "engine setting", wide, best
    if spec.precision == "bf16" and "fp8" in book.gen_chip.flops_per_s:
        yield "fp8 weights in the engines", "check the mismatch", spec.model_copy(update={"precision": "fp8"}), best
    if spec.zero_signal_frac > 0:
        half = spec.model_copy(update={"zero_signal_frac": spec.zero_signal_frac / 2})
        yield f"half as many zero-signal groups ({spec.zero_signal_frac:.0%})", "curriculum.kind = 'band'", half, best
    if best.hand_off != "delta" and not best.colocated:
        yield "delta hand-off", "", spec, replace(best, hand_off="delta")


def _trainer_moves(
    spec: PlanSpec, book: CostBook, best: Setting, step: int, chip: str
) -> Iterator[tuple[str, str, PlanSpec, Setting]]:
    """More trainer chips, and chips moved from one side to the other."""
    try:
        tp, pp, ep = book.layout(best.train_gpus + step)
        more = replace(best, train_gpus=best.train_gpus + step, train_tp=tp, train_pp=pp, train_ep=ep)
        yield f"+{step} {chip} training", "", spec, more
        if best.gen_gpus > step and not book.mixed:
            yield f"{step} {chip} moved to training", "", spec, replace(more, gen_gpus=best.gen_gpus - step)
    except PlanError:
        pass
    if best.train_gpus > step and not book.mixed:
        try:
            tp, pp, ep = book.layout(best.train_gpus - step)
        except PlanError:
            return
        fewer = replace(best, train_gpus=best.train_gpus - step, train_tp=tp, train_pp=pp, train_ep=ep)
        yield f"{step} {chip} moved to generating", "", spec, replace(fewer, gen_gpus=best.gen_gpus + step)
