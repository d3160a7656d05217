"""Bodies from elsewhere: every damage is a SyncError that names the tensor, before memory is spent on it."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.codec import MODES, Chunk, Mode, apply_chunk, decode_changes, decode_chunk, encode_chunk
from headrace.sync.streams import varint

BODIED: tuple[Mode, ...] = ("ctx", "xor", "set", "dense")


def sample() -> tuple[NDArray[Any], NDArray[Any]]:
    """300 bfloat16 of three exponents, of which 40 change, two of them far."""
    rng = np.random.default_rng(1)
    old = (0x3D00 + 0x80 * (np.arange(300) % 3) + rng.integers(0, 16, 300)).astype(np.uint16)
    new = old.copy()
    new[rng.choice(300, 40, replace=False)] += 1
    new[[10, 200]] = [0xFF80, 0x0001]
    return old, new


def chunk_of(mode: Mode) -> tuple[Chunk, NDArray[Any], NDArray[Any]]:
    old, new = sample()
    chunk = encode_chunk(old, new, tensor="layer.weight", start=0, dtype="BF16", allowed=[mode])
    assert chunk.mode == mode
    return chunk, old, new


def with_body(chunk: Chunk, body: bytes) -> Chunk:
    """As a forger would: the body's digest fits."""
    return dataclasses.replace(chunk, body=body, body_digest=xxhash.xxh3_128_hexdigest(body))


@pytest.mark.parametrize("mode", MODES)
def test_every_bit_flip_is_refused_and_changes_nothing(mode: Mode) -> None:
    chunk, old, _ = chunk_of(mode)
    for bit in range(8 * len(chunk.body)):
        body = bytearray(chunk.body)
        body[bit // 8] ^= 1 << bit % 8
        target = old.copy()
        with pytest.raises(SyncError, match=r"tensor 'layer.weight', 300 elements from 0.*body is damaged"):
            apply_chunk(dataclasses.replace(chunk, body=bytes(body)), target)
        assert target.tobytes() == old.tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_flips_under_a_fitting_digest_never_yield_other_weights(mode: Mode) -> None:
    """Padding bits may flip without effect; all else is refused."""
    chunk, old, new = chunk_of(mode)
    refused: list[str] = []
    for bit in range(8 * len(chunk.body)):
        body = bytearray(chunk.body)
        body[bit // 8] ^= 1 << bit % 8
        target = old.copy()
        try:
            apply_chunk(with_body(chunk, bytes(body)), target)
        except SyncError as error:
            refused.append(str(error))
        else:
            assert target.tobytes() == new.tobytes()
            target[:] = old
        assert target.tobytes() == old.tobytes()
    assert len(refused) >= 8 * len(chunk.body) - 40
    assert all("'layer.weight'" in message for message in refused)


@pytest.mark.parametrize("mode", MODES)
def test_truncated_and_trailing(mode: Mode) -> None:
    chunk, old, _ = chunk_of(mode)
    for size in range(len(chunk.body)):
        with pytest.raises(SyncError, match=r"'layer\.weight'"):
            decode_chunk(with_body(chunk, chunk.body[:size]), old)
    with pytest.raises(SyncError, match=r"1 bytes are left over|601 bytes is larger than the weights"):
        decode_chunk(with_body(chunk, chunk.body + b"\0"), old)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.sampled_from(MODES))
def test_noise_is_refused(body: bytes, mode: Mode) -> None:
    chunk, old, _ = chunk_of(mode)
    with pytest.raises(SyncError):
        decode_chunk(with_body(chunk, body), old)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mode": "pickle"}, "mode 'pickle' is unknown; valid modes|valid names"),
        ({"mode": "ctx", "dtype": "F64"}, "ctx does not serve F64"),
        ({"dtype": "BF15"}, "did you mean 'BF16'"),
        ({"elems": 1 << 40}, "1099511627776 elements"),
        ({"elems": -1}, "-1 elements"),
        ({"start": -1}, "300 elements from -1"),
        ({"changed": 301}, "301 of 300 elements changed"),
        ({"changed": -1}, "-1 of 300"),
        ({"changed": 0}, "nothing changed, but it has a body"),
        ({"changed": 39}, "39"),
        ({"elems": 299}, "covers 299 elements, the array has 300"),
        ({"body_digest": "0" * 32}, "its body is damaged"),
        ({"old_digest": "0" * 32}, "old digest differs"),
        ({"old_digest": ""}, "old digest differs"),
        ({"new_digest": "0" * 32}, "new digest differs"),
    ],
)
def test_headers_that_lie(change: dict[str, Any], says: str) -> None:
    chunk, old, _ = chunk_of("ctx")
    target = old.copy()
    with pytest.raises(SyncError, match=says):
        apply_chunk(dataclasses.replace(chunk, **change), target)
    assert target.tobytes() == old.tobytes()


