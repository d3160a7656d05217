from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, DataError
from headrace.trainer.advantages import ADVANTAGES, compute_advantages


def advantages(kind: str, rows: list[tuple[str, int, float]]) -> list[float]:
    return compute_advantages(
        kind, group_id_S=[r[0] for r in rows], member_S=[r[1] for r in rows], reward_S=[r[2] for r in rows]
    ).tolist()


ROWS = [("a", 0, 1.0), ("b", 0, 0.0), ("a", 1, 0.0), ("b", 1, 4.0), ("a", 2, 0.5), ("b", 2, 2.0)]  # interleaved


def test_dr_grpo_subtracts_the_mean_of_the_group_by_id() -> None:
    assert advantages("dr_grpo", ROWS) == pytest.approx([0.5, -2.0, -0.5, 2.0, 0.0, 0.0])


def test_grpo_divides_by_the_population_deviation() -> None:
    a, b = np.sqrt((0.25 + 0.25) / 3), np.sqrt(8 / 3)
    expected = [0.5 / a, -2 / b, -0.5 / a, 2 / b, 0, 0]
    assert advantages("grpo", ROWS) == pytest.approx(expected, rel=1e-4)


def test_leave_one_out_compares_with_the_others() -> None:
    assert advantages("leave_one_out", ROWS) == pytest.approx([0.75, -3.0, -0.75, 3.0, 0.0, 0.0])


def test_batch_norm_divides_by_one_deviation() -> None:
    deviation = np.sqrt((0.25 * 2 + 4 * 2) / 6)
    expected = [x / deviation for x in (0.5, -2.0, -0.5, 2.0, 0.0, 0.0)]
    assert advantages("batch_norm", ROWS) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_equal_rewards_and_groups_of_one_give_zero_despite_float_noise(kind: str) -> None:
    rows = [("a", m, 0.1 + 0.2 + m * 1e-12) for m in range(7)] + [("solo", 0, 1.0)]
    assert advantages(kind, rows) == pytest.approx([0.0] * 8, abs=1e-9)


def test_samples_of_one_rollout_count_once() -> None:
    rows = [("a", 0, 1.0), ("a", 0, 1.0), ("a", 0, 1.0), ("a", 1, 0.0)]
    assert advantages("dr_grpo", rows) == pytest.approx([0.5, 0.5, 0.5, -0.5])


def test_samples_of_one_rollout_must_agree() -> None:
    with pytest.raises(DataError, match=r"'a' member 0.*1\.0 and 0\.0"):
        advantages("dr_grpo", [("a", 0, 1.0), ("a", 0, 0.0)])


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(DataError, match="'a' member 3: reward nan"):
        advantages("dr_grpo", [("a", 3, float("nan"))])


def test_unknown_kind_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        advantages("gpro", ROWS)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-5, 5, width=32)), min_size=1, max_size=20),
    st.sampled_from(sorted(ADVANTAGES)),
    st.randoms(use_true_random=False),
)
def test_order_does_not_matter_and_groups_sum_to_zero(rows: list[tuple[str, float]], kind: str, rng: object) -> None:
    full = [(g, i, r) for i, (g, r) in enumerate(rows)]
    result = dict(zip([(g, i) for g, i, _ in full], advantages(kind, full), strict=True))
    shuffled = list(full)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    again = dict(zip([(g, i) for g, i, _ in shuffled], advantages(kind, shuffled), strict=True))
    for key, value in result.items():
        assert again[key] == pytest.approx(value, abs=1e-6)
    for group in "abc":
        assert sum(v for (g, _), v in result.items() if g == group) == pytest.approx(0.0, abs=1e-4)
