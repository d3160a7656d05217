"""Block-scaled fp8 made from the bfloat16 copy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.codec import decode_chunk, encode_chunk
from headrace.sync.fp8 import quantise_fp8_blocks

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def test_by_hand() -> None:
    """Largest magnitudes 448, 896 and 0: scales 1, 2 and 1; codes of 448, -1.5, 0 are 0x7e, 0xbc, 0."""
    weight = np.zeros((2, 6), BF16)
    weight[:, :2] = [[448, -1.5], [0, 1]]
    weight[:, 2:4] = [[896, -3], [0, 2]]
    codes, scales = quantise_fp8_blocks(weight, block=2)
    assert scales.tolist() == [[1, 2, 1]]
    assert (codes.dtype, scales.dtype) == (E4M3, np.float32)
    assert codes.view(np.uint8).tolist() == [[0x7E, 0xBC, 0x7E, 0xBC, 0, 0], [0, 0x38, 0, 0x38, 0, 0]]


def masters(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    return (rng.standard_normal(shape) * 0.02).astype(np.float32)


def test_scales_stay_where_bfloat16_stays() -> None:
    """A step of lr 1e-6: 2 % of the bfloat16 weights change. From masters, every scale would."""
    rng = np.random.default_rng(0)
    before = masters(rng, (256, 640))
    after = before - (1e-6 * np.sign(rng.standard_normal(before.shape))).astype(np.float32)
    old, new = before.astype(BF16), after.astype(BF16)
    (old_codes, old_scales), (new_codes, new_scales) = (quantise_fp8_blocks(w) for w in (old, new))
    same = (old.view(np.uint16) == new.view(np.uint16)).reshape(2, 128, 5, 128)
    peak = np.abs(old.astype(np.float32)).reshape(same.shape)
    peak_same = (same | (peak < peak.max(axis=(1, 3), keepdims=True))).all(axis=(1, 3))
    assert peak_same.sum() >= 9  # the largest weights hardly ever change
    assert (old_scales == new_scales)[peak_same].all()
    unchanged = same.reshape(old.shape) & np.repeat(np.repeat(old_scales == new_scales, 128, 0), 128, 1)
    assert (old_codes.view(np.uint8) == new_codes.view(np.uint8))[unchanged].all()
    assert 0 < (old_codes.view(np.uint8) != new_codes.view(np.uint8)).mean() < 0.01
    naive = [np.abs(w).reshape(2, 128, 5, 128).max(axis=(1, 3)) / np.float32(448) for w in (before, after)]
    assert (naive[0] != naive[1]).all()


def test_steps_below_half_a_spacing_change_nothing() -> None:
    rng = np.random.default_rng(1)
    served = masters(rng, (130, 129)).astype(BF16)
    moved = served.astype(np.float32) * np.float32(1 + 2**-10)
    assert (moved != served.astype(np.float32)).all()
    one, two = quantise_fp8_blocks(served), quantise_fp8_blocks(moved.astype(BF16))
    assert one[0].tobytes() == two[0].tobytes()
    assert one[1].tobytes() == two[1].tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 17), st.integers(-130, 120), st.integers(0, 2**32 - 1))
def test_error_is_bounded_for_any_shape_and_size(rows: int, columns: int, block: int, power: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = np.ldexp(rng.standard_normal((rows, columns)), power).astype(BF16)
    codes, scales = quantise_fp8_blocks(weight, block)
    assert codes.shape == weight.shape
    assert scales.shape == (-(-rows // block), -(-columns // block))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    wide = np.repeat(np.repeat(scales.astype(np.float64), block, 0), block, 1)[:rows, :columns]
    exact = weight.astype(np.float64)
    error = np.abs(codes.astype(np.float64) * wide - exact)
    # half of a spacing: 2^-4 of the value, or of the smallest normal where codes are denormal; a bit for the division
    assert (error <= 1.001 * np.maximum(np.abs(exact) / 16, wide * 2**-10)).all()
    for r in range(0, rows, block):
        for c in range(0, columns, block):
            alone = quantise_fp8_blocks(np.ascontiguousarray(weight[r : r + block, c : c + block]), block)
            assert alone[0].tobytes() == np.ascontiguousarray(codes[r : r + block, c : c + block]).tobytes()


def test_codes_travel_as_deltas() -> None:
    rng = np.random.default_rng(2)
    before = masters(rng, (512, 512))
    after = before - (1e-6 * np.sign(rng.standard_normal(before.shape))).astype(np.float32)
    old, new = (np.ascontiguousarray(quantise_fp8_blocks(w.astype(BF16))[0]).reshape(-1) for w in (before, after))
    chunk = encode_chunk(old, new, tensor="w", start=0, dtype="F8_E4M3")
    assert chunk.mode == "ctx"
    assert new.nbytes / len(chunk.body) > 100
    assert decode_chunk(chunk, old).tobytes() == new.tobytes()


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (np.zeros((2, 2), np.float32), "'w' is float32: fp8 is made from the served bfloat16 copy"),
        (np.zeros(4, BF16), r"'w' of shape \(4,\) has no blocks of 128 x 128"),
        (np.full((2, 2), np.nan, BF16), "'w' holds NaN or infinity"),
        (np.full((2, 2), -np.inf, BF16), "'w' holds NaN or infinity"),
    ],
)
def test_refusals(weight: NDArray[Any], says: str) -> None:
    with pytest.raises(SyncError, match=says):
        quantise_fp8_blocks(weight, tensor="w")
    with pytest.raises(SyncError, match="blocks of 0 x 0"):
        quantise_fp8_blocks(np.zeros((2, 2), BF16), 0)
