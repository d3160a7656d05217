from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))

import plan_world as world

from headrace.cli.fitted_table import Cells, fitted_table
from headrace.cli.plan_tables import (
    Side,
    print_chips,
    print_comparison,
    print_models,
    print_scoreboard,
    print_simulation,
)
from headrace.cli.plan_view import print_plan
from headrace.planner.hardware import chips
from headrace.planner.models import models
from headrace.planner.outcome import Metrics
from headrace.planner.plan_table import COLUMNS
from headrace.planner.scoreboard import Score

WIDTHS = (72, 80, 100, 140, 200)


def shown(width: int, show: Callable[[Console], None]) -> str:
    """What is printed on a console of this width; no line may be longer."""
    file = io.StringIO()
    show(Console(width=width, file=file, highlight=False))
    text = file.getvalue()
    too_long = [line for line in text.splitlines() if cell_len(line.rstrip()) > width]
    assert not too_long
    assert not re.search(r"\b(nan|inf)\b", text)
    return text


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_a_plan_says_everything_at_every_width(width: int) -> None:
    plan = world.plan(phases=world.phases())
    text = squeezed(shown(width, lambda c: print_plan(c, plan)))
    for words in (
        "1.62x (1.38 to 1.84)",
        "81.9 s a step (68.0 to 98.0)",
        "Generation binds, by KV entries",
        "+8 h100 generating",
        "+9.4 %",
        "response length",
        "x2: 150 (+83 %)",
        "Staleness costs steps",
        "2 100 dominated",
        "serving rows of vLLM",
        "re-plan",
        "4:33:04",
        "4:49:27",
        "1.7/3/4",
    ):
        assert words in text
    for column in COLUMNS:
        assert column.summary or column.name in text
    assert "trainer memory, backward" in text
    assert "61.5 of 72.0 GB" in text
    assert "…" not in text


def test_wide_consoles_show_more_columns() -> None:
    heads = []
    for width in (80, 100, 140):
        text = shown(width, lambda c: print_plan(c, world.plan()))
        heads.append(re.split(r"\s{2,}", text.split("best settings\n")[1].splitlines()[0].strip()))
    assert heads[0] == ["mode", "chips", "lag ≤", "smp/s", "step s", "idle %", "lag", "$/Mtok", "wall"]
    assert set(heads[0]) < set(heads[1]) < set(heads[2])
    assert {"gen GB", "train GB", "KV", "waste", "hand-off", "engine"} <= set(heads[2])


def test_the_best_synchronous_setting_is_shown_even_if_it_is_not_among_the_best() -> None:
    text = shown(100, lambda c: print_plan(c, world.plan(), top=3))
    rows = text.split("best settings\n")[1].split("\n\n")[0].splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [[n, "pipeline"] for n in "123"] + [["9", "sync"]]


def test_a_plan_without_extras_has_no_sections_for_them() -> None:
    bare = world.plan(
        best_sync=None, speedup=None, remedies=(), sensitivities=(), notes=(), points=(), ranked=world.plan().ranked[:1]
    )
    text = shown(80, lambda c: print_plan(c, bare))
    assert "no synchronous plan to compare with" in text
    for section in ("what would help", "what would change", "schedule", "notes"):
        assert section not in text


def test_only_ends_at_which_another_plan_is_the_best_are_named() -> None:
    plan = world.plan()
    given = replace(plan.sensitivities[0], best_low="pipeline 20+12", best_high=plan.best.setting.words())
    text = squeezed(shown(140, lambda c: print_plan(c, replace(plan, sensitivities=(given,)))))
    assert "pipeline 20+12 at x0.5" in text
    assert "at x2" not in text


def test_what_cannot_run_is_said() -> None:
    plan = world.plan(phases=world.phases())
    stuck = replace(plan.sensitivities[0], step_s_high=None)
    last = replace(plan.phases[-1], static_step_s=None, regret_frac=None)
    changed = replace(plan, sensitivities=(stuck,), phases=(*plan.phases[:-1], last))
    assert shown(140, lambda c: print_plan(c, changed)).count("cannot run") == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_a_setting_without_numbers_is_printed_all_the_same(width: int) -> None:
    plan = world.plan(phases=world.phases())
    shown(width, lambda c: print_plan(c, replace(plan, ranked=(*plan.ranked, world.spoiled(plan.best)))))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_simulation(width: int) -> None:
    text = shown(
        width,
        lambda c: print_simulation(c, world.metrics(), title="pipeline 24+8", usd_per_step=1.82, usd_per_mtok=0.89),
    )
    for words in ("pipeline 24+8", "12.5 samples/s", "$1.82 a step", "40.0 %", "1M cancelled oversample", "97 % peak"):
        assert words in squeezed(text)


