"""Before training: does the gold answer of a task score 1.0, through the same environment and grading process?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.envs.env import Env, Task
from headrace.envs.grading import Grade, GraderPool
from headrace.records import Completion, Message, Outcome, Prompt, Rollout, Turn

CHECK_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldCheck:
    """What one prompt's gold answer scored."""

    prompt: Prompt
    grade: Grade

    @property
    def ok(self) -> bool:
        return self.grade.reward is not None and abs(self.grade.reward - 1.0) < 1e-6


def check_task(
    task: Task, n: int, *, recipe_dir: Path = Path("."), deadline_s: float = CHECK_DEADLINE_S
) -> list[GoldCheck]:
    """Answer the first `n` training prompts that have a gold answer with it, and grade.

    Prompts without gold answer are skipped, so the list may be shorter than n. Must not be called inside an event loop.
    """
    prompts = [task.train[i] for i in range(min(n, len(task.train)))]
    return asyncio.run(_check(task, [p for p in prompts if p.answer], recipe_dir, deadline_s))


async def _check(task: Task, prompts: list[Prompt], recipe_dir: Path, deadline_s: float) -> list[GoldCheck]:
    pool = GraderPool(task.reward, workers=1, deadline_s=deadline_s, recipe_dir=recipe_dir)
    try:
        checks = []
        for prompt in prompts:
            rollout = await gold_rollout(task.make_env(), prompt, [prompt.answer])
            checks.append(GoldCheck(prompt=prompt, grade=await pool.grade(rollout, prompt)))
        return checks
    finally:
        await pool.close()


async def gold_rollout(env: Env, prompt: Prompt, said: Sequence[str]) -> Rollout:
    """An episode whose policy says the texts of `said`, one a turn, until they or the environment are done."""
    try:
        messages = list(await env.reset(prompt))
        turns: list[Turn] = []
        for number, text in enumerate(said):
            turns.append(Turn(prompt_ids=(), completion=_said(text, number), env_version=0))
            step = await env.step(text)
            messages += [Message(role="assistant", content=text), *step.messages]
            if step.done:
                break
    finally:
        await env.close()
    return Rollout(
        group_id="check", member=0, attempt=0, outcome=Outcome.OK, reward=None,
        turns=tuple(turns), messages=tuple(messages),
    )  # fmt: skip


def _said(text: str, turn: int) -> Completion:
    return Completion(
        request_id=f"check/{turn}", ids_N=np.zeros(0, np.int32), logp_N=np.zeros(0, np.float32),
        spans=(), finish="stop", text=text,
    )  # fmt: skip
