"""The engine's side of a landing, and how it is paused within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from numpy.typing import NDArray

from headrace.errors import SyncError, boundary


class State(StrEnum):
    """Where a receiver stands."""

    EMPTY = "empty"
    BASE = "base"
    """Looks at a keyframe: what tensors there are, and whether those held are a version already."""
    FETCHING = "fetching"
    STAGED = "staged"
    ACTIVATING = "activating"
    VERIFYING = "verifying"
    SERVING = "serving"
    ROLLING_BACK = "rolling_back"
    FENCED = "fenced"
    """What is held is no version; nothing may be served until a keyframe has landed."""


class Target(Protocol):
    """What an engine offers. Its arrays stay the same objects; only their values change, and only while paused."""

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Writable contiguous arrays by tensor name: all tensors, or this rank's part of them."""
        ...

    def pause(self) -> None:
        """Return once no forward pass reads the arrays. Pausing what is paused does nothing."""
        ...

    def resume(self) -> None: ...

    def changed(self, names: frozenset[str]) -> None:
        """Called while paused after values of these tensors changed: rebuild what is derived from them."""
        ...


def pause_in_time(target: Target, limit_s: float | None) -> None:
    """Pause the target. One that takes longer than `limit_s` is let go on as soon as it is paused: SyncError."""
    if limit_s is None:
        with boundary(SyncError, "pausing the engine"):
            target.pause()
        return
    failures: list[Exception] = []
    lock = threading.Lock()
    paused, given_up = threading.Event(), threading.Event()

    def wait() -> None:
        try:
            target.pause()
        except Exception as exc:  # noqa: BLE001 - any failure goes to the waiting thread, which raises it
            failures.append(exc)
            return
        with lock:
            paused.set()
            late = given_up.is_set()
        if late:
            target.resume()

    thread = threading.Thread(target=wait, name="sync-pause", daemon=True)
    thread.start()
    thread.join(limit_s)
    with lock:
        if not paused.is_set():
            given_up.set()
    if failures:
        raise SyncError(f"pausing the engine: {type(failures[0]).__name__}: {failures[0]}") from failures[0]
    if given_up.is_set():
        raise SyncError(f"the engine did not pause within {limit_s} s; the old version goes on")
