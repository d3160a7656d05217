"""Carriers: frozen, and their derived numbers."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from headrace import records
from headrace.records import Batch, Completion, Group, Message, Outcome, Prompt, Rollout, Sample, Span, Turn


def completion(tokens: int, *spans: tuple[int, int, int]) -> Completion:
    return Completion(
        request_id="r",
        ids_N=np.arange(tokens, dtype=np.int32),
        logp_N=np.zeros(tokens, dtype=np.float32),
        spans=tuple(Span(start=a, stop=b, policy_version=v, kv_version=v) for a, b, v in spans),
        finish="stop",
        text=f"{tokens} tokens",
    )


def rollout(*completions: Completion) -> Rollout:
    return Rollout(
        group_id="g",
        member=0,
        attempt=0,
        outcome=Outcome.OK,
        reward=1.0,
        turns=tuple(Turn(prompt_ids=(1,), completion=c, env_version=0) for c in completions),
        messages=(),
    )


def sample(mask: list[bool]) -> Sample:
    n = len(mask)
    versions = np.zeros(n, dtype=np.int32)
    return Sample(
        group_id="g",
        member=0,
        ids_T=np.zeros(n, dtype=np.int32),
        loss_mask_T=np.array(mask, dtype=np.bool_),
        logp_T=np.zeros(n, dtype=np.float32),
        policy_version_T=versions,
        kv_version_T=versions,
        env_version_T=versions,
        reward=0.0,
        prompt_tok=1,
    )


def test_all_records_are_frozen_slotted_and_keyword_only() -> None:
    carriers = [c for c in vars(records).values() if dataclasses.is_dataclass(c) and isinstance(c, type)]
    assert len(carriers) >= 10
    for carrier in carriers:
        assert "__slots__" in vars(carrier)
        assert all(f.kw_only for f in dataclasses.fields(carrier))
        assert carrier.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_only_the_policys_own_endings_train() -> None:
    assert [o for o in Outcome if o.trains] == [Outcome.OK, Outcome.POLICY_FAIL]


def test_rollout_over_two_turns() -> None:
    both = rollout(completion(3, (0, 2, 4), (2, 3, 5)), completion(2, (0, 2, 6)))
    assert (both.generated_tok, both.oldest_version, both.newest_version, both.text) == (5, 4, 6, "2 tokens")


def test_rollout_without_tokens() -> None:
    for empty in (rollout(), rollout(completion(0))):
        assert (empty.generated_tok, empty.oldest_version, empty.newest_version) == (0, None, None)
    assert rollout().text == ""


def test_batch_counts_trained_tokens() -> None:
    prompt = Prompt(id="p", messages=(Message(role="user", content="?"),))
    groups = (
        Group(group_id="a", prompt=prompt, samples=(sample([False, True, True]), sample([False, False]))),
        Group(group_id="b", prompt=prompt, samples=(sample([True]),)),
    )
    batch = Batch(version=3, groups=groups, temperature=1.0)
    assert len(batch.samples) == 3
    assert batch.trained_tok == 3


def test_records_travel_between_processes() -> None:
    sent = rollout(completion(3, (0, 3, 1)))
    got = pickle.loads(pickle.dumps(sent))
    assert got.turns[0].completion.spans == sent.turns[0].completion.spans
    assert (got.turns[0].completion.ids_N == sent.turns[0].completion.ids_N).all()


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Message(role="user", content="x").content = "y"  # type: ignore[misc]
