"""Everything random about rollouts, as a function of (seed, ordinal, attempt).

Two plans that are compared see the same prompts, lengths and rewards for the same ordinal (common random numbers),
in whatever order they ask. Numbers are drawn block by block from a counter-based generator: a block is a function of
its place, so nothing depends on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np

from headrace.planner.lengths import LengthLaw, length_law
from headrace.planner.spec import PlanSpec
from headrace.planner.turns import TOK_SIGMA, Episode, draw_around, draw_episodes, single_turn, turns_mean

T = TypeVar("T")

_BLOCK = 1024
"""Groups drawn together."""
_EPISODE_BLOCK = 64
"""The same for episodes, which are larger. Divides _BLOCK."""
_KEPT = 64
"""Blocks of a kind that stay in memory; an older one is drawn again if it is asked for again."""


class _Kind(IntEnum):
    """Independent streams."""

    PROMPT_FACTOR = 0
    LENGTH = 1
    PROMPT_TOK = 2
    REWARD = 3
    EPISODE = 4


class _Blocks(Generic[T]):
    """Blocks of rows by (block, attempt), made when first asked for."""

    def __init__(self, make: Callable[[int, int], T]) -> None:
        self._make = make
        self._made: dict[tuple[int, int], T] = {}

    def get(self, block: int, attempt: int) -> T:
        key = (block, attempt)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _KEPT:
                del self._made[next(iter(self._made))]
            found = self._made[key] = self._make(block, attempt)
        return found


class Draws:
    """Random numbers of one workload. `law` replaces the spec's; the factors are drift (planner/drift.py)."""

    def __init__(
        self,
        spec: PlanSpec,
        *,
        seed: int,
        law: LengthLaw | None = None,
        length_factor: float = 1.0,
        turns_factor: float = 1.0,
    ) -> None:
        law = length_law(spec.response) if law is None else law
        self.law = law if length_factor == 1.0 else law.scaled(length_factor)
        """After drift."""
        self.mean_turns = turns_mean(spec.episode, turns_factor)
        """After drift."""
        self._spec = spec
        self._seed = seed
        self._single = single_turn(spec)
        self._lengths = _Blocks(self._draw_lengths)
        self._prompts = _Blocks(self._draw_prompts)
        self._rewards = _Blocks(self._draw_rewards)
        self._episodes = _Blocks(self._draw_episodes)

    def lengths(self, ordinal: int, attempt: int = 0) -> Sequence[int]:
        """Tokens that each member of a group samples in all. Further attempts answer the same prompt."""
        return self._lengths.get(ordinal // _BLOCK, attempt)[ordinal % _BLOCK]

    def prompt_tok(self, ordinal: int) -> int:
        """Prompt length of a group, at least 1: lognormal around the spec's mean."""
        return self._prompts.get(ordinal // _BLOCK, 0)[ordinal % _BLOCK]

    def rewards(self, ordinal: int, attempt: int = 0) -> Sequence[float]:
        """0 or 1 for each member: all equal with probability zero_signal_frac, else at least one of each.

        Of the prompt, whatever the attempt, so that retried members do not change the share of equal groups. A group
        of one member is always equal.
        """
        return self._rewards.get(ordinal // _BLOCK, 0)[ordinal % _BLOCK]

    def episode(self, ordinal: int, member: int, attempt: int = 0) -> Episode | None:
        """Turns and times of a rollout, its turns' tokens summing to its length; None if it is one plain model call."""
        if self._single:
            return None
        return self._episodes.get(ordinal // _EPISODE_BLOCK, attempt)[ordinal % _EPISODE_BLOCK][member]

    def _rng(self, kind: _Kind, block: int, attempt: int) -> np.random.Generator:
        key = np.array([self._seed % 2**64, kind], dtype=np.uint64)
        counter = np.array([0, 0, attempt, block], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def _draw_lengths(self, block: int, attempt: int) -> list[list[int]]:
        prompts = self._rng(_Kind.PROMPT_FACTOR, block, 0)
        members = self._rng(_Kind.LENGTH, block, attempt)
        drawn: list[list[int]] = self.law.draw(prompts, _BLOCK, self._spec.group_size, members).tolist()
        return drawn

    def _draw_prompts(self, block: int, attempt: int) -> list[int]:
        rng = self._rng(_Kind.PROMPT_TOK, block, attempt)
        tokens = np.rint(draw_around(rng, _BLOCK, mean=float(self._spec.prompt_tok), sigma=TOK_SIGMA))
        drawn: list[int] = np.maximum(tokens, 1.0).astype(np.int64).tolist()
        return drawn

    def _draw_rewards(self, block: int, attempt: int) -> list[list[float]]:
        rng = self._rng(_Kind.REWARD, block, attempt)
        size = self._spec.group_size
        equal_B = rng.random(_BLOCK) < self._spec.zero_signal_frac
        solved_B = size * rng.integers(0, 2, _BLOCK)
        mixed_B = rng.integers(1, size, _BLOCK) if size > 1 else solved_B
        rank_BG = rng.random((_BLOCK, size)).argsort(axis=1)
        drawn: list[list[float]] = (rank_BG < np.where(equal_B, solved_B, mixed_B)[:, None]).astype(float).tolist()
        return drawn

    def _draw_episodes(self, block: int, attempt: int) -> list[list[Episode]]:
        rng = self._rng(_Kind.EPISODE, block, attempt)
        first = block * _EPISODE_BLOCK
        lengths = [self.lengths(ordinal, attempt) for ordinal in range(first, first + _EPISODE_BLOCK)]
        return draw_episodes(rng, self._spec.episode, lengths, mean_turns=self.mean_turns)
