"""The live screen: a RunState as rich renderables. Looks right from 72 columns up."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.telemetry.format import count, duration, percent, sparkline
from headrace.telemetry.records import StepRecord
from headrace.telemetry.state import Progress, RunState

ACCENT = "cyan"
SHARE_STYLES: Mapping[str, tuple[str, str]] = {
    "busy": ("green", "█"),
    "data": ("yellow", "▓"),
    "bound": ("magenta", "▒"),
    "hand-off": ("blue", "▓"),
    "idle": ("bright_black", "░"),
}
VERDICT_STYLES: Mapping[str, str] = {"balanced": "bold green", "signal_starved": "bold red", "sync_bound": "bold blue"}
LABEL_WIDTH = 11


class RunScreen:
    """Renderable of a RunState; reads the state anew at each refresh."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state = self._state
        inner = max(40, options.max_width - 4)
        plain = options.ascii_only
        rows: list[RenderableType] = [_progress_line(state, inner)]
        if state.last is not None:
            rows += [Text(""), _numbers(state, state.last, inner, plain)]
        elif state.roles:
            rows += [Text(""), _roles(state)]
        if state.progress:
            rows += [Text(""), *(_bar(p, state.elapsed_s, inner) for p in state.progress.values())]
        if state.messages:
            rows.append(Text(""))
            rows += [_message(when_s, text) for when_s, text in state.messages]
        yield Panel(
            Group(*rows),
            title=_title(state),
            title_align="left",
            subtitle=Text(f"{state.phase} · {duration(state.elapsed_s)}", style="dim"),
            subtitle_align="right",
            border_style=ACCENT,
            padding=(0, 1),
            width=options.max_width,
        )


def share_bar(shares: Mapping[str, float], width: int) -> Text:
    """Shares as one bar of exactly `width` cells (largest remainder); missing share stays blank."""
    exact = {name: max(0.0, shares.get(name, 0.0)) * width for name in SHARE_STYLES}
    cells = {name: int(v) for name, v in exact.items()}
    spare = round(sum(exact.values())) - sum(cells.values())
    for name in sorted(exact, key=lambda n: cells[n] - exact[n])[: max(0, spare)]:
        cells[name] += 1
    bar = Text()
    for name, (style, block) in SHARE_STYLES.items():
        bar.append(block * cells[name], style=style)
    bar.append(" " * (width - len(bar)))
    return bar


def share_legend(shares: Mapping[str, float]) -> Text:
    """Shares as words, in the colours of the bar; those under 0.5 % are left out unless they are waits."""
    legend = Text()
    for name, (style, _) in SHARE_STYLES.items():
        if name == "idle" and shares.get(name, 0.0) < 0.005:
            continue
        legend.append("  " if legend else "")
        legend.append(name, style=style)
        legend.append(f" {percent(shares.get(name, 0.0))}")
    return legend


def _title(state: RunState) -> Text:
    title = Text("headrace ", style=f"bold {ACCENT}")
    if state.config is not None:
        flow = state.config.flow
        title.append(f"{state.config.name} ", style="bold")
        title.append(f"{flow.mode}, lag ≤ {flow.lag_bound}, {flow.batch_groups} x {flow.group_size}", style="dim")
    return title


def _progress_line(state: RunState, width: int) -> RenderableType:
    last = state.last
    total = state.steps_planned
    done = last.version if last is not None else 0
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(width=LABEL_WIDTH - 1)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    eta = "ETA -" if last is None else "done" if 0 < total <= done else f"ETA {duration(last.eta_s)}"
    bar = ProgressBar(total=max(total, 1), completed=done, complete_style=ACCENT, finished_style="green")
    line.add_row(Text("step", style="bold"), Text(f"{done}/{total or '?'}", style="bold"), bar, Text(eta))
    return line


