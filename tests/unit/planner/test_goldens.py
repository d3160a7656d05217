"""Arithmetic that published figures must obey: no hardware, no simulation, numbers computed here by hand."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from headrace.planner.constants import builtin
from headrace.planner.fact_rules import hit_cap_law, predict_fact
from headrace.planner.fixtures_data import FactRow, RunRow, load_fixture
from headrace.planner.pipelinerl import Case

H = 3600.0


def fact(fixture: str, name: str) -> FactRow:
    return next(row for row in load_fixture(fixture).facts if row.name == name)


def prompt_tok(row: RunRow) -> float:
    """What a NeMo row's token rate leaves for the prompt."""
    published, run = row.published, row.run
    per_sample = published["tok_per_s_per_gpu"] * run.gpus * published["step_s"] / run.samples
    return per_sample - run.mean_tok


# ---- verl ------------------------------------------------------------------------------------------------------------


def test_verl_v1_rows_all_leave_the_same_prompt() -> None:
    rows = load_fixture("verl_v1").runs
    left = [
        row.published["tok_per_s"] * row.published["wall_h"] * H / row.published["steps"] / 512 - row.run.mean_tok
        for row in rows
    ]
    assert len(left) == 5
    assert all(153.5 < tok < 160.5 for tok in left)
    assert {row.run.samples for row in rows} == {512}
    assert sum(left) / 5 == pytest.approx(156.0, abs=1.0)


def test_verl_v1_step_seconds_are_wall_over_steps() -> None:
    for row in load_fixture("verl_v1").runs:
        assert row.published["step_s"] == pytest.approx(row.published["wall_h"] * H / row.published["steps"], abs=0.01)


def test_verl_v1_ratios_follow_from_the_walls() -> None:
    wall_h = {row.name: row.published["wall_h"] for row in load_fixture("verl_v1").runs}
    for ratio in load_fixture("verl_v1").ratios:
        assert ratio.speedup == pytest.approx(wall_h[ratio.base] / wall_h[ratio.other], abs=5e-4)


def test_verl_fully_async_speedups_are_ratios_of_400_step_walls() -> None:
    fixture = load_fixture("verl_fully_async")
    for ratio in fixture.ratios:
        base_s = fixture.run(ratio.base).published["wall_400_s"]
        other_s = fixture.run(ratio.other).published["wall_400_s"]
        assert base_s / other_s == pytest.approx(ratio.speedup, abs=0.01)


def test_verl_fully_async_phases_fill_the_sync_step_only() -> None:
    fixture = load_fixture("verl_fully_async")
    for name in ("64 sync", "128 sync", "30B-A3B 128 sync"):
        published = fixture.run(name).published
        phases_s = sum(published.get(phase, 0.0) for phase in ("gen_s", "logp_s", "ref_s", "update_s"))
        assert 0.93 < phases_s / published["step_s"] < 1.0
    wrong = fixture.run("16:16 async")
    assert wrong.published["update_s"] > wrong.published["step_s"]
    assert "update_s" in wrong.excluded


def test_verl_wall_of_400_steps_hides_three_per_cent() -> None:
    row = load_fixture("verl_fully_async").run("128 sync")
    assert row.published["wall_400_s"] / 400 == pytest.approx(367.2)
    predicted = predict_fact(fact("verl_fully_async", "sync-128 wall of 400 over steps"), builtin())
    assert predicted["overhead_frac"] == pytest.approx(367.2 / 356.30 - 1.0)


def test_a_larger_staleness_limit_was_no_faster_at_verl() -> None:
    at_03, at_05 = (fact("verl_fully_async", f"staleness {limit}").published["step_s"] for limit in ("0.3", "0.5"))
    assert at_05 > at_03


# ---- NeMo RL ---------------------------------------------------------------------------------------------------------

LOOSE = {
    "v0.5 H100 30B-A3B 1-off",
    "v0.6 H100 30B-A3B 1-off",
    "v0.5 H100 235B 1-off",
    "v0.5 GB200 235B 1-off",
    "v0.6 GB200 235B 1-off",
}
"""Rows whose remainder lies outside, yet whose tokens agree within 2.5 % (the source averages before it divides)."""


