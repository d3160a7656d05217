"""Stitching: prefixes equal, the mask is exactly the sampled tokens, spans become per-token versions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.records import Completion, Outcome, Rollout, Span, Turn
from headrace.rollout.stitch import mask_stale, samples, token_versions


def completion(ids, spans=None, logp=None):
    n = len(ids)
    return Completion(
        request_id="r",
        ids_N=np.array(ids, np.int32),
        logp_N=np.array(logp if logp is not None else [-0.1 * (i + 1) for i in range(n)], np.float32),
        spans=spans if spans is not None else (Span(start=0, stop=n, policy_version=3, kv_version=2),) if n else (),
        finish="stop",
        text="",
    )


def rollout(turns, reward: float | None = 1.0, outcome=Outcome.OK):
    return Rollout(group_id="g", member=2, attempt=0, outcome=outcome, reward=reward, turns=tuple(turns), messages=())


def turn(prompt, ids, env_version=3, **kwargs):
    return Turn(prompt_ids=tuple(prompt), completion=completion(ids, **kwargs), env_version=env_version)


def test_single_turn_golden():
    spans = (
        Span(start=0, stop=1, policy_version=4, kv_version=4),
        Span(start=1, stop=3, policy_version=5, kv_version=4),
    )
    (sample,) = samples(
        rollout([turn([1, 2, 3], [7, 8, 2], env_version=4, spans=spans, logp=[-1, -2, -3])], reward=0.5)
    )
    assert sample.ids_T.tolist() == [1, 2, 3, 7, 8, 2]
    assert sample.loss_mask_T.tolist() == [False, False, False, True, True, True]
    assert sample.logp_T.tolist() == [0, 0, 0, -1, -2, -3]
    assert sample.policy_version_T.tolist() == [-1, -1, -1, 4, 5, 5]
    assert sample.kv_version_T.tolist() == [-1, -1, -1, 4, 4, 4]
    assert sample.env_version_T.tolist() == [-1, -1, -1, 4, 4, 4]
    assert (sample.reward, sample.prompt_tok, sample.group_id, sample.member) == (0.5, 3, "g", 2)
    assert sample.ids_T.dtype == np.int32
    assert sample.logp_T.dtype == np.float32


def test_turns_that_extend_become_one_sample_and_others_a_new_one():
    turns = [turn([1, 2], [7, 9]), turn([1, 2, 7, 9, 5], [8]), turn([1, 5, 5], [6, 9]), turn([1, 5, 5, 6, 9], [4])]
    first, second = samples(rollout(turns))
    assert first.ids_T.tolist() == [1, 2, 7, 9, 5, 8]
    assert first.loss_mask_T.tolist() == [False, False, True, True, False, True]
    assert second.ids_T.tolist() == [1, 5, 5, 6, 9, 4]
    assert second.loss_mask_T.tolist() == [False, False, False, True, True, True]
    assert (first.prompt_tok, second.prompt_tok) == (2, 1)


def test_an_end_token_equal_to_pad_is_trained():
    (sample,) = samples(rollout([turn([0, 0], [0, 0])]))
    assert sample.loss_mask_T.tolist() == [False, False, True, True]


def test_reward_argument_wins_and_a_missing_reward_is_an_error():
    assert samples(rollout([turn([1], [2])], reward=None), reward=0.25)[0].reward == 0.25
    assert samples(rollout([turn([1], [2])], reward=1.0), reward=0.0)[0].reward == 0.0
    with pytest.raises(DataError, match=r"rollout g/2 \(infra_fail\) has no reward"):
        samples(rollout([turn([1], [2])], reward=None, outcome=Outcome.INFRA_FAIL))


def test_no_sampled_token_is_an_error():
    with pytest.raises(DataError, match="0 turns but no sampled token"):
        samples(rollout([]))
    with pytest.raises(DataError, match="1 turns but no sampled token"):
        samples(rollout([turn([1], [])]))


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span(start=0, stop=1, policy_version=1, kv_version=1),),
        (Span(start=1, stop=3, policy_version=1, kv_version=1),),
        (Span(start=0, stop=4, policy_version=1, kv_version=1),),
        (
            Span(start=0, stop=2, policy_version=2, kv_version=1),
            Span(start=2, stop=3, policy_version=1, kv_version=1),
        ),
        (
            Span(start=0, stop=2, policy_version=1, kv_version=1),
            Span(start=1, stop=3, policy_version=1, kv_version=1),
        ),
    ],
)
def test_spans_that_do_not_cover_are_refused(spans):
    with pytest.raises(DataError, match="spans of request r"):
        token_versions(completion([5, 6, 7], spans=spans))


@st.composite
def episodes(draw):
    """Turns with random lengths and spans; some extend, some branch."""
    token = st.integers(0, 5)
    turns, so_far, version = [], (), 0
    for _ in range(draw(st.integers(1, 5))):
        extends = draw(st.booleans())
        fresh = tuple(draw(st.lists(token, min_size=1, max_size=4)))
        prompt = so_far + fresh if extends else fresh
        ids = draw(st.lists(token, min_size=1, max_size=6))
        cuts = sorted({0, len(ids), *draw(st.lists(st.integers(0, len(ids)), max_size=2))})
        spans = []
        for start, stop in pairwise(cuts):
            version += draw(st.integers(0, 2))
            spans.append(Span(start=start, stop=stop, policy_version=version, kv_version=draw(st.integers(0, version))))
        logp = draw(st.lists(st.floats(-9, 0, width=32), min_size=len(ids), max_size=len(ids)))
        turns.append(turn(prompt, ids, env_version=draw(st.integers(0, version)), spans=tuple(spans), logp=logp))
        so_far = prompt + tuple(ids)
    return rollout(turns)


@given(episodes())
def test_every_sampled_token_is_trained_once_with_its_own_numbers(episode):
    made = samples(episode)
    trained = [
        (
            int(s.ids_T[t]),
            float(s.logp_T[t]),
            int(s.policy_version_T[t]),
            int(s.kv_version_T[t]),
            int(s.env_version_T[t]),
        )
        for s in made
        for t in np.flatnonzero(s.loss_mask_T)
    ]
    sampled = [
        (int(c.ids_N[n]), float(c.logp_N[n]), span.policy_version, span.kv_version, t.env_version)
        for t in episode.turns
        for c in [t.completion]
        for span in c.spans
        for n in range(span.start, span.stop)
    ]
    assert trained == sampled


@given(episodes())
def test_samples_hold_the_turns_prompts_exactly(episode):
    made = samples(episode)
    whole = [t.prompt_ids + tuple(t.completion.ids_N.tolist()) for t in episode.turns]
    left = list(whole)
    for sample in made:
        ids = tuple(sample.ids_T.tolist())
        mine = []
        while left and ids[: len(left[0])] == left[0] and (not mine or len(left[0]) > len(mine[-1])):
            mine.append(left.pop(0))
        assert mine
        assert mine[-1] == ids
    assert not left


@given(episodes())
def test_outside_the_mask_nothing_is_left(episode):
    for sample in samples(episode):
        out = ~sample.loss_mask_T
        assert not sample.loss_mask_T[: sample.prompt_tok].any()
        assert (sample.logp_T[out] == 0).all()
        for versions in (sample.policy_version_T, sample.kv_version_T, sample.env_version_T):
            assert (versions[out] == -1).all()
            assert (versions[sample.loss_mask_T] >= 0).all()
        first = episode.turns[0].prompt_ids
        assert tuple(sample.ids_T[: sample.prompt_tok].tolist()) == first[: sample.prompt_tok]


@given(episodes(), st.integers(0, 12))
def test_mask_stale_drops_exactly_the_old_tokens(episode, below):
    for sample in samples(episode):
        masked = mask_stale(sample, below)
        keep = sample.loss_mask_T & (sample.policy_version_T >= below)
        assert (masked.loss_mask_T == keep).all()
        assert (masked.ids_T == sample.ids_T).all()
        assert (masked.logp_T[keep] == sample.logp_T[keep]).all()
        assert (masked.policy_version_T[~keep] == -1).all()
        assert masked.policy_version_T.dtype == np.int32
        assert masked.logp_T.dtype == np.float32
