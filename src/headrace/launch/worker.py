"""What runs inside a role's process: build the servant, then serve calls between its steps.

    reader thread: pipe -> inbox           main thread: drain inbox -> call servant -> reply; servant.step() while busy

One thread reads, one thread works; a message that was read is never lost and a call never interrupts a step.
When the controller is gone (end of file on the pipe, or the parent-death signal) the process ends at once.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from headrace.errors import HeadraceError
from headrace.plugins import resolve
from headrace.roles import Reply, RoleSpec

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies; end now if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def picklable(exc: BaseException) -> tuple[str, str, str]:
    """Class name, message and traceback text of an exception: what can always travel."""
    return type(exc).__name__, str(exc), "".join(traceback.format_exception(exc))


class _Server:
    def __init__(self, conn: Connection, servant: Any) -> None:
        self._conn = conn
        self._servant = servant
        self._deferred = frozenset(getattr(servant, "deferred", ()))
        self._has_work = hasattr(servant, "step")
        self._inbox: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()

    def run(self) -> None:
        threading.Thread(target=self._read, name="role-reader", daemon=True).start()
        while True:
            busy = self._has_work and self._servant.busy
            if not self._drain(block=not busy):
                return
            if self._has_work and self._servant.busy:
                self._servant.step()

    def _read(self) -> None:
        while True:
            try:
                self._inbox.put(self._conn.recv())
            except (EOFError, OSError):
                os._exit(0)

    def _drain(self, *, block: bool) -> bool:
        """Serve what is waiting; False when asked to end."""
        while True:
            try:
                call_id, method, args = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if method == "__end__":
                return False
            self._serve(call_id, method, args)
            block = False

    def _serve(self, call_id: int, method: str, args: tuple[Any, ...]) -> None:
        reply = Reply(
            lambda value: self._conn.send((call_id, "ok", value)),
            lambda exc: self._conn.send((call_id, "error", picklable(exc))),
        )
        try:
            function = getattr(self._servant, method)
            if method in self._deferred:
                function(reply, *args)
                return
            value = function(*args)
        except Exception as exc:  # noqa: BLE001 - every failure of a call must reach its caller
            reply.fail(exc)
        else:
            reply.ok(value)


def main() -> None:
    """Entry of `python -m headrace.launch.worker FD PARENT_PID`."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    conn: Connection = Connection(fd)
    spec: RoleSpec = pickle.loads(conn.recv_bytes())
    try:
        servant = resolve(spec.factory, what=f"factory of role {spec.name!r}")(**spec.kwargs)
    except Exception as exc:  # noqa: BLE001 - the controller reports it
        conn.send((-1, "error", picklable(exc)))
        sys.exit(2 if isinstance(exc, HeadraceError) else 3)
    conn.send((-1, "ok", os.getpid()))
    _Server(conn, servant).run()


if __name__ == "__main__":
    main()
