"""Money: the founding documents' figures come out, and impossible inputs are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.planner.economics import (
    break_even,
    capital_usd_per_gpu_h,
    hosted_for,
    hosted_price,
    hosted_prices,
    hosted_usd_per_mtok,
    usd_per_gpu_h_from_capex,
    usd_per_mtok,
)
from headrace.planner.models import model

# SemiAnalysis, 16 June 2026: tokens of one sequence
SLIME = {"prompt_tok": 7932.0, "response_tok": 12232.0}
PRIME_RL = {"prompt_tok": 5591.0, "response_tok": 12704.0}


def test_h200_hour_of_the_founding_documents() -> None:
    """Stated there: $361k per 8-GPU node (server $258k), $1.59 per GPU-hour, 72.5 % of it capital.

    Not stated, chosen here so that both figures follow: five years at 4.5 % a year, 10.2 kW per node at a PUE of 1.25
    and $0.087 per kWh, $0.2985 per GPU-hour for space, network and people.
    """
    purchase = {"capex_usd": 361_000 / 8, "years": 5.0, "capital_rate": 0.045}
    hour = usd_per_gpu_h_from_capex(**purchase, power_w=10_200 / 8, pue=1.25, usd_per_kwh=0.087, other_usd_per_h=0.2985)
    assert hour == pytest.approx(1.59, abs=0.002)
    assert capital_usd_per_gpu_h(**purchase) / hour == pytest.approx(0.725, abs=0.001)
    server = capital_usd_per_gpu_h(**{**purchase, "capex_usd": 258_000 / 8})
    assert server / capital_usd_per_gpu_h(**purchase) == pytest.approx(258 / 361)


def test_straight_line_by_hand() -> None:
    assert capital_usd_per_gpu_h(capex_usd=8760.0, years=2.0) == pytest.approx(0.5)
    assert capital_usd_per_gpu_h(capex_usd=8760.0, years=2.0, utilisation=0.5) == pytest.approx(1.0)
    assert capital_usd_per_gpu_h(capex_usd=8760.0, years=2.0, residual_frac=0.2) == pytest.approx(0.4)
    assert usd_per_gpu_h_from_capex(
        capex_usd=8760.0, years=1.0, utilisation=0.5, power_w=1000.0, usd_per_kwh=0.1, pue=1.5, other_usd_per_h=0.05
    ) == pytest.approx(2.0 + (0.15 + 0.05) / 0.5)


@given(st.floats(1.0, 10.0), st.floats(1e-6, 0.5), st.floats(0.0, 1.0))
def test_an_annuity_repays_the_purchase(years: float, rate: float, residual: float) -> None:
    """Independent check: roll the debt forward month by month (whole months) until only the resale value is left."""
    months = round(years * 12)
    hour = capital_usd_per_gpu_h(capex_usd=1e5, years=months / 12, capital_rate=rate, residual_frac=residual)
    debt = 1e5
    for _ in range(months):
        debt = debt * (1 + rate / 12) - hour * 730
    assert debt == pytest.approx(1e5 * residual, abs=1e-3 * 1e5 * (1 + rate) ** years)


def test_semianalysis_dollars_per_million_tokens() -> None:
    assert usd_per_mtok(96, 1.59, 492.2, 64 * 20_164) == pytest.approx(16.17, abs=0.01)
    assert usd_per_mtok(256, 1.59, 263.0, 512 * 18_294) == pytest.approx(3.17, abs=0.01)
    assert usd_per_mtok(256, 1.59, 576.0, 512 * 18_294) == pytest.approx(6.95, abs=0.01)


def test_hosted_price_of_the_same_workloads() -> None:
    """SemiAnalysis' table for Tinker: $3.34 for slime's workload, $3.43 for Prime RL's; no cached prompts."""
    price = hosted_price("tinker", "qwen3-235b-a22b")
    assert hosted_usd_per_mtok(price, **SLIME) == pytest.approx(3.34, abs=0.005)
    assert hosted_usd_per_mtok(price, **PRIME_RL) == pytest.approx(3.43, abs=0.005)
    step_tok = 64 * 20_164
    assert hosted_usd_per_mtok(price, **SLIME) * step_tok / 1e6 == pytest.approx(4.31, abs=0.01)


