"""Plays one rollout: environment, engine, grader and seeds put together for one group member."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from headrace.config.schema import RunConfig
from headrace.envs.env import Task
from headrace.envs.grading import GraderPool
from headrace.records import Completion, GenRequest, Prompt, Rollout, SamplingParams
from headrace.rollout.codec import Codec
from headrace.rollout.engine import Engine, EngineStats, KvPolicy, SwapReport
from headrace.rollout.episode import run_rollout
from headrace.sync.manifest import Manifest


def rollout_seed(run_seed: int, ordinal: int, member: int, attempt: int) -> int:
    """Seed of a rollout (63 bits): the same admission gives the same tokens, in this run or after a resume."""
    key = f"{run_seed}/{ordinal}/{member}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class CancellableEngine:
    """An engine whose requests can be ended by group: what runs comes back cancelled, and nothing new starts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, set[str]] = {}
        self._cancelled: set[str] = set()

    async def generate(self, request: GenRequest) -> Completion:
        if request.group_id in self._cancelled:
            return _never_started(request)
        running = self._running.setdefault(request.group_id, set())
        running.add(request.id)
        try:
            return await self._engine.generate(request)
        finally:
            running.discard(request.id)
            if not running:
                self._running.pop(request.group_id, None)

    async def cancel_group(self, group_id: str) -> None:
        """End every request of the group, now and later. Call `forget` when its tasks have ended."""
        self._cancelled.add(group_id)
        for request_id in tuple(self._running.get(group_id, ())):
            await self._engine.cancel(request_id)

    async def stage(self, manifest: Manifest) -> None:
        await self._engine.stage(manifest)

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        return await self._engine.swap(version, kv)

    async def cancel(self, request_id: str) -> None:
        await self._engine.cancel(request_id)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()


def _never_started(request: GenRequest) -> Completion:
    return Completion(
        request_id=request.id,
        ids_N=np.zeros(0, dtype=np.int32),
        logp_N=np.zeros(0, dtype=np.float32),
        spans=(),
        finish="cancelled",
        text="",
    )


class Player:
    """Runs rollouts of one task on one engine."""

    def __init__(self, config: RunConfig, *, task: Task, engine: Engine, codec: Codec, grader: GraderPool) -> None:
        self._config = config
        self._task = task
        self.engine = CancellableEngine(engine)
        self._codec = codec
        self._grader = grader
        sampling = config.sampling
        self._sampling = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tok=sampling.max_new_tok,
            stop=sampling.stop,
        )

    async def play(self, prompt: Prompt, *, group_id: str, ordinal: int, member: int, attempt: int) -> Rollout:
        """One training rollout. Never raises for what goes wrong inside it: the outcome says so."""
        seed = rollout_seed(self._config.seed, ordinal, member, attempt)
        return await self._run(prompt, replace(self._sampling, seed=seed), group_id, member, attempt)

    async def play_eval(self, prompt: Prompt, *, index: int, version: int) -> Rollout:
        """One held-out rollout: the eval temperature, its own seeds."""
        sampling = replace(
            self._sampling,
            temperature=self._config.eval.temperature,
            top_p=1.0,
            top_k=0,
            seed=rollout_seed(self._config.seed, -1 - index, 0, 0),
        )
        return await self._run(prompt, sampling, f"eval-v{version}-{index}", 0, 0)

    async def _run(self, prompt: Prompt, sampling: SamplingParams, group_id: str, member: int, attempt: int) -> Rollout:
        return await run_rollout(
            engine=self.engine,
            codec=self._codec,
            env=self._task.make_env(),
            grader=self._grader,
            prompt=prompt,
            sampling=sampling,
            group_id=group_id,
            member=member,
            attempt=attempt,
            max_turns=self._config.env.max_turns,
            rollout_deadline_s=self._config.env.rollout_deadline_s,
            max_context_tok=self._config.engine.max_context_tok,
        )