def test_nemo_token_rates_leave_one_prompt_length() -> None:
    rows = [row for row in load_fixture("nemo_rl").runs if "tok_per_s_per_gpu" in row.scored]
    assert len(rows) == 46
    inside = {row.name for row in rows if 96.0 <= prompt_tok(row) <= 137.0}
    assert {row.name for row in rows} - inside == LOOSE
    for row in rows:
        assert abs(prompt_tok(row) - 115.0) / (row.run.mean_tok + 115.0) < 0.025, row.name


def test_nemo_excluded_rates_are_impossible() -> None:
    rows = load_fixture("nemo_rl").runs
    flagged = [row for row in rows if "tok_per_s_per_gpu" in row.excluded]
    assert len(flagged) == 6
    by_name = {row.name: prompt_tok(row) for row in flagged}
    assert by_name["v0.6 H100 235B 1-off"] == pytest.approx(1059, abs=1)
    assert by_name["v0.6 H100 Nemotron-3-Nano SWE 1-off"] < 0
    assert by_name["v0.5 GB200 DSV3 1-off"] == pytest.approx(28, abs=1)


def test_nemo_ratios_follow_from_step_seconds() -> None:
    fixture = load_fixture("nemo_rl")
    for ratio in fixture.ratios:
        base, other = fixture.run(ratio.base), fixture.run(ratio.other)
        assert base.published["step_s"] / other.published["step_s"] == pytest.approx(ratio.speedup, abs=6e-4)
        assert ratio.per_gpu == (ratio.speedup > 1 and ratio.speedup * base.run.gpus < other.run.gpus)


def test_nemo_has_rows_where_async_does_not_help() -> None:
    lost = [ratio for ratio in load_fixture("nemo_rl").ratios if ratio.speedup < 1 or ratio.per_gpu]
    assert len(lost) == 5


# ---- ledgers and laws ------------------------------------------------------------------------------------------------


def test_marin_ledgers_close() -> None:
    assert 3_629_028 + 1_910_321 + 268_189 == 5_807_538
    assert 6_536_199 + 154_750 == 6_690_949
    for name in ("cap 4,096 ledger", "second run ledger"):
        row = fact("marin", name)
        assert predict_fact(row, builtin())["generated_tok"] == row.published["generated_tok"]
    assert predict_fact(fact("marin", "cap 4,096 ledger"), builtin())["stale_frac"] == pytest.approx(0.3289, abs=1e-4)


def test_two_cut_shares_give_the_length_law() -> None:
    sigma, median = hit_cap_law(2048, 0.146, 4096, 0.036)
    assert sigma == pytest.approx(0.93, abs=0.005)
    assert median == pytest.approx(770, abs=3)
    for cap, cut in ((2048, 0.146), (4096, 0.036)):
        assert 1.0 - NormalDist().cdf(math.log(cap / median) / sigma) == pytest.approx(cut)


def test_marin_mean_is_predicted_from_cut_shares_alone() -> None:
    row = fact("marin", "length law, cap 2,048")
    assert pytest.approx(row.published["mean_tok_2048"], abs=0.1) == 3_139_919 / 3200
    assert pytest.approx(row.published["mean_tok_4096"], abs=0.1) == 3_629_028 / 3200
    predicted = predict_fact(row, builtin())
    for quantity in ("mean_tok_2048", "mean_tok_4096"):
        assert predicted[quantity] == pytest.approx(row.published[quantity], rel=0.05)


# ---- rates, money ----------------------------------------------------------------------------------------------------


def test_semianalysis_idle_mfu_and_price() -> None:
    idle = predict_fact(fact("semianalysis", "trainer idle"), builtin())["idle_frac"]
    assert idle == pytest.approx(1 - 1.95 / 2.75)
    assert round(idle, 3) == 0.291
    mfu = predict_fact(fact("semianalysis", "MFU while training"), builtin())["mfu"]
    assert mfu == pytest.approx(6 * 22.2e9 * 18_294 * 512 / (512 / 2.75 * 64 * 989e12), rel=1e-4)
    assert round(mfu, 3) == 0.106
    usd = predict_fact(fact("semianalysis", "slime price, 32 + 64 H200"), builtin())["usd_per_mtok"]
    assert usd == pytest.approx(96 * 1.59 * 492.2 / 3600 / (64 * 20_164 / 1e6))
    assert round(usd, 2) == 16.17


