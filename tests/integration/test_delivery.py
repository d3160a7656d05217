"""Runs that hand their weights over as deltas: the same run as with snapshots, whatever dies in between."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
from in_process import InProcessLauncher
from run_tools import SERVANTS, only_run, role_pid, steps_of, summary_of, train, trained
from test_scripted_run import recipe
from tiny_runs import tiny_recipe, tokens_of

from headrace.api import resumed_recipe
from headrace.config.schema import RunConfig
from headrace.loop.run import Run
from headrace.sync.catalog import read_head
from headrace.sync.store import Store

assert SERVANTS.is_dir()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.build_model(tmp_path_factory.mktemp("model"))


def bf16_recipe(model: Path, out: Path, **sync: Any) -> RunConfig:
    return tiny_recipe(
        model, out, steps=4, model={"name": str(model), "dtype": "bfloat16"}, optim={"lr": 1e-3}, sync=sync
    )


def weights_of(run: Run) -> bytes:
    return (Path(summary_of(run).run_dir) / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_deltas_is_the_run_with_snapshots_bit_for_bit(model: Path, tmp_path: Path, dtype: str) -> None:
    runs = {}
    for mode in ("full", "delta"):
        config = bf16_recipe(model, tmp_path / mode, mode=mode)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        runs[mode] = train(config, make_launcher=InProcessLauncher)
    full, delta = (summary_of(runs[mode]) for mode in ("full", "delta"))
    assert tokens_of(full.run_dir) == tokens_of(delta.run_dir)
    assert weights_of(runs["full"]) == weights_of(runs["delta"])
    assert (full.sync_mode, delta.sync_mode) == ("full", "delta")
    assert full.sync["ratio"] == 1.0
    assert delta.sync["versions"] == 4
    assert delta.sync["bytes"] < full.sync["bytes"]
    assert 0.1 < delta.sync["ratio_to_limit"] <= 1.01
    assert 0 < delta.sync["density"] <= 1
    assert delta.sync["failed_swaps"] == delta.sync["resyncs"] == 0
    for step in steps_of(delta.run_dir):
        assert step.metrics["sync/bytes"] > 0
        assert {"sync/encode_s", "sync/put_s", "sync/decode_s", "sync/apply_s", "sync/verify_s"} <= step.metrics.keys()


def test_a_killed_generator_gets_the_served_version_from_the_store(tmp_path: Path) -> None:
    def kill(run: Run, version: int) -> None:
        if version == 3:
            os.kill(role_pid(run, "generator"), signal.SIGKILL)

    run = train(recipe(tmp_path, flow={"mode": "sync"}, sync={"keyframe_every": 2}), during=kill)
    assert summary_of(run).balanced
    assert summary_of(run).steps == 6


@pytest.mark.model
def test_a_generator_killed_in_the_middle_of_an_update_never_serves_half_of_it(tmp_path: Path) -> None:
    def dying(name: str) -> RunConfig:
        options = recipe(tmp_path).engine.options | {"marker": str(tmp_path / name), "dies_after": 3}
        engine = {"kind": "dying_engine:build", "options": options}
        return recipe(tmp_path / f"{name}-runs", flow={"mode": "sync"}, engine=engine)

    (tmp_path / "whole").touch()  # it has died already
    whole = train(dying("whole"))
    run = train(dying("dies"))
    assert (tmp_path / "dies").exists()
    assert summary_of(run).balanced
    assert trained(Path(summary_of(run).run_dir)) == trained(Path(summary_of(whole).run_dir))


def test_an_own_store_stays_and_holds_the_last_version(tmp_path: Path) -> None:
    config = recipe(tmp_path / "runs", sync={"store": str(tmp_path / "store")})
    run = train(config, make_launcher=InProcessLauncher)
    path = Path(summary_of(run).run_dir)
    run_id = json.loads((path / "run.json").read_text())["run_id"]
    head = read_head(Store(str(tmp_path / "store" / run_id)))
    assert head is not None
    assert head.version == 6
    assert not (path / "weights").exists()


def test_resume_goes_on_in_the_own_store_with_a_new_start(tmp_path: Path) -> None:
    def interrupt(run: Run, version: int) -> None:
        if version == 2:
            run.interrupt()

    config = recipe(tmp_path / "runs", sync={"store": str(tmp_path / "store")})
    train(config, during=interrupt, make_launcher=InProcessLauncher)
    path = only_run(tmp_path / "runs")
    run = train(resumed_recipe(path), resume=path, make_launcher=InProcessLauncher)
    assert summary_of(run).steps == 6
    run_id = json.loads((path / "run.json").read_text())["run_id"]
    head = read_head(Store(str(tmp_path / "store" / run_id)))
    assert head is not None
    assert (head.version, head.epoch) == (6, 2)