def test_bars_of_lags_keep_their_proportions() -> None:
    text = shown(100, lambda c: print_simulation(c, world.metrics(), title="x"))
    bars = {int(m[1]): len(m[2]) for m in re.finditer(r"^│ (\d)\s+(█+) [\d.]+ %", text, re.MULTILINE)}
    assert bars[1] / bars[2] == pytest.approx(300 / 400, abs=0.02)
    assert bars[0] / bars[2] == pytest.approx(100 / 400, abs=0.02)


def test_a_simulation_that_trained_nothing() -> None:
    empty = Metrics(
        steps=0, wall_s=0.0, samples_per_s=0.0, trained_tok_per_s=0.0, step_s_mean=0.0, step_s_p50=0.0, step_s_p99=0.0
    )
    assert "nothing was trained" in shown(80, lambda c: print_simulation(c, empty, title="empty"))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_shows_distances_from_the_first(width: int) -> None:
    sides = [
        Side(name="runs/a-20260101-120000", what="measured", metrics=world.metrics(10.0), usd_per_mtok=1.0),
        Side(name="plan.json", what="pipeline 24+8", metrics=world.metrics(12.5), usd_per_step=1.82),
        Side(name="sync.json", what="sync 32 colocated", metrics=world.metrics(8.0, sync=True), usd_per_mtok=1.5),
    ]
    text = squeezed(shown(width, lambda c: print_comparison(c, sides)))
    for words in ("12.5 (+25 %)", "8.00 (-20 %)", "(-1.7)", "35 % (+30.0)", "$1.00 - $1.50 (+50 %)", "- $1.82 -"):
        assert words in text


@pytest.mark.parametrize("width", WIDTHS)
def test_chips_have_sources_and_dates(width: int) -> None:
    text = squeezed(shown(width, print_chips))
    for chip in chips():
        assert re.search(rf"\b{re.escape(chip.name)}\b.*{re.escape(chip.usd_per_h.date)}", text)
        assert chip.usd_per_h.source in text


@pytest.mark.parametrize("width", WIDTHS)
def test_models_have_sources_and_sizes(width: int) -> None:
    text = squeezed(shown(width, print_models))
    assert "qwen3-8b" in text
    assert "8.19B" in text
    assert "1.03T" in text
    assert all(entry.source in text for entry in models())


def test_a_scoreboard_counts_what_was_compared() -> None:
    def score(fixture: str, row: str, predicted: float | None, basis: str, grade: str) -> Score:
        return Score(
            fixture=fixture, row=row, quantity="step_s", published=100.0, predicted=predicted, basis=basis, grade=grade
        )

    scores = [
        score("nemo_rl", "8b on", 110.0, "left out", "good"),
        score("nemo_rl", "235b on", 50.0, "left out", "poor"),
        score("verl_v1", "sync", None, "note", "-"),
    ]
    text = squeezed(shown(80, lambda c: print_scoreboard(c, scores)))
    assert "nemo rl" in text
    assert "110 +10 %" in text
    assert "50.0 -50 %" in text
    assert "3 numbers: 1 good, 1 poor" in text


def test_columns_of_low_rank_stay() -> None:
    columns = [
        Cells("a", ["1234"], rank=2),
        Cells("b", ["12345678"], rank=1),
        Cells("c", ["1"], rank=0),
        Cells("d", ["12"], rank=3),
    ]
    # c, b and two gaps take 11 of 13: a (4 + 2) does not fit, and d (2 + 2) does not either.
    assert [c.header for c in fitted_table(columns, 13, [""]).columns] == ["b", "c"]
    assert [c.header for c in fitted_table(columns, 15, [""]).columns] == ["b", "c", "d"]
    assert [c.header for c in fitted_table(columns, 21, [""]).columns] == ["a", "b", "c", "d"]
