"""Ordered integers, exponent classes and byte planes, checked against values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.bits import (
    LAYOUTS,
    as_bits,
    exponent_class,
    from_planes,
    ordered,
    planes,
    rotated,
    unrotated,
    unzigzag,
    zigzag,
)

FLOATS: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def all_patterns(dtype: str) -> NDArray[Any]:
    layout = LAYOUTS[dtype]
    return np.arange(1 << 8 * layout.width_bytes, dtype=np.uint32).astype(layout.unsigned)


def values_of(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return bits.view(FLOATS[dtype]).astype(np.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_order_is_that_of_the_values(dtype: str) -> None:
    layout = LAYOUTS[dtype]
    bits = all_patterns(dtype)
    numbers = ordered(bits, layout).view(f"i{layout.width_bytes}")
    assert np.unique(numbers).size == bits.size  # a bijection, NaNs included
    assert (ordered(ordered(bits, layout), layout) == bits).all()
    values = values_of(bits, dtype)[np.argsort(numbers)]
    assert (np.diff(values[~np.isnan(values)]) >= 0).all()


@pytest.mark.parametrize("dtype", [*FLOATS, "U8", "I16"])
def test_the_sign_moves_to_the_lowest_bit_and_back(dtype: str) -> None:
    layout = LAYOUTS[dtype]
    bits = all_patterns(dtype)
    moved = rotated(bits, layout)
    assert unrotated(moved, layout).tolist() == bits.tolist()
    if dtype in FLOATS:
        assert ((moved & 1 == 1) == np.signbit(bits.view(FLOATS[dtype]))).all()
    if dtype == "BF16":
        assert planes(moved)[1].tolist() == exponent_class(bits, layout).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
def test_classes_are_exponents(dtype: str) -> None:
    layout = LAYOUTS[dtype]
    bits = all_patterns(dtype)
    classes = exponent_class(bits, layout).astype(np.int64)
    values = np.abs(values_of(bits, dtype))
    normal = np.isfinite(values) & (classes > 0)
    exponents = np.frexp(values[normal])[1]
    assert np.unique(exponents - classes[normal]).size == 1
    assert classes.max() == layout.classes - 1


def test_neighbours_are_a_step_apart() -> None:
    one = np.array([1.0, -1.0, 0.0], ml_dtypes.bfloat16).view(np.uint16)
    up = np.array([1.0078125, -0.99609375, 9.184e-41], ml_dtypes.bfloat16).view(np.uint16)
    layout = LAYOUTS["BF16"]
    assert zigzag(one, up, layout).tolist() == [2, 2, 2]
    assert zigzag(up, one, layout).tolist() == [1, 1, 1]
    zeros = np.array([0x0000, 0x8000], np.uint16)
    assert zigzag(zeros, zeros[::-1], layout).tolist() == [1, 2]  # -0.0 is next to 0.0


@pytest.mark.parametrize("dtype", [name for name, layout in LAYOUTS.items() if layout.width_bytes == 1])
def test_steps_lead_from_every_pattern_to_every_other(dtype: str) -> None:
    layout = LAYOUTS[dtype]
    old, new = (a.reshape(-1).astype(np.uint8) for a in np.meshgrid(all_patterns(dtype), all_patterns(dtype)))
    folded = zigzag(old, new, layout)
    assert ((folded == 0) == (old == new)).all()
    assert (unzigzag(old, folded, layout) == new).all()


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I32", "F64"])
def test_steps_return_for_wide_dtypes(dtype: str) -> None:
    layout = LAYOUTS[dtype]
    rng = np.random.default_rng(0)
    top = 1 << 8 * layout.width_bytes
    old, new = (rng.integers(0, top, 10_000, dtype=layout.unsigned) for _ in range(2))
    assert (unzigzag(old, zigzag(old, new, layout), layout) == new).all()
    assert (from_planes(planes(new), layout) == new).all()
    assert planes(new)[0].tolist() == (new & layout.unsigned.type(255)).tolist()


def test_bits_share_memory() -> None:
    weights = np.zeros((2, 3), ml_dtypes.bfloat16)
    as_bits(weights, "BF16", "w")[4] = 0x3F80
    assert weights[1, 1] == 1.0
    with pytest.raises(SyncError, match="'w' is not contiguous"):
        as_bits(weights.T, "BF16", "w")
