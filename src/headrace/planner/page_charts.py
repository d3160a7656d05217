"""The plots of a plan's page, as Plotly figures in plain data.

Colours are CSS variables of the page ("var(--c0)"): its script puts the theme's values in their place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from headrace.planner.memory import MemoryFit
from headrace.planner.outcome import Metrics
from headrace.planner.plan_table import gain, mode_words, significant, split_words, usd, widest_first
from headrace.planner.sim_trace import ENGINES, TRAINER, Trace
from headrace.telemetry.format import percent

if TYPE_CHECKING:
    from headrace.planner.evaluate import Evaluated
    from headrace.planner.plan import Phase, Plan, Point, Remedy, Sensitivity

Figure = dict[str, Any]

MODE_COLOURS: Mapping[str, str] = {"pipeline": "var(--c0)", "sync": "var(--c1)", "one_step_off": "var(--c4)"}
SHARE_COLOURS: Mapping[str, str] = {
    "busy": "var(--c2)",
    "decode": "var(--c2)",
    "prefill": "var(--c1)",
    "wait_data": "var(--c1)",
    "wait_bound": "var(--c3)",
    "hand_off": "var(--c0)",
    "paused": "var(--c0)",
    "blocked": "var(--c3)",
    "idle": "var(--c5)",
}
SHARE_NAMES: Mapping[str, str] = {"wait_data": "waits for data", "wait_bound": "held by the bound"}
LANE_COLOURS: Mapping[str, str] = {"train": "var(--c2)", "publish": "var(--c0)", "switch": "var(--c1)"}
TIMELINE_POINTS = 1500
"""Times at which the number of running rollouts is drawn."""
FAINT, STRONG = 0.3, 1.0
LABEL_ROOM = 0.18
"""Share of a plot's width for labels outside of its bars, on each side."""
SIZES = 6.0, 20.0
"""Pixels across of the smallest and the largest of a plot's markers."""


def lag_plot(plan: Plan) -> Figure:
    """Throughput against lag: screened settings faint at their mean lag, simulated ones with a whisker to the p99."""
    traces = _screened(plan.points, x=lambda p: p.lag_mean, size=lambda p: p.usd_per_mtok)
    traces.append(_front([(p.lag_mean, p.samples_per_s) for p in plan.points]))
    for mode, chosen in _by_mode(plan.ranked).items():
        means = [e.metrics.lag_mean for e in chosen]
        trace = _simulated(chosen, mode, means)
        reach = [max(0.0, e.metrics.lag_p99 - mean) for e, mean in zip(chosen, means, strict=True)]
        trace["error_x"] = {"type": "data", "symmetric": False, "array": reach, "arrayminus": [0] * len(reach)}
        trace["error_x"] |= {"thickness": 1.2, "width": 4, "color": MODE_COLOURS[mode]}
        traces.append(trace)
    return _figure(traces, x="lag of trained tokens: mean, whisker to p99 (steps)", y="samples/s", height=380)


def cost_plot(plan: Plan) -> Figure:
    """Throughput against dollars per million trained tokens; markers grow with lag."""
    traces = _screened(plan.points, x=lambda p: p.usd_per_mtok, size=lambda p: p.lag_mean)
    traces.append(_front([(p.usd_per_mtok, p.samples_per_s) for p in plan.points]))
    for mode, chosen in _by_mode(plan.ranked).items():
        traces.append(_simulated(chosen, mode, [e.usd_per_mtok for e in chosen]))
    return _figure(traces, x="dollars per million trained tokens", y="samples/s", height=380)


def shares_plot(chosen: Sequence[Evaluated], side: str) -> Figure:
    """Shares of the trainer's or the generator's time, one bar per setting."""
    shares = [e.metrics.trainer_shares if side == "trainer" else e.metrics.generator_shares for e in chosen]
    names = dict.fromkeys(name for each in shares for name in each)
    rows = [f"{i + 1}. {mode_words(e.setting)} {split_words(e.setting)}" for i, e in enumerate(chosen)]
    words = [escape(e.setting.words()) for e in chosen]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": SHARE_NAMES.get(name, name.replace("_", " ")),
            "y": rows,
            "x": [100 * each.get(name, 0.0) for each in shares],
            "marker": {"color": SHARE_COLOURS.get(name, "var(--c4)")},
            "text": words,
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{x:.1f} %",
        }
        for name in names
    ]
    layout = {"barmode": "stack", "yaxis": {"autorange": "reversed", "automargin": True}, "xaxis": {"range": [0, 100]}}
    return _figure(traces, x="per cent of time", height=90 + 30 * max(2, len(rows)), layout=layout)


