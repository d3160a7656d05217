"""calibrate and compare on a run that really happened: what was scripted comes back as laws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_tools import only_run, train
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.config.load import load_recipe
from headrace.planner.constants import load


@pytest.mark.slow
def test_a_scripted_run_calibrates_to_its_script(tmp_path: Path, headrace_home: Path) -> None:
    options = ["engine.options.base_s=0.02", "engine.options.per_request_s=0.001", "trainer.options.step_s=0.2"]
    train(load_recipe("recipes/scripted.toml", [f'out="{tmp_path / "runs"}"', "steps=8", *options]))
    run = only_run(tmp_path / "runs")
    done = CliRunner().invoke(app, ["calibrate", str(run), "--name", "scripted"], catch_exceptions=False)
    assert done.exit_code == 0
    (law,) = load("scripted", headrace_home / "calibrations").laws
    assert law.base_s is not None
    assert law.per_request_s is not None
    assert law.base_s.value == pytest.approx(0.02, rel=0.02)
    assert law.per_request_s.value == pytest.approx(0.001, rel=0.02)
    assert law.train_fixed_s is not None
    assert law.train_s_per_tok is not None
    batch_s = law.train_fixed_s.value + law.train_s_per_tok.value * 16 * 30
    assert batch_s == pytest.approx(0.2, rel=0.5)
    plan = tmp_path / "plan.json"
    spec = ["--model", "qwen3-0.6b", "--set", "search.simulate_best=1", "--set", "search.sim_steps=4"]
    plan.write_text(CliRunner().invoke(app, ["plan", *spec, "--json"], catch_exceptions=False).stdout)
    compared = CliRunner().invoke(app, ["plan", "compare", str(plan), str(run)], catch_exceptions=False).stdout
    assert "measured" in compared
    assert json.loads(plan.read_text())["best"]["words"].split()[0] in compared
