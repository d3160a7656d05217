"""Draws a timeline: rollouts as bars that change colour where new weights landed, the trainer's lane below.

matplotlib is optional (it is in the dev extra) and imported only here, when drawing.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.errors import DataError, HeadraceError
from headrace.telemetry.timeline import Timeline, aligned, assign_rows, begin_of, end_of, segments

VERSION_COLOURS = ("#3b75af", "#e8973a", "#4a9d74", "#c4575e", "#8a6db5", "#4fb0bf", "#b58a4a", "#d883b7")
WAIT_COLOURS = {"wait_data": "#ececec", "wait_bound": "#f3d9e8", "hand_off": "#9aa5b1"}
WAIT_NAMES = {"wait_data": "waits for data", "wait_bound": "held by the bound", "hand_off": "hand-off"}
INK = "#30363d"
PALE = 0.3
"""Opacity of what was wasted."""
SEEN_FRAC = 0.002
"""Share of the width from which an interval can be seen."""


def version_colour(version: int) -> str:
    """Colour of a policy version; neighbours differ."""
    return VERSION_COLOURS[version % len(VERSION_COLOURS)]


def plot(
    timeline: Timeline,
    path: Path,
    *,
    window: tuple[float, float] | None = None,
    title: str = "",
    width_in: float = 11.0,
) -> None:
    """Draw `timeline` to a .png or .svg file.

    `window` = (start_s, end_s) is what is shown, with time counted from its start; None shows everything.
    Raises DataError when nothing lies in the window, HeadraceError when matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional dependency)
    except ModuleNotFoundError as exc:
        raise HeadraceError("drawing a timeline needs matplotlib: pip install matplotlib") from exc
    start_s, end_s = window or _extent(timeline)
    shown = aligned(timeline).window(start_s, end_s)
    if not shown.intervals:
        raise DataError(f"nothing happened between {start_s} s and {end_s} s, so there is no timeline to draw")
    rollouts = assign_rows(shown.rollouts)
    rows = sorted({r.row for r in rollouts})
    lane_in = min(3.6, max(1.6, 0.11 * len(rows)))
    figure: Any = Figure(figsize=(width_in, lane_in + 1.45), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(lane_in, 0.42))
    _draw_rollouts(top, shown, {row: i for i, row in enumerate(rows)}, start_s)
    _draw_trainer(bottom, shown, start_s, end_s)
    for axis in (top, bottom):
        for landing in shown.landings:
            axis.axvline(landing.time_s - start_s, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=4)
        axis.set_yticks([])
        axis.tick_params(colors=INK, labelsize=9)
        for side in ("top", "right", "left", "bottom"):
            axis.spines[side].set_visible(False)
    _name_landings(top, shown, start_s, end_s)
    bottom.set_xlim(0, end_s - start_s)
    bottom.set_xlabel("seconds", color=INK, fontsize=9)
    top.tick_params(axis="x", length=0)
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=150, facecolor="white")


def _extent(timeline: Timeline) -> tuple[float, float]:
    if not timeline.intervals:
        raise DataError("the timeline is empty: there is nothing to draw")
    return min(map(begin_of, timeline.intervals)), max(map(end_of, timeline.intervals))


def _name_landings(axis: Any, shown: Timeline, start_s: float, end_s: float) -> None:
    """Names over the dashed lines: short ones where landings are close, none where they would overlap."""
    times = sorted((x.time_s - start_s, x.version) for x in shown.landings if start_s <= x.time_s <= end_s)
    span_s = end_s - start_s
    roomy = all(after[0] - before[0] > 0.085 * span_s for before, after in pairwise(times))
    style = {"ha": "center", "va": "bottom", "fontsize": 9, "color": INK, "textcoords": "offset points"}
    last_s = float("-inf")
    for time_s, version in times:
        if time_s - last_s > 0.03 * span_s:
            name = f"v{version} lands" if roomy else f"v{version}"
            axis.annotate(name, (time_s, 1.0), (0, 3), xycoords=axis.get_xaxis_transform(), **style)
            last_s = time_s


def _draw_rollouts(axis: Any, shown: Timeline, rank: dict[int, int], origin_s: float) -> None:
    bars: dict[tuple[int, bool], list[tuple[int, float, float]]] = {}
    placed = assign_rows(shown.rollouts)
    for rollout in placed:
        for version, start_s, end_s in segments(rollout):
            piece = (rank[rollout.row], start_s - origin_s, end_s - start_s)
            bars.setdefault((version, rollout.wasted), []).append(piece)
    for (version, wasted), pieces in sorted(bars.items()):
        lanes, lefts, widths = zip(*pieces, strict=True)
        style = {"color": version_colour(version), "linewidth": 0, "alpha": PALE if wasted else 1.0}
        axis.barh(lanes, widths, left=lefts, height=0.78, zorder=2, **style)
    # A white edge at the end of each rollout keeps neighbours on a row apart.
    for rollout in placed:
        at_s = rollout.end_s - origin_s
        axis.plot(
            [at_s, at_s], [rank[rollout.row] - 0.42, rank[rollout.row] + 0.42], color="white", linewidth=1.2, zorder=3
        )
    axis.set_ylim(len(rank) - 0.4, -0.6)
    axis.set_ylabel("generator\nrollouts", color=INK, fontsize=9, rotation=0, ha="right", va="center")


def _draw_trainer(axis: Any, shown: Timeline, origin_s: float, end_s: float) -> None:
    named: set[str] = set()
    for span in shown.trainer:
        left, width = span.start_s - origin_s, span.end_s - span.start_s
        busy = span.kind == "busy"
        colour = version_colour(span.version) if busy else WAIT_COLOURS[span.kind]
        seen_s = (max(left, 0.0), min(left + width, end_s - origin_s))
        seen_frac = (seen_s[1] - seen_s[0]) / (end_s - origin_s)
        # The legend explains what can be seen.
        label = WAIT_NAMES[span.kind] if not busy and span.kind not in named and seen_frac > SEEN_FRAC else None
        named |= {span.kind} if label else set()
        hatch = "////" if span.kind == "wait_bound" else None
        edge = {"edgecolor": "#c78fb0", "linewidth": 0} if hatch else {"linewidth": 0}
        axis.barh([0], [width], left=left, height=0.8, color=colour, label=label, hatch=hatch, zorder=2, **edge)
        if busy and seen_frac > 0.035:
            text = {"ha": "center", "va": "center", "fontsize": 9, "color": "white", "fontweight": "bold", "zorder": 5}
            axis.text(sum(seen_s) / 2, 0, f"makes v{span.version}" if seen_frac > 0.09 else f"v{span.version}", **text)
    axis.set_ylim(-0.5, 0.5)
    axis.set_ylabel("trainer", color=INK, fontsize=9, rotation=0, ha="right", va="center")
    if named:
        style = {"fontsize": 8.5, "frameon": False, "labelcolor": INK, "handlelength": 1.4, "columnspacing": 1.4}
        axis.legend(loc="upper right", bbox_to_anchor=(1.0, -0.45), ncols=3, borderaxespad=0, **style)
