"""The Engine that episodes and the hand-off talk to: calls into the generator's process."""

from __future__ import annotations

import asyncio

from headrace.errors import DeadlineError
from headrace.records import Completion, GenRequest
from headrace.roles import Handle
from headrace.rollout.engine import EngineStats, KvPolicy, SwapReport
from headrace.sync.manifest import Manifest


class RemoteEngine:
    """Implements `engine.Engine` over a Handle whose servant is `worker.EngineServant`."""

    def __init__(self, handle: Handle, *, call_deadline_s: float, generate_deadline_s: float) -> None:
        self._handle = handle
        self._call_deadline_s = call_deadline_s
        self._generate_deadline_s = generate_deadline_s

    async def generate(self, request: GenRequest) -> Completion:
        """Raises DeadlineError after generate_deadline_s; the request is then cancelled, as when the task is."""
        try:
            completion: Completion = await self._handle.call("generate", request, deadline_s=self._generate_deadline_s)
        except (asyncio.CancelledError, DeadlineError):
            self._handle.send("cancel", request.id)
            raise
        return completion

    async def stage(self, manifest: Manifest) -> None:
        await self._handle.call("stage", manifest, deadline_s=self._call_deadline_s)

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        report: SwapReport = await self._handle.call("swap", version, kv, deadline_s=self._call_deadline_s)
        return report

    async def cancel(self, request_id: str) -> None:
        await self._handle.call("cancel", request_id, deadline_s=self._call_deadline_s)

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._handle.call("stats", deadline_s=self._call_deadline_s)
        return stats