def test_cached_prompts_by_hand() -> None:
    price = hosted_price("tinker", "Qwen/Qwen3-8B")
    got = hosted_usd_per_mtok(price, prompt_tok=1000, response_tok=1000, group_size=4)
    prefill = (0.195 + 3 * 0.2 * 0.195) / 4
    assert got == pytest.approx((prefill + 0.60) / 2 + 0.44)
    assert got < hosted_usd_per_mtok(price, prompt_tok=1000, response_tok=1000, group_size=4, cached=False)


def test_break_even_of_slime_against_the_list() -> None:
    hosted = hosted_usd_per_mtok(hosted_price("tinker", "qwen3-235b-a22b"), **SLIME)
    point = break_even(gpus=96, usd_per_gpu_h=1.59, wall_s=492.2, trained_tok=64 * 20_164, hosted_usd_per_mtok=hosted)
    assert not point.own_is_cheaper
    assert point.busy_frac == pytest.approx(16.17 / 3.34, rel=0.002)
    assert usd_per_mtok(96, point.gpu_usd_per_h, 492.2, 64 * 20_164) == pytest.approx(hosted)
    assert usd_per_mtok(96, 1.59, point.wall_s, 64 * 20_164) == pytest.approx(hosted)


def test_prime_rl_on_the_clock_is_cheaper_than_the_list() -> None:
    hosted = hosted_usd_per_mtok(hosted_price("tinker", "qwen3-235b-a22b"), **PRIME_RL)
    point = break_even(gpus=256, usd_per_gpu_h=1.59, wall_s=263.0, trained_tok=512 * 18_294, hosted_usd_per_mtok=hosted)
    assert point.own_is_cheaper
    assert point.busy_frac == pytest.approx(3.17 / 3.43, rel=0.01)


def test_every_hosted_price_is_dated_and_names_a_model() -> None:
    assert {price.provider for price in hosted_prices()} == {"tinker", "prime"}
    for price in hosted_prices():
        assert price.source, price.model
        assert price.date.startswith("2026"), price.model
        assert 0 < price.prefill_usd < price.sample_usd
        assert 0 < price.cached_frac <= 1
        if price.model != "inkling":  # closed shape
            assert model(price.model).params > 0


def test_only_complete_prices_are_offered() -> None:
    assert [price.provider for price in hosted_for("Qwen/Qwen3-8B")] == ["tinker"]
    assert hosted_for("gpt-oss-120b") == ()
    with pytest.raises(PlanError, match="no train price is known"):
        hosted_usd_per_mtok(hosted_price("tinker", "gpt-oss-120b"), prompt_tok=1, response_tok=1)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(PlanError, match=r"unknown provider 'tinkr'.*'tinker'"):
        hosted_price("tinkr", "qwen3-8b")
    with pytest.raises(PlanError, match=r"prime has no price for 'gpt-oss-21b'.*'gpt-oss-20b'"):
        hosted_price("prime", "gpt-oss-21b")


@pytest.mark.parametrize(
    "changes",
    [
        {"capex_usd": 0.0},
        {"capex_usd": math.inf},
        {"years": -1.0},
        {"utilisation": 0.0},
        {"utilisation": 1.5},
        {"capital_rate": -0.1},
        {"residual_frac": 2.0},
        {"pue": 0.9},
        {"power_w": -5.0},
        {"usd_per_kwh": math.nan},
    ],
)
def test_impossible_ownership_is_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=next(iter(changes))):
        usd_per_gpu_h_from_capex(**{"capex_usd": 1e4, "years": 5.0, **changes})


def test_no_tokens_is_an_error_and_no_price_is_free() -> None:
    with pytest.raises(PlanError, match="trained_tok"):
        usd_per_mtok(8, 2.0, 100.0, 0)
    with pytest.raises(PlanError, match="wall_s"):
        usd_per_mtok(8, 2.0, math.nan, 1e6)
    assert usd_per_mtok(8, 0.0, 100.0, 1e6) == 0.0
    with pytest.raises(PlanError, match="hosted_usd_per_mtok"):
        break_even(gpus=8, usd_per_gpu_h=2.0, wall_s=100.0, trained_tok=1e6, hosted_usd_per_mtok=0.0)
