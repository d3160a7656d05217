"""A plan as one self-contained HTML page: no network, light and dark. Plotly draws; the tables need no script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w
from plotly.offline import get_plotlyjs

from headrace.errors import PlanError, boundary
from headrace.planner import page_charts as charts
from headrace.planner.page_charts import Figure
from headrace.planner.plan_table import (
    COLUMNS,
    chips_words,
    drifts,
    gain,
    mode_words,
    other_plans,
    significant,
    split_words,
    times,
    usd,
    workload_words,
)
from headrace.planner.sim_trace import Trace
from headrace.telemetry.format import count, duration, percent
from headrace.telemetry.report import STYLE

if TYPE_CHECKING:
    from headrace.planner.evaluate import Evaluated
    from headrace.planner.plan import Plan

PAGE_STYLE = """
.wide{grid-column:1/-1}.scroll{overflow-x:auto}h2+.scroll{margin-top:8px}
.card p{margin:4px 0}.lead{font-size:16px}
.plans{white-space:nowrap;font-size:13px}.plans th{font-weight:500;color:var(--dim)}th[title]{cursor:help}
.plans th,.plans td{padding:4px 8px 4px 0;border-bottom:1px solid var(--rule);text-align:right;
font-variant-numeric:tabular-nums}.plans .w{text-align:left}
.best td{font-weight:600;color:var(--c2)}.sync td{color:var(--c1)}.over{color:var(--c3);font-weight:600}
.left td:last-child{text-align:left}.left td{padding:4px 16px 4px 0;vertical-align:top}
.grade{border-radius:9px;padding:1px 9px;font-size:12px;color:var(--card)}
.measured,.fitted{background:var(--c2)}.spec{background:var(--c1)}.guess{background:var(--c3)}
pre{margin:8px 0 0;font:13px/1.5 ui-monospace,monospace;overflow-x:auto}
.plot{min-height:200px}.plot svg{width:auto;height:auto}.plot svg text{fill:inherit;font-size:inherit}
ul{margin:6px 0;padding-left:20px}
"""
"""On top of the style of run reports; .plot undoes what that says about its own charts."""

SCRIPT = """
const style = () => getComputedStyle(document.documentElement);
function paint() {
  const css = style();
  for (const plot of document.querySelectorAll('.plot')) {
    const text = document.getElementById(plot.dataset.figure).textContent;
    const figure = JSON.parse(text.replace(/var\\((--\\w+)\\)/g, (_, name) => css.getPropertyValue(name).trim()));
    Plotly.react(plot, figure.data, figure.layout, {responsive: true, displayModeBar: false});
  }
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paint);
paint();
"""


def write_page(plan: Plan, path: Path, *, trace: Trace | None = None) -> None:
    """Write the page of a plan to `path`, whole or not at all.

    `trace`: of a simulation of the best setting; with it the page shows a timeline, else the seconds of each step.
    Raises PlanError where the file cannot be written.
    """
    text = render_page(plan, trace=trace)
    partial = path.with_name(f"{path.name}.partial")
    with boundary(PlanError, f"writing {path}"):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def render_page(plan: Plan, *, trace: Trace | None = None) -> str:
    """The page as text."""
    spec = plan.spec
    title = f"{spec.model} on {chips_words(spec)}"
    cards = [_table_card(plan), *_words(plan), *_plots(plan, trace), *_facts_cards(plan)]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan: {escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}{PAGE_STYLE}</style><script>{get_plotlyjs()}</script></head><body><main>"
        f"<h1>{escape(title)}</h1>"
        f'<div class="dim">{escape(workload_words(spec))}; {count(spec.steps)} steps; '
        f"objective {escape(spec.search.objective.replace('_', ' '))}; calibration {escape(plan.calibration)} "
        f"({escape(plan.calibration_date)}); step costs {_grade(plan.grade)}</div>{_facts(plan)}"
        f'<div class="grid-box">{"".join(cards)}</div></main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


# ---- facts and words -------------------------------------------------------------------------------------------------


def _facts(plan: Plan) -> str:
    best, metrics, steps = plan.best, plan.best.metrics, count(plan.spec.steps)
    band = f"seconds a step, {significant(plan.step_s.low)} to {significant(plan.step_s.high)}"
    facts = [
        (f"{mode_words(best.setting)} {split_words(best.setting)}", "best: chips, generator + trainer"),
        (significant(plan.step_s.mid), band),
        (significant(metrics.samples_per_s), "samples/s"),
    ]
    if plan.speedup is not None:
        facts.insert(1, (times(plan.speedup), "samples/s of the best synchronous plan"))
    facts += [
        (duration(best.wall_s.p50), f"for {steps} steps; P90 {duration(best.wall_s.p90)}"),
        (usd(best.usd_per_mtok), f"per million trained tokens; {usd(best.usd)} in all"),
        (f"{metrics.lag_mean:.2f} / {metrics.lag_p99} / {metrics.lag_max}", "lag: mean / p99 / max"),
        (f"{percent(metrics.trainer_idle_frac)} / {percent(metrics.generator_idle_frac)}", "idle: trainer / generator"),
    ]
    boxes = "".join(f'<div class="fact"><b>{escape(v)}</b><span class="dim">{escape(k)}</span></div>' for v, k in facts)
    return f'<div class="facts">{boxes}</div>'


def _words(plan: Plan) -> list[str]:
    body = f'<p class="lead">{escape(plan.binding)}</p>'
    cards = [_card("What binds", "", body + _list(plan.notes), wide=True)]
    if plan.remedies:
        about = "gain in samples/s when one thing changes and the plan is made anew"
        cards.append(_plot("What would help", about, charts.remedy_plot(plan.remedies), "remedies"))
    if plan.sensitivities:
        about = "one assumption at a time; hover for the plan that would then be the best"
        figure = charts.tornado(plan.sensitivities, plan.step_s.mid)
        changes = [f"{s.what}: {words}" for s in plan.sensitivities for words in other_plans(s, plan.best.setting)]
        note = f"<p>Another plan would be the best with</p>{_list(changes)}" if changes else "<p>The plan stays.</p>"
        cards.append(_plot("What would change the answer", about, figure, "sensitivity", note))
    return cards


def _plots(plan: Plan, trace: Trace | None) -> list[str]:
    best, shown = plan.best, _shown(plan)
    cards = [
        _plot("Throughput and lag", "strong: simulated. Faint: screened; larger ones cost more per token",
              charts.lag_plot(plan), "lag"),
        _plot("Throughput and cost", "strong: simulated. Faint: screened; larger ones lag more",
              charts.cost_plot(plan), "cost"),
        _plot("Trainer", "shares of its time", charts.shares_plot(shown, "trainer"), "trainer"),
        _plot("Generator", "shares of its time", charts.shares_plot(shown, "generator"), "generator"),
    ]  # fmt: skip
    if trace is not None:
        about = "of the best plan, simulated"
        cards.append(_plot("Timeline", about, charts.timeline(trace), "timeline", wide=True))
    cards.append(_plot("Lag", "of the best plan", charts.lag_histogram(best.metrics), "lag-histogram"))
    if best.metrics.step_s:
        cards.append(_plot("Steps", "of the best plan, simulated", charts.step_plot(best.metrics), "steps"))
    if drifts(plan):
        about = "as the workload drifts; diamonds grow where another plan becomes the best"
        cards.append(_plot("Schedule", about, charts.drift_plot(plan.phases), "drift", _schedule(plan), wide=True))
    for side, fit in (("generator", best.generator_fit), ("trainer", best.trainer_fit)):
        about = "of the best plan; a side needs the most of its instants, never their sum"
        cards.append(_plot(f"Memory of the {side}", about, charts.memory_plot(fit), f"memory-{side}"))
    return cards


def _facts_cards(plan: Plan) -> list[str]:
    grades = [[escape(t.name.replace("_", " ")), _grade(t.grade), escape(t.source)] for t in plan.terms]
    spec = tomli_w.dumps(plan.spec.model_dump(mode="json", exclude_none=True, exclude_unset=True))
    how = "headrace plan spec.toml --emit recipe.toml\nheadrace train recipe.toml"
    counts = [("settings screened", count(plan.screened)), ("simulated", str(plan.simulated))]
    counts += [(f"left out: {reason}", count(number)) for reason, number in sorted(plan.pruned.items())]
    return [
        _card("Confidence", "how each term of the prediction is known", _rows(grades, "left"), wide=True),
        _card("Memory of all plans", "GB on a chip at each instant", _memory_table(_shown(plan)), wide=True),
        _card("Spec", "spec.toml: everything that this plan depends on", f"<pre>{escape(spec)}</pre>"),
        _card("From here", "the plan is the run", f"<pre>{escape(how)}</pre>"),
        _card("Search", f"in {duration(plan.plan_s)}", _rows([[escape(a), escape(b)] for a, b in counts])),
    ]


# ---- tables ----------------------------------------------------------------------------------------------------------


def _shown(plan: Plan) -> list[Evaluated]:
    """All ranked settings, and the best synchronous one where it is not among them."""
    sync = plan.best_sync
    return [*plan.ranked, *([sync] if sync is not None and all(e.setting != sync.setting for e in plan.ranked) else [])]


def _table_card(plan: Plan) -> str:
    heads = "".join(f'<th{_left(c.words)} title="{escape(c.name)}">{escape(c.head)}</th>' for c in COLUMNS)
    sync = None if plan.best_sync is None else plan.best_sync.setting
    rows = []
    for i, e in enumerate(_shown(plan)):
        kind = "best" if i == 0 else "sync" if e.setting == sync else ""
        cells = "".join(f"<td{_left(c.words)}>{escape(c.text(e))}</td>" for c in COLUMNS)
        rows.append(f'<tr class="{kind}"><td>{i + 1}</td>{cells}</tr>')
    table = f'<div class="scroll"><table class="plans"><tr><th></th>{heads}</tr>{"".join(rows)}</table></div>'
    about = (
        "simulated, best first; green: the best, orange: the best synchronous one. Hover over a head for its meaning"
    )
    return _card("Plans", about, table, wide=True)


def _memory_table(shown: Sequence[Evaluated]) -> str:
    fits = [(e, fit) for e in shown for fit in (e.generator_fit, e.trainer_fit)]
    instants = list(dict.fromkeys((fit.side, name) for _, fit in fits for name in fit.instants))
    instants.sort(key=lambda each: each[0])
    heads = "".join(f"<th>{escape(side)}: {escape(name)}</th>" for side, name in instants)
    rows = []
    for i, e in enumerate(shown):
        sides = {"generator": e.generator_fit, "trainer": e.trainer_fit}
        cells = []
        for side, name in instants:
            used, limit = sides[side].instants.get(name), sides[side].limit_bytes
            over = ' class="over"' if used is not None and used > limit else ""
            text = "-" if used is None else f"{used / 1e9:.1f} of {limit / 1e9:.1f}"
            cells.append(f"<td{over}>{text}</td>")
        rows.append(f'<tr><td>{i + 1}</td><td class="w">{escape(e.setting.words())}</td>{"".join(cells)}</tr>')
    return f'<div class="scroll"><table class="plans"><tr><th></th><th></th>{heads}</tr>{"".join(rows)}</table></div>'


def _schedule(plan: Plan) -> str:
    heads = ["at", "best then", "lengths", "turns", "step s", "first plan's", "regret"]
    rows = [
        [
            percent(p.at_frac),
            p.best.words() + (" (re-plan)" if p.replan else ""),
            f"x{p.length_factor:.2g}",
            f"x{p.turns_factor:.2g}",
            significant(p.best_step_s),
            "cannot run" if p.static_step_s is None else significant(p.static_step_s),
            "-" if p.regret_frac is None else gain(p.regret_frac),
        ]
        for p in plan.phases
    ]
    head = "".join(f"<th{_left(i < 2)}>{h}</th>" for i, h in enumerate(heads))
    body = ("".join(f"<td{_left(i < 2)}>{escape(c)}</td>" for i, c in enumerate(row)) for row in rows)
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f'<div class="scroll"><table class="plans"><tr>{head}</tr>{lines}</table></div>'


# ---- parts -----------------------------------------------------------------------------------------------------------


def _plot(title: str, note: str, figure: Figure, name: str, after: str = "", *, wide: bool = False) -> str:
    # "<" would end the script element early; JSON reads < as the same character.
    data = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    body = (
        f'<script type="application/json" id="{name}">{data}</script>'
        f'<div class="plot" data-figure="{name}" style="height:{figure["layout"]["height"]}px"></div>'
        f"{_legend(figure)}{after}"
    )
    return _card(title, note, body, wide=wide)


def _legend(figure: Figure) -> str:
    items = [f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in charts.legend(figure)]
    return f'<div class="legend">{"".join(items)}</div>' if items else ""


def _card(title: str, note: str, body: str, *, wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}</section>'


def _rows(rows: Iterable[Sequence[str]], kind: str = "") -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{kind}">{cells}</table>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _grade(grade: str) -> str:
    return f'<span class="grade {escape(grade)}">{escape(grade)}</span>'


def _left(words: bool) -> str:
    return ' class="w"' if words else ""
