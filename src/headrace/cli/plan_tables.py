"""What `headrace simulate`, `plan compare`, `plan chips` and `plan models` print. Fits 72 columns and wider."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from headrace.cli.fitted_table import Cells, fitted_table, plain_table
from headrace.planner.hardware import Chip, chips
from headrace.planner.models import model, models
from headrace.planner.outcome import Metrics
from headrace.planner.plan_table import gain, significant, usd
from headrace.telemetry.format import count, duration, percent, sparkline
from headrace.telemetry.panels import ACCENT, share_bar, share_legend
from headrace.telemetry.summary import GENERATOR_NAMES, TRAINER_NAMES

if TYPE_CHECKING:
    from headrace.planner.scoreboard import Score

WIDTH_MAX = 100
LABEL_WIDTH = 12
SPARK = 24
SCORE_STYLES: Mapping[str, str] = {
    "good": "green",
    "right": "green",
    "closes": "green",
    "fair": "yellow",
    "poor": "red",
    "wrong": "red",
    "open": "red",
    "-": "dim",
}


# ---- one simulation --------------------------------------------------------------------------------------------------


def print_simulation(
    console: Console,
    metrics: Metrics,
    *,
    title: str,
    usd_per_step: float | None = None,
    usd_per_mtok: float | None = None,
) -> None:
    """Print what one simulated setting (`title` says which) does."""
    width = min(console.width, WIDTH_MAX)
    bar_width = max(16, width - 4 - LABEL_WIDTH)
    parts: list[RenderableType] = [
        _grid(_rates(metrics, usd_per_step, usd_per_mtok)),
        Rule("shares of time", style="dim"),
        _grid(_shares(metrics, bar_width)),
        Rule("lag of trained tokens, in steps", style="dim"),
        _grid(lag_rows(metrics.lag_hist, bar_width)),
        Rule("tokens, groups, rollouts", style="dim"),
        _grid(_accounts(metrics)),
    ]
    console.print(
        Panel(
            Group(*parts),
            title=Text(title, style="bold"),
            title_align="left",
            border_style=ACCENT,
            width=width,
            padding=(0, 1),
        )
    )


def _rates(metrics: Metrics, usd_per_step: float | None, usd_per_mtok: float | None) -> list[tuple[str, Text]]:
    step = Text(f"{duration(metrics.step_s_mean)}", style="bold")
    step.append(f"  p50 {duration(metrics.step_s_p50)}  p99 {duration(metrics.step_s_p99)}", style="dim")
    step.append(f"  {sparkline(metrics.step_s, SPARK)}", style="green")
    rate = Text(f"{significant(metrics.samples_per_s)} samples/s", style="bold")
    rate.append(f"  {count(metrics.trained_tok_per_s)} tok/s trained", style="dim")
    rows = [("rate", rate), ("step", step)]
    if usd_per_step is not None:
        cost = Text(f"{usd(usd_per_step)} a step", style="bold")
        cost.append(f"  {usd(usd_per_mtok)} per million trained tokens" if usd_per_mtok is not None else "")
        rows.append(("cost", cost))
    rows.append(("simulated", Text(f"{metrics.steps} steps, {duration(metrics.wall_s)}", style="dim")))
    return rows


def _shares(metrics: Metrics, bar_width: int) -> list[tuple[str, Text]]:
    trainer = {short: metrics.trainer_shares.get(name, 0.0) for name, short in TRAINER_NAMES.items()}
    generator = {bar: metrics.generator_shares.get(name, 0.0) for name, (bar, _) in GENERATOR_NAMES.items()}
    legend = Text("  ").join(
        Text.assemble((name, style), f" {percent(metrics.generator_shares[name])}")
        for name, (_, style) in GENERATOR_NAMES.items()
        if name in metrics.generator_shares
    )
    return [
        ("trainer", share_bar(trainer, bar_width)),
        ("", share_legend(trainer)),
        ("generator", share_bar(generator, bar_width)),
        ("", legend),
    ]


def lag_rows(lag_hist: Mapping[int, int], width: int) -> list[tuple[str, Text]]:
    """One bar per lag, the most frequent one over the whole width."""
    whole, most = sum(lag_hist.values()), max(lag_hist.values(), default=0)
    if not most:
        return [("", Text("nothing was trained", style="dim"))]
    room = max(1, width - 9)
    return [
        (str(lag), Text.assemble(("█" * round(room * tok / most), "green"), f" {percent(tok / whole, 1)}"))
        for lag, tok in sorted(lag_hist.items())
    ]


def _accounts(metrics: Metrics) -> list[tuple[str, Text]]:
    made = max(1, metrics.generated_tok)
    tokens = [f"{count(metrics.generated_tok)} generated", f"{count(metrics.trained_tok)} trained"]
    tokens += [f"{count(metrics.masked_tok)} masked"] if metrics.masked_tok else []
    wasted = [
        f"{count(tok)} {reason.replace('_', ' ')}"
        for reason, tok in sorted(metrics.wasted_tok.items(), key=lambda item: -item[1])
        if tok
    ]
    groups = [f"{number} {bucket.replace('_', ' ')}" for bucket, number in metrics.groups.items() if number]
    at_once = f"{count(metrics.running_mean)} decoded, {count(metrics.queued_mean)} queued"
    at_once += f", {count(metrics.tool_mean)} in tools" if metrics.tool_mean else ""
    took = f"mean {duration(metrics.rollout_s_mean)}, p50 {duration(metrics.rollout_s_p50)}, "
    took += f"p99 {duration(metrics.rollout_s_p99)}, longest {duration(metrics.rollout_s_max)}"
    kv = (
        f"{percent(metrics.kv_used_frac)} mean, {percent(metrics.kv_peak_frac)} peak, {metrics.preemptions} preemptions"
    )
    return [
        ("tokens", Text(", ".join(tokens))),
        ("wasted", Text(f"{percent(metrics.wasted_frac, 1)} of {count(made)}: {', '.join(wasted) or 'nothing'}")),
        ("groups", Text(", ".join(groups) or "none ended")),
        ("at once", Text(at_once)),
        ("a rollout", Text(took)),
        ("a group", Text(f"waits {duration(metrics.queue_s_mean)} for the trainer")),
        ("KV", Text(kv)),
    ]


def _grid(rows: Iterable[tuple[str, Text]]) -> Table:
    table = Table.grid()
    table.add_column(width=LABEL_WIDTH, style="dim")
    table.add_column()
    for label, value in rows:
        table.add_row(label, value)
    return table


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One column of a comparison: a plan, a simulation or a measured run."""

    name: str
    what: str
    """Its setting in words, or 'measured'."""
    metrics: Metrics
    usd_per_step: float | None = None
    usd_per_mtok: float | None = None


