"""Episodes of several turns: how many model calls, which tokens between them, how long tools take.

The number of turns is geometric, cut at turns_max, with the mean that the spec names after the cut. The tokens that a
rollout samples in all come from its response law, whatever the number of turns, and are split over the turns at
random (uniform spacings). Tools and turns of one rollout do not depend on its siblings: no public data says how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import PlanError
from headrace.planner.normal import Floats
from headrace.planner.spec import PlanSpec, TurnsConfig

TOK_SIGMA = 0.4
"""Spread of the logarithm of prompt lengths and tool outputs. A guess: public RL data sets name means only."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What happens in one rollout, from its sandbox to its grade."""

    turn_tok: tuple[int, ...]
    """Sampled in each turn, each at least 1; their sum is the rollout's length."""
    tool_tok: tuple[int, ...]
    """Added to the context after each turn but the last."""
    tool_s: tuple[float, ...]
    """Seconds of the tool calls after each turn but the last."""
    start_s: float
    """Until the sandbox is ready."""
    grade_s: float
    """After the last turn."""
    fails: bool
    """Infrastructure loses this attempt: its tokens are wasted."""


def single_turn(spec: PlanSpec) -> bool:
    """Rollouts are one model call and nothing else: no tools, sandboxes, grading time or failures."""
    episode = spec.episode
    extras = (episode.start_s, episode.grade_s, episode.fail_frac, episode.sandboxes)
    return episode.turns == 1.0 and not any(extras)


def turns_mean(config: TurnsConfig, factor: float = 1.0) -> float:
    """Mean model calls of a rollout when drift multiplies them. A single call stays one; turns_max stays the limit.

    PlanError: the spec's own mean lies above turns_max.
    """
    if config.turns > config.turns_max:
        raise PlanError(
            f"episode.turns = {config.turns:g} lies above turns_max = {config.turns_max}: "
            f"raise turns_max to at least {math.ceil(config.turns)}"
        )
    if config.turns == 1.0:
        return 1.0
    return min(max(config.turns * factor, 1.0), float(config.turns_max))


def going_on(mean: float, most: int) -> float:
    """Probability p that another turn follows: E[min(turns, most)] = (1 - p^most) / (1 - p) = mean."""
    if mean <= 1.0:
        return 0.0
    if mean >= most:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if (1.0 - middle**most) / (1.0 - middle) < mean:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def draw_turns(rng: np.random.Generator, shape: tuple[int, ...], *, mean: float, most: int) -> NDArray[np.int64]:
    """Turns of each rollout, 1 to `most`."""
    uniform = rng.random(shape)
    p = going_on(mean, most)
    if p <= 0.0:
        return np.ones(shape, dtype=np.int64)
    if p >= 1.0:
        return np.full(shape, most, dtype=np.int64)
    out: NDArray[np.int64] = np.minimum(1 + np.floor(np.log1p(-uniform) / math.log(p)), most).astype(np.int64)
    return out


def draw_around(rng: np.random.Generator, count: int, *, mean: float, sigma: float) -> Floats:
    """Lognormal draws with this mean; all 0 if it is 0."""
    normals = rng.standard_normal(count)
    if mean == 0.0:
        return np.zeros(count)
    return mean * np.exp(sigma * normals - sigma**2 / 2.0)


def split_tokens(rng: np.random.Generator, total_N: NDArray[np.int64], turns_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Split each rollout's tokens over its turns, at least 1 each; needs total_N >= turns_N. Flat, rollout by rollout.

    Exponential weights, made whole by rounding their running sum down: each rollout's sum is exact.
    """
    weight = rng.standard_exponential(int(turns_N.sum()))
    first_N = np.cumsum(turns_N) - turns_N
    rollout = np.repeat(np.arange(turns_N.size), turns_N)
    running = np.cumsum(weight)
    before_N = running[first_N] - weight[first_N]
    sum_N = np.add.reduceat(weight, first_N)
    spare_N = total_N - turns_N
    share = (running - before_N[rollout]) / sum_N[rollout]
    upto: NDArray[np.int64] = np.floor(np.minimum(share, 1.0) * spare_N[rollout]).astype(np.int64)
    upto[first_N + turns_N - 1] = spare_N
    parts: NDArray[np.int64] = np.diff(upto, prepend=0)
    parts[first_N] = upto[first_N]
    parts += 1
    return parts


def draw_episodes(
    rng: np.random.Generator, config: TurnsConfig, lengths: Sequence[Sequence[int]], *, mean_turns: float
) -> list[list[Episode]]:
    """One episode for each rollout of each group, with these lengths (tokens in all)."""
    total = np.asarray(lengths, dtype=np.int64)
    fails = (rng.random(total.shape) < config.fail_frac).tolist()
    turns = np.minimum(draw_turns(rng, total.shape, mean=mean_turns, most=config.turns_max), total)
    turn_tok = split_tokens(rng, total.ravel(), turns.ravel()).tolist()
    calls = len(turn_tok)
    tool_tok = np.rint(draw_around(rng, calls, mean=config.tool_tok, sigma=TOK_SIGMA)).astype(np.int64).tolist()
    tool_s = draw_around(rng, calls, mean=config.tool_s, sigma=config.tool_sigma).tolist()
    out: list[list[Episode]] = []
    end = 0
    for turns_G, fails_G in zip(turns.tolist(), fails, strict=True):
        group: list[Episode] = []
        for count, failed in zip(turns_G, fails_G, strict=True):
            start, end = end, end + count
            group.append(
                Episode(
                    turn_tok=tuple(turn_tok[start:end]),
                    tool_tok=tuple(tool_tok[start : end - 1]),
                    tool_s=tuple(tool_s[start : end - 1]),
                    start_s=config.start_s,
                    grade_s=config.grade_s,
                    fails=failed,
                )
            )
        out.append(group)
    return out
