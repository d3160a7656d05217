"""Eras, blocks, choice and order: which weights score which tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.numerics.version_plan import Block, Replay, VersionPlan, plan_versions
from headrace.records import Sample


def sample(mask: list[int], policy: list[int], kv: list[int]) -> Sample:
    tokens = len(mask)
    zeros = np.zeros(tokens, np.int32)
    return Sample(
        group_id="g", member=0, ids_T=zeros, loss_mask_T=np.asarray(mask, bool), logp_T=zeros.astype(np.float32),
        policy_version_T=np.asarray(policy, np.int32), kv_version_T=np.asarray(kv, np.int32), env_version_T=zeros,
        reward=0.0, prompt_tok=1,
    )  # fmt: skip


def plan(*samples: Sample, **options: Any) -> VersionPlan:
    base: dict[str, Any] = {"current": 9, "now_known": True, "limit_tok": None, "kv_limit_tok": 1000, "seed": 0}
    return plan_versions(samples, **{**base, **options})


# Two prompt tokens; three tokens of version 4, two of version 5 on kept KV: the example of the module's docstring.
KEPT = sample([0, 0, 0, 1, 1, 1, 1, 1], [-1, -1, -1, 4, 4, 4, 5, 5], [-1, -1, -1, 4, 4, 4, 4, 4])
RECOMPUTED = sample([0, 0, 0, 1, 1, 1, 1, 1], [-1, -1, -1, 4, 4, 4, 5, 5], [-1, -1, -1, 4, 4, 4, 5, 5])


def test_kept_kv_is_replayed_block_by_block() -> None:
    (needs,) = plan(KEPT).needs
    assert needs.fresh == {}
    assert needs.replays == (Replay(0, (Block(4, 0, 5), Block(5, 5, 7)), 3, 8),)
    assert needs.forward_tok(9) == 7
    assert plan(KEPT).passes == ((4, 5),)


def test_recomputed_kv_is_one_pass_for_each_version() -> None:
    found = plan(RECOMPUTED)
    (needs,) = found.needs
    assert needs.fresh == {4: (3, 4, 5), 5: (6, 7)}
    assert needs.replays == ()
    # Up to the last token of each: positions 0 to 4 and 0 to 6.
    assert needs.forward_tok(9) == 5 + 7
    assert found.passes == ((4, 5),)


def test_the_current_weights_score_everything_unless_they_have() -> None:
    unknown = plan(RECOMPUTED, now_known=False)
    assert unknown.needs[0].now == (3, 4, 5, 6, 7)
    assert unknown.passes == ((4, 5, 9),)
    assert unknown.forward_tok == 5 + 7 + 7
    # Version 5 is the current one: its own pass scores all of it.
    assert plan(RECOMPUTED, now_known=False, current=5).forward_tok == 5 + 7
    known = plan(RECOMPUTED, current=5)
    assert known.needs[0].fresh == {4: (3, 4, 5)}
    assert known.needs[0].free == (6, 7)
    assert known.forward_tok == 5


def test_turns_are_eras_of_their_own() -> None:
    two = sample([0, 1, 1, 0, 1, 1], [-1, 4, 5, -1, 5, 5], [-1, 4, 4, -1, 5, 5])
    (needs,) = plan(two).needs
    assert needs.replays == (Replay(0, (Block(4, 0, 1), Block(5, 1, 2)), 1, 3),)
    assert needs.fresh == {5: (4, 5)}


def test_an_era_without_its_beginning_is_unknown() -> None:
    # The tokens of version 4 were masked as too old, so nothing says which positions it computed.
    carried = sample([0, 0, 1, 1], [-1, -1, 5, 5], [-1, -1, 4, 4])
    found = plan(carried)
    assert found.unknown_tok == 2
    assert found.needs[0].fresh == {}
    assert found.forward_tok == 0
    assert found.passes == ((),)


def test_waves_bound_what_waits() -> None:
    assert [len(w) for w in plan(KEPT, KEPT, KEPT, kv_limit_tok=16).waves] == [2, 1]
    assert [len(w) for w in plan(KEPT, KEPT, kv_limit_tok=1).waves] == [1, 1]
    alone = sample([0, 1], [-1, 2], [-1, 2])
    assert plan(KEPT, KEPT, alone, kv_limit_tok=1).passes == ((2, 4, 5), (4, 5))


def test_a_too_large_sample_does_not_stop_the_choice() -> None:
    small = sample([0, 1], [-1, 4], [-1, 4])
    for seed in range(4):
        assert [n.sample for n in plan(KEPT, small, limit_tok=3, seed=seed).needs] == [1]
    assert plan(KEPT, limit_tok=3).needs == ()


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """What an engine makes: turns, swaps with kept or recomputed KV, and perhaps tokens masked afterwards."""
    mask, policy, kv = [0], [-1], [-1]
    version = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 3))):
        mask += [0] * draw(st.integers(1, 3))
        policy += [-1] * (len(mask) - len(policy))
        kv += [-1] * (len(mask) - len(kv))
        kept = version
        for _ in range(draw(st.integers(1, 6))):
            if draw(st.booleans()):
                version += 1
                kept = version if draw(st.booleans()) else kept
            mask.append(1)
            policy.append(version)
            kv.append(kept)
    if draw(st.booleans()):
        mask = [m if draw(st.booleans()) else 0 for m in mask]
    return sample(mask, policy, kv)


@given(st.lists(samples(), min_size=1, max_size=5), st.booleans(), st.integers(0, 60), st.integers(0, 5))
def test_every_token_once_by_its_own_version_and_within_the_bound(
    group: list[Sample], now_known: bool, limit: int, seed: int
) -> None:
    free = plan(*group, now_known=now_known, current=30)
    for need in free.needs:
        s = group[need.sample]
        scored = {t: v for v, places in need.fresh.items() for t in places}
        for replay in need.replays:
            blocks = replay.blocks
            assert [blocks[0].start, blocks[-1].stop] == [0, replay.stop - 1]
            assert all(a.stop == b.start and a.version < b.version for a, b in pairwise(blocks))
            assert all(b.start < b.stop for b in blocks)
            for t in range(replay.start, replay.stop):
                (owner,) = [b.version for b in blocks if b.start <= t - 1 < b.stop]
                assert t not in scored
                scored[t] = owner
        places = set(np.flatnonzero(s.loss_mask_T).tolist())
        assert scored.keys() <= places
        assert len(scored) + need.unknown_tok == len(places)
        assert all(v == s.policy_version_T[t] for t, v in scored.items())
    for visits in free.passes:
        assert list(visits) == sorted(set(visits))
    bound = plan(*group, now_known=now_known, current=30, limit_tok=limit, seed=seed)
    assert bound.forward_tok <= limit
    assert bound.all_forward_tok == free.forward_tok