@dataclass(frozen=True, slots=True)
class _Number:
    """One row of a comparison."""

    name: str
    value: Callable[[Side], float | None]
    text: Callable[[float], str]
    distance: Callable[[float, float], str]


def _ratio(value: float, base: float) -> str:
    return f"({gain(value / base - 1)})" if base else ""


def _points(value: float, base: float) -> str:
    return f"({100 * (value - base):+.1f})"


def _steps(value: float, base: float) -> str:
    return f"({value - base:+.3g})"


_NUMBERS = (
    _Number("samples/s", lambda s: s.metrics.samples_per_s, significant, _ratio),
    _Number("trained tok/s", lambda s: s.metrics.trained_tok_per_s, count, _ratio),
    _Number("step, mean", lambda s: s.metrics.step_s_mean, duration, _ratio),
    _Number("step, p50", lambda s: s.metrics.step_s_p50, duration, _ratio),
    _Number("step, p99", lambda s: s.metrics.step_s_p99, duration, _ratio),
    _Number("trainer idle", lambda s: s.metrics.trainer_idle_frac, percent, _points),
    _Number("generator idle", lambda s: s.metrics.generator_idle_frac, percent, _points),
    _Number("lag, mean", lambda s: s.metrics.lag_mean, "{:.2f}".format, _steps),
    _Number("lag, p99", lambda s: float(s.metrics.lag_p99), "{:.0f}".format, _steps),
    _Number("lag, max", lambda s: float(s.metrics.lag_max), "{:.0f}".format, _steps),
    _Number("wasted tokens", lambda s: s.metrics.wasted_frac, lambda v: percent(v, 1), _points),
    _Number("KV, mean", lambda s: s.metrics.kv_used_frac or None, percent, _points),
    _Number("at once", lambda s: s.metrics.running_mean or None, count, _ratio),
    _Number("a rollout, mean", lambda s: s.metrics.rollout_s_mean or None, duration, _ratio),
    _Number("$/step", lambda s: s.usd_per_step, usd, _ratio),
    _Number("$/Mtok trained", lambda s: s.usd_per_mtok, usd, _ratio),
)


def print_comparison(console: Console, sides: Sequence[Side]) -> None:
    """Print the numbers of all sides beside each other, each with its distance from the first.

    Distances are relative; those of shares are in points, those of lags in steps. '-' is what a side does not know.
    """
    table = plain_table()
    table.add_column("", no_wrap=True)
    for side in sides:
        table.add_column(Text(side.name, style="bold"), justify="right", overflow="fold")
    table.add_row(Text("setting", style="dim"), *(side.what for side in sides))
    for number in _NUMBERS:
        values = [number.value(side) for side in sides]
        if all(value is None for value in values):
            continue
        cells = []
        for i, value in enumerate(values):
            cell = Text("-", style="dim") if value is None else Text(number.text(value))
            if i and value is not None and values[0] is not None:
                cell.append(f" {number.distance(value, values[0])}", style="dim")
            cells.append(cell)
        table.add_row(Text(number.name, style="dim"), *cells)
    console.print(table)


