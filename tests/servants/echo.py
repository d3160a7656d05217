"""Servants for tests of the launcher: importable from a spawned role."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from headrace.errors import SyncError
from headrace.roles import Reply


class Echo:
    """Answers at once, later, wrongly or never."""

    deferred = ("later",)

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting
        self.waiting: list[tuple[Reply, Any]] = []
        self.steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def step(self) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            reply, value = self.waiting.pop(0)
            reply.ok(value)

    def hello(self, name: str) -> str:
        return f"{self.greeting} {name}"

    def later(self, reply: Reply, value: Any) -> None:
        self.waiting.append((reply, value))

    def fail_ours(self) -> None:
        raise SyncError("digest differs")

    def fail_foreign(self) -> None:
        raise ZeroDivisionError("by hand")

    def hang(self) -> None:
        time.sleep(3600)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    def big(self, size: int) -> bytes:
        return bytes(size)


def build(greeting: str = "hello") -> Echo:
    return Echo(greeting)


def build_broken() -> Callable[[], None]:
    raise ValueError("cannot be built: no such model")
