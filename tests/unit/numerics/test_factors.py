"""The two factors of the total ratio."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.numerics.factors import FACTORS, factors


def test_golden_numbers() -> None:
    # log(v/m) = 0.1, -0.1; log(c/v) = 0.5, 0.
    table = factors([-1.0, -2.0], [-0.9, -2.1], [-0.4, -2.1])
    assert table["numeric_ratio/kl_k1"] == pytest.approx(0.0, abs=1e-12)
    assert table["numeric_ratio/kl_k3"] == pytest.approx((np.exp(0.1) - 1 - 0.1 + np.exp(-0.1) - 1 + 0.1) / 2)
    assert table["numeric_ratio/abs_mean"] == pytest.approx(0.1)
    assert table["lag_ratio/kl_k1"] == pytest.approx(-0.25)
    assert table["lag_ratio/kl_k3"] == pytest.approx((np.exp(0.5) - 1.5) / 2)
    assert table["lag_ratio/abs_max"] == pytest.approx(0.5)
    assert table["lag_ratio/ess_token"] == pytest.approx((np.exp(0.5) + 1) ** 2 / (2 * (np.exp(1.0) + 1)))


def test_tokens_without_all_three_are_left_out() -> None:
    full = factors([-1.0, -2.0], [-0.9, -2.1], [-0.4, -2.1])
    holes = factors(
        [-1.0, np.nan, -2.0, -5.0], [-0.9, -1.0, -2.1, np.nan], [-0.4, -1.0, -2.1, np.inf]
    )  # fmt: skip
    assert holes == full


def test_nothing_scored_is_no_mismatch() -> None:
    table = factors([], [], [])
    assert {name.partition("/")[0] for name in table} == set(FACTORS)
    assert all(value == (1.0 if name.endswith("ess_token") else 0.0) for name, value in table.items())


def test_extremes_stay_finite() -> None:
    table = factors([-1000.0], [0.0], [-1000.0])
    assert all(np.isfinite(value) for value in table.values())
