"""Small charts as SVG text, without a plotting library: lines, stacked bars, bars.

Colours come from CSS variables of the page (report.py), so the charts follow its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
COLOURS = ("var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)")
Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], *, zero: bool = False, smooth: str = "", marks: str = "") -> str:
    """Lines over a common x axis, non-finite points left out.

    `zero` makes the y axis begin at 0; the series named `smooth` is drawn thin with a running mean on it; the one
    named `marks` gets a dot at each point.
    """
    finite = {name: [(x, y) for x, y in pts if math.isfinite(y)] for name, pts in series.items()}
    points = [p for pts in finite.values() for p in pts]
    if not points:
        return _empty()
    x_low, x_high = _range([x for x, _ in points])
    y_low, y_high = _range([y for _, y in points] + ([0.0] if zero else []))
    frame = _Frame(x_low, x_high, *_nice(y_low, y_high))
    body = [frame.axes()]
    for i, (name, pts) in enumerate(finite.items()):
        colour = COLOURS[i % len(COLOURS)]
        if name == smooth and len(pts) > 8:
            body.append(frame.path(pts, colour, width=1.0, opacity=0.35))
            body.append(frame.path(running_mean(pts, max(3, len(pts) // 12)), colour))
        else:
            body.append(frame.path(pts, colour))
        if name == marks or len(pts) == 1:
            body += [frame.dot(x, y, colour) for x, y in pts]
    return _svg("".join(body)) + (_legend(list(finite)) if len(finite) > 1 else "")


def stacked_chart(x: Sequence[float], parts: Mapping[str, Sequence[float]]) -> str:
    """Bars of parts on top of each other, one bar per x."""
    if not x:
        return _empty()
    totals = [sum(values[i] for values in parts.values()) for i in range(len(x))]
    frame = _Frame(min(x) - 0.5, max(x) + 0.5, *_nice(0.0, max(totals)))
    body = [frame.axes()]
    width = max(0.5, 0.82 * (frame.x(x[0] + 1) - frame.x(x[0])))
    base = [0.0] * len(x)
    for i, values in enumerate(parts.values()):
        for j, value in enumerate(values):
            if value > 0:
                body.append(frame.bar(frame.x(x[j]) - width / 2, width, base[j], base[j] + value, COLOURS[i % 6]))
                base[j] += value
    return _svg("".join(body)) + _legend(list(parts))


def bar_chart(values: Mapping[str, float], *, unit: str = "") -> str:
    """One labelled bar per entry."""
    if not values:
        return _empty()
    frame = _Frame(0.0, float(len(values)), *_nice(0.0, max(values.values())))
    body = [frame.axes(x_ticks=False)]
    step = (WIDTH - LEFT - RIGHT) / len(values)
    for i, (name, value) in enumerate(values.items()):
        left = LEFT + (i + 0.14) * step
        body.append(frame.bar(left, 0.72 * step, 0.0, value, "var(--c0)"))
        centre = left + 0.36 * step
        body.append(_text(centre, HEIGHT - 8, name, anchor="middle"))
        body.append(_text(centre, frame.y(value) - 4, f"{tick(value)}{unit}", anchor="middle"))
    return _svg("".join(body))


def running_mean(points: Points, width: int) -> list[tuple[float, float]]:
    """Mean over the last `width` points at each point (fewer at the start)."""
    out = []
    for i, (x, _) in enumerate(points):
        last = [y for _, y in points[max(0, i - width + 1) : i + 1]]
        out.append((x, sum(last) / len(last)))
    return out


def tick(value: float) -> str:
    """A number on an axis.

    >>> tick(0.0), tick(0.25), tick(1500.0), tick(2e6), tick(0.0004)
    ('0', '0.25', '1.5k', '2M', '4e-04')
    """
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e3:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0e}" if size < 1e-3 else f"{value:.3g}"


class _Frame:
    """Maps numbers to pixels and draws the axes."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, y_step: float) -> None:
        self.x_low, self.x_high, self.y_low, self.y_high, self.y_step = x_low, x_high, y_low, y_high, y_step

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - BOTTOM - TOP)

    def axes(self, *, x_ticks: bool = True) -> str:
        out = []
        for i in range(round((self.y_high - self.y_low) / self.y_step) + 1):
            value = self.y_low + i * self.y_step
            at = f"{self.y(value):.1f}"
            out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
            out.append(_text(LEFT - 6, self.y(value) + 4, tick(round(value, 12)), anchor="end"))
        if x_ticks:
            step = max(1.0, _step(self.x_high - self.x_low, 8))
            value = math.ceil(self.x_low / step) * step
            while value <= self.x_high:
                out.append(_text(self.x(value), HEIGHT - 8, tick(value), anchor="middle"))
                value += step
        return "".join(out)

    def path(self, points: Points, colour: str, *, width: float = 1.8, opacity: float = 1.0) -> str:
        if not points:
            return ""
        steps = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        style = f'stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
        return f'<polyline class="line" points="{steps}" {style}/>'

    def dot(self, x: float, y: float, colour: str) -> str:
        return f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.2" fill="{colour}"/>'

    def bar(self, left: float, width: float, low: float, high: float, colour: str) -> str:
        top, height = self.y(high), max(0.0, self.y(low) - self.y(high))
        return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-12:
        pad = abs(high) * 0.1 or 0.5
        return low - pad, high + pad
    return low, high


def _step(span: float, count: int) -> float:
    """The smallest 1, 2 or 5 times a power of ten that needs at most `count` steps."""
    rough = max(span, 1e-12) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def _nice(low: float, high: float) -> tuple[float, float, float]:
    """Axis ends and step around [low, high]."""
    if high - low < 1e-12:
        high = low + 1.0
    step = _step(high - low, 4)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{body}</svg>'


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{items}</div>'


def _empty() -> str:
    return '<p class="empty">nothing was recorded</p>'
