from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import batch_of, random_batch, sample

from headrace.errors import DataError
from headrace.trainer.batching import MicroBatch, micro_batches, split


def seen_ids(micro: MicroBatch, k: int) -> list[int]:
    """Ids that the hidden state of target k may depend on, in order, from the segments alone."""
    source = int(micro.source_K[k])
    i = next(i for i, s in enumerate(micro.segments) if s.start <= source < s.start + s.length)
    segment = micro.segments[i]
    own = micro.ids_N[segment.start : source + 1].tolist()
    # a source inside a parent is the parent's last token, which sees all of the parent
    if segment.parent >= 0:
        parent = micro.segments[segment.parent]
        return [*micro.ids_N[parent.start : parent.start + parent.length].tolist(), *own]
    return own


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(8, 120), st.booleans())
def test_every_trained_token_is_predicted_once_from_exactly_its_own_past(seed: int, budget: int, share: bool) -> None:
    batch = random_batch(seed)
    found: dict[tuple[int, int], list[int]] = {}
    for micro in micro_batches(batch, budget_tok=budget, share_prompts=share):
        for k in range(len(micro.target_K)):
            key = (int(micro.sample_K[k]), int(micro.place_K[k]))
            assert key not in found
            found[key] = seen_ids(micro, k)
            assert micro.target_K[k] == batch.samples[key[0]].ids_T[key[1]]
            assert micro.position_N[micro.source_K[k]] == key[1] - 1
    wanted = {(i, int(t)) for i, s in enumerate(batch.samples) for t in np.flatnonzero(s.loss_mask_T)}
    assert found.keys() == wanted
    for (i, t), ids in found.items():
        assert ids == batch.samples[i].ids_T[:t].tolist()


def test_a_prompt_is_computed_once_per_group() -> None:
    group = [sample("a", m, [1, 2, 3, 4], [5 + m, 6]) for m in range(3)]
    (micro,) = micro_batches(batch_of(group), budget_tok=100, share_prompts=True)
    assert micro.tokens == 4 + 3 * 2
    assert micro.ids_N.tolist() == [1, 2, 3, 4, 5, 6, 6, 6, 7, 6]
    assert micro.position_N.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 4, 5]
    # the first token of every member is predicted by the last prompt token
    assert micro.source_K.tolist() == [3, 4, 3, 6, 3, 8]
    (plain,) = micro_batches(batch_of(group), budget_tok=100, share_prompts=False)
    assert plain.tokens == 3 * 6


def test_prompts_are_shared_by_their_ids_not_by_their_group() -> None:
    group = [sample("a", 0, [1, 2], [5]), sample("a", 1, [1, 9], [5]), sample("a", 2, [1, 2], [6])]
    (micro,) = micro_batches(batch_of(group), budget_tok=100, share_prompts=True)
    assert micro.tokens == 2 + 2 + 3


def test_budget_cuts_between_groups_then_between_members() -> None:
    groups = [[sample(f"g{g}", m, [1, 2, 3], [4, 5, 6]) for m in range(4)] for g in range(3)]
    sizes = [m.tokens for m in micro_batches(batch_of(*groups), budget_tok=30, share_prompts=True)]
    assert sizes == [30, 15]
    sizes = [m.tokens for m in micro_batches(batch_of(*groups), budget_tok=9, share_prompts=True)]
    assert sizes == [9] * 6
    sizes = [m.tokens for m in micro_batches(batch_of(*groups), budget_tok=2, share_prompts=False)]
    assert sizes == [6] * 12  # a longer sample goes alone


def test_samples_without_trained_tokens_are_left_out() -> None:
    quiet = sample("a", 1, [1, 2], [3, 4], loss_mask_T=np.zeros(4, dtype=np.bool_))
    micros = micro_batches(batch_of([sample("a", 0, [1, 2], [3]), quiet]), budget_tok=50, share_prompts=True)
    assert [m.tokens for m in micros] == [3]
    assert micro_batches(batch_of([quiet]), budget_tok=50, share_prompts=True) == []


def test_wrong_samples_are_named() -> None:
    good = sample("a", 1, [1, 2], [3, 4])
    with pytest.raises(DataError, match=r"'a'/1: logp_T has length 3, ids_T has 4"):
        micro_batches(batch_of([replace(good, logp_T=good.logp_T[:3])]), budget_tok=9, share_prompts=True)
    first = np.ones(4, dtype=np.bool_)
    with pytest.raises(DataError, match="first token is under the loss mask"):
        micro_batches(batch_of([replace(good, loss_mask_T=first)]), budget_tok=9, share_prompts=True)


def test_split_keeps_groups_whole_and_in_order() -> None:
    batch = random_batch(groups=5)
    parts = split(batch, 3)
    assert [len(p.groups) for p in parts] == [1, 2, 2]
    assert tuple(g for p in parts for g in p.groups) == batch.groups
    with pytest.raises(DataError, match="5 groups cannot be split into 6"):
        split(batch, 6)
