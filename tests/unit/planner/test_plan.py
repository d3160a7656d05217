from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tomli_w

from headrace.config.load import load_recipe
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError, PlanError
from headrace.planner.calibrations import choose
from headrace.planner.constants import MeasuredLaw, ServingSet, builtin, save
from headrace.planner.explain import explain
from headrace.planner.facts import Fact
from headrace.planner.fixtures_data import load_fixture
from headrace.planner.phases import run_s
from headrace.planner.plan import Plan, plan
from headrace.planner.recipe import recipe_of_plan, spec_of_recipe
from headrace.planner.sensitivity import slower
from headrace.planner.setting import Setting
from headrace.planner.spec import (
    ClusterConfig,
    DriftConfig,
    LimitsConfig,
    PlanSpec,
    ResponseConfig,
    SearchConfig,
)
from headrace.planner.step_fit import book_of


def fact(value: float) -> Fact:
    return Fact(value=value, unit="", source="test", date="2026-11-29", grade="measured")


def spec(**changes: object) -> PlanSpec:
    values: dict[str, object] = {
        "model": "qwen3-8b",
        "batch_groups": 16,
        "group_size": 8,
        "prompt_tok": 256,
        "response": ResponseConfig(mean_tok=1000, cap_tok=8192),
        "cluster": ClusterConfig(gpu="h100", num_gpus=8),
        "limits": LimitsConfig(max_lag_steps=2),
        "search": SearchConfig(simulate_best=3, sim_steps=6),
    }
    return PlanSpec.model_validate(values | changes)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(spec())


def test_the_same_spec_gives_the_same_bytes(planned: Plan) -> None:
    again = plan(spec()).to_json()
    assert again == planned.to_json()
    assert "NaN" not in again
    assert "Infinity" not in again


def test_a_spec_may_be_a_mapping_or_a_file(planned: Plan, tmp_path: Path) -> None:
    data = planned.spec.model_dump(mode="json", exclude_unset=True)
    assert plan(data).to_json() == planned.to_json()
    path = tmp_path / "spec.toml"
    path.write_text(tomli_w.dumps(data))
    assert plan(path).to_json() == planned.to_json()
    with pytest.raises(ConfigError, match="modell is not a setting; did you mean 'model'"):
        plan({"modell": "qwen3-8b"})


def test_bands_hold_their_middle_and_the_best_is_at_least_synchronous(planned: Plan) -> None:
    assert planned.step_s.low < planned.step_s.mid < planned.step_s.high
    assert planned.best_sync is not None
    assert planned.speedup is not None
    assert planned.speedup.low <= planned.speedup.mid <= planned.speedup.high
    assert planned.speedup.mid >= 1.0
    assert planned.best.samples_per_s >= planned.best_sync.samples_per_s


def test_every_term_says_what_it_rests_on(planned: Plan) -> None:
    names = {"decode", "prefill", "training", "hand_off", "lengths", "model", "memory", "price"}
    assert {term.name for term in planned.terms} == names
    assert all(term.source for term in planned.terms)
    assert planned.grade == "fitted"


def test_words_name_the_plan_and_what_is_uncertain(planned: Plan) -> None:
    text = explain(planned)
    for needed in (planned.best.setting.words(), "What binds", "How sure", "synchronous", "lognormal"):
        assert needed in text


def test_more_expensive_chips_cost_in_proportion_and_change_nothing_else(planned: Plan) -> None:
    dear = plan(spec(cluster=ClusterConfig(gpu="h100", num_gpus=8, usd_per_gpu_h=4.7)))
    ratio = dear.best.usd / planned.best.usd
    assert dear.best.setting == planned.best.setting
    assert ratio == pytest.approx(dear.best.usd_per_mtok / planned.best.usd_per_mtok)


