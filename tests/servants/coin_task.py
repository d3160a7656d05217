"""A task for the scripted engine: the answer is right when the text is "1". Rewards can misbehave on demand."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from headrace.envs.env import Task
from headrace.envs.single_turn import SingleTurnEnv
from headrace.records import Message, Prompt, Rollout


@dataclass(frozen=True)
class Trouble:
    """A reward that raises, hangs or dies for some prompts."""

    raises: str = ""
    hangs: str = ""
    dies: str = ""

    def __call__(self, rollout: Rollout, prompt: Prompt) -> float:
        if prompt.id == self.raises:
            raise RuntimeError(f"no grade for {prompt.id}")
        if prompt.id == self.hangs:
            time.sleep(3600)
        if prompt.id == self.dies:
            os._exit(9)
        return float(rollout.text == "1")


def build(size: int = 64, raises: str = "", hangs: str = "", dies: str = "") -> Task:
    def prompt(name: str) -> Prompt:
        return Prompt(id=name, messages=(Message(role="user", content=f"coin {name}"),), answer="1", task="coin")

    return Task(
        train=[prompt(f"t{i}") for i in range(size)],
        eval=[prompt(f"e{i}") for i in range(20)],
        make_env=SingleTurnEnv,
        reward=Trouble(raises, hangs, dies),
        fingerprint=f"coin-{size}",
    )
