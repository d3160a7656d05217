"""Parts of a body: integers, frames, gaps, steps."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SyncError
from headrace.sync.gaps import read_gaps, write_gaps
from headrace.sync.steps import read_codes, write_codes
from headrace.sync.streams import Reader, frame, varint


@given(st.lists(st.integers(0, 2**35 - 1)))
def test_integers_return(numbers: list[int]) -> None:
    reader = Reader(b"".join(varint(number) for number in numbers), "chunk")
    assert [reader.varint("number", most=2**35) for _ in numbers] == numbers
    reader.end()


def test_integers_by_hand() -> None:
    assert [varint(n) for n in (0, 127, 128, 300)] == [b"\x00", b"\x7f", b"\x80\x01", b"\xac\x02"]


@given(st.binary(max_size=300), st.integers(0, 400))
def test_frames_return_and_never_grow(data: bytes, zeros: int) -> None:
    whole = np.frombuffer(data + bytes(zeros), np.uint8)
    packed = frame(whole)
    assert len(packed) <= whole.size + 2
    reader = Reader(packed, "chunk")
    assert reader.frame(whole.size, "data").tobytes() == whole.tobytes()
    reader.end()


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (zstandard.ZstdCompressor().compress(bytes(99)), "declares 99 bytes unpacked, 100 are expected"),
        (zstandard.ZstdCompressor().compress(bytes(100))[:-1], "not a zstd frame"),
        (zstandard.ZstdCompressor().compress(bytes(100)) + b"\0", "not a zstd frame"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)), "declares"),
        (zstandard.ZstdCompressor().compress(bytes(100))[1:], "not a zstd frame"),
    ],
)
def test_frames_that_are_none(packed: bytes, says: str) -> None:
    with pytest.raises(SyncError, match=f"^chunk: data .*{says}|^chunk: data {says}"):
        Reader(varint(len(packed)) + packed, "chunk").frame(100, "data")


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 4_000_000)), min_size=1, max_size=200))
def test_gaps_return(numbers: list[int]) -> None:
    gaps = np.array(numbers, np.uint32)
    places = sum(numbers) + len(numbers)
    packed = write_gaps(gaps)
    reader = Reader(packed, "chunk")
    assert read_gaps(reader, gaps.size, places).tolist() == numbers
    reader.end()
    with pytest.raises(SyncError, match=f"position {places - 1} is out of range, there are {places - 1}|at most"):
        read_gaps(Reader(packed, "chunk"), gaps.size, places - 1)


def test_rice_code_by_hand() -> None:
    """Gaps 5, 16, 10 with two remainder bits: quotients 1, 4, 2 as 01 00001 001, remainders 1, 0, 2 as 10 00 01."""
    assert write_gaps(np.array([5, 16, 10], np.uint32)) == bytes([2, 2, 0b01000010, 0b00000010, 0b00100001])


@pytest.mark.parametrize("density", [0.001, 0.02, 0.3])
def test_gaps_of_independent_changes_come_close_to_their_entropy(density: float) -> None:
    places = 1 << 20
    at = np.flatnonzero(np.random.default_rng(0).random(places) < density)
    p = at.size / places
    bound_bits = -places * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    gaps = (np.diff(at, prepend=-1) - 1).astype(np.uint32)
    assert 1.0 < 8 * len(write_gaps(gaps)) / bound_bits < 1.04


@pytest.mark.parametrize("rows_between", [31, 999])
def test_clustered_gaps_take_the_other_form(rows_between: int) -> None:
    """Whole rows of 64 change, as in an embedding: at the density, independent changes take 6 and 11 bits each."""
    gaps = np.zeros(64 * 60, np.uint32)
    gaps[::64] = rows_between * 64
    packed = write_gaps(gaps)
    assert packed[0] == 255
    assert 8 * len(packed) < gaps.size
    assert read_gaps(Reader(packed, "chunk"), gaps.size, 1 << 22).tolist() == gaps.tolist()


@given(st.lists(st.integers(0, 255), min_size=1, max_size=300), st.integers(0, 300))
def test_steps_return(numbers: list[int], ones: int) -> None:
    codes = np.array(numbers + [0, 1, 1] * ones, np.uint8)
    packed = write_codes(codes)
    assert len(packed) <= codes.size + 4
    reader = Reader(packed, "chunk")
    assert read_codes(reader, codes.size).tolist() == codes.tolist()
    reader.end()


def test_steps_of_one_take_a_bit_each() -> None:
    codes = np.random.default_rng(0).integers(0, 2, 8000).astype(np.uint8)
    assert len(write_codes(codes)) == 1 + 1000 + 1
    codes[[5, 4000]] = [2, 255]  # two gaps and two magnitudes more
    assert len(write_codes(codes)) < 1 + 1000 + 1 + 16
    assert read_codes(Reader(write_codes(codes), "chunk"), 8000).tolist() == codes.tolist()


def test_steps_refuse_what_cannot_be() -> None:
    for body, says in [
        (b"\x02\x00", "form 2 of steps is unknown"),
        (b"\x01\x00\x09", "larger steps is 9, at most 8"),
        (b"\x01", "signs needs 1 bytes, 0 are left"),
    ]:
        with pytest.raises(SyncError, match=says):
            read_codes(Reader(body, "chunk"), 8)
