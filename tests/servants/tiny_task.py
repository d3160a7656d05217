"""A task whose reward depends on every sampled character, so that untrained models of random text have signal."""

from __future__ import annotations

import zlib

from headrace.envs.env import Step, Task
from headrace.records import Message, Prompt, Rollout


class ChattyEnv:
    """Asks again until `turns` completions are there."""

    def __init__(self, turns: int) -> None:
        self._left = turns

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, completion_text: str) -> Step:
        self._left -= 1
        if self._left == 0:
            return Step(done=True)
        return Step(done=False, messages=(Message(role="user", content=f"{len(completion_text)}. Next number?"),))

    async def close(self) -> None:
        return None


def parity(rollout: Rollout, prompt: Prompt) -> float:
    """0 or 1 from a hash of everything that was said: a fair coin, the same for the same tokens."""
    said = "".join(turn.completion.text for turn in rollout.turns)
    return float(zlib.crc32(said.encode()) % 2)


def build(turns: int = 1) -> Task:
    def prompts(name: str, count: int) -> list[Prompt]:
        texts = [f"What is {i} + {2 * i + len(name)}?" for i in range(count)]
        return [Prompt(id=f"{name}{i}", messages=(Message(role="user", content=t),)) for i, t in enumerate(texts)]

    return Task(
        train=prompts("train", 12),
        eval=prompts("eval", 4),
        make_env=lambda: ChattyEnv(turns),
        reward=parity,
        fingerprint=f"tiny-{turns}",
    )
