"""Closed forms against published numbers, exact limits and independent sums."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.planner import closed
from headrace.planner.cost import DecodeTable, EngineCost
from headrace.planner.lengths import LengthLaw, length_law
from headrace.planner.pipelinerl import Case, exponent_for
from headrace.planner.spec import ResponseConfig

# C, B, q, rho, M, predicted and measured mean lag (Applied Compute, July 2026), and the formula computed by hand.
APPLIED_COMPUTE = (
    (120, 240, 2, 0.63, 1.42, 1.34, 1.26, 1.34),
    (240, 120, 2, 0.92, 1.43, 3.86, 3.59, 3.78),
    (128, 128, 2, 1.07, 1.44, 3.29, 3.09, 3.25),
    (240, 120, 1, 0.86, 1.42, 3.34, 3.40, 3.70),
    (120, 120, 1, 0.67, 1.42, 1.95, 1.92, 2.09),
    (128, 128, 1, 1.14, 1.45, 2.24, 2.01, 2.21),
)


def law(**changes: object) -> LengthLaw:
    return length_law(ResponseConfig.model_validate({"mean_tok": 1000, "cap_tok": 8192, **changes}))


def engine(slots: int = 64, *, base_s: float = 0.01, per_running_s: float = 0.0, per_tok_s: float = 0.0) -> EngineCost:
    """Step = base + per_running * b + per_tok * context: memory only, so that sums can be done by hand."""
    table = DecodeTable(
        mem_s=tuple(base_s + per_running_s * b for b in range(slots + 1)),
        mem_s_per_tok=per_tok_s,
        flop_s=(0.0,) * (slots + 1),
        flop_s_per_tok=0.0,
        other_s=(0.0,) * (slots + 1),
    )
    return EngineCost(
        decode=table,
        prefill_s_per_tok=0.0,
        prefill_s_per_tok2=0.0,
        prefill_s_min=0.0,
        kv_capacity_tok=10**9,
        max_running=slots,
    )


def batch_s(cost: EngineCost, lengths: LengthLaw, *, groups: int, members: int, prompt_tok: float = 0.0) -> float:
    table = closed.length_table(lengths)
    return closed.batch_time(
        cost,
        closed.DecodeArrays(cost),
        table,
        sequences=groups * members,
        independent=table.independent(lengths.max_of(groups, members)),
        prompt_tok=prompt_tok,
        prefill_s=0.0,
    ).wall_s


# ---- published numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", APPLIED_COMPUTE)
def test_staleness_of_applied_compute(row: tuple[float, ...]) -> None:
    running, batch, queue, rho, m, _, measured, by_hand = row
    lag = float(closed.staleness_drop_oldest(running, batch, queue, rho, m))
    assert lag == pytest.approx(by_hand, abs=0.006)
    assert lag == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("running", "sigma", "queue", "rho", "event_simulation"),
    [(256, 0.8, 2, 0.8, 7.49), (512, 1.0, 1, 0.8, 16.75)],
)
def test_staleness_with_the_tail_of_a_lognormal_group(
    running: int, sigma: float, queue: int, rho: float, event_simulation: float
) -> None:
    """PLANNER 2.5 (c): batch 128, groups of 16, members independent; agreement within 6 %."""
    lengths = law(sigma=sigma, sigma_within=sigma, cap_tok=10**7)
    m = closed.tailness(lengths.max_of_members(16), lengths.mean_tok)
    lag = float(closed.staleness_drop_oldest(running, 128, queue, rho, m))
    assert lag == pytest.approx(event_simulation, rel=0.06)


PIPELINE_RL = Case(chips=128, batch=128, tau=4.918, at_h=192, at_u=0.384)


def test_pipelinerl_rates_and_lag() -> None:
    gen, train = PIPELINE_RL.pipeline_rates(44, 192)
    assert gen == pytest.approx(16.9, abs=0.05)
    assert train == pytest.approx(17.08, abs=0.005)
    assert PIPELINE_RL.max_lag_steps(44, 192) == 132
    assert replace(PIPELINE_RL, batch=2048).max_lag_steps(44, 192) == 9  # 8.25, published as about 8


def test_pipelinerl_conventional_rate_of_a_straight_line_is_too_low() -> None:
    gen, train = PIPELINE_RL.conventional_rates(133)
    assert gen == pytest.approx(17.02, abs=0.01)  # the paper, with its measured curve: 18.3
    assert train == pytest.approx(26.02, abs=0.01)


def test_pipelinerl_speedup_and_its_optimum() -> None:
    """One number (18.3) fixes the curve's bend; speed-up, rate and the split 44 x 192 then follow."""
    curve = replace(PIPELINE_RL, exponent=exponent_for(PIPELINE_RL, 133, 18.3))
    assert 0.9 < curve.exponent < 1.0
    assert curve.conventional_rate(133) == pytest.approx(10.74, abs=0.01)
    assert min(curve.pipeline_rates(44, 192)) / curve.conventional_rate(133) == pytest.approx(1.573, abs=0.002)
    assert curve.best_pipeline(132)[:2] == (44, 192)
    assert curve.speedup(132) > curve.speedup(1000) > 0