def lag_histogram(metrics: Metrics) -> Figure:
    """Trained tokens by lag, and samples by the lag of their oldest token."""
    traces = []
    both = (("tokens", metrics.lag_hist, "var(--c0)"), ("samples, oldest token", metrics.sample_lag_hist, "var(--c1)"))
    for name, histogram, colour in both:
        whole = sum(histogram.values())
        if whole:
            lags = sorted(histogram)
            shares = [100 * histogram[lag] / whole for lag in lags]
            trace = {"type": "bar", "name": name, "x": lags, "y": shares, "marker": {"color": colour}}
            traces.append(trace | {"hovertemplate": "lag %{x}: %{y:.1f} %"})
    return _figure(traces, x="lag (steps)", y="per cent", layout={"xaxis": {"dtick": 1}})


def step_plot(metrics: Metrics) -> Figure:
    """Seconds of each simulated step."""
    steps = list(range(1, len(metrics.step_s) + 1))
    bars = {"type": "bar", "x": steps, "y": list(metrics.step_s), "marker": {"color": "var(--c0)"}, "name": "step"}
    return _figure([bars | {"hovertemplate": "%{y:.3r} s"}], x="simulated step, after warm-up", y="seconds")


def timeline(trace: Trace) -> Figure:
    """What a simulation did: rollouts that run and wait over time, and the trainer's lane below them."""
    events = json.loads(trace.chrome_json())["traceEvents"]
    levels = _levels([e for e in events if e["ph"] == "C" and e["pid"] == ENGINES])
    traces: list[Figure] = [
        {"type": "scatter", "mode": "lines", "name": name, "x": levels["at_s"], "y": levels[name]}
        | {"line": {"color": colour, "width": 1.6, "shape": "hv"}}
        for name, colour in (("running", "var(--c2)"), ("queued", "var(--c3)"))
    ]
    for name in LANE_COLOURS:
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == TRAINER and e["name"] == name]
        if spans:
            traces.append(_lane(name, spans))
    swaps = sorted({e["ts"] / 1e6 for e in events if e["ph"] == "X" and e["pid"] == ENGINES and e["name"] == "swap"})
    mark: Figure = {"type": "line", "xref": "x", "yref": "paper", "y0": 0.24, "y1": 1}
    mark["line"] = {"color": "var(--dim)", "width": 1, "dash": "dot"}
    layout: Figure = {
        "shapes": [mark | {"x0": at_s, "x1": at_s} for at_s in _apart(swaps)],
        "xaxis": {"anchor": "y2"},
        "yaxis": {"domain": [0.24, 1], "rangemode": "tozero"},
        "yaxis2": {"domain": [0, 0.16], "showgrid": False, "fixedrange": True, "zeroline": False},
        "barmode": "overlay",
    }
    return _figure(traces, x="simulated seconds; dotted: new weights land", y="rollouts", height=380, layout=layout)


def tornado(sensitivities: Sequence[Sensitivity], base_s: float) -> Figure:
    """Change of the step time when an assumption is low or high; the widest on top."""
    ordered = widest_first(sensitivities)
    rows = [escape(s.what) for s in ordered]
    ends = (
        ("low", [(s.low_label, s.step_s_low, s.best_low) for s in ordered], "var(--c0)"),
        ("high", [(s.high_label, s.step_s_high, s.best_high) for s in ordered], "var(--c1)"),
    )
    traces: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"assumption {name}",
            "y": rows,
            "x": [None if step_s is None else 100 * (step_s / base_s - 1) for _, step_s, _ in values],
            "text": [escape(label) for label, _, _ in values],
            "textposition": "outside",
            "cliponaxis": False,
            "customdata": [["" if step_s is None else significant(step_s), escape(best)] for _, step_s, best in values],
            "hovertemplate": "%{y} %{text}<br>%{customdata[0]} s a step<br>then best: %{customdata[1]}",
            "marker": {"color": colour},
        }
        for name, values, colour in ends
    ]
    layout = {"barmode": "group", **_labelled_bars([x for trace in traces for x in trace["x"] if x is not None])}
    return _figure(traces, x="change of the step time, per cent", height=100 + 44 * max(2, len(rows)), layout=layout)


def remedy_plot(remedies: Sequence[Remedy]) -> Figure:
    """Gain in samples/s of each change."""
    ordered = sorted(remedies, key=lambda r: -r.gain_frac)
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": "gain",
        "y": [escape(r.what) for r in ordered],
        "x": [100 * r.gain_frac for r in ordered],
        "text": [gain(r.gain_frac) for r in ordered],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": [escape(r.note) for r in ordered],
        "hovertemplate": "%{y}: %{text}<br>%{customdata}",
        "marker": {"color": ["var(--c2)" if r.gain_frac > 0 else "var(--c3)" for r in ordered]},
    }
    layout = _labelled_bars([100 * r.gain_frac for r in ordered])
    return _figure([bars], x="gain in samples/s, per cent", height=90 + 34 * max(2, len(ordered)), layout=layout)


