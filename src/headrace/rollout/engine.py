"""The Engine seam: something that generates.

Two halves. `Engine` is what episodes talk to (async, in the controller's process). `EngineCore` is what runs inside
the generator's process: no threads, no asyncio; the worker (`rollout/worker.py`) calls `step` in a loop and everything
else *between two steps*, which is what makes an in-flight weight swap safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.records import Completion, GenRequest
from headrace.rollout.profile import DecodePoint
from headrace.sync.manifest import Manifest
from headrace.sync.report import SyncReport

KvPolicy = Literal["keep", "recompute", "flush"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """What one swap did."""

    version: int
    digest: str
    """Content hash of the weights that are served now."""
    running: int
    """Requests that went on across the swap."""
    pause_s: float
    """Seconds during which no token was decoded."""
    recomputed_tok: int
    """Tokens whose KV was computed again."""
    sync: SyncReport | None = None
    """What a delta cost on this side; None for a full snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters only grow."""

    version: int
    digest: str
    running: int
    waiting: int
    kv_used_frac: float
    """Share of KV memory in use, 0 to 1."""
    decode_tok: int
    """Completion tokens sampled since the start."""
    prefill_tok: int
    """Prompt tokens computed since the start (shared prefixes count once)."""
    shared_tok: int
    """Prompt tokens not computed because a group member's prefix was reused."""
    decode_s: float
    prefill_s: float
    idle_s: float
    """Seconds in which the worker waited with nothing to do."""
    paused_s: float
    """Seconds spent swapping."""
    decode_points: tuple[DecodePoint, ...] = ()
    """Measured decode steps by number of running requests; empty if the engine does not measure."""
    prefills: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of the newest prefills."""


class Engine(Protocol):
    """What episodes and the hand-off use. `tests/contracts/engine_contract.py` checks any implementation."""

    async def generate(self, request: GenRequest) -> Completion:
        """Run one request to its end. Cancelling the awaiting task cancels the request."""
        ...

    async def stage(self, manifest: Manifest) -> None:
        """Load and verify a version beside the served one; requests go on. SyncError leaves the old one served."""
        ...

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        """Serve a staged version from the next decode step on. Swapping to the served version is a no-op."""
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request early; its completion arrives with finish = cancelled and the tokens so far."""
        ...

    async def stats(self) -> EngineStats: ...


class EngineCore(Protocol):
    """The generator process's side. All calls come from one thread, between two steps."""

    def add(self, requests: Sequence[GenRequest]) -> None:
        """Queue requests. Impossible ones (too long, unknown version) come back from `step` with finish = error."""
        ...

    def step(self) -> list[Completion]:
        """Prefill what fits and decode one token for each running request; return what ended (also cancelled ones)."""
        ...

    def cancel(self, request_id: str) -> None:
        """Unknown or ended ids are ignored."""
        ...

    def stage(self, manifest: Manifest) -> None:
        """As Engine.stage. A core whose attribute `takes_deltas` is True is also given StoreManifests; these it may be
        asked to stage in another thread, beside `step`, but never beside `swap`."""
        ...

    def swap(self, version: int, kv: KvPolicy) -> SwapReport: ...

    def stats(self) -> EngineStats: ...

    @property
    def busy(self) -> bool:
        """There is something to step."""
        ...
