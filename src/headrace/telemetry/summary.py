"""The end of a run on one screen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from headrace.telemetry.deliveries import PARTS
from headrace.telemetry.format import count, duration, percent, size_text, sparkline
from headrace.telemetry.panels import share_bar
from headrace.telemetry.records import BUCKETS, RunSummary
from headrace.telemetry.report import FILE_NAME as REPORT

TRAINER_NAMES: Mapping[str, str] = {
    "busy": "busy",
    "wait_data": "data",
    "wait_bound": "bound",
    "hand_off": "hand-off",
    "idle": "idle",
}
# The generator's shares borrow the trainer's colours: work green, held by the bound magenta, hand-off blue.
GENERATOR_NAMES: Mapping[str, tuple[str, str]] = {
    "decode": ("busy", "green"),
    "prefill": ("data", "yellow"),
    "blocked": ("bound", "magenta"),
    "paused": ("hand-off", "blue"),
    "idle": ("idle", "bright_black"),
}
WIDTH_MAX = 100
LABEL_WIDTH = 12


def print_summary(console: Console, summary: RunSummary) -> None:
    """Print the final table; fits 72 columns and wider."""
    width = min(console.width, WIDTH_MAX)
    console.print(summary_panel(summary, width), soft_wrap=False)
    if summary.reason == "interrupted":
        go_on = f"  go on with  headrace train --resume {summary.run_dir}"
        console.print(Text(go_on, style="bold"), soft_wrap=True)
    # Paths stand outside the box, unwrapped, so that they can be copied.
    console.print(Text(f"  run folder  {summary.run_dir}", style="bold"), soft_wrap=True)
    if summary.model_dir is not None:
        console.print(Text(f"  model       {summary.model_dir}", style="bold"), soft_wrap=True)
    report = Path(summary.run_dir) / REPORT
    if report.is_file():
        console.print(Text(f"  report      {report}", style="bold"), soft_wrap=True)


def summary_panel(summary: RunSummary, width: int) -> Panel:
    """The table as a renderable of `width` columns."""
    bar_width = max(16, width - 4 - LABEL_WIDTH)
    parts: list[RenderableType] = [
        _grid(_results(summary)),
        Rule("tokens and groups", style="dim"),
        _grid(_accounts(summary)),
        Rule("shares of training time", style="dim"),
        _grid(_shares(summary, bar_width)),
    ]
    fine = summary.balanced and not summary.reason.startswith("failed")
    title = Text(summary.reason, style="bold green" if fine else "bold red")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        border_style="green" if fine else "red",
        width=width,
        padding=(0, 1),
    )


def _results(summary: RunSummary) -> list[tuple[str, Text]]:
    train_s = summary.train_s
    tok = summary.trained_tok - summary.resumed_tok
    groups = summary.groups.get("trained", 0) - summary.resumed_groups
    time = Text().append(duration(summary.total_s), style="bold")
    time.append(f"  training {duration(train_s)}", style="dim")
    if train_s > 0:
        time.append(f"  {count(tok / train_s)} tok/s, ", style="dim")
        time.append(f"{count(groups / train_s)} groups/s trained", style="dim")
    steps = Text().append(str(summary.steps), style="bold")
    steps.append(f"  policy version {summary.version}", style="dim")
    return [
        ("accuracy", _accuracy(summary)),
        ("reward", _change(summary.reward_first, summary.reward_last)),
        ("steps", steps),
        ("time", time),
    ]


def _accuracy(summary: RunSummary) -> Text:
    before, after = summary.accuracy_before, summary.accuracy_after
    if before is None and after is None:
        return Text("not measured", style="dim")
    line = Text(percent(before, 1) if before is not None else "?")
    line.append("  →  ", style="dim")
    line.append(percent(after, 1) if after is not None else "?", style="bold")
    if before is not None and after is not None:
        change = 100 * (after - before)
        line.append(f"  {change:+.1f} points", style="bold green" if change >= 0 else "bold red")
    line.append(f"  ({summary.eval_prompts} held-out prompts)", style="dim")
    return line


def _change(first: float | None, last: float | None) -> Text:
    if first is None or last is None:
        return Text("no step was done", style="dim")
    line = Text(f"{first:.3f}")
    line.append("  →  ", style="dim")
    line.append(f"{last:.3f}", style="bold")
    return line


def _accounts(summary: RunSummary) -> list[tuple[str, Text]]:
    made = max(1, summary.generated_tok)
    wasted = sum(summary.wasted_tok.values())
    rows = [
        ("generated", Text(f"{count(summary.generated_tok)} tokens")),
        ("trained", Text(f"{count(summary.trained_tok)} tokens  {percent(summary.trained_tok / made, 1)}")),
    ]
    if summary.masked_tok:
        rows.append(("masked", Text(f"{count(summary.masked_tok)} tokens  {percent(summary.masked_tok / made, 1)}")))
    rows.append(("wasted", Text(f"{count(wasted)} tokens  {percent(wasted / made, 1)}")))
    for reason, tok in sorted(summary.wasted_tok.items(), key=lambda item: -item[1]):
        if tok:
            rows.append(("", Text(f"{count(tok)} {reason.replace('_', ' ')}  {percent(tok / made, 1)}", style="dim")))
    open_groups, open_tok = unended(summary)
    if summary.balanced and open_tok:
        rows.append(("kept", Text(f"{count(open_tok)} tokens  {percent(open_tok / made, 1)}  for --resume")))
    ended = [f"{summary.groups[b]} {b.replace('_', ' ')}" for b in BUCKETS if summary.groups.get(b)]
    if summary.balanced and open_groups:
        ended.append(f"{open_groups} kept for --resume")
    rows.append(("groups", Text(f"{summary.admitted} admitted: {', '.join(ended) or 'none ended'}")))
    rows.append(("ledger", _ledger(summary)))
    if summary.lag_hist:
        rows.append(("lag", _lag(summary.lag_hist)))
    if summary.accept_by_length:
        rows.append(("accepted", _accepted(summary.accept_by_length)))
    if summary.sync:
        rows += _delivery(summary.sync_mode, summary.sync)
    return rows


def _delivery(mode: str, sync: Mapping[str, float]) -> list[tuple[str, Text]]:
    """How weights travelled: sizes against a full snapshot and the entropy limit, then where the time went."""
    size = Text(f"{size_text(sync['bytes'])} a version")
    if mode == "delta":
        size.append(f"  {sync['ratio']:.0f} x smaller", style="bold")
        size.append(f"  {percent(sync['density'], 2)} changed", style="dim")
    rows = [("weights", size)]
    if sync["ratio_to_limit"]:
        rows.append(("", Text(f"{percent(sync['ratio_to_limit'])} of the entropy limit", style="dim")))
    for side in (PARTS[:3], PARTS[3:]):
        times = "  ".join(f"{part.removesuffix('_s')} {1000 * sync[part]:.0f}" for part in side if part in sync)
        rows.append(("", Text(f"ms  {times}", style="dim")))
    if sync["resyncs"] or sync["failed_swaps"]:
        rows.append(
            ("", Text(f"{sync['resyncs']:.0f} resyncs, {sync['failed_swaps']:.0f} swaps taken back", style="yellow"))
        )
    return rows


def unended(summary: RunSummary) -> tuple[int, int]:
    """(groups, tokens) that are in no bucket: of an interrupted run those that a resume goes on with."""
    groups = summary.admitted - sum(summary.groups.values())
    return groups, summary.generated_tok - summary.trained_tok - summary.masked_tok - sum(summary.wasted_tok.values())


def _ledger(summary: RunSummary) -> Text:
    if summary.balanced:
        return Text("balanced: every group and token is accounted for", style="green")
    groups, tok = unended(summary)
    return Text(f"NOT balanced: {groups} groups and {tok} tokens are unaccounted for", style="bold red")


def _lag(lag_hist: Mapping[int, int]) -> Text:
    whole = max(1, sum(lag_hist.values()))
    mean = sum(lag * tok for lag, tok in lag_hist.items()) / whole
    line = Text(f"mean {mean:.2f}  max {max(lag_hist)}  ")
    for lag in sorted(lag_hist):
        line.append(f" {lag}: {percent(lag_hist[lag] / whole)} ", style="dim")
    return line


def _accepted(shares: tuple[float, ...]) -> Text:
    line = Text("short ", style="dim")
    # Scaled from 0, not from the least: equal shares shall look equal.
    line.append(sparkline([0.0, 1.0, *shares], len(shares) + 2)[2:], style="green")
    line.append(" long", style="dim")
    line.append(f"  {percent(shares[0])} → {percent(shares[-1])} trained, by length", style="dim")
    return line


def _shares(summary: RunSummary, bar_width: int) -> list[tuple[str, Text]]:
    trainer = {short: summary.trainer_shares.get(name, 0.0) for name, short in TRAINER_NAMES.items()}
    generator = {bar_name: summary.generator_shares.get(name, 0.0) for name, (bar_name, _) in GENERATOR_NAMES.items()}
    generator_legend = Text("  ").join(
        Text.assemble((name, style), f" {percent(summary.generator_shares.get(name, 0.0))}")
        for name, (_, style) in GENERATOR_NAMES.items()
    )
    trainer_legend = Text("  ").join(
        Text.assemble((short, style), f" {percent(trainer[short])}")
        for short, style in zip(
            TRAINER_NAMES.values(), ("green", "yellow", "magenta", "blue", "bright_black"), strict=True
        )
    )
    return [
        ("trainer", share_bar(trainer, bar_width)),
        ("", trainer_legend),
        ("generator", share_bar(generator, bar_width)),
        ("", generator_legend),
    ]


def _grid(rows: list[tuple[str, Text]]) -> Table:
    table = Table.grid()
    table.add_column(width=LABEL_WIDTH, style="dim")
    table.add_column()
    for label, value in rows:
        table.add_row(label, value)
    return table
