"""The only way to wait in the loop: every wait has an owner, a reason, a deadline, and can be dumped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from headrace.clock import Clock
from headrace.errors import DeadlineError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait under way."""

    owner: str
    what: str
    since_s: float
    deadline_s: float


class Waits:
    """Who waits for what, since when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[int, Wait] = {}
        self._next = 0

    async def wait_for(self, awaitable: Awaitable[T], *, owner: str, what: str, deadline_s: float) -> T:
        """Await it for at most `deadline_s` seconds; DeadlineError lists every wait that is open then."""
        with self.open(owner=owner, what=what, deadline_s=deadline_s):
            try:
                return await asyncio.wait_for(awaitable, deadline_s)
            except TimeoutError as exc:
                if isinstance(exc, DeadlineError):
                    raise
                raise DeadlineError(
                    f"{owner} waited {deadline_s:.0f} s for {what}. Who waits for whom:\n{self.dump()}"
                ) from None

    @contextmanager
    def open(self, *, owner: str, what: str, deadline_s: float) -> Iterator[None]:
        """Register a wait that something else ends."""
        key, self._next = self._next, self._next + 1
        self._open[key] = Wait(owner, what, self._clock.now(), deadline_s)
        try:
            yield
        finally:
            del self._open[key]

    def dump(self) -> str:
        """One line per open wait, oldest first."""
        now_s = self._clock.now()
        waits = sorted(self._open.values(), key=lambda w: w.since_s)
        lines = (f"  {w.owner} waits for {w.what} since {now_s - w.since_s:.1f} s" for w in waits)
        return "\n".join(lines) or "  nobody waits"
