"""Bounds against sums written out differently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.entropy import place_bits, stats, symbol_bits


def joint_bytes(symbols: NDArray[Any], given_class: NDArray[Any]) -> float:
    """Sum over classes of N times the entropy of a symbol: what places and values take together."""
    bits = 0.0
    for c in np.unique(given_class):
        share = np.unique(symbols[given_class == c], return_counts=True)[1] / (given_class == c).sum()
        bits -= (given_class == c).sum() * float((share * np.log2(share)).sum())
    return bits / 8


def signed(bits: NDArray[Any]) -> NDArray[np.int64]:
    return np.where(bits >> 15, -1 - (bits & 0x7FFF).astype(np.int64), bits.astype(np.int64))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01, 0.4, 1.0]))
def test_bounds_are_entropies(seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0x3A00, 0x3F00, 3000).astype(np.uint16)
    new = np.where(rng.random(3000) < density, old + rng.integers(1, 5, 3000).astype(np.uint16), old)
    one = np.zeros(3000, np.int64)
    found = stats(old, new, "BF16")
    assert found.l0_bytes == pytest.approx(joint_bytes(old ^ new, one))
    assert found.l1_bytes == pytest.approx(joint_bytes(signed(new) - signed(old), one))
    assert found.l2_bytes == pytest.approx(joint_bytes(signed(new) - signed(old), (old >> 7) & 255))
    assert found.l2_bytes <= found.l1_bytes + 1e-9
    assert (found.elems, found.changed) == (3000, int((old != new).sum()))
    assert found.density_frac == found.changed / 3000


def test_by_hand() -> None:
    """Four of eight ones step up: a bit each says which, nothing says how far."""
    old = np.full(8, 0x3F80, np.uint16)
    new = old.copy()
    new[:4] += 1
    found = stats(old, new, "BF16")
    assert (found.l0_bytes, found.l1_bytes, found.l2_bytes) == (1.0, 1.0, 1.0)
    assert found.step_histogram == (4,)
    assert found.ratio_to_limit_frac(2) == 0.5


def test_step_sizes_by_octave() -> None:
    old = np.full(7, 0x3F80, np.uint16)
    new = old + np.array([0, 1, 65535, 2, 3, 4, 65536 - 9], np.uint16)  # steps 0 1 -1 2 3 4 -9
    assert stats(old, new, "BF16").step_histogram == (2, 2, 1, 1)


def test_nothing_changed_and_nothing_there() -> None:
    old = np.zeros(5, np.float32)
    for size in (5, 0):
        found = stats(old[:size], old[:size], "F32")
        assert (found.changed, found.density_frac, found.l0_bytes, found.l1_bytes, found.l2_bytes) == (0, 0, 0, 0, 0)
        assert found.step_histogram == ()
        assert found.ratio_to_limit_frac(0) == 1.0


def test_large_tensors_are_summed_over_blocks() -> None:
    elems = 4 * 1024 * 1024 + 8
    old = np.zeros(elems, np.uint8)
    new = old.copy()
    new[[0, elems - 1]] = 1
    found = stats(old, new, "F8_E4M3")
    assert (found.elems, found.changed, found.step_histogram) == (elems, 2, (2,))


def test_pieces() -> None:
    assert place_bits(4, 2) == 4.0
    assert place_bits(4, 0) == place_bits(4, 4) == 0.0
    assert symbol_bits(np.array([2, 1, 1, 0])) == 6.0
    assert symbol_bits(np.array([7])) == 0.0
    with pytest.raises(SyncError, match="'w' has 3 old elements and 2 new ones"):
        stats(np.zeros(3, np.uint8), np.zeros(2, np.uint8), "U8", tensor="w")
