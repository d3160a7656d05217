"""A plan in words: why it is the best, what binds it, what would help, what would change it, how sure it is."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.planner.plan import Plan
from headrace.telemetry.format import duration


def explain(plan: Plan) -> str:
    """Plain text, a paragraph per question."""
    return "\n\n".join("\n".join(part) for part in _parts(plan) if part) + "\n"


def _parts(plan: Plan) -> Iterator[list[str]]:
    best, metrics, spec = plan.best, plan.best.metrics, plan.spec
    yield [
        f"Best of {plan.screened:,} settings ({plan.simulated} simulated) for {spec.model} on "
        f"{spec.cluster.num_gpus} {spec.cluster.gpu}, by {spec.search.objective}:",
        f"  {best.setting.words()}",
        f"  {metrics.samples_per_s:.3g} samples/s; step {plan.step_s.mid:.3g} s (P10 {plan.step_s.low:.3g}, "
        f"P90 {plan.step_s.high:.3g}); {spec.steps} steps in {duration(best.wall_s.p50)} "
        f"(P90 {duration(best.wall_s.p90)})",
        f"  ${best.usd_per_mtok:.3g} per million trained tokens, ${best.usd:,.0f} in all",
    ]
    yield [f"What binds: {plan.binding}."]
    if plan.best_sync is not None and plan.speedup is not None:
        sync, band = plan.best_sync, plan.speedup
        same = sync.setting == best.setting
        yield (
            ["The best plan is synchronous: nothing that overlaps is faster here."]
            if same
            else [
                f"Against the best synchronous plan ({sync.setting.words()}, step {sync.metrics.step_s_mean:.3g} s): "
                f"{band.mid:.2f} times as fast, {band.low:.2f} to {band.high:.2f} when speeds and lengths are off by "
                "their own error.",
                f"  It pays with lag: mean {metrics.lag_mean:.2f}, p99 {metrics.lag_p99}, max {metrics.lag_max} steps; "
                f"{metrics.wasted_frac:.1%} of tokens wasted.",
            ]
        )
    helps = [r for r in plan.remedies if r.gain_frac > 0]
    if helps:
        yield ["What would help (samples per second):"] + [
            f"  {r.gain_frac:+6.1%}  {r.what}" + (f"  ({r.note})" if r.note else "") for r in helps
        ]
    harms = [r for r in plan.remedies if r.gain_frac < 0]
    if harms:
        yield ["What would not:"] + [f"  {r.gain_frac:+6.1%}  {r.what}" for r in harms]
    changing = [s for s in plan.sensitivities if s.changes]
    if changing:
        yield ["What would change the answer:"] + [
            f"  {s.what} at {label}: {words}"
            for s in changing
            for label, words in ((s.low_label, s.best_low), (s.high_label, s.best_high))
            if words and words != best.setting.words()
        ]
    else:
        yield ["None of the inputs that were varied would change the best plan."]
    if plan.phases:
        yield ["Along the run:"] + [
            f"  at {p.at_frac:.0%} (lengths x{p.length_factor:.2g}, turns x{p.turns_factor:.2g}): {p.best.words()}"
            + (
                ", where the first split cannot run"
                if p.regret_frac is None
                else f"; the first split is {p.regret_frac:.0%} slower" + (": re-plan" if p.replan else "")
            )
            for p in plan.phases
        ]
    yield ["How sure:"] + [f"  {t.name:9s} {t.grade:8s} {t.source}" for t in plan.terms]
    if plan.pruned:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in plan.pruned.items())
        yield [f"Left out: {reasons}."]
    yield [f"Note: {note}." for note in plan.notes]
