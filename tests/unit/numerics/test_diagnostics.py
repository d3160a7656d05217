from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.numerics import diagnostics as d


def table(t: list[float], m: list[float], sequence: list[int], lag: list[int]) -> dict[str, float]:
    return d.mismatch(t, m, sequence_K=np.array(sequence, np.int64), lag_K=np.array(lag, np.int64))


def test_closed_forms() -> None:
    # ratios t/m: 2, 1/2, 1
    got = table([np.log(0.4), np.log(0.1), -1.0], [np.log(0.2), np.log(0.2), -1.0], [0, 0, 1], [0, 1, 0])
    log2 = np.log(2)
    assert got["kl_infer_train/k1"] == pytest.approx(0.0)
    assert got["kl_infer_train/k3"] == pytest.approx(((2 - 1 - log2) + (0.5 - 1 + log2)) / 3)
    assert got["mult_prob_error"] == pytest.approx((2 + 2 + 1) / 3)
    assert got["abs_dlogp/mean"] == pytest.approx(2 * log2 / 3)
    assert got["abs_dlogp/max"] == pytest.approx(log2)
    assert got["prob_diff/max"] == pytest.approx(0.2)
    assert got["m2"] == pytest.approx(2 * log2**2 / 3)
    assert got["is_weight/mean"] == pytest.approx(3.5 / 3)
    assert got["is_weight/std"] == pytest.approx(np.std([2, 0.5, 1]))
    assert got["chi2/token"] == pytest.approx(5.25 / 3 - 1)
    assert got["ess/token_raw"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert got["ess/seq_raw"] == pytest.approx(1.0)  # both products are 1
    assert got["seq_logprob_error"] == pytest.approx((2 + 1) / 2)
    assert got["ratio/p50"] == pytest.approx(1.0)
    assert got["kl_infer_train/k1_lag0"] == pytest.approx(-log2 / 2)
    assert got["kl_infer_train/k1_lag_pos"] == pytest.approx(log2)
    assert got["ppl_ratio"] == pytest.approx(1.0)


def test_equal_policies_are_all_ones_and_zeros() -> None:
    got = table([-1.0, -2.0], [-1.0, -2.0], [0, 0], [0, 0])
    ones = {"mult_prob_error", "ppl_ratio", "is_weight/mean", "ess/token_raw", "ess/seq_raw", "seq_logprob_error"}
    for name, value in got.items():
        one = name in ones or name.startswith(("ratio/p", "ess/"))
        assert value == pytest.approx(1.0 if one else 0.0), name


def test_empty_batch_is_defined() -> None:
    got = table([], [], [], [])
    assert all(np.isfinite(v) for v in got.values())
    assert got["ess/token_raw"] == 1.0


@given(st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=30))
def test_never_overflows_and_k3_is_not_negative(rows: list[tuple[float, float]]) -> None:
    got = table([t for t, _ in rows], [m for _, m in rows], [i % 3 for i in range(len(rows))], [0] * len(rows))
    assert all(np.isfinite(v) for v in got.values())
    assert got["kl_infer_train/k3"] >= -1e-12
    assert 0 < got["ess/token_raw"] <= 1 + 1e-12


def test_k1_and_k3_estimate_the_true_kl() -> None:
    rng = np.random.default_rng(0)
    m, t = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    draws = rng.choice(3, size=200_000, p=m)
    x = d.log_ratio(np.log(t)[draws], np.log(m)[draws])
    true = float(np.sum(m * np.log(m / t)))
    assert d.k1(x) == pytest.approx(true, abs=2e-3)
    assert d.k3(x) == pytest.approx(true, abs=5e-4)


def test_weighted_mean_of_tables() -> None:
    assert d.weighted_mean([(1.0, {"a": 1.0}), (3.0, {"a": 5.0, "b": 2.0})]) == {"a": 4.0, "b": 2.0}
