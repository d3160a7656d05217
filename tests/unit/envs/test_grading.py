"""Grading: hanging, crashing and lying rewards cost one rollout; replies never mix; nothing outlives its parent."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.envs.grading import GraderPool
from headrace.errors import ConfigError, EnvError
from headrace.records import Completion, Outcome, Prompt, Rollout, Span, Turn


def rollout(text: str) -> Rollout:
    said = Completion(
        request_id="r", ids_N=np.array([1], np.int32), logp_N=np.zeros(1, np.float32),
        spans=(Span(start=0, stop=1, policy_version=0, kv_version=0),), finish="stop", text=text,
    )  # fmt: skip
    turn = Turn(prompt_ids=(1,), completion=said, env_version=0)
    return Rollout(group_id="g", member=0, attempt=0, outcome=Outcome.OK, reward=None, turns=(turn,), messages=())


PROMPT = Prompt(id="p", messages=(), answer="7", row={"n": 1})


def graded(reward, texts=("x",), *, workers=1, deadline_s=30.0, recipe_dir=Path(".")):
    """Grades of all texts, at once."""

    async def run():
        pool = GraderPool(reward, workers=workers, deadline_s=deadline_s, recipe_dir=recipe_dir)
        try:
            return await asyncio.gather(*(pool.grade(rollout(t), PROMPT) for t in texts))
        finally:
            await pool.close()

    return asyncio.run(run())


def test_closures_travel_and_replies_do_not_mix():
    scale = 10.0
    grades = graded(lambda r, p: float(r.text) * scale + p.row["n"], [str(i) for i in range(40)], workers=2)
    assert [g.reward for g in grades] == [i * 10.0 + 1 for i in range(40)]
    assert {g.outcome for g in grades} == {Outcome.OK}


@pytest.mark.parametrize(
    ("value", "reward", "parts"),
    [
        (True, 1.0, {}),
        (0, 0.0, {}),
        (np.float32(0.5), 0.5, {}),
        (np.True_, 1.0, {}),
        ({"reward": 0.25, "length": 3}, 0.25, {"reward": 0.25, "length": 3.0}),
        ({"format": 0.25, "right": True}, 1.25, {"format": 0.25, "right": 1.0}),
    ],
)
def test_values_that_count(value, reward, parts):
    (grade,) = graded(lambda r, p: value)
    assert (grade.outcome, grade.reward, dict(grade.parts)) == (Outcome.OK, reward, parts), grade.error


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "missing reward is an error"),
        (math.nan, "is nan; it must be finite"),
        (math.inf, "is inf; it must be finite"),
        ("1.0", "'1.0' of type str"),
        ([1.0], "of type list"),
        ({}, "empty dict"),
        ({"reward": None}, "part 'reward' of the reward is None"),
        ({"a": 1.0, "b": math.nan}, "part 'b' of the reward is nan"),
        (1j, "of type complex"),
    ],
)
def test_values_that_would_be_a_guess_are_infra_fail(value, says):
    (grade,) = graded(lambda r, p: value)
    assert grade.outcome is Outcome.INFRA_FAIL
    assert grade.reward is None
    assert says in grade.error


def test_async_rewards():
    async def reward(r, p):
        await asyncio.sleep(0)
        return len(r.text)

    assert [g.reward for g in graded(reward, ["a", "bb"])] == [1.0, 2.0]


def test_exception_gives_its_traceback_and_the_worker_goes_on():
    def reward(r, p):
        if r.text == "bad":
            raise KeyError("no such column")
        if r.text == "exit":
            sys.exit(3)
        return 1.0

    bad, left, good = graded(reward, ["bad", "exit", "good"])
    assert bad.outcome is Outcome.INFRA_FAIL
    assert "no such column" in bad.error
    assert "in reward" in bad.error
    assert "SystemExit: 3" in left.error
    assert good.reward == 1.0


def test_hanging_reward_is_killed_at_its_deadline_and_its_worker_replaced():
    def reward(r, p):
        while r.text == "hang":
            pass
        return os.getpid()

    before, hang, after = graded(reward, ["a", "hang", "b"], deadline_s=1.0)
    assert hang.outcome is Outcome.TIMEOUT
    assert hang.reward is None
    assert "env.grade_deadline_s = 1 s" in hang.error
    assert hang.grade_s >= 1.0
    assert after.outcome is Outcome.OK
    assert before.reward != after.reward


def test_deadline_kills_programs_that_the_reward_started(tmp_path):
    pid_file = tmp_path / "pid"

    def reward(r, p):
        child = subprocess.Popen(["sleep", "1000"])
        pid_file.write_text(str(child.pid))
        return child.wait()

    (grade,) = graded(reward, deadline_s=1.0)
    assert grade.outcome is Outcome.TIMEOUT
    wait_gone(int(pid_file.read_text()))


def test_crashes_say_how_the_worker_died():
    def reward(r, p):
        if r.text == "exit":
            os._exit(7)
        if r.text == "segfault":
            ctypes.string_at(0)
        return 1.0

    gone, fault, good = graded(reward, ["exit", "segfault", "good"])
    assert gone.outcome is fault.outcome is Outcome.INFRA_FAIL
    assert "died with exit code 7" in gone.error
    assert "SIGSEGV" in fault.error
    assert "in reward" in fault.error  # the stack of the crash
    assert good.reward == 1.0


def test_noise_on_standard_output_breaks_nothing():
    def reward(r, p):
        sys.stdout.write("x" * 100_000)
        os.write(1, b"\x00\xff" * 50_000)
        os.write(2, b"\x00\xff" * 50_000)
        os.system("echo noise from a program")
        return 1.0

    assert [g.reward for g in graded(reward, ["a"] * 5)] == [1.0] * 5


def test_module_beside_the_recipe(tmp_path):
    (tmp_path / "my_rewards_x1.py").write_text(
        "from helper_x1 import two\n\ndef reward(rollout, prompt):\n    return two() + len(rollout.text)\n"
    )
    (tmp_path / "helper_x1.py").write_text("def two():\n    return 2\n")
    assert [g.reward for g in graded("my_rewards_x1:reward", ["abc"], recipe_dir=tmp_path)] == [5.0]


def test_reward_that_cannot_be_loaded():
    (grade,) = graded("no_such_module_x2:reward")
    assert grade.outcome is Outcome.INFRA_FAIL
    assert "there is no module 'no_such_module_x2'" in grade.error
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        GraderPool("numerc", workers=1, deadline_s=1.0, recipe_dir=Path("."))

    async def start():
        pool = GraderPool("no_such_module_x2:reward", workers=1, deadline_s=1.0, recipe_dir=Path("."))
        try:
            await pool.start()
        finally:
            await pool.close()

    with pytest.raises(EnvError, match="no_such_module_x2"):
        asyncio.run(start())


def test_built_in_reward_by_name():
    assert [g.reward for g in graded("numeric", ["so it is 7", "8"])] == [1.0, 0.0]


def test_cancelled_grade_neither_loses_the_worker_nor_mixes_replies(tmp_path):
    started, release = tmp_path / "started", tmp_path / "release"
    os.mkfifo(started)
    os.mkfifo(release)

    def reward(r, p):
        if r.text == "slow":
            started.write_text("x")  # blocks until the test reads
            release.read_text()
            return -1.0
        return float(r.text)

    async def run():
        pool = GraderPool(reward, workers=1, deadline_s=30.0, recipe_dir=Path("."))
        try:
            slow = asyncio.create_task(pool.grade(rollout("slow"), PROMPT))
            await asyncio.to_thread(started.read_text)
            queued = [asyncio.create_task(pool.grade(rollout(str(i)), PROMPT)) for i in range(3)]
            await asyncio.sleep(0)
            assert pool.waiting == 3
            slow.cancel()
            queued[1].cancel()
            await asyncio.to_thread(release.write_text, "x")
            results = await asyncio.gather(slow, *queued, return_exceptions=True)
            return results, await pool.grade(rollout("9"), PROMPT)
        finally:
            await pool.close()

    (slow, first, second, third), last = asyncio.run(run())
    assert isinstance(slow, asyncio.CancelledError)
    assert isinstance(second, asyncio.CancelledError)
    assert (first.reward, third.reward, last.reward) == (0.0, 2.0, 9.0)


def test_loop_stays_free_while_a_reward_runs(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def run():
        pool = GraderPool(lambda r, p: float(len(gate.read_text())), workers=1, deadline_s=30.0, recipe_dir=Path("."))
        try:
            task = asyncio.create_task(pool.grade(rollout("x"), PROMPT))
            await asyncio.to_thread(gate.write_text, "abc")  # returns only if the loop served the worker meanwhile
            return await task
        finally:
            await pool.close()

    assert asyncio.run(run()).reward == 3.0


def test_large_rollouts_pass():
    (grade,) = graded(lambda r, p: len(r.text), ["x" * 3_000_000])
    assert grade.reward == 3_000_000


def test_closing_ends_what_is_in_progress():
    async def run():
        pool = GraderPool(lambda r, p: time.sleep(1000), workers=1, deadline_s=500.0, recipe_dir=Path("."))
        await pool.start()
        tasks = [asyncio.create_task(pool.grade(rollout("x"), PROMPT)) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        await pool.close()
        return await asyncio.gather(*tasks)

    for grade in asyncio.run(run()):
        assert grade.outcome is Outcome.INFRA_FAIL
        assert "closed" in grade.error


def test_workers_are_light():
    (grade,) = graded(
        lambda r, p: {m: float(m in sys.modules) for m in ("torch", "transformers", "reasoning_gym", "pandas")}
    )
    assert sum(grade.parts.values()) == 0.0, grade.parts


ORPHAN = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from headrace.envs.grading import GraderPool
from headrace.records import Outcome, Prompt, Rollout

def reward(rollout, prompt):
    Path({pid!r}).write_text(str(os.getpid()))
    while True:
        pass

async def main():
    pool = GraderPool(reward, workers=1, deadline_s=500.0, recipe_dir=Path("."))
    r = Rollout(group_id="g", member=0, attempt=0, outcome=Outcome.OK, reward=None, turns=(), messages=())
    await pool.grade(r, Prompt(id="p", messages=()))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signal")
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path):
    pid_fifo = tmp_path / "pid"
    os.mkfifo(pid_fifo)
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN.format(here=str(tmp_path), pid=str(pid_fifo))])
    worker = int(pid_fifo.read_text())
    assert psutil.pid_exists(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_gone(worker)


def wait_gone(pid: int) -> None:
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        return
