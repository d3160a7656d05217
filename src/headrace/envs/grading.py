"""Rewards in killable processes: one slow, hanging or crashing reward costs one rollout, never the run.

    grade() ──takes an idle slot──> slot's worker process (spawned, warm) ──reply──> Grade, slot idle again
                                     └─ over its deadline, or dead: SIGKILL to its process group, Grade says why,
                                        a replacement starts in the background, then the slot is idle again

One request per worker at a time, so replies cannot mix. A cancelled grade leaves its worker to finish (under the
deadline); that reply is thrown away. Time in the queue and time to start a worker do not count against the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import cloudpickle

from headrace.envs.env import RewardFn
from headrace.envs.grade_worker import HEADER
from headrace.envs.rewards import built_in
from headrace.errors import ConfigError, EnvError
from headrace.plugins import resolve
from headrace.records import Outcome, Prompt, Rollout

log = logging.getLogger(__name__)
START_DEADLINE_S: Final = 120.0
STDERR_SHOWN_BYTES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What grading one rollout gave."""

    outcome: Outcome
    """ok, infra_fail (reward raised, crashed, or returned no finite number) or timeout."""
    reward: float | None
    """None exactly when the outcome is not ok."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The entries of a reward that returned a dict."""
    error: str = ""
    """Traceback or reason."""
    grade_s: float = 0.0
    """Seconds inside the reward (waiting for a free worker excluded)."""


def load_reward(reward: RewardFn | str, recipe_dir: Path) -> RewardFn:
    """A reward given as callable, "module:function" (looked up beside the recipe first) or built-in name.

    Raises PluginError or ConfigError with the nearest names.
    """
    if not isinstance(reward, str):
        return reward
    if ":" not in reward:
        return built_in(reward)
    found = resolve(reward, what="env.reward", search=recipe_dir.resolve())
    if not callable(found):
        raise ConfigError(
            f"env.reward = {reward!r} is {type(found).__name__}; it must be a function (rollout, prompt) -> float"
        )
    return found  # type: ignore[no-any-return]


class _ByName:
    """A "module:function" reward that is imported in the worker, not in the controller."""

    def __init__(self, name: str, recipe_dir: Path) -> None:
        self._name, self._recipe_dir = name, recipe_dir

    def __reduce__(self) -> tuple[Any, ...]:
        return (load_reward, (self._name, self._recipe_dir))


