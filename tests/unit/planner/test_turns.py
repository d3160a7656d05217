"""Episodes, and the draws that are keyed by ordinal and attempt."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.planner.draws import Draws
from headrace.planner.spec import PlanSpec, ResponseConfig, TurnsConfig
from headrace.planner.turns import Episode, draw_turns, going_on, single_turn, split_tokens, turns_mean

AGENTIC = TurnsConfig(turns=8, turns_max=24, tool_tok=250, tool_s=4.0, tool_sigma=1.0, start_s=3.0, grade_s=7.0)


def spec_of(episode: TurnsConfig | None = None, **more: object) -> PlanSpec:
    return PlanSpec.model_validate({"group_size": 8, "episode": episode or TurnsConfig(), **more})


def all_of(draws: Draws, groups: int, attempt: int = 0) -> list[Episode]:
    out = [draws.episode(g, m, attempt) for g in range(groups) for m in range(8)]
    return [e for e in out if e is not None]


def test_the_mean_number_of_turns_is_the_one_asked_for() -> None:
    for mean, most in ((1.5, 64), (8.0, 24), (20.0, 24), (16.0, 1000)):
        drawn = draw_turns(np.random.default_rng(0), (200_000,), mean=mean, most=most)
        assert drawn.mean() == pytest.approx(mean, rel=0.01)
        assert drawn.min() == 1
        assert drawn.max() <= most
    assert going_on(16.0, 10**6) == pytest.approx(1 - 1 / 16)
    assert draw_turns(np.random.default_rng(0), (3,), mean=5.0, most=5).tolist() == [5, 5, 5]


def test_turns_are_geometric_below_their_limit() -> None:
    drawn = draw_turns(np.random.default_rng(1), (200_000,), mean=4.0, most=1000)
    shares = np.bincount(drawn)[1:5] / drawn.size
    assert shares == pytest.approx([0.25 * 0.75**k for k in range(4)], abs=0.004)


def test_means_of_an_episode() -> None:
    draws = Draws(spec_of(AGENTIC.model_copy(update={"fail_frac": 0.1})), seed=1)
    episodes = all_of(draws, 2048)
    assert np.mean([len(e.turn_tok) for e in episodes]) == pytest.approx(8.0, rel=0.02)
    assert np.mean([t for e in episodes for t in e.tool_s]) == pytest.approx(4.0, rel=0.03)
    assert np.log([t for e in episodes for t in e.tool_s]).std() == pytest.approx(1.0, rel=0.02)
    assert np.mean([t for e in episodes for t in e.tool_tok]) == pytest.approx(250, rel=0.01)
    assert np.mean([e.fails for e in episodes]) == pytest.approx(0.1, abs=0.01)
    assert {(e.start_s, e.grade_s) for e in episodes} == {(3.0, 7.0)}


def test_turns_add_up_to_the_rollout() -> None:
    draws = Draws(spec_of(AGENTIC, response=ResponseConfig(mean_tok=20, cap_tok=60)), seed=2)
    for ordinal in range(300):
        for member, tok in enumerate(draws.lengths(ordinal, 1)):
            episode = draws.episode(ordinal, member, 1)
            assert episode is not None
            assert sum(episode.turn_tok) == tok
            assert min(episode.turn_tok) >= 1
            assert len(episode.tool_tok) == len(episode.tool_s) == len(episode.turn_tok) - 1


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10_000)), min_size=1, max_size=30), st.integers(0, 99))
def test_a_split_is_exact(rollouts: list[tuple[int, int]], seed: int) -> None:
    turns = np.array([count for count, _ in rollouts])
    total = turns + np.array([spare for _, spare in rollouts])
    parts = split_tokens(np.random.default_rng(seed), total, turns)
    assert parts.min() >= 1
    assert [int(p.sum()) for p in np.split(parts, np.cumsum(turns)[:-1])] == total.tolist()


def test_a_split_favours_no_turn() -> None:
    turns = np.full(20_000, 5)
    parts = split_tokens(np.random.default_rng(3), turns * 1000, turns).reshape(-1, 5)
    assert parts.mean(axis=0) == pytest.approx(np.full(5, 1000.0), rel=0.02)


def test_one_plain_call_has_no_episode() -> None:
    assert single_turn(spec_of())
    assert Draws(spec_of(), seed=0).episode(5, 3) is None
    for more in (
        {"turns": 2.0},
        {"start_s": 1.0},
        {"grade_s": 1.0},
        {"fail_frac": 0.1},
        {"sandboxes": 4},
    ):
        spec = spec_of(TurnsConfig.model_validate(more))
        assert not single_turn(spec)
        assert Draws(spec, seed=0).episode(5, 3) is not None


def test_drift_moves_lengths_and_turns() -> None:
    grown = Draws(spec_of(AGENTIC), seed=1, length_factor=2.0, turns_factor=1.5)
    assert grown.mean_turns == 12.0
    assert np.mean([len(e.turn_tok) for e in all_of(grown, 1024)]) == pytest.approx(12.0, rel=0.02)
    still = Draws(spec_of(AGENTIC), seed=1)
    pairs = [(a, b) for o in range(200) for a, b in zip(still.lengths(o), grown.lengths(o), strict=True)]
    assert all(b == min(2 * a, 16384) or abs(b - 2 * a) <= 1 for a, b in pairs)
    assert turns_mean(AGENTIC, 10.0) == 24.0
    assert turns_mean(AGENTIC, 0.01) == 1.0
    assert turns_mean(TurnsConfig(), 2.5) == 1.0
    with pytest.raises(PlanError, match="raise turns_max to at least 81"):
        Draws(spec_of(TurnsConfig(turns=80.5)), seed=0)


# --- draws -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**63), order=st.randoms(use_true_random=False))
def test_order_of_calls_does_not_matter(seed: int, order: random.Random) -> None:
    spec = spec_of(AGENTIC, zero_signal_frac=0.3)
    keys = [(o, a) for o in (0, 1, 63, 64, 1023, 1024, 70_000) for a in (0, 1)]

    def read(draws: Draws, key: tuple[int, int]) -> object:
        ordinal, attempt = key
        parts = (draws.lengths(ordinal, attempt), draws.rewards(ordinal, attempt), draws.prompt_tok(ordinal))
        return *parts, draws.episode(ordinal, 3, attempt)

    one = Draws(spec, seed=seed)
    first = {key: read(one, key) for key in keys}
    order.shuffle(keys)
    two = Draws(spec, seed=seed)
    assert {key: read(two, key) for key in keys} == first


def test_blocks_that_left_memory_come_back_the_same() -> None:
    draws = Draws(spec_of(), seed=4)
    first = list(draws.lengths(17))
    for block in range(70):
        draws.lengths(block * 1024)
    assert draws.lengths(17) == first


def test_seeds_ordinals_and_attempts_differ() -> None:
    draws = Draws(spec_of(), seed=0)
    assert draws.lengths(0) != Draws(spec_of(), seed=1).lengths(0)
    assert draws.lengths(0) != draws.lengths(1024)
    assert draws.lengths(0) != draws.lengths(0, 1)


def test_a_retry_answers_the_same_prompt() -> None:
    draws = Draws(spec_of(), seed=0)
    first = np.log([draws.lengths(o)[0] for o in range(3000)])
    again = np.log([draws.lengths(o, 1)[0] for o in range(3000)])
    assert np.corrcoef(first, again)[0, 1] == pytest.approx(1 - 0.35**2, abs=0.03)
    other = np.log([draws.lengths(o + 3000, 1)[0] for o in range(3000)])
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.06


def test_numbers_are_plain() -> None:
    draws = Draws(spec_of(AGENTIC), seed=0)
    episode = draws.episode(0, 0)
    assert episode is not None
    assert {type(v) for v in (*draws.lengths(0), draws.prompt_tok(0), *episode.turn_tok, *episode.tool_tok)} == {int}
    assert {type(v) for v in (*draws.rewards(0), *episode.tool_s)} <= {float}


def test_prompts_lie_around_their_mean() -> None:
    draws = Draws(spec_of(prompt_tok=512), seed=0)
    tokens = [draws.prompt_tok(o) for o in range(10_000)]
    assert np.mean(tokens) == pytest.approx(512, rel=0.01)
    assert np.log(tokens).std() == pytest.approx(0.4, rel=0.03)
    tiny = Draws(spec_of(prompt_tok=1), seed=0)
    assert min(tiny.prompt_tok(o) for o in range(1000)) == 1


def test_shares_of_zero_signal_groups() -> None:
    for share in (0.0, 0.55):
        draws = Draws(spec_of(zero_signal_frac=share), seed=0)
        groups = [draws.rewards(o) for o in range(8000)]
        assert {r for g in groups for r in g} == {0.0, 1.0}
        assert np.mean([len(set(g)) == 1 for g in groups]) == pytest.approx(share, abs=0.02)
    draws = Draws(spec_of(zero_signal_frac=0.0), seed=0)
    assert np.mean([draws.rewards(o) for o in range(4000)], axis=0) == pytest.approx(np.full(8, 0.5), abs=0.03)


def test_groups_of_one_are_possible() -> None:
    draws = Draws(PlanSpec(group_size=1), seed=0)
    assert len(draws.lengths(3)) == len(draws.rewards(3)) == 1
