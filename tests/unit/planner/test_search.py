"""Search: what is possible, what is best, and how it moves with the spec."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import PlanError
from headrace.planner.assemble import CostBook
from headrace.planner.closed import BINDINGS
from headrace.planner.estimate import Estimator
from headrace.planner.search import Found, candidates, lag_points, pareto_front, screen, search, sim_plan, split_points
from headrace.planner.setting import Setting
from headrace.planner.spec import PlanSpec

BASE: dict[str, Any] = {
    "model": "qwen3-8b",
    "batch_groups": 16,
    "group_size": 4,
    "steps": 100,
    "response": {"mean_tok": 1000, "cap_tok": 8192},
    "cluster": {"gpu": "h100", "num_gpus": 8},
    "search": {"simulate_best": 3, "sim_steps": 8},
}


def spec(**changes: Any) -> PlanSpec:
    nested = {
        key: BASE[key] | value if isinstance(value, dict) and isinstance(BASE.get(key), dict) else value
        for key, value in changes.items()
    }
    return PlanSpec.model_validate(BASE | nested)


def estimator(**changes: Any) -> Estimator:
    return Estimator(CostBook(spec(**changes)))


def fastest(**changes: Any) -> float:
    """Samples per second of the best closed-form estimate: exact monotonicities, no noise."""
    found = estimator(**changes)
    return max(estimate.samples_per_s for _, estimate in screen(found, candidates(found)))


@pytest.fixture(scope="module")
def found() -> Found:
    return search(spec())


# ---- what is possible ------------------------------------------------------------------------------------------------


def test_candidates_are_possible_and_distinct() -> None:
    book = estimator()
    settings = candidates(book)
    assert len(settings) == len(set(settings)) > 200
    assert {setting.mode for setting in settings} == {"sync", "one_step_off", "pipeline"}
    for setting in settings:
        assert setting.gpus == 8
        assert setting.gen_gpus % setting.gen_tp == 0
        assert setting.train_gpus % (setting.train_tp * setting.train_pp) == 0
        assert 4 <= setting.max_running <= setting.flow(book.book.spec).slots * 4
        assert setting.max_running % 4 == 0


def test_the_spec_restricts_the_search() -> None:
    settings = candidates(
        estimator(
            search={"modes": ["pipeline"], "gen_tp": [2], "gen_gpus": [2, 4], "hand_off": ["stop"]},
            limits={"max_lag_steps": 2},
        )
    )
    assert {(s.mode, s.gen_tp, s.hand_off) for s in settings} == {("pipeline", 2, "stop")}
    assert {s.gen_gpus for s in settings} == {2, 4}
    assert {s.max_lag_steps for s in settings} == {1, 2}


def test_pruned_reasons_are_counted() -> None:
    pruned: Counter[str] = Counter()
    candidates(estimator(model="qwen3-32b", cluster={"num_gpus": 16}, response={"cap_tok": 32768}), pruned)
    assert pruned["trainer memory"] > 0
    assert pruned["generator memory"] > 0
    assert pruned["divisibility"] > 0


def test_lag_zero_leaves_turns() -> None:
    assert {s.mode for s in candidates(estimator(limits={"max_lag_steps": 0}))} == {"sync"}


def test_a_mixed_pool_keeps_its_sides() -> None:
    pool = {"num_gpus": 4, "gpu_generate": "h20", "num_generate": 8}
    settings = candidates(estimator(cluster=pool))
    assert {(s.colocated, s.gen_gpus, s.train_gpus) for s in settings} == {(False, 8, 4)}


@pytest.mark.parametrize(("total", "points"), [(1, 0), (8, 7), (64, 7), (4096, 15)])
def test_split_points(total: int, points: int) -> None:
    found = split_points(total)
    assert len(found) == points
    assert all(0 < each < total for each in found)


def test_lag_points() -> None:
    assert lag_points(0) == []
    assert lag_points(4) == [1, 2, 3, 4]
    assert lag_points(20) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 17, 20]


# ---- screening -------------------------------------------------------------------------------------------------------


def test_estimates_are_near_the_simulation() -> None:
    """Screening must order settings, not more: half of them within 15 %, all within 45 %."""
    runs = search(spec(search={"simulate_best": 8, "sim_steps": 24})).ranked
    misses = sorted(abs(each.estimate.step_s / each.metrics.step_s_mean - 1) for each in runs)
    assert misses[len(misses) // 2] < 0.15
    assert misses[-1] < 0.45


def test_the_front_is_what_nothing_beats() -> None:
    book = estimator()
    screened = screen(book, candidates(book))
    front = pareto_front(screened)
    steps = [estimate.step_s for _, estimate in front]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(min(estimate.step_s for _, estimate in screened), rel=6e-3)
    assert [estimate.lag_mean for _, estimate in front] == sorted((e.lag_mean for _, e in front), reverse=True)


def test_estimates_are_shares_and_positive() -> None:
    book = estimator(zero_signal_frac=0.4, search={"lend": True, "oversample": [0.0, 0.5], "update_splits": [1, 4]})
    for _, estimate in screen(book, candidates(book)):
        assert estimate.step_s >= max(estimate.train_s, 0.0)
        assert 0.0 <= estimate.trainer_idle_frac < 1.0
        assert 0.0 <= estimate.generator_idle_frac < 1.0
        assert 0.0 <= estimate.lag_mean <= 4.0
        assert estimate.binding in BINDINGS


# ---- monotonicities (PLANNER 5.8, 13 to 19) --------------------------------------------------------------------------


def test_more_chips_never_hurt() -> None:
    rates = [fastest(cluster={"num_gpus": n}) for n in (4, 8, 16)]
    assert rates == sorted(rates)


def test_more_lag_never_hurts() -> None:
    rates = [fastest(limits={"max_lag_steps": lag}) for lag in (0, 1, 2, 4, 8)]
    assert rates == sorted(rates)


def test_more_kv_memory_never_hurts() -> None:
    rates = [
        fastest(cluster={"mem_frac": share}, response={"mean_tok": 4000, "cap_tok": 32768}) for share in (0.5, 0.7, 0.9)
    ]
    assert rates == sorted(rates)


def test_a_wider_law_never_speeds_up_turns() -> None:
    rates = [
        fastest(search={"modes": ["sync"]}, response={"sigma": sigma, "sigma_within": sigma, "cap_tok": 10**5})
        for sigma in (0.1, 0.5, 1.0)
    ]
    assert rates == sorted(rates, reverse=True)


def test_longer_tools_never_speed_anything_up() -> None:
    rates = [fastest(episode={"turns": 5, "tool_tok": 100, "tool_s": seconds}) for seconds in (0.0, 2.0, 20.0)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "pipeline"])
def test_filtering_groups_costs_time(mode: str) -> None:
    """Replacing zero-signal groups buys signal, never speed (UniRL issue 94: 104 s a rollout became 156 s)."""
    rates = [fastest(search={"modes": [mode]}, zero_signal_frac=share) for share in (0.0, 0.3, 0.6)]
    assert rates == sorted(rates, reverse=True)
    assert rates[2] < rates[0]


def test_price_scales_dollars_and_nothing_else() -> None:
    cheap, dear, free = (
        search(spec(cluster={"usd_per_gpu_h": usd}, search={"objective": "usd_per_mtok"})) for usd in (1.0, 3.0, 0.0)
    )
    assert cheap.best.setting == dear.best.setting
    assert dear.best.usd_per_mtok == pytest.approx(3 * cheap.best.usd_per_mtok)
    assert (free.best.usd_per_mtok, free.best.usd) == (0.0, 0.0)


def test_more_generators_never_slow_a_pipeline_that_they_bind() -> None:
    """Simulated on common random numbers: 2 of 8 chips generating is the bottleneck, more of them help."""
    steps = [
        search(spec(search={"modes": ["pipeline"], "gen_gpus": [gpus], "gen_tp": [1]})).best.metrics.step_s_mean
        for gpus in (2, 3, 4)
    ]
    assert steps[0] > steps[1] > steps[2] * 0.98


def test_verl_dynamic_scheduling_balances_between_its_two_splits() -> None:
    """PLANNER A4: 32 H20, Qwen3.5-35B-A3B: 16 + 16 waits for generation, 8 train + 24 generate waits for training."""
    sides = {}
    for gen_gpus in (16, 24):
        book = estimator(
            model="qwen3.5-35b-a3b",
            batch_groups=64,
            group_size=8,
            prompt_tok=156,
            response={"mean_tok": 12500, "cap_tok": 32768, "sigma": 0.8},
            cluster={"gpu": "h20", "num_gpus": 32, "mem_frac": 0.7},
            limits={"max_lag_steps": 8},
            search={"modes": ["pipeline"], "gen_gpus": [gen_gpus], "gen_tp": [4], "hand_off": ["in_flight"]},
        )
        best = min(screen(book, candidates(book)), key=lambda each: each[1].step_s)
        sides[gen_gpus] = best[1].rho
    assert sides[16] < sides[24]


# ---- the search ------------------------------------------------------------------------------------------------------


def test_the_best_is_first_and_beats_sync(found: Found) -> None:
    steps = [each.metrics.step_s_mean for each in found.ranked]
    assert steps == sorted(steps)
    assert found.best_sync is not None
    assert found.best_sync.setting.mode == "sync"
    assert found.speedup >= 1.0
    assert len(found.estimates) > len(found.front) >= len(found.ranked) - 2
    assert found.pruned["dominated"] == len(found.estimates) - len(found.front)


def test_accounts_of_the_best(found: Found) -> None:
    best = found.best
    metrics = best.metrics
    price_s = 8 * CostBook(spec()).gen_chip.usd_per_h.value / 3600
    assert best.usd_per_step == pytest.approx(price_s * metrics.step_s_mean)
    assert best.usd_per_mtok == pytest.approx(1e6 * price_s / metrics.trained_tok_per_s)
    assert best.wall_s.p50 == pytest.approx(100 * metrics.step_s_mean)
    assert best.wall_s.p50 < best.wall_s.p90 < best.wall_s.p99
    assert best.finishes_by(best.wall_s.p90) == pytest.approx(0.9)
    assert best.finishes_by(0.0) == 0.0
    assert best.generator_fit.fits
    assert best.trainer_fit.fits
    assert best.binding in BINDINGS


def test_same_seed_same_result(found: Found) -> None:
    assert search(spec()) == found


def test_the_speedup_is_measured_even_where_sync_may_not_be_chosen() -> None:
    only = search(spec(search={"modes": ["pipeline"]}))
    assert {each.setting.mode for each in only.ranked} == {"pipeline"}
    assert only.best_sync is not None


def test_quality_prefers_less_lag() -> None:
    wall, quality = (
        search(spec(search={"objective": objective, "penalty_per_lag": 2.0})).best for objective in ("wall", "quality")
    )
    assert quality.metrics.lag_mean < wall.metrics.lag_mean


def test_dollars_may_prefer_fewer_chips() -> None:
    cheap = search(spec(cluster={"num_gpus": 16}, search={"objective": "usd_per_mtok", "modes": ["sync"]})).best
    assert cheap.setting.gpus < 16


def test_lag_p99_is_kept(found: Found) -> None:
    assert found.best.metrics.lag_p99 > 1
    limited = search(spec(limits={"lag_p99": 1}))
    assert limited.best.metrics.lag_p99 <= 1


def test_progress_is_reported() -> None:
    seen: list[tuple[str, int, int]] = []
    search(spec(), progress=lambda *args: seen.append(args))
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert {whole for _, _, whole in seen} == {len(seen)}


@pytest.mark.parametrize("samples", [64, 1024, 8192, 100_000])
def test_simulations_stay_within_their_budget(samples: int) -> None:
    plan = spec(batch_groups=samples // 4, search={"simulate_best": 8, "sim_steps": 16})
    count, steps, sync_steps = sim_plan(plan, [4] * 8)
    rollouts = (count * (steps + 5) + sync_steps) * samples
    assert 1 <= count <= 8
    assert 2 <= sync_steps <= 16
    assert rollouts <= max(80_000, 12 * samples)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_names_what_would() -> None:
    with pytest.raises(PlanError, match="needs at least"):
        search(spec(model="qwen3-235b-a22b"))


def test_one_chip_trains_adapters_in_turns() -> None:
    one = search(spec(model="qwen3-8b", lora=True, cluster={"num_gpus": 1}))
    assert (one.best.setting.mode, one.best.setting.gpus, one.speedup) == ("sync", 1, 1.0)


def test_one_chip_cannot_be_split() -> None:
    with pytest.raises(PlanError, match="at least 2"):
        search(spec(lora=True, cluster={"num_gpus": 1}, search={"modes": ["pipeline"]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size = 1"),
        ({"limits": {"usd": 0.01}}, "limits.usd"),
        ({"limits": {"deadline_h": 1e-4}}, "limits.deadline_h"),
        ({"limits": {"max_lag_steps": 0}, "search": {"modes": ["pipeline"]}}, "max_lag_steps = 0"),
        ({"search": {"gen_gpus": [9]}}, "gen_gpus = 9"),
        ({"search": {"modes": []}}, "search.modes is empty"),
        ({"search": {"gen_tp": [3]}}, "no setting"),
        ({"search": {"train_tp": [64]}}, "train_tp"),
    ],
)
def test_impossible_specs_say_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        search(spec(**changes))


def test_a_cap_of_one_token_is_defined() -> None:
    tiny = search(spec(response={"mean_tok": 1, "cap_tok": 1}))
    assert tiny.best.metrics.samples_per_s > 0


def test_words_of_settings_differ_where_settings_do(found: Found) -> None:
    words = [each.setting.words() for each in found.ranked]
    assert len(set(words)) == len(words)


def test_settings_keep_their_identity() -> None:
    setting = candidates(estimator())[0]
    assert isinstance(setting, Setting)
    assert replace(setting) == setting
