"""The process that runs rewards: `python -m headrace.envs.grade_worker FD PARENT_PID`, started by grading.py.

Reads frames from a socket, calls the reward, answers each with one frame. A frame is an 8-byte big-endian length and
a pickle. Standard output and error belong to the user's reward; they never carry the protocol.
The process ends when its parent does, also after kill -9 (parent-death signal; end of file elsewhere).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import math
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final

import cloudpickle
import numpy as np

PR_SET_PDEATHSIG: Final = 1
HEADER: Final = struct.Struct(">Q")
STDERR_KEEP_BYTES: Final = 1 << 20


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); leave at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def scored(result: Any) -> tuple[float, dict[str, float]]:
    """Turn what a reward returned into (reward, parts); TypeError or ValueError if that would be a guess."""
    if isinstance(result, Mapping):
        if not result:
            raise ValueError("the reward returned an empty dict; give 'reward' or at least one part")
        parts = {str(name): _number(value, f"part {name!r} of the reward") for name, value in result.items()}
        return (parts["reward"] if "reward" in parts else _finite(math.fsum(parts.values()), "sum of parts")), parts
    return _number(result, "the reward"), {}


def _number(value: Any, what: str) -> float:
    if value is None:
        raise TypeError(f"{what} is None: a missing reward is an error, never 0. Does a branch lack its return?")
    if not isinstance(value, bool | int | float | np.number | np.bool_):
        raise TypeError(f"{what} is {value!r:.200} of type {type(value).__name__}; it must be a number, bool or dict")
    return _finite(float(value), what)


def _finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}; it must be finite")
    return value


class Worker:
    """Serves one socket, one request at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.new_event_loop()
        self._reward: Any = None

    def serve(self) -> None:
        """Load the reward, say ready, then grade until the other side closes."""
        first = self._receive()
        if first is None:
            return
        try:
            setup = pickle.loads(first)
            sys.path[:] = setup["path"]
            self._reward = cloudpickle.loads(setup["reward"])
            if callable(warm := getattr(self._reward, "warm", None)):
                warm()
        except (Exception, SystemExit):  # noqa: BLE001  whatever the user's module raises becomes the pool's error
            self._send(("broken", 0, traceback.format_exc()))
            return
        self._send(("ready", 0, ""))
        while (frame := self._receive()) is not None:
            self._send(self._grade(frame))
            if os.fstat(2).st_size > STDERR_KEEP_BYTES:
                os.ftruncate(2, 0)

    def _grade(self, frame: bytes) -> tuple[Any, ...]:
        """("ok", number, reward, parts, seconds) or ("fail", number, traceback, seconds)."""
        number, rollout, prompt = pickle.loads(frame)
        start_s = time.monotonic()
        try:
            result = self._reward(rollout, prompt)
            if inspect.isawaitable(result):
                result = self._loop.run_until_complete(_await(result))
            reward, parts = scored(result)
        except (Exception, SystemExit):  # noqa: BLE001  a reward may raise anything; it becomes infra_fail with this text
            return ("fail", number, traceback.format_exc(), time.monotonic() - start_s)
        finally:
            sys.stdout.flush()
        return ("ok", number, reward, parts, time.monotonic() - start_s)

    def _receive(self) -> bytes | None:
        head = self._read(HEADER.size)
        return None if head is None else self._read(HEADER.unpack(head)[0])

    def _read(self, size: int) -> bytes | None:
        parts = []
        while size:
            part = self._sock.recv(min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _send(self, message: tuple[Any, ...]) -> None:
        frame = pickle.dumps(message)
        self._sock.sendall(HEADER.pack(len(frame)) + frame)


async def _await(result: Any) -> Any:
    return await result


def main() -> None:
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    faulthandler.enable()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # programs that a reward starts must not keep the pipe open
    with contextlib.suppress(OSError):  # the pool went away between two frames
        Worker(sock).serve()
    os._exit(0)  # threads and atexit handlers of a reward must not keep the process


if __name__ == "__main__":
    main()
