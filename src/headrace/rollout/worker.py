"""The generator's servant: an EngineCore behind calls by name.

`launch` serves calls between two steps, so nothing here is concurrent: a swap can never meet a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.clock import Clock, WallClock
from headrace.errors import EngineError, SyncError
from headrace.plugins import require_methods, resolve
from headrace.records import GenRequest
from headrace.roles import Reply
from headrace.rollout.engine import EngineCore, EngineStats, KvPolicy, SwapReport
from headrace.sync.manifest import Manifest, StoreManifest

_POLL_S = 0.005
"""How long an engine with nothing to decode waits for staging before it looks for calls again."""
_CORE_METHODS = ("add", "step", "cancel", "stage", "swap", "stats")


class EngineServant:
    """What the generator role runs. `generate` answers when its request ends, `stage` when the version is staged.

    Deltas are fetched and decoded in a thread of their own while decoding goes on; nothing of what is served changes
    there. Snapshots, whose staging makes new weights, are staged between two steps.
    """

    deferred = ("generate", "stage")

    def __init__(self, core: EngineCore, *, clock: Clock) -> None:
        self._core, self._clock = core, clock
        self._replies: dict[str, Reply] = {}
        self._staging: list[tuple[Future[None], Reply]] = []
        self._idle_s = 0.0
        self._idle_since_s: float | None = clock.now()

    def generate(self, reply: Reply, request: GenRequest) -> None:
        """Queue a request; the reply is its Completion. EngineError if its id is in use."""
        try:
            self._core.add([request])
        except EngineError as exc:
            reply.fail(exc)
            return
        self._replies[request.id] = reply
        self._end_idling()

    def stage(self, reply: Reply, manifest: Manifest) -> None:
        """Stage a version; the reply comes when that is done. SyncError."""
        self._finish_staging(all_of_it=True)
        if not isinstance(manifest, StoreManifest):
            try:
                self._core.stage(manifest)
            except Exception as exc:  # noqa: BLE001 - every failure of a call must reach its caller
                reply.fail(exc)
                return
            reply.ok(None)
        elif not getattr(self._core, "takes_deltas", False):
            reply.fail(SyncError("this engine core takes full snapshots only: set sync.mode = 'full'"))
        else:
            thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
            self._staging.append((thread.submit(self._core.stage, manifest), reply))
            thread.shutdown(wait=False)  # the thread ends with its one task

    def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        """Serve a staged version."""
        self._finish_staging(all_of_it=True)
        return self._core.swap(version, kv)

    def cancel(self, request_id: str) -> None:
        """End a request early; unknown ids are ignored. Its reply comes with the next step."""
        self._core.cancel(request_id)

    def stats(self) -> EngineStats:
        idle_s = self._idle_s
        if self._idle_since_s is not None:
            idle_s += self._clock.now() - self._idle_since_s
        return replace(self._core.stats(), idle_s=idle_s)

    @property
    def busy(self) -> bool:
        return self._core.busy or bool(self._staging)

    def step(self) -> None:
        """One step of the core. If it fails, so does every request, and the role ends: its state is unknown."""
        if not self._core.busy:
            wait([future for future, _ in self._staging], timeout=_POLL_S)
        else:
            self._step()
        self._finish_staging(all_of_it=False)

    def _finish_staging(self, *, all_of_it: bool) -> None:
        """Answer the calls whose staging is done; wait for the others first if all are wanted."""
        while self._staging and (all_of_it or self._staging[0][0].done()):
            future, reply = self._staging.pop(0)
            error = future.exception()
            if error is None:
                reply.ok(None)
            else:
                reply.fail(error)

    def _step(self) -> None:
        try:
            ended = self._core.step()
        except Exception as exc:
            for reply in self._replies.values():
                reply.fail(EngineError(f"a decode step failed: {type(exc).__name__}: {exc}"))
            self._replies.clear()
            raise
        for completion in ended:
            self._replies.pop(completion.request_id).ok(completion)
        if not self._core.busy:
            self._idle_since_s = self._clock.now()

    def _end_idling(self) -> None:
        if self._idle_since_s is not None:
            self._idle_s += self._clock.now() - self._idle_since_s
            self._idle_since_s = None


def build_servant(*, core: str, kwargs: Mapping[str, Any], search: str | None = None) -> EngineServant:
    """A servant around the core that the factory `core` ("module:attr") builds from `kwargs`. Raises PluginError.

    `search` is a folder in which the module may lie.
    """
    built = resolve(core, what="engine core", search=Path(search) if search else None)(**kwargs)
    require_methods(built, _CORE_METHODS, what="engine core")
    return EngineServant(built, clock=WallClock())
