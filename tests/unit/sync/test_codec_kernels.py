"""Compiled and NumPy passes: the same results, hence the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync import codec_fallback, codec_kernels
from headrace.sync.bits import LAYOUTS
from headrace.sync.codec import apply_chunk, encode_chunk, warm_up
from headrace.sync.codec_ctx import kernels, read_ctx, write_ctx
from headrace.sync.streams import Reader

needs_numba = pytest.mark.skipif(codec_kernels.numba is None, reason="numba is an optional speed-up")


@st.composite
def changed_weights(draw: st.DrawFn) -> tuple[str, NDArray[Any], NDArray[Any]]:
    """dtype of at most 4 bytes, old and new bits with at least one change."""
    dtype = draw(st.sampled_from([name for name, layout in LAYOUTS.items() if layout.width_bytes <= 4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unsigned = LAYOUTS[dtype].unsigned
    elems = draw(st.sampled_from([1, 5, 300, 9000, 40_000]))
    old = rng.integers(0, 1 << 8 * unsigned.itemsize, elems, dtype=unsigned)
    new = old.copy()
    for position in rng.integers(0, elems, draw(st.sampled_from([1, 3, elems]))):
        new[position] = old[position] ^ unsigned.type(rng.choice([1, 3, 0x80]))
    return dtype, old, new


@needs_numba
@settings(max_examples=60, deadline=None)
@given(changed_weights())
def test_same_bytes_with_and_without_numba(case: tuple[str, NDArray[Any], NDArray[Any]]) -> None:
    dtype, old, new = case
    layout = LAYOUTS[dtype]
    positions = codec_kernels.changed_positions(old, new)
    plain = codec_fallback.changed_positions(old, new)
    assert positions.dtype == plain.dtype
    assert positions.tolist() == plain.tolist()
    body = write_ctx(old, new, positions, layout, codec_kernels)
    assert body == write_ctx(old, new, plain, layout, codec_fallback)
    for passes in (codec_kernels, codec_fallback):
        at, bits = read_ctx(Reader(body, "chunk"), old, positions.size, layout, passes)
        assert at.dtype == np.uint32
        assert at.tolist() == positions.tolist()
        assert bits.tolist() == new[positions].tolist()


@needs_numba
@pytest.mark.parametrize("unsigned", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("elems", [0, 1, 3, 7, 8, 9, 1003])
def test_changes_are_found_at_any_size_and_address(unsigned: type[Any], elems: int) -> None:
    """Words of 8 bytes are compared where they are aligned; ends and odd addresses go element by element."""
    rng = np.random.default_rng(elems)
    width = np.dtype(unsigned).itemsize
    for offset in (0, width):
        old = np.zeros(elems * width + 16, np.uint8)[offset : offset + elems * width].view(unsigned)
        new = old.copy()
        new[rng.integers(0, elems, elems // 50 + 1) if elems else []] = 1
        new[elems - 1 :] = 1
        assert codec_kernels.changed_positions(old, new).tolist() == np.flatnonzero(old != new).tolist()


@needs_numba
def test_numba_is_used_where_it_is() -> None:
    assert kernels() is codec_kernels


@needs_numba
def test_nothing_is_compiled_after_warming_up() -> None:
    warm_up("U16")
    passes = (codec_kernels._changed, codec_kernels._gaps, codec_kernels._locate)
    compiled = [len(kernel.signatures) for kernel in passes]
    assert all(compiled)
    old = np.arange(5000, dtype=np.uint16)
    new = old.copy()
    new[::50] += 1
    old.flags.writeable = new.flags.writeable = False
    apply_chunk(encode_chunk(old, new, tensor="w", start=0, dtype="BF16"), old.copy())
    odd = np.zeros(10_002, np.uint8)[2:].view(np.uint16)
    apply_chunk(encode_chunk(old, new, tensor="w", start=0, dtype="BF16"), np.add(old, 0, out=odd))
    assert [len(kernel.signatures) for kernel in passes] == compiled


@pytest.mark.parametrize("passes", [codec_kernels, codec_fallback])
def test_locate_reports_gaps_that_leave_their_bucket(passes: Any) -> None:
    layout = LAYOUTS["U8"]
    old = np.zeros(10, np.uint8)
    buckets, counts = np.zeros(1, np.uint16), np.array([3], np.int64)
    positions, indices = passes.locate(old, np.array([0, 3, 5], np.uint32), buckets, counts, layout)
    assert positions.tolist() == [0, 4]  # the third would be at 10
    assert indices.tolist() == [0, 1]


@pytest.mark.parametrize("passes", [codec_kernels, codec_fallback])
def test_a_base_with_other_exponents_is_refused_by_the_body_too(passes: Any) -> None:
    """The digest of the base guards against this; the body must not rely on it."""
    layout = LAYOUTS["BF16"]
    old = np.full(2000, 0x3F80, np.uint16)
    new = old.copy()
    new[::7] += 1
    body = write_ctx(old, new, codec_fallback.changed_positions(old, new), layout, passes)
    other = np.full(2000, 0x4000, np.uint16)
    with pytest.raises(SyncError, match="286 positions are out of the range of their exponents"):
        read_ctx(Reader(body, "chunk"), other, 286, layout, passes)