def test_under_drift_a_plan_is_a_schedule() -> None:
    drifting = plan(spec(drift=DriftConfig(at_frac=(0.0, 1.0), length=(1.0, 4.0))))
    assert [phase.at_frac for phase in drifting.phases] == [0.0, 0.5, 1.0]
    assert drifting.phases[0].regret_frac == pytest.approx(0.0, abs=1e-9)
    assert all(p.regret_frac is None or p.regret_frac >= 0.0 for p in drifting.phases)
    moved_s, static_s = run_s(200, drifting.phases)
    first, middle, last = (phase.best_step_s for phase in drifting.phases)
    assert moved_s == pytest.approx(200 * (first / 4 + middle / 2 + last / 4))
    assert static_s is None or static_s >= moved_s
    assert any("the split moves" in note for note in drifting.notes)
    assert drifting.phases[-1].best_step_s > 1.5 * drifting.phases[0].best_step_s


def test_slower_constants_slow_what_they_name() -> None:
    fast_set = ServingSet(chip="h100", facts={"mem_eff": fact(0.9), "layer_s": fact(1e-6), "prefill_eff": fact(0.8)})
    run = load_fixture("nemo_rl").run("v0.6 H100 30B-A3B 1-off").run
    for base in (builtin(), builtin().model_copy(update={"serving": (fast_set,)})):
        book = book_of(run, base)
        layout = 16, 1, 2, 8
        for name in ("rollout_factor_dense", "rollout_factor_moe", "train_eff"):
            assert getattr(slower(base, 2.0, 3.0), name) != getattr(base, name)
        gen = book.with_constants(slower(base, 2.0, 1.0))
        assert gen.engine(2).decode.step_s(64, 1e5) == pytest.approx(2 * book.engine(2).decode.step_s(64, 1e5))
        assert gen.engine(2).prefill_s_per_tok2 == pytest.approx(2 * book.engine(2).prefill_s_per_tok2)
        assert gen.trainer(*layout) == book.trainer(*layout)
        train = book.with_constants(slower(base, 1.0, 3.0))
        assert train.batch_s(train.trainer(*layout)) == pytest.approx(3 * book.batch_s(book.trainer(*layout)))
        assert train.engine(2) == book.engine(2)


# ---- recipes ---------------------------------------------------------------------------------------------------------


