"""Roles: the processes of a run, how they are started and called.

A role runs a *servant*: an object whose public methods can be called by name from the controller. A servant that has
work of its own (the engine decodes) also has `busy` and `step()`; calls are served between two steps.
A method named in the servant's `deferred` gets a `reply` callable as its first argument and answers later.
`launch/local.py` implements this with spawned processes; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """What to start."""

    name: str
    """generator, trainer, ...; appears in errors and log file names."""
    factory: str
    """"module:function"; called in the new process with `kwargs`, returns the servant."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    """CPU threads of the numeric libraries in that process."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Handed to a deferred method; call exactly one of the two, once, from the servant's thread."""

    ok: Callable[[Any], None]
    fail: Callable[[BaseException], None]


class Handle(Protocol):
    """A started role, seen from the controller."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Call a servant's method. Raises its exception, RoleDiedError, or DeadlineError that names the method."""
        ...

    def send(self, method: str, *args: Any) -> None:
        """Call without waiting for (or getting) an answer."""
        ...

    def kill(self) -> None:
        """End the process now (SIGKILL); idempotent."""
        ...

    async def close(self, deadline_s: float) -> None:
        """Ask it to end, then kill; idempotent. Never raises."""
        ...

    async def died(self) -> str:
        """Return, once the process has ended, why: exit code or signal, and the end of its log."""
        ...


class Launcher(Protocol):
    """Starts roles."""

    async def spawn(self, spec: RoleSpec, *, deadline_s: float) -> Handle:
        """Start a role and wait until its servant is built; LaunchError with the traceback when it cannot be."""
        ...

    def kill(self) -> None:
        """End every role now (SIGKILL), without waiting: for when nothing can be awaited any more."""
        ...

    async def close(self) -> None:
        """End every role that is still alive; idempotent."""
        ...
