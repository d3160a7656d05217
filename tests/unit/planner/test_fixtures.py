"""Files of published measurements: all load, and a bad one is refused with the place."""

from __future__ import annotations

import pytest

from headrace.errors import PlanError
from headrace.planner.fixtures_data import (
    RULES,
    FactRow,
    Fixture,
    RunTerms,
    fixture_names,
    load_fixture,
    load_fixtures,
    parse_fixture,
)

HEAD = """
title: t
source: s
version: v
read: r
licence: l
confidence: complete
"""
RUN = (
    "{model: qwen3-8b, gpu: h100, mode: sync, colocated: true, gen_gpus: 8, groups: 4, group_size: 2, "
    "prompt_tok: 9, mean_tok: 5, cap_tok: 9, sigma: 0.5}"
)


def test_every_shipped_file_loads() -> None:
    fixtures = load_fixtures()
    assert len(fixtures) == len(fixture_names()) == 16
    assert sum(len(f.runs) for f in fixtures) >= 70
    assert all(f.runs or f.facts for f in fixtures)
    assert all(f.source and f.licence and f.version for f in fixtures)


@pytest.mark.parametrize("fixture", load_fixtures(), ids=lambda f: str(f.name))
def test_what_is_not_complete_says_what_is_missing(fixture: Fixture) -> None:
    assert fixture.missing
    for row in (*fixture.runs, *fixture.facts):
        assert all(len(reason) > 10 for reason in row.excluded.values())


def test_every_run_is_a_spec_and_a_setting() -> None:
    for fixture in load_fixtures():
        for row in fixture.runs:
            spec, setting = row.run.spec(), row.run.setting()
            assert setting.flow(spec).batch_groups * setting.flow(spec).group_size == row.run.samples
            assert setting.gpus == row.run.gpus == spec.cluster.num_gpus
            assert setting.engines * setting.gen_tp == setting.gen_gpus
            assert setting.train_gpus % (setting.train_tp * setting.train_pp) == 0
            assert (setting.train_gpus // setting.train_pp) % setting.train_ep == 0


def test_contradictory_figures_are_excluded() -> None:
    def excluded(fixture: str, row: str) -> set[str]:
        rows = [*load_fixture(fixture).runs, *load_fixture(fixture).facts]
        return set(next(r for r in rows if r.name == row).excluded)

    assert excluded("nemo_rl", "v0.6 H100 235B 1-off") == {"tok_per_s_per_gpu"}
    assert "tok_per_s_per_gpu" in excluded("nemo_rl", "v0.6 H100 Nemotron-3-Nano SWE 1-off")
    assert "update_s" in excluded("verl_fully_async", "16:16 async")
    assert excluded("semianalysis", "Prime RL price") == {"usd_per_mtok"}


def terms(**changes: object) -> RunTerms:
    base: dict[str, object] = {
        "model": "qwen3-8b", "gpu": "h100", "mode": "pipeline", "gen_gpus": 8, "train_gpus": 8, "lag": 3, "groups": 4,
        "group_size": 2, "prompt_tok": 9, "mean_tok": 5, "cap_tok": 9, "sigma": 0.5, "max_seqs": 16,
    }  # fmt: skip
    return RunTerms.model_validate(base | changes)


def test_as_many_run_at_once_as_lag_and_engines_allow() -> None:
    assert terms().setting().max_running == 4 * 8
    assert terms(max_seqs=2).setting().max_running == 8 * 2
    assert terms(running=11).setting().max_running == 11


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x: 1", ["x", "Extra inputs"]),
        (f"runs: [{{name: a, run: {RUN}, published: {{step_s: .nan}}}}]", ["runs.0.published.step_s"]),
        (f"runs: [{{name: a, run: {RUN}, published: {{s: 1}}}}, {{name: a, run: {RUN}, published: {{}}}}]", ["'a'"]),
        (
            f"runs: [{{name: a, run: {RUN}, published: {{step_s: 1}}, excluded: {{steps: none}}}}]",
            ["'steps'", "did you mean 'step_s'"],
        ),
        (
            f"runs: [{{name: alpha, run: {RUN}, published: {{}}}}]\n"
            "ratios: [{name: r, base: alpha, other: alfa, speedup: 1}]",
            ["'alfa'", "did you mean 'alpha'"],
        ),
        ("facts: [{name: f, rule: guess, published: {}}]", ["facts.0.rule"]),
        ("runs: [{name: a, published: {}}]", ["runs.0.run"]),
        ("a: [", ["no YAML"]),
    ],
)
def test_bad_files_are_refused_with_the_place(body: str, words: list[str]) -> None:
    with pytest.raises(PlanError, match=r"fixtures/bad\.yaml") as caught:
        parse_fixture("bad", HEAD + body)
    for word in words:
        assert word in str(caught.value)


def test_a_list_is_no_fixture() -> None:
    with pytest.raises(PlanError, match="mapping"):
        parse_fixture("bad", "[1]")


def test_impossible_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="train_gpus"):
        terms(colocated=True)
    with pytest.raises(ValueError, match="multiple of gen_tp"):
        terms(gen_tp=3)


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(PlanError, match="nemo_rl"):
        load_fixture("nemo-rl")
    with pytest.raises(PlanError, match="did you mean"):
        load_fixture("verl_v1").run("syn")


def test_a_fact_without_its_inputs_says_so() -> None:
    row = FactRow(name="f", rule="little", inputs={"gpu": "h100", "rate": 1.0}, published={})
    with pytest.raises(PlanError, match=r"needs the number 'gpu'.*rate"):
        row.number("gpu")
    with pytest.raises(PlanError, match="needs the name 'rate'"):
        row.word("rate")


def test_every_rule_is_used() -> None:
    used = {row.rule for fixture in load_fixtures() for row in fixture.facts}
    assert used == set(RULES)