def test_an_empty_body_means_no_change_only_in_sparse_modes() -> None:
    old, _ = sample()
    same = encode_chunk(old, old.copy(), tensor="w", start=0, dtype="BF16")
    assert decode_chunk(same, old).tobytes() == old.tobytes()
    for mode in ("dense", "raw"):
        with pytest.raises(SyncError, match="cut off"):
            decode_chunk(dataclasses.replace(same, mode=mode), old)
    with pytest.raises(SyncError, match="cut off"):
        decode_chunk(dataclasses.replace(same, changed=3), old)


@pytest.mark.parametrize("mode", BODIED)
def test_a_bomb_is_refused_before_it_unpacks(mode: Mode) -> None:
    """A frame that says 256 MiB, and one that hides it: neither costs memory."""
    chunk, old, _ = chunk_of(mode)
    zeros = np.zeros(1 << 28, np.uint8)
    plain = zstandard.ZstdCompressor(level=1).compress(zeros.data)[:40]
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(zeros.data)[:40]
    del zeros
    gaps = b"\x00\x06" + b"\xff" * 5 + b"\x03"  # 42 zeros
    before = {"ctx": b"\x01\x00\xff\x2a" + gaps + b"\x00", "set": gaps}
    for frame in (plain, silent):
        body = before.get(mode, b"") + varint(len(frame)) + frame
        tracemalloc.start()
        with pytest.raises(SyncError, match=r"'layer\.weight'.* declares \d+ bytes unpacked"):
            decode_changes(with_body(chunk, body), old)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\x00\x01\x01" + b"\x02\x01\x02\x03\x04", "quotients hold 1 gaps, 2 are expected"),
        (b"\x00\x02\x03\x00", "length of quotients is 2, at most 1"),
        (b"\x00\x01\x81" + b"\x01\x02\x03\x04", "position 7 is out of range, there are 5"),
        (b"\x19\x01\x03", "gap method 25 is unknown"),
        (b"\xff\x02\x02\xff\xff", "gap bytes hold 0 gaps, 2 are expected"),
        (b"\xff\x03\x03\x00\x00\x00", "gap bytes is 3, at most 2"),
        (b"\xff\x02\x02\x00\x04", "position 5 is out of range, there are 5"),
        (b"\x00\x80\x80\x80\x80\x80\x01", "longer than 5 bytes"),
        (b"\x00\xff\xff\xff\xff\x7f", "length of quotients is 34359738367, at most 1 is possible"),
        (b"\x00\x01\x03\x03\x00\x00\x00", "length of byte plane 0 is 3, at most 2"),
        (b"\x00\x01\x03\x01\x00", "byte plane 0 is not a zstd frame"),
    ],
)
def test_positions_that_cannot_be(body: bytes, says: str) -> None:
    """`set`, two changes among five weights. Decreasing positions cannot even be written."""
    digest = xxhash.xxh3_128_hexdigest
    chunk = Chunk(
        tensor="w",
        start=0,
        elems=5,
        changed=2,
        mode="set",
        dtype="BF16",
        body=body,
        body_digest=digest(body),
        old_digest="",
        new_digest=digest(b""),
    )
    with pytest.raises(SyncError, match=says):
        decode_changes(chunk)


def table(*buckets: tuple[int, int, int]) -> bytes:
    return bytes([len(buckets), *(number for bucket in buckets for number in bucket)])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (table((122, 122, 39)), "its buckets hold 39 changes, 42 are declared"),
        (table((122, 122, 20), (122, 124, 22)), "classes 122 to 124 do not follow class 122 of 256"),
        (table((124, 122, 42)), "classes 124 to 122 do not follow"),
        (table((122, 122, 0), (123, 124, 42)), "bucket of classes 122 to 122 is empty"),
        (table((122, 122, 43)), "changes of a bucket is 43, at most 42"),
        (b"\xff\x7f", "number of buckets is 16383, at most 256"),
    ],
)
def test_bucket_tables_that_cannot_be(body: bytes, says: str) -> None:
    chunk, old, _ = chunk_of("ctx")
    assert chunk.changed == 42
    with pytest.raises(SyncError, match=says):
        decode_changes(with_body(chunk, body), old)
