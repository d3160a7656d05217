"""Roles as processes on this machine.

Each role is a fresh interpreter (never a fork) that talks over a socket pair: no ports. It dies with the controller,
even under kill -9. Its standard output and error go to a log file, whose end appears in error messages.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import headrace.errors as errors
from headrace.errors import DeadlineError, HeadraceError, LaunchError, RoleDiedError
from headrace.roles import RoleSpec

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Ask for huge pages: a decode step streams all weights, and with 4 KiB pages it waits for address translation
(SmolLM2-135M, 64 requests: 79 -> 64 ms with two threads, 115 -> 92 ms with one). Other C libraries ignore it."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class RemoteError(LaunchError):
    """A servant's method raised something outside our own tree; carries its traceback."""


def _rebuild(name: str, message: str, trace: str, *, role: str) -> HeadraceError:
    """The exception that a role raised: of its own class if it is one of ours."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HeadraceError):
        return kind(message)
    return RemoteError(f"{role}: {name}: {message}\n{trace}")


class LocalHandle:
    """A role's process. One reader thread hands each message to the event loop: none is lost to a cancelled wait."""

    def __init__(self, spec: RoleSpec, log_path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._spec = spec
        self._log_path = log_path
        self._loop = loop
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._methods: dict[int, tuple[str, float]] = {}
        self._next_id = 0
        self._died: asyncio.Future[str] = loop.create_future()
        self._closing = False
        parent, child = socket.socketpair()
        env = os.environ | {name: str(spec.threads) for name in _THREAD_VARIABLES}
        env |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        env.setdefault("GLIBC_TUNABLES", _HUGE_PAGES)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.launch.worker", str(child.fileno()), str(os.getpid())],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        child.close()
        self._conn: Connection = Connection(parent.detach())
        self._ready: asyncio.Future[Any] = loop.create_future()
        self._pending[-1] = self._ready
        # Calls leave through one thread, in order: a role that is slow to read must not stop the event loop.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"{spec.name}-send")
        self._sender.submit(self._conn.send_bytes, pickle.dumps(spec))
        self._reader = threading.Thread(target=self._read, name=f"{spec.name}-read", daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, deadline_s: float) -> None:
        """Wait until the servant is built."""
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), deadline_s)
        except TimeoutError:
            raise DeadlineError(
                f"{self.name}: not ready after {deadline_s:.0f} s{self._log_end()}; raise launch.start_deadline_s"
            ) from None

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        future = self._post(method, args)
        try:
            return await asyncio.wait_for(future, deadline_s)
        except TimeoutError:
            waiting = ", ".join(f"{m} since {time.monotonic() - t:.0f} s" for m, t in self._methods.values())
            raise DeadlineError(
                f"{self.name}: no answer to {method!r} within {deadline_s:.0f} s "
                f"(still waiting: {waiting or 'nothing'})"
            ) from None

    def send(self, method: str, *args: Any) -> None:
        if not self._died.done():
            self._submit((-2, method, args))

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._sender.shutdown(wait=False)

    async def close(self, deadline_s: float) -> None:
        self._closing = True
        if not self._died.done():
            self._submit((-2, "__end__", ()))
            try:
                await asyncio.wait_for(asyncio.shield(self._died), deadline_s)
            except TimeoutError:
                self.kill()
                await self._died
        await self._loop.run_in_executor(None, self._reader.join)
        self._sender.shutdown(wait=True)

    async def died(self) -> str:
        return await asyncio.shield(self._died)

    def _post(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._died.done():
            future.set_exception(RoleDiedError(self._died.result()))
            return future
        call_id, self._next_id = self._next_id, self._next_id + 1
        self._pending[call_id] = future
        self._methods[call_id] = (method, time.monotonic())
        future.add_done_callback(lambda _: (self._pending.pop(call_id, None), self._methods.pop(call_id, None)))
        self._submit((call_id, method, args))
        return future

    def _submit(self, message: tuple[int, str, tuple[Any, ...]]) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with suppress(RuntimeError):  # killed: the reader thread fails every pending call
            self._sender.submit(self._send, data)

    def _send(self, data: bytes) -> None:
        try:
            self._conn.send_bytes(data)
        except OSError:
            return  # the reader thread sees the same end of the pipe and fails every pending call

    def _read(self) -> None:
        while True:
            try:
                message = self._conn.recv()
            except (EOFError, OSError):
                break
            self._tell(self._on_message, *message)
        code = self._process.wait()
        self._conn.close()
        self._tell(self._on_death, code)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *args)

    def _on_message(self, call_id: int, status: str, value: Any) -> None:
        future = self._pending.get(call_id)
        if future is None or future.done():
            return
        if status == "ok":
            future.set_result(value)
        else:
            future.set_exception(_rebuild(*value, role=self.name))

    def _on_death(self, code: int) -> None:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"{self.name} (process {self._process.pid}) ended: {how}{self._log_end()}"
        self._died.set_result(reason)
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(RoleDiedError(reason))
                future.exception()  # seen: an unawaited call must not warn at exit

    def _log_end(self, lines: int = 8) -> str:
        if not self._log_path.exists():
            return ""
        tail = self._log_path.read_text(errors="replace").splitlines()[-lines:]
        return "" if not tail else f"\n  end of {self._log_path}:\n    " + "\n    ".join(tail)


class LocalLauncher:
    """Starts roles on this machine; logs go to `log_dir`/NAME.log."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._handles: list[LocalHandle] = []

    async def spawn(self, spec: RoleSpec, *, deadline_s: float) -> LocalHandle:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        handle = LocalHandle(spec, self._log_dir / f"{spec.name}.log", asyncio.get_running_loop())
        self._handles.append(handle)
        try:
            await handle.ready(deadline_s)
        except BaseException:
            handle.kill()
            await handle.close(5.0)
            raise
        return handle

    def kill(self) -> None:
        for handle in self._handles:
            handle.kill()

    async def close(self) -> None:
        handles, self._handles = self._handles, []
        await asyncio.gather(*(handle.close(5.0) for handle in handles))