def test_semianalysis_idle_and_mfu() -> None:
    """Qwen3-235B on 64 + 192 H200: 1.95 of 2.75 samples/s; 512 x 18,294 tokens in 186 busy seconds of 64 chips."""
    assert float(closed.trainer_idle_frac(1.95 / 2.75)) == pytest.approx(0.291, abs=0.0005)
    assert closed.train_mfu(22.2e9, 512 * 18294, 186, 64, 989e12) == pytest.approx(0.106, abs=0.0005)


# ---- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0, 1.5])
def test_the_table_keeps_mean_and_longest(sigma: float) -> None:
    lengths = law(sigma=sigma, sigma_within=sigma)
    table = closed.length_table(lengths)
    assert table.longest_tok(1.0) == pytest.approx(lengths.mean_tok, rel=0.005)
    assert table.longest_tok(16) == pytest.approx(lengths.max_of_members(16), rel=0.01)


def test_tied_members_count_as_fewer_draws() -> None:
    tied, free = law(sigma_within=0.35), law(sigma_within=1.0)
    draws = [closed.length_table(each).independent(each.max_of(64, 16)) for each in (tied, free)]
    assert draws[0] < 0.7 * draws[1]
    assert draws[1] == pytest.approx(64 * 16, rel=0.2)


def test_a_cap_of_one_token() -> None:
    table = closed.length_table(law(mean_tok=1, cap_tok=1))
    assert (table.mean_tok, table.resident_tok, table.longest_tok(100)) == (1.0, 0.5, 1.0)


# ---- decode ----------------------------------------------------------------------------------------------------------


def test_step_times_are_the_scalar_law() -> None:
    table = DecodeTable(
        mem_s=(0.0, 0.010, 0.011, 0.012),
        mem_s_per_tok=1e-6,
        flop_s=(0.0, 0.004, 0.009, 0.014),
        flop_s_per_tok=2e-7,
        other_s=(0.0, 0.001, 0.002, 0.003),
    )
    arrays = closed.DecodeArrays(replace(engine(3), decode=table))
    steps = arrays.step_s([1, 2, 3], [100, 2000, 30000])
    assert steps == pytest.approx([table.step_s(1, 100), table.step_s(2, 2000), table.step_s(3, 30000)])
    assert arrays.compute_bound(3, 0)
    assert not arrays.compute_bound(1, 0)


def test_equal_lengths_take_length_times_step() -> None:
    """sigma -> 0: generation is exactly L * T (PLANNER 5.8, 6)."""
    assert batch_s(engine(), law(sigma=0, sigma_within=0), groups=4, members=8) == pytest.approx(10.0, rel=0.005)


def test_a_batch_is_the_sum_over_survivors() -> None:
    """Against drawn lengths, token by token."""
    cost, lengths = engine(64, per_running_s=2e-4, per_tok_s=1e-7), law(sigma_within=0.5)
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(500):
        drawn = lengths.draw(rng, 4, 16).ravel()
        at = np.arange(drawn.max())
        running = (drawn[None, :] > at[:, None]).sum(1)
        seconds.append(float(np.sum(0.01 + 2e-4 * running + 1e-7 * running * (100 + at))))
    assert batch_s(cost, lengths, groups=4, members=16, prompt_tok=100) == pytest.approx(np.mean(seconds), rel=0.03)


