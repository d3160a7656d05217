"""One question, one answer: the environment of most verifiable tasks."""

from __future__ import annotations

from headrace.envs.env import Step
from headrace.records import Message, Prompt


class SingleTurnEnv:
    """Shows the prompt's messages and is done after one completion."""

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, completion_text: str) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        return None