def _numbers(state: RunState, last: StepRecord, width: int, plain: bool) -> RenderableType:
    bound = "" if state.lag_bound is None else f"/{state.lag_bound}"
    spark = max(8, min(32, width - 52))
    generated, trained = state.tok_per_s()
    shares = state.trainer_shares()
    rows: list[tuple[str, Text]] = [
        ("reward", _reward(state, last, spark, plain)),
        ("held-out", _held_out(state, spark, plain)),
        ("rates", _rates(last)),
        ("trainer", share_bar(shares, width - LABEL_WIDTH)),
        ("", share_legend(shares)),
        (
            "lag",
            _fields(
                ("mean", f"{last.lag_mean:.2f}"),
                ("max", f"{last.lag_max}{bound}"),
                ("queue", f"{last.queue_groups} groups"),
                ("running", count(last.running_rollouts)),
            ),
        ),
        ("tokens", _fields(("generated", f"{count(generated)} tok/s"), ("trained", f"{count(trained)} tok/s"))),
        ("verdict", Text(last.verdict.replace("_", " "), style=VERDICT_STYLES.get(last.verdict, "bold yellow"))),
    ]
    table = Table.grid()
    table.add_column(width=LABEL_WIDTH, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in rows:
        table.add_row(label, value)
    return table


def _reward(state: RunState, last: StepRecord, spark: int, plain: bool) -> Text:
    line = Text().append(f"{last.reward_mean:.3f}", style="bold")
    line.append("  " + sparkline([s.reward_mean for s in state.steps], spark, ascii_only=plain), style="green")
    line.append("  ")
    line.append(_fields(("pass", percent(last.pass_frac)), ("zero-signal", percent(last.zero_signal_frac))))
    return line


def _held_out(state: RunState, spark: int, plain: bool) -> Text:
    if not state.evals:
        return Text("not measured", style="dim")
    first, newest = state.evals[0], state.evals[-1]
    line = Text().append(percent(newest.accuracy, 1), style="bold")
    line.append(f" at v{newest.version}", style="dim")
    if newest is not first:
        change = 100 * (newest.accuracy - first.accuracy)
        line.append("  " + sparkline([e.accuracy for e in state.evals], spark, ascii_only=plain), style="green")
        line.append(f"  {change:+.1f} points", style="green" if change >= 0 else "red")
        line.append(f" since v{first.version}", style="dim")
    return line


def _rates(last: StepRecord) -> Text:
    produced, consumed = last.production_per_s, last.consumption_per_s
    ratio = f"{produced / consumed:.2f}" if consumed > 0 else "-"
    return _fields(("production", f"{count(produced)}/s"), ("consumption", f"{count(consumed)}/s"), ("ratio", ratio))


def _fields(*pairs: tuple[str, str]) -> Text:
    line = Text()
    for name, value in pairs:
        line.append("   " if line else "")
        line.append(f"{name} ", style="dim")
        line.append(value)
    return line


def _roles(state: RunState) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for role in state.roles.values():
        ready = not role.waits_for and role.state == "ready"
        table.add_row(
            Text(role.name, style="bold"),
            Text(role.state, style="green" if ready else "yellow"),
            Text(f"waits for {role.waits_for}" if role.waits_for else "", style="dim"),
            Text("" if ready else f"for {duration(state.elapsed_s - role.since_s)}", style="dim"),
        )
    return table


def _bar(progress: Progress, now_s: float, width: int) -> RenderableType:
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True, max_width=width // 2, overflow="ellipsis")
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    known = progress.total > 0
    bar = ProgressBar(
        total=progress.total if known else None,
        completed=progress.done,
        pulse=not known,
        complete_style=ACCENT,
    )
    numbers = f"{count(progress.done)}/{count(progress.total)}" if known else count(progress.done)
    spent_s = now_s - progress.began_s
    if known and progress.done > 0 and spent_s > 1:
        numbers += f"  {duration(spent_s * (progress.total - progress.done) / progress.done)} left"
    line.add_row(progress.what, bar, numbers)
    return line


def _message(when_s: float, text: str) -> Text:
    line = Text(f"{duration(when_s):>8}  ", style="dim", no_wrap=True, overflow="ellipsis")
    line.append(text, style="default")
    return line
