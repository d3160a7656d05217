"""Predicted against published: arithmetic of the page is current, steps keep their accuracy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from headrace.errors import PlanError
from headrace.planner.constants import builtin
from headrace.planner.fixtures_data import Fixture, load_fixture, load_fixtures
from headrace.planner.scoreboard import (
    Score,
    facts_table,
    grade_of,
    main,
    markdown,
    models_of,
    partitions,
    rows_json,
    score,
    score_facts,
    sources_table,
)
from headrace.planner.step_fit import (
    NAMES,
    PUBLISHED,
    StepConstants,
    book_of,
    closed_step_s,
    estimate,
    fit,
    left_out_fits,
    simulated_step_s,
    untuned,
)

PAGE = Path(__file__).parents[3] / "docs" / "scoreboard.md"


def few(*names: str, fixture: str = "nemo_rl") -> Fixture:
    """A fixture with some of its runs, no ratios and no facts."""
    whole = load_fixture(fixture)
    runs = tuple(whole.run(name) for name in names)
    return whole.model_copy(update={"runs": runs, "ratios": (), "facts": ()})


SMALL = (
    "v0.6 H100 235B on 128",
    "v0.6 H100 235B on 256",
    "v0.6 H100 DSV3 on 256",
    "v0.6 H100 DSV3 1-off",
    "v0.6 GB200 DSV3 on 128",
    "v0.6 GB200 235B on 64",
    "v0.5 GB200 8B on",
    "v0.5 H100 8B on",
)


def test_page_holds_today_s_arithmetic() -> None:
    page = PAGE.read_text(encoding="utf-8")
    facts = [one for one in score_facts(load_fixtures()) if one.basis in ("formula", "identity")]
    assert len(facts) > 30
    for line in facts_table(facts).splitlines()[2:]:
        assert line in page, "run `python -m headrace.planner.scoreboard docs/scoreboard.md`"
    assert sources_table(load_fixtures()) in page


def test_page_shows_every_published_step() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for fixture in load_fixtures():
        for row in fixture.runs:
            if "step_s" in row.published:
                assert f"| {fixture.name} | {row.name} |" in page


def test_identities_close_and_formulas_mostly_hold() -> None:
    facts = score_facts(load_fixtures())
    assert {one.grade for one in facts if one.basis == "identity"} == {"closes"}
    formulas = [one for one in facts if one.basis == "formula"]
    poor = {(one.fixture, one.row) for one in formulas if one.grade == "poor"}
    assert poor == {("seer", "Moonlight"), ("seer", "Kimi-K2"), ("skyrl_mtp", "rollout speed-up")}
    assert all(one.where for one in formulas if one.grade == "poor")


def test_grades() -> None:
    assert [grade_of(error) for error in (0.0, -0.15, 0.151, -0.3, 0.31)] == ["good", "good", "fair", "fair", "poor"]


def test_a_row_does_not_pull_on_its_own_prediction() -> None:
    fixture = few(*SMALL)
    row = fixture.runs[3]
    lied = row.model_copy(update={"published": {"step_s": row.published["step_s"] * 1.3}})
    rows = list(fixture.runs)
    changed = [*rows[:3], lied, *rows[4:]]
    whole = StepConstants()
    honest = left_out_fits(rows, untuned(), whole)[3]
    assert left_out_fits(changed, untuned(), whole)[3] == honest
    assert left_out_fits(changed, untuned(), whole)[0] != left_out_fits(rows, untuned(), whole)[0]


@pytest.mark.slow
def test_fit_recovers_constants_that_made_the_steps() -> None:
    truth = StepConstants(
        rollout_factor_dense=1.5, rollout_factor_moe=2.2, train_rate_dense=3e14, train_rate_moe=1e14, fixed_s=4.0,
        fixed_s_per_gb=0.04,
    )  # fmt: skip
    rows = [
        row.model_copy(update={"published": {"step_s": closed_step_s(row.run, truth.constants(untuned()))}})
        for row in few(*SMALL, "v0.6 H100 30B-A3B on", "v0.5 H100 32B on", "v0.5 GB200 32B on").runs
    ]
    found = fit(rows, untuned())
    for row in rows:
        assert closed_step_s(row.run, found.constants(untuned())) == pytest.approx(row.published["step_s"], rel=0.05)


def test_fit_needs_more_steps_than_constants() -> None:
    with pytest.raises(PlanError, match="6 constants"):
        fit(few(*SMALL[:3]).runs, untuned())


def test_constants_move_what_they_name() -> None:
    base = untuned()
    found = StepConstants(rollout_factor_dense=2.0, train_rate_moe=1e14, fixed_s_per_gb=0.1)
    moved = found.constants(base)
    assert {name: getattr(moved, name).value for name in NAMES} == asdict(found)
    assert moved.train_rate_moe.grade == "fitted"
    assert moved.train_eff.value == builtin().train_eff.value
    assert moved.mem_eff == base.mem_eff
    assert base.hand_off_eff == moved.hand_off_eff
    assert StepConstants.from_logs(found.logs()).logs() == pytest.approx(found.logs())
    assert len(NAMES) == 6


def test_books_of_other_constants_share_lengths_only() -> None:
    run = load_fixture("nemo_rl").run("v0.5 H100 32B on").run
    slow = StepConstants(train_rate_dense=1e14).constants(untuned())
    first, second = book_of(run, untuned()), book_of(run, slow)
    assert first.workload is second.workload
    assert first.engine(run.gen_tp) is first.engine(run.gen_tp)
    rate = 1 / (1 / (0.6 * 989e12) + 1 / 1e14)
    assert second.trainer_of(run.setting()).s_per_tok == pytest.approx(
        first.trainer_of(run.setting()).s_per_tok * 0.4 * 989e12 / rate
    )


def test_what_does_not_fit_is_named() -> None:
    run = load_fixture("nemo_rl").run("v0.6 H100 DSV3 on 256").run.model_copy(update={"gen_tp": 8})
    with pytest.raises(PlanError, match=r"deepseek-v3.*no room for KV"):
        estimate(run, builtin())


@pytest.mark.slow
def test_score_of_a_few_rows() -> None:
    impossible = "v0.6 H100 Nemotron-3-Nano SWE 1-off"
    fixture = few(*SMALL, impossible)
    fixture = fixture.model_copy(
        update={"ratios": tuple(r for r in load_fixture("nemo_rl").ratios if {r.base, r.other} <= set(SMALL))}
    )
    scores = score([fixture])
    steps = [one for one in scores if one.quantity == "step_s"]
    assert [one.row for one in steps] == [*SMALL, impossible]
    assert all(one.basis == "left out" and one.untuned is not None for one in steps[:-1])
    assert (steps[-1].basis, steps[-1].grade) == ("excluded", "-")
    shares = partitions(scores, models_of([fixture]))
    assert shares["all"][0] == 8
    assert sum(count for name, (count, _, _) in shares.items() if name != "all") == 8
    assert math.isclose(shares["all"][1], sum(abs(one.untuned_error_frac or 0) for one in steps) / 8)
    data = json.loads(rows_json(scores))
    assert data[0]["row"] == SMALL[0]
    assert data[0]["error_frac"] == pytest.approx(scores[0].error_frac)
    text = markdown(scores, [fixture])
    assert all(name in text for name in SMALL)


def test_a_negative_control_is_no_win() -> None:
    fixture = load_fixture("unirl")
    ratio = fixture.ratios[0]
    base, other = (fixture.run(name).run for name in (ratio.base, ratio.other))
    for constants in (untuned(), builtin()):
        assert estimate(other, constants).gen_s > 1.05 * estimate(base, constants).gen_s
        assert simulated_step_s(other, constants) > 1.05 * simulated_step_s(base, constants)


def test_built_in_constants_are_those_of_the_published_fit() -> None:
    row = load_fixture("nemo_rl").run("v0.6 H100 30B-A3B on")
    assert closed_step_s(row.run, PUBLISHED.constants(untuned())) == closed_step_s(row.run, builtin())
    assert all(getattr(builtin(), name).grade == "fitted" for name in NAMES)


def test_training_scales_less_than_the_peak_as_rows_that_were_not_fitted_do() -> None:
    """prime-rl's gains from H100 to B200 lie between none and the peaks' 2.28; verl's MFU on H20 is within a fifth."""
    facts = [one for one in score_facts([load_fixture("prime_mfu")]) if one.basis == "costs"]
    gains = [one for one in facts if one.quantity == "speedup"]
    assert len(gains) == 6
    assert all(one.predicted is not None and 1.0 < one.predicted < 2.275 * 0.8 for one in gains)
    assert all(1.0 < one.published < 2.275 for one in gains)
    on_h20 = [one for one in facts if "H20" in one.row and one.quantity == "mfu" and "verl" in one.row]
    assert len(on_h20) == 3
    assert all(abs(one.error_frac or 1.0) < 0.2 for one in on_h20)


