"""Chunks: what goes in comes out bit for bit, in place and back, whatever the bits are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.bits import LAYOUTS
from headrace.sync.codec import (
    CHUNK_ELEMS,
    MODES,
    Chunk,
    Mode,
    apply_chunk,
    decode_changes,
    decode_chunk,
    encode_chunk,
    encode_tensors,
    undo,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
Pairs = tuple[str, NDArray[Any], NDArray[Any]]


def special_patterns(dtype: str) -> list[int]:
    """+-0, smallest denormals, infinities, NaNs with and without payload, all ones: of any float of that width."""
    bits = 8 * LAYOUTS[dtype].width_bytes
    top = 1 << (bits - 1)
    exponent = (LAYOUTS[dtype].classes - 1) << LAYOUTS[dtype].shift
    small = [0, 1, exponent, exponent | 1, top - 1]
    return small + [top | pattern for pattern in small]


@st.composite
def pairs(draw: st.DrawFn) -> Pairs:
    """dtype, old bits and new bits: weights with any share of changes, near or far, among them the odd patterns."""
    dtype = draw(st.sampled_from(sorted(LAYOUTS)))
    elems = draw(st.sampled_from([0, 1, 2, 7, 255, 2049, 6000]))
    density = draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
    far = draw(st.sampled_from([0.0, 0.1, 1.0]))
    odd = draw(st.sampled_from([0.0, 0.05]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unsigned = LAYOUTS[dtype].unsigned
    old = rng.integers(0, 1 << 8 * unsigned.itemsize, elems, dtype=unsigned)
    if dtype == "BF16" and draw(st.booleans()):
        old = (rng.standard_normal(elems) * 0.02).astype(BF16).view(unsigned)
    patterns = np.array(special_patterns(dtype), unsigned)
    old = np.where(rng.random(elems) < odd, rng.choice(patterns, elems), old)
    near = old + rng.choice(np.array([1, 2, (1 << 8 * unsigned.itemsize) - 1], unsigned), elems)
    wild = rng.choice(np.concatenate([patterns, rng.integers(0, 200, 9).astype(unsigned)]), elems)
    moved = np.where(rng.random(elems) < far, wild, near)
    return dtype, old, np.where(rng.random(elems) < density, moved, old)


def encode(old: NDArray[Any] | None, new: NDArray[Any], dtype: str, allowed: Sequence[Mode] = MODES) -> Chunk:
    return encode_chunk(old, new, tensor="layer.weight", start=0, dtype=dtype, allowed=allowed)


@settings(max_examples=150, deadline=None)
@given(pairs(), st.sampled_from([*MODES, None]))
def test_what_goes_in_comes_out(case: Pairs, mode: Mode | None) -> None:
    dtype, old, new = case
    chunk = encode(old, new, dtype, MODES if mode is None else [mode])
    assert chunk.mode in MODES if mode is None else chunk.mode in (mode, "raw")
    assert len(chunk.body) <= new.nbytes
    assert chunk.changed == int((old != new).sum())
    assert decode_chunk(chunk, old).tobytes() == new.tobytes()
    target = old.copy()
    record = apply_chunk(chunk, target)
    assert target.tobytes() == new.tobytes()
    assert record.positions.size == chunk.changed  # taking back costs what changed, in every mode
    undo(target, record)
    assert target.tobytes() == old.tobytes()


@settings(max_examples=50, deadline=None)
@given(pairs())
def test_without_old_bits(case: Pairs) -> None:
    dtype, _, new = case
    chunk = encode(None, new, dtype)
    assert chunk.mode in ("dense", "raw")
    assert (chunk.old_digest, chunk.changed) == ("", new.size)
    assert len(chunk.body) <= new.nbytes
    assert decode_chunk(chunk).tobytes() == new.tobytes()


@settings(max_examples=50, deadline=None)
@given(pairs())
def test_changes_are_what_a_scatter_elsewhere_needs(case: Pairs) -> None:
    dtype, old, new = case
    for mode in MODES:
        changes = decode_changes(encode(old, new, dtype, [mode]), old)
        assert (np.diff(changes.positions.astype(np.int64)) > 0).all()
        assert changes.positions.tolist() == np.flatnonzero(old != new).tolist()
        assert changes.bits.tolist() == new[old != new].tolist()


def adam_like(elems: int, lr: float, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """bfloat16 copies of float32 masters of four scales, before and after steps of about `lr`."""
    rng = np.random.default_rng(seed)
    scale = np.repeat([0.01, 0.02, 0.03, 0.05], -(-elems // 4))[:elems]
    master = (rng.standard_normal(elems) * scale).astype(np.float32)
    step = (lr * np.clip(0.7 * rng.standard_normal(elems), -1.5, 1.5)).astype(np.float32)
    return master.astype(BF16), (master - step).astype(BF16)


def test_weights_keep_their_dtype_and_special_values() -> None:
    old = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 1.0, 2.0], BF16)
    new = np.array([-0.0, 0.0, np.inf, np.nan, np.inf, 2e-40, -1.0, 2.0], BF16)
    for mode in ("ctx", "set", "xor", "dense", "raw"):
        target = old.copy()
        record = apply_chunk(encode(old, new, "BF16", [mode]), target)
        assert target.tobytes() == new.tobytes()
        assert record.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_only_differing_bits_count_not_values() -> None:
    nan = np.array([0x7FC0, 0x7FC0], np.uint16)
    payload = np.array([0x7FC0, 0x7FC1], np.uint16)
    assert encode(nan, nan.copy(), "BF16").changed == 0  # equal bits, although NaN is unequal to itself
    assert encode(nan, payload, "BF16").changed == 1
    assert encode(np.array([0.0], BF16), np.array([-0.0], BF16), "BF16").changed == 1


@pytest.mark.parametrize(("lr", "best"), [(0.0, "ctx"), (1e-6, "ctx"), (3e-5, "ctx"), (0.1, "dense")])
def test_mode_follows_density(lr: float, best: Mode) -> None:
    old, new = adam_like(1 << 18, lr)
    sizes = {mode: len(encode(old, new, "BF16", [mode]).body) for mode in MODES}
    chunk = encode(old, new, "BF16")
    assert chunk.mode == best
    assert len(chunk.body) == min(sizes.values())
    if not lr:
        assert chunk.body == b""
        assert chunk.old_digest == chunk.new_digest


def test_random_bits_are_raw_and_no_mode_grows() -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 1 << 16, 50_000, dtype=np.uint16) for _ in range(2))
    for mode in MODES:
        chunk = encode(old, new, "BF16", [mode])
        assert len(chunk.body) <= new.nbytes
    assert encode(old, new, "BF16").mode == "raw"


def test_set_works_over_any_base_that_differs_only_where_it_writes() -> None:
    old, new = adam_like(5000, 1e-5)
    chunk = encode(old, new, "BF16", ["set"])
    assert chunk.old_digest == ""
    target = new.copy()
    assert apply_chunk(chunk, target).positions.size == chunk.changed
    assert target.tobytes() == new.tobytes()  # twice is once
    target[int(np.flatnonzero(old == new)[0])] = 7.0
    drifted = target.copy()
    with pytest.raises(SyncError, match="new digest differs"):
        apply_chunk(chunk, target)
    assert target.tobytes() == drifted.tobytes()


@pytest.mark.parametrize("mode", ["ctx", "xor"])
def test_a_base_that_differs_by_one_bit_is_refused_untouched(mode: Mode) -> None:
    old, new = adam_like(5000, 1e-5)
    chunk = encode(old, new, "BF16", [mode])
    drifted = old.copy()
    drifted.view(np.uint16)[123] ^= 1
    before = drifted.tobytes()
    with pytest.raises(SyncError, match=r"'layer.weight'.*old digest differs"):
        apply_chunk(chunk, drifted)
    with pytest.raises(SyncError, match="old digest differs"):  # a second time: the weights are the new ones by now
        apply_chunk(chunk, new.copy())
    assert drifted.tobytes() == before


def test_a_chain_and_its_undoing() -> None:
    rng = np.random.default_rng(3)
    master = (rng.standard_normal(20_000) * 0.02).astype(np.float32)
    target = master.astype(BF16)
    states, records = [target.tobytes()], []
    for _ in range(20):
        master = master + (1e-5 * rng.standard_normal(master.size)).astype(np.float32)
        records.append(apply_chunk(encode(target.copy(), master.astype(BF16), "BF16"), target))
        states.append(target.tobytes())
        assert states[-1] == master.astype(BF16).tobytes()
    while records:
        undo(target, records.pop())
        states.pop()
        assert target.tobytes() == states[-1]


def tensors() -> list[tuple[str, NDArray[Any] | None, NDArray[Any], str]]:
    old, new = adam_like(CHUNK_ELEMS + 1000, 1e-6)
    wide_old, wide_new = (a[:6000].reshape(60, 100) for a in (old, new))
    return [
        ("big", old, new, "BF16"),
        ("turned", wide_old.T, wide_new.T, "BF16"),  # not contiguous
        ("none", old[:0], new[:0], "BF16"),
        ("scalar", None, np.array(1.5, np.float32), "F32"),
        ("fresh", None, new[:9000], "BF16"),
    ]


def test_bytes_do_not_depend_on_threads() -> None:
    heard: list[int] = []
    one = encode_tensors(tensors(), threads=1, progress=heard.append)
    assert one == encode_tensors(iter(tensors()), threads=3)
    assert [(c.tensor, c.start, c.elems) for c in one] == [
        ("big", 0, CHUNK_ELEMS),
        ("big", CHUNK_ELEMS, 1000),
        ("turned", 0, 6000),
        ("none", 0, 0),
        ("scalar", 0, 1),
        ("fresh", 0, 9000),
    ]
    assert heard == sorted(heard)
    assert heard[-1] == 2 * (CHUNK_ELEMS + 1000 + 6000 + 9000) + 4
    turned = tensors()[1]
    assert turned[1] is not None
    base = np.ascontiguousarray(turned[1]).reshape(-1)
    assert decode_chunk(one[2], base).tobytes() == np.ascontiguousarray(turned[2]).tobytes()


def test_size_and_limit_on_weights_like_real_ones() -> None:
    """At 2 % density, bytes of XOR + zstd-1 over bytes of ctx, and the bound over the latter."""
    zstandard = pytest.importorskip("zstandard")
    old, new = adam_like(1 << 21, 1e-6)
    chunk = encode(old, new, "BF16")
    xor = (old.view(np.uint16) ^ new.view(np.uint16)).tobytes()
    assert chunk.mode == "ctx"
    assert len(zstandard.ZstdCompressor(level=1).compress(xor)) / len(chunk.body) > 2.5
    assert independent_l2_bytes(old.view(np.uint16), new.view(np.uint16)) / len(chunk.body) > 0.9


def independent_l2_bytes(old: NDArray[Any], new: NDArray[Any]) -> float:
    """The bound by joint entropies: per exponent, N times the entropy of (changed by how many steps, 0 included)."""
    total = 0.0
    signed = [np.where(b >> 15, -1 - (b & 0x7FFF).astype(np.int64), b.astype(np.int64)) for b in (old, new)]
    steps = signed[1] - signed[0]
    for exponent in range(256):
        here = steps[(old >> 7) & 255 == exponent]
        if here.size:
            share = np.unique(here, return_counts=True)[1] / here.size
            total -= here.size * float((share * np.log2(share)).sum())
    return total / 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "BF61"}, r"'w' has dtype 'BF61': did you mean 'BF16'\?"),
        ({"dtype": "F32"}, r"'w' is said to be F32 \(4 bytes an element\) but its array is bfloat16"),
        ({"allowed": ["ctz"]}, r"mode 'ctz' is unknown; did you mean 'ctx'"),
        ({"allowed": []}, "no mode is allowed"),
        ({"old": np.zeros(3, BF16)}, "3 old elements and 8 new ones"),
        ({"new": np.zeros(16, BF16)[::2]}, "not contiguous"),
        ({"new": np.zeros(8, ">u2")}, "big-endian"),
        ({"new": np.zeros(CHUNK_ELEMS + 1, BF16), "old": None}, "at most 4194304"),
    ],
)
def test_requests_that_make_no_sense(change: dict[str, Any], says: str) -> None:
    request: dict[str, Any] = {"old": np.zeros(8, BF16), "new": np.zeros(8, BF16), "dtype": "BF16", "allowed": MODES}
    request |= change
    with pytest.raises(SyncError, match=says):
        encode_chunk(request.pop("old"), request.pop("new"), tensor="w", start=0, **request)


def test_shape_changes_and_threads_are_refused() -> None:
    with pytest.raises(SyncError, match=r"'w' changed its shape from \(2, 3\) to \(3, 2\)"):
        encode_tensors([("w", np.zeros((2, 3), BF16), np.zeros((3, 2), BF16), "BF16")], threads=2)
    with pytest.raises(SyncError, match="threads = 0"):
        encode_tensors([], threads=0)


def test_a_target_must_be_writable_and_fit() -> None:
    old, new = adam_like(100, 1e-3)
    chunk = encode(old, new, "BF16")
    locked = old.copy()
    locked.flags.writeable = False
    with pytest.raises(SyncError, match="read-only"):
        apply_chunk(chunk, locked)
    with pytest.raises(SyncError, match="covers 100 elements, the array has 99"):
        apply_chunk(chunk, old[:99].copy())
    for mode in ("ctx", "xor", "set"):
        with pytest.raises(SyncError, match="needs the old weights"):
            decode_chunk(encode(old, new, "BF16", [mode]))