def test_prime_price_counts_latency_as_step_time() -> None:
    row = fact("semianalysis", "Prime RL price")
    on_wall = predict_fact(row, builtin())["usd_per_mtok"]
    assert round(on_wall, 2) == 3.17
    assert "usd_per_mtok" in row.excluded
    assert on_wall * 576 / 263 == pytest.approx(row.published["usd_per_mtok"], abs=0.06)


def test_semianalysis_sequences_in_flight() -> None:
    in_flight = predict_fact(fact("semianalysis", "in flight"), builtin())["in_flight"]
    assert in_flight == pytest.approx(1.95 / 0.4 * 576)
    assert in_flight / (192 / 8) == pytest.approx(117, abs=0.1)


def test_deepseek_sequences_per_node() -> None:
    in_flight = predict_fact(fact("orl_bits", "DeepSeek V3 decode, per H800 node"), builtin())["in_flight"]
    assert round(in_flight) == round(14_800 / 21) == 705


def test_vime_waiting_and_training_make_the_step() -> None:
    for name in ("sync", "fully async"):
        row = fact("vime", name)
        assert abs(row.number("wait_s") + row.number("train_s") - row.published["step_s"]) <= 0.31
    assert pytest.approx(1.714, abs=0.01) == 178.3 / 104.0
    assert pytest.approx(1.22, abs=0.01) == 99.6 / 81.4


def test_prime_rl_idle_from_two_medians() -> None:
    idle = predict_fact(fact("prime_mfu", "prime-rl 0.6, GLM-5 trainer idle"), builtin())["idle_frac"]
    assert idle == pytest.approx(1 - 3.7 / 5.0, abs=1e-5)


def test_accepted_length_is_no_speedup() -> None:
    row = fact("skyrl_mtp", "rollout speed-up")
    measured = row.number("rollout_s") / row.number("rollout_spec_s")
    assert round(measured, 2) == row.published["speedup"] == 2.03
    assert measured < predict_fact(row, builtin())["speedup"] < row.number("accept_tok")


def test_kv_pool_sets_running_and_rate() -> None:
    running = predict_fact(fact("miles", "running by KV pool"), builtin())["running_large"]
    assert running == pytest.approx(39, rel=0.05)
    assert predict_fact(fact("miles", "throughput by running"), builtin())["tok_per_s_ratio"] == pytest.approx(
        2.98, rel=0.05
    )


# ---- staleness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", load_fixture("applied_compute").facts[:6], ids=lambda row: str(row.name))
def test_staleness_within_15_per_cent_of_measured(row: FactRow) -> None:
    lag = predict_fact(row, builtin())["lag_mean"]
    assert lag == pytest.approx(row.published["lag_mean"], rel=0.15)


@pytest.mark.parametrize(
    ("name", "lag"),
    [("C 120 B 240 q 2", 1.34), ("C 240 B 120 q 2", 3.78), ("C 128 B 128 q 2", 3.25), ("C 240 B 120 q 1", 3.70)],
)
def test_staleness_formula_by_hand(name: str, lag: float) -> None:
    assert predict_fact(fact("applied_compute", name), builtin())["lag_mean"] == pytest.approx(lag, abs=0.005)


def test_pipelinerl_case_study() -> None:
    row = fact("pipelinerl", "case study, pipeline")
    predicted = predict_fact(row, builtin())
    assert predicted["rate_generate"] == pytest.approx(44 * 0.384)
    assert predicted["rate_train"] == pytest.approx(84 / 4.92)
    assert predicted["lag_max_steps"] == 192 * 44 * 2 / 128 == 132
    case = Case(chips=128, batch=128, tau=4.92, at_h=192, at_u=0.384, exponent=0.95)
    assert case.conventional_rate(133) == pytest.approx(10.7, abs=0.1)
    assert min(case.pipeline_rates(44, 192)) / case.conventional_rate(133) == pytest.approx(1.57, abs=0.01)