def test_waves_when_the_batch_exceeds_the_slots() -> None:
    """Constant step time: a list schedule of 512 rollouts on 32 slots, drawn."""
    lengths = law(sigma_within=1.0)
    rng = np.random.default_rng(1)
    seconds = []
    for _ in range(40):
        free = np.zeros(32)
        for tok in lengths.draw(rng, 512, 1).ravel():
            free[int(np.argmin(free))] += 0.01 * tok
        seconds.append(free.max())
    assert batch_s(engine(32), lengths, groups=512, members=1) == pytest.approx(np.mean(seconds), rel=0.10)


def test_oversampling_cuts_the_tail() -> None:
    cost, lengths = engine(2000), law()
    table = closed.length_table(lengths)
    one_group = table.independent(lengths.max_of_members(16))
    whole, cut = (
        closed.batch_time(
            cost,
            closed.DecodeArrays(cost),
            table,
            sequences=1024 * (1 + extra),
            independent=table.independent(lengths.max_of(64, 16)),
            prompt_tok=0.0,
            prefill_s=0.0,
            until_frac=1 / (1 + extra),
            group_draws=one_group,
        )
        for extra in (0.0, 0.25)
    )
    assert cut.wall_s < 0.7 * whole.wall_s


@given(st.floats(0.05, 1.5), st.floats(0.0, 0.5))
def test_a_wider_law_never_makes_a_batch_faster(sigma: float, more: float) -> None:
    """PLANNER 5.8, 16: same mean, all rollouts of a small batch at once, constant step time."""
    narrow, wide = (
        batch_s(engine(), law(sigma=each, sigma_within=each, cap_tok=10**6), groups=2, members=8)
        for each in (sigma, sigma + more)
    )
    assert wide >= narrow * 0.99


def steady(cost: EngineCost, in_system: float, **changes: float) -> closed.Steady:
    keys: dict[str, float] = {"slots": 1e9, "tok": 1000.0, "context_tok": 0.0, "prefill_s": 0.0, "away_s": 0.0}
    keys |= changes
    return closed.steady(cost, closed.DecodeArrays(cost), in_system=np.array([in_system]), **keys)


def test_a_steady_engine_obeys_littles_law() -> None:
    found = steady(engine(per_running_s=1e-4), 40.0, away_s=30.0, prefill_s=0.05)
    rate = float(found.rollouts_per_s[0])
    assert rate * (float(found.rollout_s[0]) + 30.0) == pytest.approx(40.0, rel=1e-4)
    assert float(found.running[0]) < 40


def test_slots_cut_what_runs() -> None:
    found = steady(engine(), 1000.0, slots=20.0)
    assert float(found.running[0]) == 20.0
    assert float(found.rollouts_per_s[0]) == pytest.approx(2.0)


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_longer_tools_never_raise_the_rate(away_s: float, more_s: float) -> None:
    """PLANNER 5.8, 19."""
    cost = engine(per_running_s=1e-4)
    quick, slow = (steady(cost, 30.0, away_s=each).rollouts_per_s[0] for each in (away_s, away_s + more_s))
    assert slow <= quick * (1 + 1e-6)


def test_the_smaller_of_batch_limit_and_kv_capacity() -> None:
    cost = replace(engine(64), kv_capacity_tok=10_000)
    assert closed.engine_slots(cost, 1000) == 10.0
    assert closed.engine_slots(cost, 10) == 64.0


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_rates_and_bounds() -> None:
    assert closed.keep_frac(0.5, 0.2, 0.25) == pytest.approx(0.3)
    assert float(closed.little_bound(128, 3, 64.0)) == 8.0
    assert list(closed.generator_idle_frac([0.5, 1.0, 2.0])) == [0.0, 0.0, 0.5]
    assert list(closed.trainer_idle_frac([0.5, 2.0], 0.2)) == pytest.approx([0.6, 0.0])
    # 3 chip-seconds to train, 4 to generate, half of them kept: 3 training chips per 8 generating ones.
    assert closed.throughput_match(3.0, 4.0, 0.5) == pytest.approx(3 / 8)


def test_nothing_left_to_train_on() -> None:
    with pytest.raises(PlanError, match="zero-signal share 1"):
        closed.keep_frac(1.0)


def test_staleness_is_continuous_where_it_matters_and_never_nan() -> None:
    grid = closed.staleness_drop_oldest(128, 128, 1, np.linspace(0.0, 2.0, 41), 1.4)
    assert np.all(np.isfinite(grid))
    assert math.isclose(grid[19], 1.4 + 0.95, rel_tol=1e-9)
