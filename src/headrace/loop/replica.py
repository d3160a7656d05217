"""A generator that comes back: when its process dies it is started again with the weights that it served.

Requests that were running fail as infrastructure (the controller retries them); a stage or swap under way is repeated.
Deaths without progress in between end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.errors import EngineError, RoleDiedError
from headrace.records import Completion, GenRequest
from headrace.roles import Handle
from headrace.rollout.engine import Engine, EngineStats, KvPolicy, SwapReport
from headrace.sync.manifest import Manifest

Spawn = Callable[[], Awaitable[tuple[Handle, Engine]]]


class Replica:
    """An Engine whose process may die up to `max_deaths` times between two landed versions."""

    def __init__(
        self,
        spawn: Spawn,
        *,
        notice: Callable[[str], None],
        fail: Callable[[BaseException], None],
        max_deaths: int = 2,
    ) -> None:
        self._spawn = spawn
        self._notice = notice
        self._fail = fail
        self._max_deaths = max_deaths
        self._deaths = 0
        self._engine: Engine | None = None
        self._up = asyncio.Event()
        self._served: Manifest | None = None
        self._staged: Manifest | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process for the first time; LaunchError when it cannot be."""
        handle, self._engine = await self._spawn()
        self._up.set()
        self._watcher = asyncio.create_task(self._watch(handle), name="generator watch")

    async def close(self) -> None:
        """Stop watching; the launcher ends the process."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def generate(self, request: GenRequest) -> Completion:
        engine = await self._serving()
        try:
            return await engine.generate(request)
        except RoleDiedError as exc:
            raise EngineError(f"request {request.id} was lost: {exc}") from exc

    async def stage(self, manifest: Manifest) -> None:
        await self._again(lambda engine: engine.stage(manifest))
        self._staged = manifest

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        report: SwapReport = await self._again(lambda engine: engine.swap(version, kv))
        self._served, self._deaths = self._staged, 0
        return report

    async def cancel(self, request_id: str) -> None:
        if self._up.is_set() and self._engine is not None:
            await self._engine.cancel(request_id)

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._again(lambda engine: engine.stats())
        return stats

    async def _serving(self) -> Engine:
        await self._up.wait()
        if self._engine is None:
            raise EngineError("the generator was not started")
        return self._engine

    async def _again(self, call: Callable[[Engine], Awaitable[Any]]) -> Any:
        while True:
            engine = await self._serving()
            try:
                return await call(engine)
            except RoleDiedError:
                if self._up.is_set():
                    self._up.clear()  # the watcher sees the death a moment later and sets it again

    async def _watch(self, handle: Handle) -> None:
        while True:
            reason = await handle.died()
            self._up.clear()
            self._deaths += 1
            if self._deaths > self._max_deaths:
                self._fail(RoleDiedError(f"{reason}\n  it died {self._deaths} times without serving a new version"))
                return
            self._notice(f"{reason.splitlines()[0]}; starting it again")
            try:
                handle, engine = await self._spawn()
                for manifest in (self._served, self._staged):
                    if manifest is not None:
                        await engine.stage(manifest)
                    if manifest is not None and manifest is self._served:
                        await engine.swap(manifest.version, "keep")
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is why the run ends
                self._fail(exc)
                return
            self._engine = engine
            self._up.set()
