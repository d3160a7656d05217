"""What every Engine must do. Run it on your own: `await check_engine(make, publish, prompt_ids)`.

`make()` gives a fresh engine that serves version 0 (an async context manager); `publish(version, run_id)` writes a
version of the same model and returns its manifest. `prompt_ids` is any valid prompt of 3 to 20 tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from headrace.errors import SyncError
from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.engine import Engine
from headrace.sync.manifest import Manifest

Make = Callable[[], AbstractAsyncContextManager[Engine]]
Publish = Callable[[int, str], Manifest]


async def check_engine(make: Make, publish: Publish, prompt_ids: tuple[int, ...], *, run_id: str) -> None:
    """Every check below, each on a fresh engine."""
    async with make() as engine:
        await completions_are_well_formed(engine, prompt_ids)
    async with make() as engine:
        await tokens_depend_on_seed_and_prompt_only(engine, prompt_ids)
    async with make() as engine:
        await cancelled_requests_end_early(engine, prompt_ids)
    async with make() as engine:
        await impossible_requests_come_back_as_errors(engine, prompt_ids)
    async with make() as engine:
        await a_swap_starts_new_spans(engine, prompt_ids, publish(1, run_id))
    async with make() as engine:
        await bad_versions_are_refused(engine, publish(1, run_id), publish(1, "another-run"))


def request(name: str, prompt_ids: tuple[int, ...], *, new: int = 12, seed: int = 0, **more: object) -> GenRequest:
    return GenRequest(id=name, prompt_ids=prompt_ids, sampling=SamplingParams(max_new_tok=new, seed=seed), **more)  # type: ignore[arg-type]


def well_formed(done: Completion, *, new: int) -> None:
    count = len(done.ids_N)
    assert done.ids_N.dtype == np.int32
    assert done.logp_N.dtype == np.float32
    assert done.logp_N.shape == (count,)
    assert count <= new
    assert np.isfinite(done.logp_N).all()
    assert (done.logp_N <= 1e-6).all()
    edges = [0, *(s.stop for s in done.spans)]
    assert [s.start for s in done.spans] == edges[:-1]
    assert edges[-1] == count
    versions = [s.policy_version for s in done.spans]
    assert versions == sorted(versions)
    assert all(s.kv_version <= s.policy_version and s.start < s.stop for s in done.spans)
    assert done.queue_s >= 0
    assert done.gen_s >= 0


async def completions_are_well_formed(engine: Engine, prompt_ids: tuple[int, ...]) -> None:
    done = await asyncio.gather(
        *(engine.generate(request(f"r{i}", prompt_ids, seed=i, group_id="g")) for i in range(5))
    )
    assert [c.request_id for c in done] == [f"r{i}" for i in range(5)]
    for completion in done:
        well_formed(completion, new=12)
        assert completion.finish in ("stop", "length")
        assert completion.finish == "stop" or len(completion.ids_N) == 12
        assert not completion.error
        assert {(s.policy_version, s.kv_version) for s in completion.spans} == {(0, 0)}
    stats = await engine.stats()
    assert stats.version == 0
    assert stats.running == stats.waiting == 0
    assert stats.decode_tok >= sum(len(c.ids_N) for c in done)


async def tokens_depend_on_seed_and_prompt_only(engine: Engine, prompt_ids: tuple[int, ...]) -> None:
    alone = await engine.generate(request("alone", prompt_ids, seed=7))
    among = await asyncio.gather(
        *(engine.generate(request(f"r{i}", prompt_ids[: 1 + i % 3], seed=i)) for i in range(3)),
        engine.generate(request("again", prompt_ids, seed=7)),
        engine.generate(request("other", prompt_ids, seed=8)),
    )
    assert among[3].ids_N.tolist() == alone.ids_N.tolist()
    np.testing.assert_allclose(among[3].logp_N, alone.logp_N, atol=2e-2)
    assert among[4].ids_N.tolist() != alone.ids_N.tolist()


async def cancelled_requests_end_early(engine: Engine, prompt_ids: tuple[int, ...]) -> None:
    await engine.cancel("nobody")
    task = asyncio.create_task(engine.generate(request("long", prompt_ids, new=30)))
    other = asyncio.create_task(engine.generate(request("short", prompt_ids, new=4)))
    await asyncio.sleep(0)
    await engine.cancel("long")
    done = await task
    well_formed(done, new=30)
    assert done.finish == "cancelled"
    assert len((await other).ids_N) <= 4
    again = await engine.generate(request("long", prompt_ids, new=2))
    assert again.finish in ("stop", "length")


async def impossible_requests_come_back_as_errors(engine: Engine, prompt_ids: tuple[int, ...]) -> None:
    long = await engine.generate(request("long", prompt_ids, new=1_000_000))
    assert long.finish == "error"
    assert "max_context_tok" in long.error
    assert str(1_000_000 + len(prompt_ids)) in long.error
    newer = await engine.generate(request("newer", prompt_ids, min_version=5))
    assert newer.finish == "error"
    assert "v0" in newer.error
    assert "v5" in newer.error
    assert len(newer.ids_N) == 0
    assert newer.spans == ()
    other = await engine.generate(request("other", prompt_ids, exact_version=5))
    assert other.finish == "error"
    assert "exactly v5" in other.error
    assert (await engine.generate(request("this", prompt_ids, exact_version=0))).finish in ("stop", "length")


async def a_swap_starts_new_spans(engine: Engine, prompt_ids: tuple[int, ...], manifest: Manifest) -> None:
    early = [asyncio.create_task(engine.generate(request(f"r{i}", prompt_ids, new=30, seed=i))) for i in range(3)]
    while (await engine.stats()).decode_tok < 3:
        await asyncio.sleep(0)
    await engine.stage(manifest)
    assert (await engine.stats()).version == 0
    report = await engine.swap(manifest.version, "keep")
    assert (report.version, report.digest) == (manifest.version, manifest.digest)
    assert report.recomputed_tok == 0
    again = await engine.swap(manifest.version, "recompute")
    assert (again.version, again.digest, again.recomputed_tok) == (manifest.version, manifest.digest, 0)
    late = await engine.generate(request("late", prompt_ids))
    assert {(s.policy_version, s.kv_version) for s in late.spans} == {(manifest.version, manifest.version)}
    for task in early:
        done = await task
        well_formed(done, new=30)
        pairs = [(s.policy_version, s.kv_version) for s in done.spans]
        assert pairs in ([(0, 0)], [(0, 0), (manifest.version, 0)])


async def bad_versions_are_refused(engine: Engine, good: Manifest, foreign: Manifest) -> None:
    with pytest.raises(SyncError):
        await engine.swap(1, "keep")
    with pytest.raises(SyncError, match="another-run"):
        await engine.stage(foreign)
    assert (await engine.stats()).version == 0
    await engine.stage(good)
    await engine.swap(1, "flush")
    with pytest.raises(SyncError):
        await engine.swap(0, "keep")
    assert (await engine.stats()).version == 1
