"""Every example spec gives a plan that keeps its limits, and a recipe that loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.load import load_document, load_recipe
from headrace.planner.plan import Plan, plan
from headrace.planner.spec import PlanSpec

SPECS = {path.stem: path for path in sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.toml"))}
QUICK = ("search.simulate_best=1", "search.sim_steps=4")
LIGHTER = {"agentic": ("batch_groups=4", "drift.preset=none")}
"""Episodes of 20 turns cost the simulator ten times as much."""


def planned(name: str, *changes: str) -> Plan:
    return plan(load_document(PlanSpec, SPECS[name], [*QUICK, *changes], what="spec"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SPECS)
def test_it_gives_a_plan_and_a_recipe(name: str, tmp_path: Path) -> None:
    found = planned(name, *LIGHTER.get(name, ()))
    spec, setting, metrics = found.spec, found.best.setting, found.best.metrics
    assert setting.gpus <= spec.cluster.num_gpus + spec.cluster.num_generate
    assert metrics.lag_max <= setting.max_lag_steps <= spec.limits.max_lag_steps
    assert metrics.samples_per_s > 0
    path = tmp_path / "planned.toml"
    path.write_text(found.recipe(), encoding="utf-8")
    recipe = load_recipe(path)
    planned_flow = setting.flow(spec)
    assert (recipe.flow.mode, recipe.flow.max_running) == (planned_flow.mode, planned_flow.max_running)
    assert (recipe.flow.slots, recipe.flow.lag_bound) == (planned_flow.slots, planned_flow.lag_bound)
    assert recipe.steps == spec.steps


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_agentic_example_is_a_schedule() -> None:
    phases = planned("agentic", "batch_groups=4").phases
    assert [phase.at_frac for phase in phases] == [0.0, 0.5, 1.0]
    assert phases[-1].length_factor == pytest.approx(3.8)  # 7.3 K to 28 K tokens
    assert phases[-1].best_step_s > 2 * phases[0].best_step_s