class _Slot:
    """One worker process at most, and the socket to it. Used by one task at a time."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Spawn and wait until the reward is loaded; EnvError with the worker's traceback."""
        self.kill()
        ours, theirs = socket.socketpair()
        # Popen from this thread on purpose: the parent-death signal is tied to the thread that spawned the child.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed in kill()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.envs.grade_worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=self._stderr, stderr=self._stderr,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(START_DEADLINE_S):
                self._write(self._setup)
                kind, _, text = await self._read()
        except TimeoutError:
            raise EnvError(f"a grading worker was not ready after {START_DEADLINE_S:g} s{self._death()}") from None
        except (OSError, EOFError) as exc:
            raise EnvError(f"a grading worker ended while it started{self._death()}") from exc
        if kind == "broken":
            self.kill()
            raise EnvError(f"the reward could not be loaded in a grading worker:\n{text}")

    async def grade(self, payload: tuple[Rollout, Prompt], deadline_s: float) -> Grade:
        """One exchange. Never raises except on cancellation; after that, or a failure, the worker is dead."""
        start_s = time.monotonic()
        self._number += 1
        try:
            frame = _dump((self._number, *payload))
        except (pickle.PicklingError, TypeError, AttributeError) as exc:
            return _failed(f"the rollout or its prompt cannot travel to a grading worker: {exc}", 0.0)
        try:
            async with asyncio.timeout(deadline_s):
                self._write(frame)
                reply = await self._read()
        except TimeoutError:
            self.kill()
            waited_s = time.monotonic() - start_s
            error = f"the reward took longer than env.grade_deadline_s = {deadline_s:g} s; its process was killed"
            return Grade(outcome=Outcome.TIMEOUT, reward=None, error=error, grade_s=waited_s)
        except (OSError, EOFError):
            return _failed(f"the grading worker died{self._death()}", time.monotonic() - start_s)
        except asyncio.CancelledError:
            self.kill()
            raise
        if reply[0] == "fail":
            return _failed(reply[2], reply[3])
        _, number, reward, parts, grade_s = reply
        assert number == self._number, f"grading worker answered request {number}, asked was {self._number}"
        return Grade(outcome=Outcome.OK, reward=reward, parts=parts, grade_s=grade_s)

    def kill(self) -> None:
        """End the worker and every program of its process group; idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def _write(self, frame: bytes) -> None:
        assert self._writer is not None
        self._writer.write(HEADER.pack(len(frame)) + frame)

    async def _read(self) -> Any:
        assert self._reader is not None
        head = await self._reader.readexactly(HEADER.size)
        return pickle.loads(await self._reader.readexactly(HEADER.unpack(head)[0]))

    def _death(self) -> str:
        """How the worker ended and the end of what it wrote, in words; kills it."""
        assert self._process is not None
        assert self._stderr is not None
        try:
            code = self._process.wait(0.5)  # the socket closes a moment before the process can be reaped
        except subprocess.TimeoutExpired:
            code = None
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - STDERR_SHOWN_BYTES))
        tail = self._stderr.read().decode("utf-8", "replace").strip()
        self.kill()
        how = "" if code is None else f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return how + (f"; it wrote last:\n{tail}" if tail else "")


class GraderPool:
    """Scores rollouts in `workers` processes. Use from one event loop."""

    def __init__(self, reward: RewardFn | str, *, workers: int, deadline_s: float, recipe_dir: Path) -> None:
        """`reward` is a callable (travels by cloudpickle), "module:function" or a built-in name. Starts nothing."""
        self._deadline_s = deadline_s
        recipe_dir = recipe_dir.resolve()
        by_name = isinstance(reward, str) and ":" in reward
        function = _ByName(str(reward), recipe_dir) if by_name else load_reward(reward, recipe_dir)
        path = [str(recipe_dir), *(p for p in sys.path if p != str(recipe_dir))]
        setup = pickle.dumps({"path": path, "reward": cloudpickle.dumps(function)})
        self._slots = [_Slot(setup) for _ in range(workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Grades that wait for a free worker."""
        return self._waiting

    async def start(self) -> None:
        """Warm every worker now. Raises EnvError with the traceback if the reward cannot be loaded."""
        await asyncio.gather(*(slot.start() for slot in self._slots if not slot.alive))

    async def grade(self, rollout: Rollout, prompt: Prompt) -> Grade:
        """Score one rollout; a failure of any kind is a Grade, never an exception."""
        if self._closed:
            return _failed("the grader pool is closed", 0.0)
        self._waiting += 1
        try:
            slot = await self._idle.get()
        finally:
            self._waiting -= 1
        if self._closed:
            self._idle.put_nowait(slot)
            return _failed("the grader pool is closed", 0.0)
        answer: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._serve(slot, (rollout, prompt), answer))
        self._tasks.add(task)

        def idle_again(_: asyncio.Task[None]) -> None:  # a callback, since a task cancelled early never runs at all
            self._tasks.discard(task)
            self._idle.put_nowait(slot)
            broke = None if task.cancelled() else task.exception()
            if not answer.done():
                why = f"grading failed: {broke!r}" if broke else "the grader pool was closed while grading"
                answer.set_result(_failed(why, 0.0))

        task.add_done_callback(idle_again)
        return await answer

    async def _serve(self, slot: _Slot, payload: tuple[Rollout, Prompt], answer: asyncio.Future[Grade]) -> None:
        """Own the slot while it works, whether or not anybody still waits for the answer."""
        try:
            if not slot.alive:
                await slot.start()
            grade = await slot.grade(payload, self._deadline_s)
            if not answer.done():
                answer.set_result(grade)
            if not slot.alive:
                await slot.start()  # warm again before the next grade takes it
        except EnvError as exc:  # the next grade tries to start it again, and reports if that fails too
            if not answer.done():
                answer.set_result(_failed(str(exc), 0.0))
            else:
                log.warning("replacing a grading worker failed: %s", exc)

    def kill(self) -> None:
        """Kill all workers without waiting; idempotent."""
        self._closed = True
        for slot in self._slots:
            slot.kill()

    async def close(self) -> None:
        """Kill all workers; grades in progress end as infra_fail. Idempotent."""
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            slot.kill()


def _dump(message: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(message, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError):
        return bytes(cloudpickle.dumps(message, protocol=5))  # rows may hold objects of the user's script


def _failed(error: str, grade_s: float) -> Grade:
    return Grade(outcome=Outcome.INFRA_FAIL, reward=None, error=error, grade_s=grade_s)
