"""The launcher against real processes: calls, failures, deadlines, and death of either side."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DeadlineError, LaunchError, RoleDiedError, SyncError
from headrace.launch.local import LocalHandle, LocalLauncher, RemoteError
from headrace.roles import RoleSpec

SERVANTS = Path(__file__).parents[2] / "servants"


@pytest.fixture(autouse=True)
def _servants_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SERVANTS))


@asynccontextmanager
async def echo(tmp_path: Path, factory: str = "echo:build", **kwargs: Any) -> AsyncIterator[LocalHandle]:
    launcher = LocalLauncher(tmp_path)
    try:
        spec = RoleSpec(name="echo", factory=factory, kwargs=kwargs, threads=1)
        yield await launcher.spawn(spec, deadline_s=30)
    finally:
        await launcher.close()


def run(tmp_path: Path, body: Callable[[LocalHandle], Awaitable[None]]) -> None:
    async def main() -> None:
        async with echo(tmp_path, greeting="good day") as handle:
            await body(handle)

    asyncio.run(main())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_calls_deferred_answers_and_big_messages(tmp_path: Path) -> None:
    async def body(handle: LocalHandle) -> None:
        assert await handle.call("hello", "you", deadline_s=10) == "good day you"
        values = await asyncio.gather(*(handle.call("later", i, deadline_s=10) for i in range(20)))
        assert values == list(range(20))
        assert len(await handle.call("big", 5_000_000, deadline_s=30)) == 5_000_000
        assert await handle.call("threads", deadline_s=10) == "1"

    run(tmp_path, body)


def test_errors_keep_their_class_or_their_traceback(tmp_path: Path) -> None:
    async def body(handle: LocalHandle) -> None:
        with pytest.raises(SyncError, match="digest differs"):
            await handle.call("fail_ours", deadline_s=10)
        with pytest.raises(RemoteError, match=r"(?s)ZeroDivisionError: by hand.*fail_foreign"):
            await handle.call("fail_foreign", deadline_s=10)
        with pytest.raises(RemoteError, match="no_such"):
            await handle.call("no_such", deadline_s=10)
        assert await handle.call("hello", "again", deadline_s=10)

    run(tmp_path, body)


def test_deadline_names_the_method_and_a_cancelled_wait_loses_nothing(tmp_path: Path) -> None:
    async def body(handle: LocalHandle) -> None:
        waiting = asyncio.ensure_future(handle.call("later", "lost?", deadline_s=10))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await handle.call("later", "mine", deadline_s=10) == "mine"
        with pytest.raises(DeadlineError, match=r"echo: no answer to 'hang' within 0 s"):
            await handle.call("hang", deadline_s=0.2)

    run(tmp_path, body)


def test_a_killed_role_fails_every_call_and_says_why(tmp_path: Path) -> None:
    async def body(handle: LocalHandle) -> None:
        await handle.call("say", "famous last words", deadline_s=10)
        pending = asyncio.ensure_future(handle.call("hang", deadline_s=60))
        await asyncio.sleep(0)
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(RoleDiedError, match=r"(?s)killed by SIGKILL.*famous last words"):
            await pending
        with pytest.raises(RoleDiedError):
            await handle.call("hello", "anyone", deadline_s=10)
        assert "SIGKILL" in await handle.died()

    run(tmp_path, body)


def test_a_servant_that_cannot_be_built(tmp_path: Path) -> None:
    async def main() -> None:
        async with echo(tmp_path, factory="echo:build_broken"):
            raise AssertionError("built")

    with pytest.raises(LaunchError, match="cannot be built: no such model"):
        asyncio.run(main())


def test_close_ends_a_hanging_role(tmp_path: Path) -> None:
    async def main() -> int:
        launcher = LocalLauncher(tmp_path)
        handle = await launcher.spawn(RoleSpec(name="echo", factory="echo:build"), deadline_s=30)
        handle.send("hang")
        await handle.close(0.2)
        await handle.close(0.2)
        await launcher.close()
        return handle.pid

    assert not alive(asyncio.run(main()))


def test_roles_die_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from headrace.launch.local import LocalLauncher
        from headrace.roles import RoleSpec

        async def main():
            launcher = LocalLauncher(Path({str(tmp_path)!r}))
            handle = await launcher.spawn(RoleSpec(name="echo", factory="echo:build"), deadline_s=30)
            handle.send("hang")
            print(handle.pid, flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        assert alive(pid)
        controller.kill()
        controller.wait()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        os.sched_yield()
    assert not alive(pid)
