"""Advantages: how much better a rollout did than its group expected. Pure; grouped by id, never by position.

Dimension letters: S samples, R rollouts.

A multi-turn rollout may give several samples. They share its reward, get the same advantage, and count once in the
baseline. Statistics use the population deviation. A group whose rewards are all equal gets advantage 0 in every
kind, whatever float noise its deviation holds; so does a group with a single scored rollout (there is nothing to
compare with). Such groups still count in the loss denominator, and still feel the KL term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, DataError, did_you_mean

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]

_DEVIATION_EPS = 1e-6
"""Deviations at or below it are float noise: the advantage is 0, not a huge number."""


def dr_grpo(reward_R: Float64Array, group_R: Int64Array) -> Float64Array:
    """Reward minus the mean of its group: no deviation, no length (Dr. GRPO, arXiv 2503.20783)."""
    return reward_R - _group_mean(reward_R, group_R)


def grpo(reward_R: Float64Array, group_R: Int64Array) -> Float64Array:
    """Reward minus group mean, divided by the group's deviation (DeepSeekMath, arXiv 2402.03300)."""
    centred_R = dr_grpo(reward_R, group_R)
    deviation_R = np.sqrt(_group_mean(centred_R**2, group_R))
    return _divide(centred_R, deviation_R)


def leave_one_out(reward_R: Float64Array, group_R: Int64Array) -> Float64Array:
    """Reward minus the mean of the *other* rollouts of its group (RLOO, arXiv 2402.14740)."""
    count_R = np.bincount(group_R)[group_R].astype(np.float64)
    centred_R = dr_grpo(reward_R, group_R)
    # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    return np.where(count_R > 1, centred_R * count_R / np.maximum(count_R - 1, 1), 0.0)


def batch_norm(reward_R: Float64Array, group_R: Int64Array) -> Float64Array:
    """Reward minus group mean, divided by the deviation of that difference over the batch (ScaleRL, 2510.13786)."""
    centred_R = dr_grpo(reward_R, group_R)
    deviation = float(np.sqrt(np.mean(centred_R**2)))
    return _divide(centred_R, np.full_like(centred_R, deviation))


ADVANTAGES: dict[str, Callable[[Float64Array, Int64Array], Float64Array]] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "leave_one_out": leave_one_out,
    "batch_norm": batch_norm,
}


def compute_advantages(
    kind: str, *, group_id_S: Sequence[str], member_S: Sequence[int], reward_S: Sequence[float]
) -> Float64Array:
    """Advantage of each sample, shape [S], in the order given.

    Samples with the same (group_id, member) are one rollout. DataError if their rewards differ or a reward is not
    finite; ConfigError for an unknown kind.
    """
    function = ADVANTAGES.get(kind)
    if function is None:
        raise ConfigError(f"loss.advantage = {kind!r} is unknown; {did_you_mean(kind, ADVANTAGES)}")
    rollouts: dict[tuple[str, int], int] = {}
    groups: dict[str, int] = {}
    reward_R: list[float] = []
    group_R: list[int] = []
    rollout_S: list[int] = []
    for group_id, member, reward in zip(group_id_S, member_S, reward_S, strict=True):
        if not np.isfinite(reward):
            raise DataError(f"group {group_id!r} member {member}: reward {reward} is not finite")
        key = (group_id, member)
        if key not in rollouts:
            rollouts[key] = len(reward_R)
            reward_R.append(float(reward))
            group_R.append(groups.setdefault(group_id, len(groups)))
        elif reward_R[rollouts[key]] != float(reward):
            raise DataError(
                f"group {group_id!r} member {member}: samples of one rollout have rewards "
                f"{reward_R[rollouts[key]]} and {reward}; they must share the rollout's reward"
            )
        rollout_S.append(rollouts[key])
    if not reward_R:
        return np.zeros(0)
    advantage_R = function(np.asarray(reward_R), np.asarray(group_R, dtype=np.int64))
    return advantage_R[rollout_S]


def _group_mean(value_R: Float64Array, group_R: Int64Array) -> Float64Array:
    """Mean over each rollout's group, shape [R]."""
    mean: Float64Array = np.bincount(group_R, weights=value_R) / np.maximum(np.bincount(group_R), 1)
    return mean[group_R]


def _divide(value_R: Float64Array, deviation_R: Float64Array) -> Float64Array:
    signal_R = deviation_R > _DEVIATION_EPS
    return np.where(signal_R, value_R / (np.where(signal_R, deviation_R, 1.0) + _DEVIATION_EPS), 0.0)
