"""Roles inside the test's own process: the same servants and the same loop without the seconds of starting processes.

Calls are served between two steps of the servant, as in a role's process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from headrace.plugins import resolve
from headrace.roles import Reply, RoleSpec


class InProcessHandle:
    """A servant and the task that steps it."""

    def __init__(self, spec: RoleSpec) -> None:
        self.name = spec.name
        self._servant = resolve(spec.factory, what=spec.name)(**spec.kwargs)
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._work = asyncio.Event()
        self._pump = asyncio.create_task(self._step(), name=f"in-process {spec.name}")

    async def _step(self) -> None:
        while hasattr(self._servant, "step"):
            await self._work.wait()
            while self._servant.busy:
                self._servant.step()
                await asyncio.sleep(0)
            self._work.clear()

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        function = getattr(self._servant, method)
        if method not in getattr(self._servant, "deferred", ()):
            return function(*args)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        function(Reply(future.set_result, future.set_exception), *args)
        self._work.set()
        async with asyncio.timeout(deadline_s):
            return await future

    def send(self, method: str, *args: Any) -> None:
        getattr(self._servant, method)(*args)
        self._work.set()

    def kill(self) -> None:
        self._pump.cancel()

    async def close(self, deadline_s: float) -> None:
        self.kill()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def died(self) -> str:
        return await self._died


class InProcessLauncher:
    """Stands in for LocalLauncher."""

    def __init__(self, logs: Path) -> None:
        self._handles: list[InProcessHandle] = []

    async def spawn(self, spec: RoleSpec, *, deadline_s: float) -> InProcessHandle:
        self._handles.append(InProcessHandle(spec))
        return self._handles[-1]

    def kill(self) -> None:
        for handle in self._handles:
            handle.kill()

    async def close(self) -> None:
        for handle in self._handles:
            await handle.close(1.0)