# ---- scoreboard ------------------------------------------------------------------------------------------------------


def print_scoreboard(console: Console, scores: Sequence[Score]) -> None:
    """Print published numbers beside predicted ones, a table per source, and how many of them are good."""
    for fixture in dict.fromkeys(score.fixture for score in scores):
        own = [score for score in scores if score.fixture == fixture]
        console.print(Text(f"\n{fixture.replace('_', ' ')}", style=f"bold {ACCENT}"))
        columns = [
            Cells("row", [s.row for s in own], 1, words=True),
            Cells("quantity", [s.quantity for s in own], 2, words=True),
            Cells("published", [significant(s.published) for s in own], 3),
            Cells("predicted", ["-" if s.predicted is None else significant(s.predicted) for s in own], 4),
            Cells("error", [_error(s.error_frac) for s in own], 5),
            Cells("untuned", [_error(s.untuned_error_frac) for s in own], 7),
            Cells("basis", [s.basis for s in own], 6, words=True),
            Cells("grade", [s.grade for s in own], 0, words=True),
        ]
        console.print(fitted_table(columns, console.width, [SCORE_STYLES.get(s.grade, "") for s in own]))
    counts = Counter(score.grade for score in scores if score.predicted is not None and score.grade != "-")
    words = ", ".join(f"{number} {grade}" for grade, number in counts.most_common())
    console.print(Text(f"\n{len(scores)} numbers: {words or 'none compared'}", style="bold"))


def _error(share: float | None) -> str:
    return "" if share is None else gain(share)


# ---- tables of facts -------------------------------------------------------------------------------------------------


def print_chips(console: Console) -> None:
    """Print the chips with dense peaks, memory, links one way and price, then where the figures come from."""

    def peak(chip: Chip, precision: str) -> str:
        flops = chip.flops_per_s.get(precision)
        return "" if flops is None else significant(flops / 1e12)

    known = chips()
    columns = [
        Cells("chip", [c.name for c in known], 0, words=True),
        Cells("", [c.title for c in known], 9, words=True),
        Cells("bf16 TFLOP/s", [peak(c, "bf16") for c in known], 1),
        Cells("fp8", [peak(c, "fp8") for c in known], 7),
        Cells("GB", [f"{c.hbm_bytes / 1e9:.0f}" for c in known], 2),
        Cells("TB/s", [significant(c.hbm_bytes_per_s / 1e12) for c in known], 3),
        Cells("link GB/s", [significant(c.scale_up_bytes_per_s / 1e9) for c in known], 6),
        Cells("domain", [str(c.scale_up_chips) for c in known], 8),
        Cells("$/h", [usd(c.usd_per_h.value) for c in known], 4),
        Cells("priced", [c.usd_per_h.date for c in known], 5),
        Cells("price is", [c.usd_per_h.grade for c in known], 10, words=True),
    ]
    console.print(fitted_table(columns, console.width, [""] * len(known)))
    facts = [
        (f"{c.name} price" if key == "usd_per_h" else c.name, fact.source, fact.date)
        for c in known
        for key, fact in c.facts.items()
    ]
    console.print(_sources(facts))


def print_models(console: Console) -> None:
    """Print the models with their sizes and KV entries, then where their shapes come from."""
    entries = models()
    shapes = [model(entry.name) for entry in entries]
    columns = [
        Cells("model", [entry.name for entry in entries], 0, words=True),
        Cells("published as", [entry.title for entry in entries], 7, words=True),
        Cells("params", [_params(s.params) for s in shapes], 1),
        Cells("active", [_params(s.active_params) for s in shapes], 2),
        Cells("layers", [str(s.layers) for s in shapes], 5),
        Cells("hidden", [str(s.hidden) for s in shapes], 6),
        Cells("experts", [f"{s.experts_per_tok}/{s.experts}" if s.is_moe else "" for s in shapes], 4),
        Cells("KV MB/1k tok", [significant((s.kv_bytes(2000) - s.kv_bytes(1000)) / 1e6) for s in shapes], 3),
        Cells("shape is", [entry.grade for entry in entries], 8, words=True),
    ]
    console.print(fitted_table(columns, console.width, [""] * len(entries)))
    console.print(_sources((entry.name, entry.source, entry.date) for entry in entries))


def _params(number: float) -> str:
    """As the names of models have it.

    >>> _params(8.19e9), _params(1.03e12), _params(135e6)
    ('8.19B', '1.03T', '135M')
    """
    scale, letter = next(s for s in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1.0, "")) if number >= s[0] or s[0] == 1.0)
    return f"{number / scale:.3g}{letter}"


def _sources(facts: Iterable[tuple[str, str, str]]) -> Table:
    """Each source with its date and what it says something about."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for name, source, date in facts:
        names.setdefault((source, date), {})[name] = None
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(style="dim")
    for (source, date), about in names.items():
        table.add_row(date, f"{source}: {', '.join(about)}")
    return table
