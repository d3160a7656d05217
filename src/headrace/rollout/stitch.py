"""Turns to training samples, token-exact.

Dimension letters: T tokens of one sequence, N tokens of one completion.

Turns whose prompt begins with everything before it (previous prompt + sampled ids) become ONE sample: the trainer
computes the conversation once. Where a prompt does not (a chat template rewrote history), a new sample begins. Either
way each sampled token is trained exactly once, and exactly the sampled tokens are: nothing is encoded again, the end
token is an action like any other, the environment's tokens are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from headrace.errors import DataError
from headrace.records import Completion, IntArray, Rollout, Sample, Turn


def samples(rollout: Rollout, reward: float | None = None) -> tuple[Sample, ...]:
    """The samples of a scored rollout, in order; `reward` replaces rollout.reward.

    Entries outside the loss mask are 0 (log-probs) and -1 (versions).
    DataError if there is no reward or no sampled token: a missing one is never 0, and a rollout never vanishes.
    """
    who = f"rollout {rollout.group_id}/{rollout.member}"
    value = rollout.reward if reward is None else reward
    if value is None:
        raise DataError(f"{who} ({rollout.outcome}) has no reward; only scored rollouts become samples")
    if rollout.generated_tok == 0:
        raise DataError(f"{who} has {len(rollout.turns)} turns but no sampled token")
    first = rollout.turns[0].prompt_ids
    return tuple(_sample(rollout, turns, value, first) for turns in _branches(rollout.turns) if _sampled(turns))


def mask_stale(sample: Sample, below_version: int) -> Sample:
    """The same sample without loss on tokens whose policy_version is below `below_version`."""
    keep_T = sample.loss_mask_T & (sample.policy_version_T >= below_version)
    if bool((keep_T == sample.loss_mask_T).all()):
        return sample
    return dataclasses.replace(
        sample,
        loss_mask_T=keep_T,
        logp_T=np.where(keep_T, sample.logp_T, np.float32(0.0)),
        policy_version_T=_where(keep_T, sample.policy_version_T),
        kv_version_T=_where(keep_T, sample.kv_version_T),
        env_version_T=_where(keep_T, sample.env_version_T),
    )


def token_versions(completion: Completion) -> tuple[IntArray, IntArray]:
    """(policy_version_N, kv_version_N) from spans. DataError unless they cover [0, N) in order, without gaps."""
    n = len(completion.ids_N)
    policy_N, kv_N = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    at, version = 0, -1
    for span in completion.spans:
        if span.start != at or span.stop <= span.start or span.stop > n or span.policy_version < version:
            raise DataError(
                f"spans of request {completion.request_id} do not cover its {n} tokens in order: {completion.spans}"
            )
        policy_N[span.start : span.stop], kv_N[span.start : span.stop] = span.policy_version, span.kv_version
        at, version = span.stop, span.policy_version
    if at != n:
        raise DataError(f"spans of request {completion.request_id} end at token {at} of {n}: {completion.spans}")
    return policy_N, kv_N


def _branches(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Maximal runs of turns in which each prompt extends all that came before it in the run."""
    runs: list[list[Turn]] = []
    so_far: tuple[int, ...] = ()
    for turn in turns:
        if runs and turn.prompt_ids[: len(so_far)] == so_far:
            runs[-1].append(turn)
        else:
            runs.append([turn])
        so_far = turn.prompt_ids + tuple(turn.completion.ids_N.tolist())
    return runs


def _sampled(turns: Sequence[Turn]) -> bool:
    return any(len(t.completion.ids_N) for t in turns)


def _sample(rollout: Rollout, turns: Sequence[Turn], reward: float, first: tuple[int, ...]) -> Sample:
    length = len(turns[-1].prompt_ids) + len(turns[-1].completion.ids_N)
    ids_T = np.empty(length, np.int32)
    mask_T = np.zeros(length, np.bool_)
    logp_T = np.zeros(length, np.float32)
    policy_T, kv_T, env_T = (np.full(length, -1, np.int32) for _ in range(3))
    at = 0
    for turn in turns:
        start = len(turn.prompt_ids)
        ids_T[at:start] = turn.prompt_ids[at:]
        at = start + len(turn.completion.ids_N)
        ids_T[start:at] = turn.completion.ids_N
        mask_T[start:at] = True
        logp_T[start:at] = turn.completion.logp_N
        policy_T[start:at], kv_T[start:at] = token_versions(turn.completion)
        env_T[start:at] = turn.env_version
    return Sample(
        group_id=rollout.group_id,
        member=rollout.member,
        ids_T=ids_T,
        loss_mask_T=mask_T,
        logp_T=logp_T,
        policy_version_T=policy_T,
        kv_version_T=kv_T,
        env_version_T=env_T,
        reward=float(reward),
        prompt_tok=_common_prefix(first, turns[0].prompt_ids),
    )


def _common_prefix(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the common prefix: a branch may share less than the whole first prompt with its group."""
    if left == right[: len(left)]:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _where(keep_T: np.ndarray[tuple[int], np.dtype[np.bool_]], version_T: IntArray) -> IntArray:
    return np.where(keep_T, version_T, np.int32(-1)).astype(np.int32)
