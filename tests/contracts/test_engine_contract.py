"""The engine contract on both built-in cores, through the servant and the remote engine."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.clock import WallClock
from headrace.config.schema import EngineConfig, SyncConfig
from headrace.roles import Reply
from headrace.rollout.native import core as native
from headrace.rollout.native.loading import named_tensors, to_array
from headrace.rollout.remote import RemoteEngine
from headrace.rollout.scripted import build as build_scripted
from headrace.rollout.worker import EngineServant
from headrace.sync.manifest import Manifest
from headrace.trainer.publishing import Publishing

_spec = importlib.util.spec_from_file_location("engine_contract", Path(__file__).with_name("engine_contract.py"))
assert _spec is not None
assert _spec.loader is not None
contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(contract)
RUN = "run-1"
ENGINE = EngineConfig(max_batch=4, max_context_tok=64).model_dump()


class LoopHandle:
    """A servant in this process: calls are served between two steps, as in a role."""

    name = "generator"

    def __init__(self, servant: EngineServant) -> None:
        self.servant = servant

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        function = getattr(self.servant, method)
        if method not in self.servant.deferred:
            return function(*args)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        function(Reply(future.set_result, future.set_exception), *args)
        return await asyncio.wait_for(future, deadline_s)

    def send(self, method: str, *args: Any) -> None:
        getattr(self.servant, method)(*args)

    async def pump(self) -> None:
        while True:
            if self.servant.busy:
                self.servant.step()
            await asyncio.sleep(0)


@asynccontextmanager
async def engine_of(core: Any) -> AsyncIterator[RemoteEngine]:
    handle = LoopHandle(EngineServant(core, clock=WallClock()))
    pump = asyncio.create_task(handle.pump())
    yield RemoteEngine(handle, call_deadline_s=30.0, generate_deadline_s=30.0)  # type: ignore[arg-type]
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=299,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def publisher(folder: Path, mode: str, arrays_of: Any) -> Any:
    """A function that publishes a version of a run; each check starts from a generator that has the first weights."""
    ways: dict[str, Publishing] = {}

    def publish(version: int, run_id: str) -> Manifest:
        if run_id not in ways:
            ways[run_id] = Publishing(SyncConfig(mode=mode), threads=1)
            ways[run_id].publish(arrays_of(0), folder=str(folder / run_id), run_id=run_id, version=0)
        return ways[run_id].publish(arrays_of(version), folder=str(folder / run_id), run_id=run_id, version=version)

    return publish


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native(dtype: str, mode: str, model_dir: Path, tmp_path: Path) -> None:
    named = named_tensors(LlamaForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)))

    def arrays_of(version: int) -> Any:
        return [(n, to_array(t * 1.5 if t.ndim == 2 and version else t)) for n, t in named.items()]

    publish = publisher(tmp_path, mode, arrays_of)

    def make() -> Any:
        return engine_of(native.build(model_dir=str(model_dir), engine=ENGINE, dtype=dtype, device="cpu", run_id=RUN))

    asyncio.run(contract.check_engine(make, publish, tuple(range(3, 20)), run_id=RUN))


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("length", ["constant", "lognormal"])
def test_scripted(length: str, mode: str, tmp_path: Path) -> None:
    publish = publisher(tmp_path, mode, lambda version: [("w", np.full(3, version, np.float32))])

    def make() -> Any:
        return engine_of(build_scripted(options={"length": length, "length_tok": 9}, engine=ENGINE, run_id=RUN))

    asyncio.run(contract.check_engine(make, publish, (5, 6, 7), run_id=RUN))


def test_cancelling_the_task_cancels_the_request() -> None:
    async def drive() -> None:
        core = build_scripted(options={"length_tok": 50}, engine=ENGINE, run_id=RUN)
        async with engine_of(core) as engine:
            task = asyncio.create_task(engine.generate(contract.request("r", (1, 2), new=55)))
            while (await engine.stats()).decode_tok < 2:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            assert (await engine.stats()).running == 0

    asyncio.run(drive())