def test_same_seed_same_seconds() -> None:
    run = load_fixture("nemo_rl").run("v0.6 H100 DSV3 1-off").run
    assert simulated_step_s(run, untuned()) == simulated_step_s(run, untuned())


def test_an_uncompared_score_has_no_error() -> None:
    one = Score(fixture="f", row="r", quantity="q", published=2.0, basis="note")
    assert one.error_frac is None
    assert one.untuned_error_frac is None
    assert replace(one, predicted=3.0).error_frac == 0.5


def test_oversampling_and_filter_is_no_win() -> None:
    """UniRL's negative control: 16 groups instead of 8 and the zero-signal ones dropped."""
    fixture = load_fixture("unirl")
    base, other = (fixture.run(row.name).run for row in fixture.runs)
    constants = StepConstants().constants(untuned())
    assert closed_step_s(other, constants) > closed_step_s(base, constants)
    assert simulated_step_s(other, constants) > simulated_step_s(base, constants)


def test_twice_the_gpus_of_one_off_lose_per_gpu() -> None:
    """NeMo RL's 32B and 235B rows: one step off on twice the GPUs is faster, and slower per GPU."""
    fixture = load_fixture("nemo_rl")
    constants = StepConstants().constants(untuned())
    for name in ("32B H100 v0.5 (twice the GPUs)", "235B H100 v0.6 (twice the GPUs)"):
        ratio = next(r for r in fixture.ratios if r.name == name)
        base, other = fixture.run(ratio.base).run, fixture.run(ratio.other).run
        speedup = simulated_step_s(base, constants) / simulated_step_s(other, constants)
        assert 1.0 < speedup < other.gpus / base.gpus


def test_usage() -> None:
    with pytest.raises(PlanError, match="usage"):
        main([])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_keep_their_accuracy() -> None:
    """A gate, not a goal: measured 0.13 (all), worst model 0.19, when it was set; 4 points of room."""
    fixtures = load_fixtures()
    scores = score(fixtures)
    shares = partitions(scores, models_of(fixtures))
    count, before, after = shares["all"]
    assert count == 54
    assert after < 0.17
    assert after < before
    worst = {"deepseek-v3": 0.17, "llama-3.1-8b": 0.14, "qwen3-235b-a22b": 0.23, "qwen3-30b-a3b": 0.17}
    worst |= {"qwen3-32b": 0.09, "qwen3.5-35b-a3b": 0.19}
    assert {name for name, limit in worst.items() if shares[name][2] > limit} == set()
    wrong = {one.row for one in scores if one.quantity.startswith("speedup") and one.grade == "wrong"}
    assert len(wrong) <= 4
    assert "oversampling with filter" not in wrong