def drift_plot(phases: Sequence[Phase]) -> Figure:
    """Step time over the run: the first plan kept, and the best plan at each point."""
    at = [100 * phase.at_frac for phase in phases]
    words = [escape(phase.best.words()) + (" (re-plan)" if phase.replan else "") for phase in phases]
    lines = (
        ("first plan kept", [p.static_step_s for p in phases], "var(--c1)"),
        ("best plan", [p.best_step_s for p in phases], "var(--c0)"),
    )
    traces: list[Figure] = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": at, "y": values, "text": words}
        | {"hovertemplate": "%{x:.0f} %: %{y:.3r} s<br>%{text}", "line": {"color": colour}}
        for name, values, colour in lines
    ]
    traces[1]["marker"] = {"size": [13 if p.replan else 7 for p in phases], "symbol": "diamond"}
    return _figure(
        traces, x="share of the run, per cent", y="seconds a step", layout={"yaxis": {"rangemode": "tozero"}}
    )


def memory_plot(fit: MemoryFit) -> Figure:
    """GB on a chip of one side at each instant; the line is what may be used."""
    names = list(fit.instants)
    colours = ["var(--c3)" if fit.instants[n] > fit.limit_bytes else "var(--c0)" for n in names]
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": fit.side,
        "y": [escape(name) for name in names],
        "x": [fit.instants[name] / 1e9 for name in names],
        "marker": {"color": colours},
        "hovertemplate": "%{y}: %{x:.1f} GB",
    }
    limit = {
        "type": "line",
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "x0": fit.limit_bytes / 1e9,
        "x1": fit.limit_bytes / 1e9,
    }
    layout = {
        "shapes": [limit | {"line": {"color": "var(--c3)", "width": 2}}],
        "yaxis": {"autorange": "reversed", "automargin": True},
        "xaxis": {"rangemode": "tozero"},
    }
    title = f"GB on each {fit.side} chip; line: {fit.limit_bytes / 1e9:.1f} may be used"
    return _figure([bars], x=title, height=90 + 30 * max(2, len(names)), layout=layout)


def legend(figure: Figure) -> list[tuple[str, str]]:
    """(name, colour) of the traces that a reader must tell apart; empty for a single one.

    The page draws it: Plotly's own takes the room of the plot.
    """
    named = {}
    for trace in figure["data"]:
        look = trace.get("marker", {}) if trace["type"] == "bar" or trace["mode"] == "markers" else trace["line"]
        if isinstance(look.get("color"), str):
            named[trace["name"]] = look["color"]
    return list(named.items()) if len(named) > 1 else []


# ---- parts -----------------------------------------------------------------------------------------------------------


def _figure(
    traces: Sequence[Figure], *, x: str, y: str = "", height: int = 300, layout: Mapping[str, Any] | None = None
) -> Figure:
    """Traces with the layout that all plots share; `layout` wins, axis by axis."""
    axis = {"gridcolor": "var(--rule)", "zerolinecolor": "var(--rule)", "linecolor": "var(--rule)"}
    shared: Figure = {
        "height": height,
        "margin": {"l": 58, "r": 18, "t": 10, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--dim)", "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--rule)", "font": {"color": "var(--ink)"}},
        "showlegend": False,
        "xaxis": axis | {"title": {"text": x}},
        "yaxis": axis | {"title": {"text": y}},
        "bargap": 0.3,
    }
    for name, value in (layout or {}).items():
        known = shared.get(name)
        shared[name] = known | value if isinstance(known, dict) else (axis | value if name == "yaxis2" else value)
    return {"data": list(traces), "layout": shared}


def _labelled_bars(values: Sequence[float]) -> Figure:
    """Layout of horizontal bars, first on top, with room for labels outside of them."""
    low, high = min(0.0, *values), max(0.0, *values)
    room = LABEL_ROOM * (high - low)
    axes: Figure = {"yaxis": {"autorange": "reversed", "automargin": True}}
    return axes | {"xaxis": {"range": [low - room, high + room]}} if room else axes