def test_the_plan_is_the_run(planned: Plan, tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    path.write_text(planned.recipe())
    recipe = load_recipe(path)
    setting = planned.best.setting
    assert recipe.flow == setting.flow(planned.spec)
    assert recipe.steps == planned.spec.steps
    assert recipe.sampling.max_new_tok == 8192
    assert planned.best.setting.words() in path.read_text()


def test_a_recipe_keeps_what_the_plan_does_not_decide(tmp_path: Path) -> None:
    base = RunConfig.model_validate(
        {
            "name": "mine",
            "model": {"name": "smollm2-135m-instruct"},
            "env": {"kind": "jsonl", "options": {"path": "data.jsonl"}},
            "sampling": {"max_new_tok": 32, "temperature": 0.7},
            "flow": {"mode": "sync", "batch_groups": 8, "group_size": 4, "retries": 5},
            "engine": {"max_context_tok": 192},
        }
    )
    wanted = spec_of_recipe(base, cluster=ClusterConfig(gpu="cpu", num_gpus=2))
    assert (wanted.batch_groups, wanted.group_size, wanted.response.cap_tok) == (8, 4, 32)
    setting = Setting(
        mode="pipeline", colocated=False, gen_gpus=1, train_gpus=1, gen_tp=1, train_tp=1, train_pp=1, train_ep=1,
        max_running=48, max_lag_steps=2, hand_off="in_flight",
    )  # fmt: skip
    path = tmp_path / "r.toml"
    path.write_text(recipe_of_plan(wanted, setting, base=base))
    recipe = load_recipe(path)
    assert recipe.flow.retries == 5
    assert recipe.sampling.temperature == 0.7
    assert recipe.env == base.env
    assert (recipe.engine.threads, recipe.trainer.threads) == (1, 1)
    assert (recipe.engine.max_batch, recipe.engine.max_context_tok) == (48, 192)


def test_splitting_a_batch_needs_a_loss_that_clips() -> None:
    base = RunConfig.model_validate({"loss": {"kind": "pg"}})
    setting = Setting(
        mode="pipeline", colocated=False, gen_gpus=1, train_gpus=1, gen_tp=1, train_tp=1, train_pp=1, train_ep=1,
        max_running=48, max_lag_steps=2, hand_off="in_flight", update_split=4,
    )  # fmt: skip
    with pytest.raises(PlanError, match="no clipping"):
        recipe_of_plan(spec(), setting, base=base)


# ---- which calibration -----------------------------------------------------------------------------------------------


def _fact(value: float) -> Fact:
    return Fact(value=value, unit="s", source="test", date="2026-11-29", grade="measured")


def test_the_newest_calibration_that_knows_the_model_is_used(tmp_path: Path) -> None:
    law = MeasuredLaw(model="qwen3-8b", chip="h100", train_fixed_s=_fact(1.0), train_s_per_tok=_fact(1e-5))
    for age, name, known in (
        (30, "old", law),
        (20, "newer", law),
        (10, "other", law.model_copy(update={"chip": "a100"})),
    ):
        path = save(builtin().model_copy(update={"name": name, "laws": (known,)}), tmp_path)
        os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    assert choose(spec(), tmp_path).name == "newer"
    assert choose(spec(calibration="old"), tmp_path).name == "old"
    assert choose(spec(), tmp_path / "nothing").name == "builtin"
    with pytest.raises(PlanError, match="did you mean 'newer'"):
        choose(spec(calibration="newr"), tmp_path)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": ClusterConfig(gpu="h10", num_gpus=8)}, "did you mean 'h100'"),
        ({"model": "qwen3-9b"}, "qwen3-8b"),
        ({"model": "deepseek-v3", "cluster": ClusterConfig(gpu="h100", num_gpus=8)}, "h100"),
        ({"calibration": "nope"}, "no calibration 'nope'"),
        ({"group_size": 1}, "at least 2"),
        ({"limits": LimitsConfig(max_lag_steps=2, usd=0.01)}, "limits.usd"),
    ],
)
def test_what_cannot_be_planned_says_why(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        plan(spec(**changes))
    assert "nan" not in str(caught.value).lower().split()


def test_json_has_what_a_machine_needs(planned: Plan) -> None:
    data = json.loads(planned.to_json())
    best = data["best"]
    assert best["setting"]["gen_gpus"] + best["setting"]["train_gpus"] == 8 or best["setting"]["colocated"]
    assert set(best["wall_s"]) == {"p50", "p90", "p99"}
    assert best["metrics"]["lag_max"] <= 2
    assert data["speedup"]["mid"] >= 1.0


def test_a_hunt_for_signal_that_a_run_would_give_up_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"zero-signal|equal rewards"):
        plan(spec(zero_signal_frac=0.97))


def test_hosted_prices_break_even_where_both_cost_the_same(planned: Plan) -> None:
    (line,) = [h for h in planned.hosted if h.provider.lower() == "tinker"]
    assert line.words() in planned.notes
    same = plan(spec(cluster=ClusterConfig(gpu="h100", num_gpus=8, usd_per_gpu_h=line.break_even_usd_per_gpu_h)))
    (even,) = [h for h in same.hosted if h.provider.lower() == "tinker"]
    assert even.own_usd_per_mtok == pytest.approx(even.hosted_usd_per_mtok)


def test_cores_are_threads_of_one_engine_and_a_chip_that_is_a_guess_says_so() -> None:
    short = ResponseConfig(mean_tok=50, cap_tok=256)
    laptop = plan(spec(model="smollm2-135m-instruct", response=short, cluster=ClusterConfig(gpu="cpu", num_gpus=4)))
    assert all(found.setting.engines == 1 for found in laptop.ranked)
    assert laptop.grade == "guess"
    assert laptop.step_s.high > 2 * laptop.step_s.mid
