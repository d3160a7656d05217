"""From spec and setting to costs and simulator parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import PlanError
from headrace.planner.assemble import CostBook, decoding_engines, parts_of
from headrace.planner.setting import Setting
from headrace.planner.simulate import simulate
from headrace.planner.spec import PlanSpec

BASE: dict[str, Any] = {
    "model": "qwen3-8b",
    "batch_groups": 8,
    "group_size": 4,
    "response": {"mean_tok": 500, "cap_tok": 4096},
    "cluster": {"gpu": "h100", "num_gpus": 8},
}
SETTING = Setting(
    mode="pipeline",
    colocated=False,
    gen_gpus=4,
    train_gpus=4,
    gen_tp=1,
    train_tp=1,
    train_pp=1,
    train_ep=1,
    max_running=32,
    max_lag_steps=2,
    hand_off="in_flight",
)


def spec(**changes: Any) -> PlanSpec:
    return PlanSpec.model_validate(BASE | changes)


def test_parts_are_what_the_setting_says() -> None:
    parts = parts_of(spec(), SETTING)
    assert len(parts.engines) == 4
    assert (parts.flow.mode, parts.flow.max_running, parts.flow.max_lag_steps) == ("pipeline", 32, 2)
    assert (parts.colocated, parts.updates, parts.hand_off_policy, len(parts.lent)) == (False, 1, "in_flight", 0)
    assert parts.hand_off.switch_s == 0.0


def test_lent_chips_are_engines_that_pay_a_switch() -> None:
    parts = parts_of(spec(), replace(SETTING, lent_gpus=4, gen_tp=2))
    assert (len(parts.engines), len(parts.lent)) == (2, 2)
    assert parts.hand_off.switch_s > 0


def test_simulating_the_parts_trains_what_was_asked_for() -> None:
    book = CostBook(spec())
    metrics = simulate(parts_of(spec(), SETTING), book.draws(), steps=5)
    assert metrics.groups["trained"] == 5 * 8
    assert metrics.lag_max <= 2


def test_a_prefill_split_takes_engines_and_prefill_away() -> None:
    split = spec(prefill_split=0.25)
    parts = parts_of(split, SETTING)
    assert len(parts.engines) == 3
    assert parts.engines[0].prefill_s(10_000) == 0.0
    assert decoding_engines(replace(SETTING, gen_gpus=1), 0.25) == 1
    assert decoding_engines(replace(SETTING, gen_gpus=2), 0.99) == 1


def test_sample_tokens_and_squares() -> None:
    constant = CostBook(spec(prompt_tok=100, response={"law": "constant", "mean_tok": 500, "cap_tok": 4096})).workload
    assert constant.sample_tok == 600
    assert constant.square_tok2 == pytest.approx(600**2)
    assert constant.resident_tok == 350
    # On one engine all four siblings share the prompt while they run, and equal lengths run to the same end.
    assert constant.kv_tok(1) == pytest.approx(250 + 100 / 4)
    assert constant.kv_tok(8) == 350


def test_tools_add_context_and_time_away() -> None:
    episode = {"turns": 5, "tool_tok": 200, "tool_s": 3.0, "start_s": 7.0, "grade_s": 1.0, "tool_sigma": 0.5}
    work = CostBook(spec(episode=episode)).workload
    assert work.tool_tok == 800
    assert work.away_s == 20.0
    assert work.away_longest_s > 2 * work.away_s


def test_drift_moves_lengths() -> None:
    drifting = spec(drift={"at_frac": [0.0, 1.0], "length": [1.0, 2.0]})
    start, end = CostBook(drifting, at=0.0), CostBook(drifting, at=1.0)
    assert end.workload.table.mean_tok == pytest.approx(2 * start.workload.table.mean_tok, rel=0.15)  # the cap stays
    assert end.draws().lengths(3)[0] > start.draws().lengths(3)[0]


def test_dollars_of_a_mixed_pool() -> None:
    pool = {"gpu": "h100", "num_gpus": 4, "gpu_generate": "h20", "num_generate": 4}
    book = CostBook(spec(cluster=pool))
    per_hour = 3600 * book.usd_per_s(SETTING)
    assert per_hour == pytest.approx(4 * book.gen_chip.usd_per_h.value + 4 * book.train_chip.usd_per_h.value)
    given = CostBook(spec(cluster=BASE["cluster"] | {"usd_per_gpu_h": 2.5}))
    assert 3600 * given.usd_per_s(SETTING) == pytest.approx(8 * 2.5)
    together = replace(SETTING, mode="sync", colocated=True, gen_gpus=8, train_gpus=8, max_lag_steps=0)
    assert 3600 * given.usd_per_s(together) == pytest.approx(8 * 2.5)


def test_half_a_mixed_pool_is_an_error() -> None:
    with pytest.raises(PlanError, match="gpu_generate"):
        CostBook(spec(cluster={"gpu": "h100", "num_gpus": 4, "num_generate": 4}))


def test_a_trainer_that_fits_no_chip_names_what_would() -> None:
    with pytest.raises(PlanError, match="needs at least"):
        CostBook(spec(model="qwen3-235b-a22b")).layout(4)


def test_a_width_that_the_trainer_may_not_have() -> None:
    with pytest.raises(PlanError, match=r"train_tp = \[16\].*possible"):
        CostBook(spec(search={"train_tp": [16]})).layout(4)