def _screened(points: Sequence[Point], *, x: Callable[[Point], float], size: Callable[[Point], float]) -> list[Figure]:
    """Faint markers of the settings that only closed forms have seen, one trace per mode; area grows with `size`.

    Of settings that fall on one place only the first is drawn.
    """
    seen = {(p.mode, f"{x(p):.3g}", f"{p.samples_per_s:.3g}"): p for p in reversed(points)}
    low, high = (bound(map(size, points), default=0.0) for bound in (min, max))
    traces = []
    for mode in dict.fromkeys(p.mode for p in points):
        own = [p for p in seen.values() if p.mode == mode]
        shares = [(size(p) - low) / (high - low) if high > low else 0.0 for p in own]
        diameters = [round(SIZES[0] + (SIZES[1] - SIZES[0]) * share**0.5, 1) for share in shares]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": mode.replace("_", " "),
                "x": [x(p) for p in own],
                "y": [p.samples_per_s for p in own],
                "text": [
                    f"{escape(p.words)}<br>{usd(p.usd_per_mtok)} per Mtok, mean lag {p.lag_mean:.2f}" for p in own
                ],
                "hovertemplate": "%{text}<br>%{y:.3r} samples/s",
                "marker": {
                    "color": MODE_COLOURS[mode],
                    "opacity": FAINT,
                    "size": diameters,
                    "line": {"width": 0},
                },
            }
        )
    return traces


def _simulated(chosen: Sequence[Evaluated], mode: str, x: Sequence[float]) -> Figure:
    """Strong markers of the simulated settings."""
    words = [
        f"<b>{escape(e.setting.words())}</b><br>lag {e.metrics.lag_mean:.2f}/{e.metrics.lag_p99}/{e.metrics.lag_max}, "
        f"{usd(e.usd_per_mtok)} per Mtok, trainer idle {percent(e.metrics.trainer_idle_frac)}"
        for e in chosen
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": mode.replace("_", " "),
        "x": list(x),
        "y": [e.metrics.samples_per_s for e in chosen],
        "text": words,
        "hovertemplate": "%{text}<br>%{y:.3r} samples/s",
        "marker": {
            "color": MODE_COLOURS[mode],
            "opacity": STRONG,
            "size": 11,
            "line": {"color": "var(--card)", "width": 1.5},
        },
    }


def _front(points: Sequence[tuple[float, float]]) -> Figure:
    """The line that no screened setting lies above: for each x the most samples/s at that x or less."""
    steps: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (p[0], -p[1])):
        if not steps or y > steps[-1][1]:
            steps.append((x, y))
    line = {"color": "var(--dim)", "width": 1, "dash": "dot", "shape": "hv"}
    front = {"type": "scatter", "mode": "lines", "name": "front of the screened", "line": line, "hoverinfo": "skip"}
    return front | {"x": [x for x, _ in steps], "y": [y for _, y in steps]}


def _by_mode(ranked: Sequence[Evaluated]) -> dict[str, list[Evaluated]]:
    found: dict[str, list[Evaluated]] = {}
    for e in ranked:
        found.setdefault(e.setting.mode, []).append(e)
    return found


def _levels(counters: Sequence[Figure]) -> dict[str, list[float]]:
    """Running and queued rollouts over all engines, at about TIMELINE_POINTS times at most."""
    ordered = sorted(counters, key=lambda event: float(event["ts"]))
    gap_us = (ordered[-1]["ts"] - ordered[0]["ts"]) / TIMELINE_POINTS if ordered else 0.0
    total = dict.fromkeys(("running", "queued"), 0.0)
    engines: dict[str, Mapping[str, float]] = {}
    found: dict[str, list[float]] = {"at_s": [], **{name: [] for name in total}}
    last_us = float("-inf")
    for i, event in enumerate(ordered):
        before = engines.get(event["name"], {})
        for name in total:
            total[name] += event["args"][name] - before.get(name, 0.0)
        engines[event["name"]] = event["args"]
        is_last = i == len(ordered) - 1
        if is_last or (ordered[i + 1]["ts"] > event["ts"] and event["ts"] - last_us >= gap_us):
            last_us = event["ts"]
            found["at_s"].append(last_us / 1e6)
            for name, value in total.items():
                found[name].append(value)
    return found


def _lane(name: str, spans: Sequence[Figure]) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": ["trainer"] * len(spans),
        "base": [span["ts"] / 1e6 for span in spans],
        "x": [span["dur"] / 1e6 for span in spans],
        "width": 0.9,
        "yaxis": "y2",
        "marker": {"color": LANE_COLOURS[name], "line": {"color": "var(--card)", "width": 0.5}},
        "text": [f"v{span['args']['version']}" if "version" in span["args"] else "" for span in spans],
        "textposition": "none",
        "hovertemplate": f"{name} %{{text}}: %{{x:.3r}} s",
    }


def _apart(times: Sequence[float], most: int = 60) -> list[float]:
    """Times of which near ones count once, and none where there are too many to tell apart."""
    if not times:
        return []
    gap_s = (times[-1] - times[0]) / most
    kept: list[float] = []
    for at_s in times:
        if not kept or at_s - kept[-1] > gap_s:
            kept.append(at_s)
    return kept
