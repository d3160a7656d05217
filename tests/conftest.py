"""Shared by all tests: nothing may leak out of a test, and no test touches the user's model cache by accident."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_GRACE_S = 5.0
"""How long something that is already ending may take to be gone."""
_LIBRARY_THREADS = ("ThreadPoolExecutor", "asyncio_", "QueueFeederThread", "tqdm", "Tqdm", "execnet", "pytest_timeout")
"""Prefixes of threads that libraries keep for the life of the process."""
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Children that the standard library keeps for the life of the process."""


def _children() -> dict[int, psutil.Process]:
    alive = {}
    for child in psutil.Process().children(recursive=True):
        try:
            helper = any(h in part for part in child.cmdline() for h in _HELPERS)
            if child.status() != psutil.STATUS_ZOMBIE and not helper:
                alive[child.pid] = child
        except psutil.NoSuchProcess:
            continue
    return alive


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.is_alive() and not t.name.startswith(_LIBRARY_THREADS)}


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread or a child process behind."""
    threads_before, children_before = _threads(), set(_children())
    yield
    deadline_s = time.monotonic() + _GRACE_S
    while True:
        threads = _threads() - threads_before
        children = {pid: p for pid, p in _children().items() if pid not in children_before}
        if not threads and not children:
            return
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.02)  # something is ending; there is no event to wait for from outside
    for child in children.values():
        child.kill()
    names = [f"thread {t.name}" for t in threads] + [f"process {pid}: {p}" for pid, p in children.items()]
    pytest.fail("left behind: " + "; ".join(names))


@pytest.fixture
def headrace_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache for tests that fetch or list models."""
    home = tmp_path / "home"
    monkeypatch.setenv("HEADRACE_HOME", str(home))
    return home
