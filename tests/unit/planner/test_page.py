from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plan_world as world
import pytest
from plotly import graph_objects
from plotly.offline import get_plotlyjs

from headrace.errors import PlanError
from headrace.planner import page_charts as charts
from headrace.planner.page import render_page, write_page
from headrace.planner.sim_trace import ENGINES, TRAINER, Trace

NEVER_CLOSED = {"meta"}


class Structure(HTMLParser):
    """Fails on a tag that is closed out of order; collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in NEVER_CLOSED:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def trace() -> Trace:
    """Two engines, two steps of the trainer, one hand-off."""
    found = Trace()
    for second in range(10):
        for engine in (0, 1):
            found.counter(ENGINES, f"engine {engine}", float(second), running=10 * engine + second, queued=engine)
    found.span(TRAINER, 0, "train", 1.0, 4.0, version=0)
    found.span(TRAINER, 0, "publish", 4.0, 4.5, version=1)
    found.span(TRAINER, 0, "train", 5.0, 8.0, version=1)
    found.span(ENGINES, 0, "swap", 5.0, 5.25, version=1)
    return found


def without_plotly(page: str) -> str:
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def figures(page: str) -> dict[str, dict[str, Any]]:
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', page)
    return {name: json.loads(data) for name, data in found}


def test_the_page_is_one_whole_file_without_network(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    write_page(world.plan(phases=world.phases()), path, trace=trace())
    page = without_plotly(path.read_text(encoding="utf-8"))
    structure = Structure()
    structure.feed(page)
    assert structure.open == []
    assert structure.fetched == []
    assert "http" not in page
    assert "@import" not in page
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]


def test_nothing_is_left_behind_where_the_page_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plan.html").mkdir()
    with pytest.raises(PlanError, match=r"plan\.html"):
        write_page(world.plan(), tmp_path / "plan.html")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]


def test_every_figure_is_one_that_plotly_accepts() -> None:
    page = without_plotly(render_page(world.plan(phases=world.phases()), trace=trace()))
    found = figures(page)
    assert set(found) == set(re.findall(r'data-figure="([\w-]+)"', page))
    assert {"lag", "cost", "timeline", "lag-histogram", "sensitivity", "drift", "memory-trainer"} <= set(found)
    colours = re.compile(r"var\(--\w+\)")
    for figure in found.values():
        graph_objects.Figure(json.loads(colours.sub("#123456", json.dumps(figure))))  # raises for an unknown key


def test_every_colour_of_a_figure_is_one_of_the_page() -> None:
    page = without_plotly(render_page(world.plan(phases=world.phases()), trace=trace()))
    used = set(re.findall(r"var\((--\w+)\)", page))
    assert used <= set(re.findall(r"(--\w+):", page))


def test_the_page_says_what_the_plan_says() -> None:
    page = without_plotly(render_page(world.plan(phases=world.phases())))
    best = world.plan().best
    assert "1.62x (1.38 to 1.84)" in page
    assert "Generation binds, by KV entries" in page
    assert f"${best.usd_per_mtok:.2f}" in page
    assert "1.7/3/4" in page  # lag mean / p99 / max
    assert "61.5 of 72.0" in page  # the trainer's worst instant
    assert "serving rows of vLLM on H100" in page
    assert "num_gpus = 32" in page  # the spec as TOML
    assert "(re-plan)" in page
    assert page.count('<tr class="sync">') == 1
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan[a-z]*", "", page.lower())


def test_a_plan_without_extras_has_no_cards_for_them() -> None:
    bare = world.plan(
        best_sync=None, speedup=None, remedies=(), sensitivities=(), notes=(), points=(), ranked=world.plan().ranked[:1]
    )
    found = figures(without_plotly(render_page(bare)))
    assert not {"timeline", "drift", "remedies", "sensitivity"} & set(found)
    assert "steps" in found


def test_names_from_outside_are_escaped() -> None:
    spec = world.SPEC.model_copy(update={"model": "</script><script>alert(1)</script>"})
    page = without_plotly(render_page(world.plan(spec=spec, binding="<b>", notes=("</ul>",))))
    assert "<script>alert" not in page
    assert "&lt;b&gt;" in page
    assert "&lt;/ul&gt;" in page


def test_a_setting_without_numbers_is_drawn_all_the_same() -> None:
    plan = world.plan()
    page = without_plotly(render_page(replace(plan, ranked=(*plan.ranked, world.spoiled(plan.best)))))
    assert len(re.findall(r'<tr class="[a-z]*"><td>\d', page)) == 10


def test_whiskers_reach_from_the_mean_to_the_p99() -> None:
    plan = world.plan()
    simulated = next(t for t in charts.lag_plot(plan)["data"] if "error_x" in t and t["name"] == "pipeline")
    assert simulated["x"][0] == pytest.approx((300 + 2 * 400 + 3 * 199 + 4) / 1000)
    assert simulated["x"][0] + simulated["error_x"]["array"][0] == pytest.approx(3.0)


def test_the_front_rises_and_nothing_lies_above_it() -> None:
    plan = world.plan()
    front = next(t for t in charts.cost_plot(plan)["data"] if t["name"].startswith("front"))
    steps = list(zip(front["x"], front["y"], strict=True))
    assert steps == sorted(steps)
    for point in plan.points:
        assert point.samples_per_s <= max(y for x, y in steps if x <= point.usd_per_mtok)


def test_settings_on_one_place_are_drawn_once() -> None:
    plan = world.plan()
    twice = replace(plan, points=plan.points * 2)
    drawn = [sum(len(t["x"]) for t in charts.lag_plot(p)["data"]) for p in (plan, twice)]
    assert drawn[0] == drawn[1]


def test_the_timeline_adds_the_engines_up() -> None:
    figure = charts.timeline(trace())
    running, queued = figure["data"][:2]
    assert running["x"] == [float(second) for second in range(10)]
    assert running["y"] == [10 + 2 * second for second in range(10)]
    assert queued["y"] == [1.0] * 10
    lanes = {t["name"]: t for t in figure["data"][2:]}
    assert set(lanes) == {"train", "publish"}
    assert lanes["train"]["base"] == [1.0, 5.0]
    assert lanes["train"]["x"] == [3.0, 3.0]
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [5.0]


def test_a_long_timeline_is_thinned() -> None:
    long = Trace()
    for i in range(20_000):
        long.counter(ENGINES, "engine 0", i * 0.01, running=i % 7, queued=0)
    running = charts.timeline(long)["data"][0]
    assert 100 < len(running["x"]) <= charts.TIMELINE_POINTS + 1
    assert running["x"][-1] == pytest.approx(199.99)


def test_the_tornado_has_the_widest_on_top_and_leaves_out_what_cannot_run() -> None:
    given = world.plan().sensitivities
    stuck = replace(given[2], what="HBM", step_s_low=None, best_low="nothing fits")
    figure = charts.tornado((*given, stuck), 100.0)
    low, high = figure["data"]
    assert low["y"] == ["HBM", "response length", "trainer MFU", "length spread (sigma)"]
    assert low["x"] == [None, pytest.approx(-55.0), pytest.approx(4.0), pytest.approx(-22.0)]
    assert high["x"][1] == pytest.approx(50.0)


def test_shares_fill_the_bar() -> None:
    figure = charts.shares_plot(world.plan().ranked, "trainer")
    for row in range(len(world.plan().ranked)):
        assert sum(t["x"][row] for t in figure["data"]) == pytest.approx(100.0)


def test_legends_name_colours_once() -> None:
    names = [name for name, _ in charts.legend(charts.lag_plot(world.plan()))]
    assert names == ["pipeline", "sync", "front of the screened"]
    assert charts.legend(charts.step_plot(world.metrics())) == []
