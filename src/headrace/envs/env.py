"""The Env seam: where prompts come from and how an episode goes. No torch, no tokenizer: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.records import Message, Prompt, Rollout

RewardFn = Callable[[Rollout, Prompt], "float | Mapping[str, float]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one completion."""

    messages: tuple[Message, ...] = ()
    """Appended to the conversation before the next model call; empty when done."""
    done: bool = True
    policy_fail: str = ""
    """The policy's own fault (bad format, illegal move) in words; the rollout ends, is scored, and trains."""


class Env(Protocol):
    """One episode. Made fresh for each rollout; `close` is called on every path."""

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        """The first messages."""
        ...

    async def step(self, completion_text: str) -> Step:
        """Answer one completion. Raise EnvError when the environment itself failed (never for a bad completion)."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a kind of environment gives: prompts, episodes, a reward."""

    train: Sequence[Prompt]
    eval: Sequence[Prompt]
    """Disjoint from `train`."""
    make_env: Callable[[], Env]
    reward: RewardFn
    fingerprint: str
    """Content hash of both prompt sets; stored in checkpoints, a different one is refused at resume."""
    families: tuple[str, ...] = field(default=())
    """Task names that occur, for reports."""
    notes: tuple[str, ...] = field(default=())
    """What a report must say about the data, e.g. that evaluation repeats training questions."""
