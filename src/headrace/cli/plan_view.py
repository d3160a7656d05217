"""A plan in the terminal: the best settings, what binds, what would help, how sure it is. Fits 72 columns and wider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.cli.fitted_table import Cells, fitted_table, plain_table
from headrace.planner.evaluate import Evaluated
from headrace.planner.facts import Grade
from headrace.planner.memory import MemoryFit
from headrace.planner.plan import Phase, Plan, Remedy, Sensitivity, Term
from headrace.planner.plan_table import (
    COLUMNS,
    chips_words,
    drifts,
    gain,
    mode_words,
    other_plans,
    significant,
    split_words,
    sync_words,
    times,
    usd,
    widest_first,
    workload_words,
)
from headrace.telemetry.format import count, duration, percent
from headrace.telemetry.panels import ACCENT

GRADE_STYLES: Mapping[Grade, str] = {"measured": "bold green", "fitted": "green", "spec": "yellow", "guess": "red"}
"""From what was measured on these chips to what nobody measured."""
WIDTH_MAX = 160
SIDE_BY_SIDE = 132
"""Width from which two tables stand beside each other."""
BAR_WIDTH = 20
REGRET = 0.05
"""A first plan that loses more than this share later on stands out."""


def print_plan(console: Console, plan: Plan, *, top: int = 8) -> None:
    """Print the plan: its `top` best settings and the best synchronous one, then the words."""
    width = min(console.width, WIDTH_MAX)
    console.print(_header(plan, width))
    console.print()
    console.print(_headline(plan), width=width)
    _section(console, "best settings", plan_table(_shown(plan, top), plan, width))
    _section(console, "in full", _in_full(plan, width))
    _section(console, "what binds", Text(plan.binding), width=width)
    if plan.remedies:
        _section(console, "what would help", remedy_table(plan.remedies, width), width=width)
    if plan.sensitivities:
        _section(console, "what would change the answer", sensitivity_table(plan.sensitivities, plan), width=width)
    if drifts(plan):
        _section(console, "schedule", phase_table(plan.phases), width=width)
    _section(console, "confidence", term_table(plan.terms), width=width)
    if plan.notes:
        _section(console, "notes", Group(*map(_listed, plan.notes)), width=width)
    console.print(Text(f"\n{search_words(plan)}", style="dim"), width=width)


def search_words(plan: Plan) -> str:
    """What the search did."""
    left_out = ", ".join(f"{count(number)} {reason}" for reason, number in sorted(plan.pruned.items()) if number)
    tried = f"{count(plan.screened)} settings screened, {plan.simulated} simulated in {duration(plan.plan_s)}"
    return f"{tried}; left out: {left_out}" if left_out else tried


def _section(console: Console, title: str, body: RenderableType, *, width: int | None = None) -> None:
    console.print(Text(f"\n{title}", style=f"bold {ACCENT}"))
    console.print(body, width=width)


def _listed(note: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("·", style="dim"), Text(note, style="dim"))
    return grid


def _header(plan: Plan, width: int) -> Panel:
    spec = plan.spec
    precision = f"{spec.precision}{', LoRA' if spec.lora else ''}"
    grade = Text(plan.grade, style=GRADE_STYLES[plan.grade])
    lines = [
        Text.assemble((spec.model, "bold"), f" ({precision}) on ", (chips_words(spec), "bold")),
        Text(workload_words(spec)),
        Text.assemble(
            f"{count(spec.steps)} steps, objective {spec.search.objective.replace('_', ' ')}, ",
            f"calibration {plan.calibration} ({plan.calibration_date}), step costs ",
            grade,
        ),
    ]
    title = Text.assemble(("headrace ", f"bold {ACCENT}"), ("plan", "bold"))
    return Panel(Group(*lines), title=title, title_align="left", border_style=ACCENT, padding=(0, 1), width=width)


def _headline(plan: Plan) -> Table:
    best, band = plan.best, plan.step_s
    step = Text(f"{significant(band.mid)} s a step", style="bold")
    step.append(f" ({significant(band.low)} to {significant(band.high)})", style="not bold")
    if plan.speedup is None:
        faster = Text("no synchronous plan to compare with", style="dim")
    else:
        faster = Text(times(plan.speedup), style="bold green" if plan.speedup.low > 1 else "bold yellow")
        faster.append(" the samples/s of the best synchronous plan", style="not bold default")
    p50_s, p90_s, p99_s = best.wall_s
    wall = f"{duration(p50_s)} for {count(plan.spec.steps)} steps (P90 {duration(p90_s)}, P99 {duration(p99_s)})"
    cost = f"{usd(best.usd_per_mtok)} per million trained tokens, {usd(best.usd)} in all"
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("  best", Text.assemble((_words(best), "bold green"), ", ", step))
    grid.add_row("  speed-up", faster)
    grid.add_row("  wall time", wall)
    grid.add_row("  cost", cost)
    return grid


def _words(e: Evaluated) -> str:
    chips = f"{e.setting.gen_gpus} chips in turns" if e.setting.colocated else f"{split_words(e.setting)} chips"
    return f"{mode_words(e.setting)} on {chips}"


def _shown(plan: Plan, top: int) -> list[Evaluated]:
    shown = list(plan.ranked[:top])
    if plan.best_sync is not None and all(e.setting != plan.best_sync.setting for e in shown):
        shown.append(plan.best_sync)
    return shown


# ---- tables ----------------------------------------------------------------------------------------------------------


def plan_table(shown: Sequence[Evaluated], plan: Plan, width: int) -> Table:
    """One row per setting with as many columns as fit; the best is green, the best synchronous one is yellow."""
    ranks = [str(plan.ranked.index(e) + 1) if e in plan.ranked else "" for e in shown]
    sync = None if plan.best_sync is None else plan.best_sync.setting
    styles = ["bold green" if e is plan.best else "yellow" if e.setting == sync else "" for e in shown]
    columns = [Cells("", ranks, rank=-1)]
    columns += [Cells(c.head, [c.text(e) for e in shown], rank=c.rank, words=c.words) for c in COLUMNS]
    return fitted_table(columns, width, styles)


def _in_full(plan: Plan, width: int) -> RenderableType:
    """Every number of the best setting beside those of the best synchronous one, and memory at each instant."""
    shown = {"best": plan.best}
    if plan.best_sync is not None and plan.best_sync.setting != plan.best.setting:
        shown["best sync"] = plan.best_sync
    numbers = _beside([(c.name, [Text(c.text(e)) for e in shown.values()]) for c in COLUMNS if not c.summary], shown)
    memory = memory_table(shown)
    if width < SIDE_BY_SIDE:
        return Group(numbers, Text(""), memory)
    pair = Table.grid(padding=(0, 4))
    pair.add_row(numbers, memory)
    return pair


def memory_table(shown: Mapping[str, Evaluated]) -> Table:
    """Bytes on a chip of each side at each instant; the worst is bold, red if it does not fit."""
    rows = []
    for side in ("generator", "trainer"):
        fits = [e.generator_fit if side == "generator" else e.trainer_fit for e in shown.values()]
        for instant in dict.fromkeys(name for fit in fits for name in fit.instants):
            rows.append((f"{side} memory, {instant}", [_instant(fit, instant) for fit in fits]))
    return _beside(rows, shown)


def _beside(rows: Sequence[tuple[str, Sequence[Text]]], heads: Iterable[str]) -> Table:
    table = plain_table()
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, cells in rows:
        table.add_row(Text(name, style="dim"), *cells)
    return table


def _instant(fit: MemoryFit, instant: str) -> Text:
    if instant not in fit.instants:
        return Text("-", style="dim")
    used = fit.instants[instant]
    text = f"{used / 1e9:.1f} of {fit.limit_bytes / 1e9:.1f} GB"
    return Text(text, style="red" if used > fit.limit_bytes else "bold" if instant == fit.worst else "")


def remedy_table(remedies: Sequence[Remedy], width: int) -> Table:
    """What each change would gain in samples/s, the most useful first."""
    most = max((abs(r.gain_frac) for r in remedies), default=0.0) or 1.0
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right")
    bar_width = BAR_WIDTH if width >= 100 else BAR_WIDTH // 2
    for remedy in sorted(remedies, key=lambda r: -r.gain_frac):
        style = "green" if remedy.gain_frac > 0.005 else "red" if remedy.gain_frac < -0.005 else "bright_black"
        bar = Text("█" * max(1, round(bar_width * abs(remedy.gain_frac) / most)), style=style, no_wrap=True)
        table.add_row(remedy.what, Text(gain(remedy.gain_frac), style=style), bar, Text(remedy.note, style="dim"))
    return table


def sensitivity_table(sensitivities: Sequence[Sensitivity], plan: Plan) -> Table:
    """Step time of the best plan when an assumption is wrong, and whether another plan would then be the best."""
    table = _listing("assumption", "low: step s", "high: step s", "then best", folding=("assumption", "then best"))
    for s in widest_first(sensitivities):
        ends = (s.low_label, s.step_s_low), (s.high_label, s.step_s_high)
        cells = [f"{label}: {_changed(step_s, plan.step_s.mid)}" for label, step_s in ends]
        table.add_row(s.what, *cells, _then_best(other_plans(s, plan.best.setting)))
    return table


def _changed(step_s: float | None, base_s: float) -> str:
    return "cannot run" if step_s is None else f"{significant(step_s)} ({gain(step_s / base_s - 1)})"


def _then_best(others: Sequence[str]) -> Text:
    return Text("\n".join(others), style="yellow") if others else Text("same", style="green")


def phase_table(phases: Sequence[Phase]) -> Table:
    """What to run when, as the workload drifts, and what the first plan would lose there."""
    table = _listing("at", "lengths", "turns", "best then", "step s", "first plan's", "regret", folding=("best then",))
    for phase in phases:
        best = f"{mode_words(phase.best)} {split_words(phase.best)} C{phase.best.max_running} {sync_words(phase.best)}"
        table.add_row(
            percent(phase.at_frac),
            f"x{phase.length_factor:.2g}",
            f"x{phase.turns_factor:.2g}",
            Text(f"{best}{'  re-plan' if phase.replan else ''}", style="bold yellow" if phase.replan else ""),
            significant(phase.best_step_s),
            "cannot run" if phase.static_step_s is None else significant(phase.static_step_s),
            _regret(phase.regret_frac),
        )
    return table


def _regret(share: float | None) -> Text:
    if share is None:
        return Text("-", style="yellow")
    return Text(percent(share), style="yellow" if share > REGRET else "")


def term_table(terms: Iterable[Term]) -> Table:
    """How each term of the prediction is known."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for term in terms:
        name = term.name.replace("_", " ")
        table.add_row(name, Text(term.grade, style=GRADE_STYLES[term.grade]), Text(term.source, style="dim"))
    return table


def _listing(*heads: str, folding: Sequence[str]) -> Table:
    """A table whose columns `folding` may wrap."""
    table = plain_table()
    for head in heads:
        table.add_column(head, no_wrap=head not in folding)
    return table
