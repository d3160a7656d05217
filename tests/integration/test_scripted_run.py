"""The whole loop with real processes and the scripted engine and learner: modes, failures, kill -9, resume."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_tools import (
    SERVANTS,
    assert_nothing_trained_twice,
    only_run,
    role_pid,
    roles_of,
    steps_of,
    summary_of,
    train,
    trained,
    wait_until,
)

from headrace.api import open as open_run
from headrace.api import resumed_recipe
from headrace.config.schema import RunConfig
from headrace.errors import RoleDiedError, SignalStarvedError
from headrace.flow.stimulus import read_log as read_stimuli
from headrace.flow.stimulus import replay
from headrace.loop.run import Run


def recipe(out: Path, **sections: Any) -> RunConfig:
    """Small, fast, with a long tail of lengths."""
    data: dict[str, Any] = {
        "name": "coin",
        "out": str(out),
        "steps": 6,
        "recipe_dir": str(SERVANTS),
        "env": {"kind": "coin_task:build", "eval_prompts": 20, "grade_deadline_s": 5.0},
        "flow": {"mode": "pipeline", "batch_groups": 3, "group_size": 4},
        "engine": {
            "kind": "scripted",
            "options": {
                "length": "lognormal",
                "length_tok": 8,
                "base_s": 0.001,
                "right_p": 0.5,
                "verify_weights": True,
            },
        },
        "trainer": {"kind": "scripted"},
        "launch": {"start_deadline_s": 60, "call_deadline_s": 60, "step_deadline_s": 60},
    }
    for name, values in sections.items():
        data[name] = data[name] | values if isinstance(values, dict) and name in data else values
    return RunConfig.model_validate(data)


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("one_step_off", 1), ("pipeline", 2)])
def test_each_mode_ends_balanced_within_its_bound(tmp_path: Path, mode: str, bound: int) -> None:
    run = train(recipe(tmp_path, flow={"mode": mode}))
    summary = summary_of(run)
    assert summary.reason == "steps done"
    assert summary.balanced
    assert summary.steps == 6
    assert max(summary.lag_hist) <= bound
    assert summary.groups["trained"] == 6 * 3
    assert summary.eval_prompts == 20
    versions = [s.version for s in steps_of(summary.run_dir)]
    assert versions == [1, 2, 3, 4, 5, 6]
    assert not list(Path(summary.run_dir).glob("weights"))


def test_the_stimulus_log_of_a_run_replays(tmp_path: Path) -> None:
    run = train(recipe(tmp_path))
    lines = (Path(summary_of(run).run_dir) / "stimulus-v000000.jsonl").read_text().splitlines()
    setup, stimuli = read_stimuli(lines)
    assert replay(setup, [s.event for s in stimuli]) == [d for s in stimuli for d in s.decisions]


@pytest.mark.parametrize("on_bound", ["hold", "drop", "carry"])
def test_every_policy_at_the_bound(tmp_path: Path, on_bound: str) -> None:
    run = train(recipe(tmp_path, flow={"on_bound": on_bound, "max_lag_steps": 1, "oversample": 0.34}))
    assert summary_of(run).balanced
    assert max(summary_of(run).lag_hist) <= 1


def test_rewards_that_raise_hang_or_die_are_records_not_zeros(tmp_path: Path) -> None:
    options = {"size": 12, "raises": "t1", "hangs": "t2", "dies": "t3"}
    run = train(
        recipe(tmp_path, env={"options": options, "grade_deadline_s": 0.3, "grade_workers": 2}, flow={"retries": 0})
    )
    assert summary_of(run).balanced
    with sqlite3.connect(Path(summary_of(run).run_dir) / "ledger.sqlite") as db:
        found = dict(db.execute("SELECT outcome, count(*) FROM rollouts WHERE reward IS NULL GROUP BY outcome"))
        (trace,) = db.execute("SELECT data FROM rollouts WHERE data LIKE '%no grade for t1%' LIMIT 1").fetchone()
    assert found["infra_fail"] > 0
    assert found["timeout"] > 0
    assert "RuntimeError" in trace
    assert summary_of(run).groups["failed_infra"] + summary_of(run).groups["quarantined"] > 0


def test_no_signal_ends_with_an_error_that_shows_the_pass_rates(tmp_path: Path) -> None:
    options = recipe(tmp_path).engine.options | {"right_p": 0.0}
    with pytest.raises(SignalStarvedError, match="0"):
        train(recipe(tmp_path, engine={"options": options}, flow={"refill_budget": 5}))


def test_a_killed_generator_comes_back(tmp_path: Path) -> None:
    def kill(run: Run, version: int) -> None:
        if version == 2:
            os.kill(role_pid(run, "generator"), signal.SIGKILL)

    run = train(recipe(tmp_path), during=kill)
    assert summary_of(run).balanced
    assert summary_of(run).steps == 6


def test_a_killed_trainer_ends_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    def kill(run: Run, version: int) -> None:
        if version == 4:
            os.kill(role_pid(run, "trainer"), signal.SIGKILL)

    config = recipe(tmp_path, checkpoint={"every_steps": 2})
    with pytest.raises(RoleDiedError, match=r"trainer .*SIGKILL"):
        train(config, during=kill)
    path = only_run(tmp_path)
    run = train(resumed_recipe(path), resume=path)
    assert summary_of(run).balanced
    assert [s.version for s in steps_of(path)] == [1, 2, 3, 4, 5, 6]
    assert_nothing_trained_twice(path)


def test_a_body_that_raises_leaves_nothing_behind_even_without_async_with(tmp_path: Path) -> None:
    run = open_run(recipe(tmp_path))

    async def body() -> None:
        async for _ in run.batches():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(body())
    path = only_run(tmp_path)
    wait_until(lambda: not roles_of(path))
    again = train(resumed_recipe(path), resume=path)
    assert summary_of(again).steps == 6


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(4))
def test_kill_9_of_the_controller_at_any_moment(tmp_path: Path, moment: int) -> None:
    config = recipe(tmp_path, checkpoint={"every_steps": 2}, steps=40)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    script = (
        "import sys, pathlib; from headrace.api import train; from headrace.config.schema import RunConfig\n"
        "train(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_text()))"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "config.json")]) as process:
        wait_until(lambda: bool(list(tmp_path.glob("*/run.json"))))
        path = only_run(tmp_path)
        wait_until(lambda: (path / "metrics.jsonl").exists() and len(steps_of(path)) >= 3 + 2 * moment)
        process.kill()
    wait_until(lambda: not roles_of(path))
    run = train(resumed_recipe(path, ["steps=12"]), resume=path)
    assert summary_of(run).balanced
    assert summary_of(run).steps == 12
    assert_nothing_trained_twice(path)


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path) -> None:
    def interrupt(run: Run, version: int) -> None:
        if version == 2:
            run.interrupt()

    first = train(recipe(tmp_path), during=interrupt)
    assert summary_of(first).reason == "interrupted"
    assert summary_of(first).balanced
    path = Path(summary_of(first).run_dir)
    again = train(resumed_recipe(path), resume=path)
    assert summary_of(again).steps == 6
    assert summary_of(again).balanced
    assert_nothing_trained_twice(path)


def test_a_resumed_synchronous_run_makes_the_same_batches(tmp_path: Path) -> None:
    def kill(run: Run, version: int) -> None:
        if version == 5:
            os.kill(role_pid(run, "trainer"), signal.SIGKILL)

    sync = {"mode": "sync"}
    whole = train(recipe(tmp_path / "whole", flow=sync, steps=8))
    config = recipe(tmp_path / "broken", flow=sync, steps=8, checkpoint={"every_steps": 3})
    with pytest.raises(RoleDiedError):
        train(config, during=kill)
    path = only_run(tmp_path / "broken")
    train(resumed_recipe(path), resume=path)
    assert trained(path) == trained(Path(summary_of(whole).run_dir))


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_after_it(tmp_path: Path) -> None:
    config = recipe(tmp_path, steps=400, eval={"before": False, "after": False})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    script = (
        "import pathlib, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))\n"
        "from headrace.api import train\n"
        "from headrace.config.schema import RunConfig\n"
        "train(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_text()))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "config.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "headrace.errors.DataError: writing the" in done.stderr.strip().splitlines()[-1]
    path = only_run(tmp_path)
    wait_until(lambda: not roles_of(path))
    run = train(resumed_recipe(path, ["steps=4"]), resume=path)
    assert summary_of(run).balanced
    assert_nothing_trained_twice(path)
