from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import random_batch, recipe

from headrace.config.schema import SyncConfig
from headrace.errors import ConfigError, LearnerError, PluginError
from headrace.sync.receive import read_version
from headrace.trainer.publishing import Publishing
from headrace.trainer.remote import RemoteLearner
from headrace.trainer.schedule import learning_rate
from headrace.trainer.worker import LearnerServant, build_servant

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))
from learner_contract import check_learner

from headrace.trainer.scripted import build


class DirectHandle:
    """A Handle that calls a servant in this process."""

    name = "trainer"

    def __init__(self, servant: object) -> None:
        self.servant = servant
        self.deadlines: list[float] = []

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        self.deadlines.append(deadline_s)
        return getattr(self.servant, method)(*args)


def scripted(mode: str = "full", **options: Any) -> LearnerServant:
    config = recipe(trainer={"kind": "scripted", "options": options}).model_dump()
    return build_servant(factory="scripted", kwargs={"config": config, "model_dir": ""}, sync={"mode": mode})


def test_scripted_contract(tmp_path: Path) -> None:
    config = recipe(trainer={"kind": "scripted"}).model_dump()
    check_learner(lambda: build(config=config), random_batch(0), tmp_path)


def test_remote_learner_end_to_end(tmp_path: Path) -> None:
    handle = DirectHandle(scripted())
    remote = RemoteLearner(handle, 7.0)  # type: ignore[arg-type]

    async def go() -> None:
        first = await remote.publish(str(tmp_path / "w"), "run-1", 0)
        forward, optim = await remote.train(random_batch(0))
        assert (len(forward), optim[0].step) == (1, 1)
        await remote.forward_backward(random_batch(1))
        assert (await remote.optim_step()).step == 2
        second = await remote.publish(str(tmp_path / "w"), "run-1", 1)
        assert first.digest != second.digest
        assert read_version(second, run_id="run-1")["step"].tolist() == [2.0] * 4
        (tmp_path / "c").mkdir()
        await remote.save(str(tmp_path / "c"))
        await remote.load(str(tmp_path / "c"))
        await remote.export(str(tmp_path / "e"))
        assert (await remote.describe())["step"] == 2

    asyncio.run(go())
    assert set(handle.deadlines) == {7.0}


def test_scripted_failures_and_options() -> None:
    servant = scripted(fail_at_step=1)
    servant.train(random_batch(0))
    with pytest.raises(LearnerError, match="scripted failure at step 1"):
        servant.train(random_batch(0))
    with pytest.raises(ConfigError, match="stepp_s"):
        scripted(stepp_s=1.0)
    with pytest.raises(LearnerError, match="call forward_backward first"):
        scripted().optim_step()


def test_a_learner_without_the_methods_is_refused() -> None:
    with pytest.raises(PluginError, match="lacks train"):
        LearnerServant(object(), Publishing(SyncConfig(), threads=1))


def test_worker_and_scripted_learner_load_without_torch() -> None:
    code = (
        "import sys; import headrace.trainer.worker, headrace.trainer.scripted, headrace.trainer.remote; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_schedules() -> None:
    def rates(**optim: Any) -> list[float]:
        config = recipe(optim={"lr": 1.0, **optim}).optim
        return [learning_rate(config, s, 5) for s in range(7)]

    assert rates() == [1.0] * 7
    assert rates(warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0, 0])
    assert rates(schedule="linear", min_lr_frac=0.5) == pytest.approx([1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5])
    assert rates(schedule="cosine")[2] == pytest.approx(0.5)
    assert rates(schedule="cosine")[4] == pytest.approx(0.0)
