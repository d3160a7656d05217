"""Increasing positions as gaps: Rice codes, or bytes in a zstd frame where the gaps cluster.

Gaps between independent changes of probability p are geometric, for which a Rice code (Rice and Plaunt 1971: quotient
by 2^r in unary, remainder in r bits) stays within a few percent of the entropy and needs no table. Quotients and
remainders lie in two separate bit strings, which lets NumPy read and write them without a loop.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.sync.streams import Reader, frame, varint

_MAX_REMAINDER_BITS = 24  # gaps inside one chunk are below 2^22
_BYTES = 255  # method number of the zstd frame; smaller ones are the bits of a Rice remainder
_MORE = 255  # a byte of the zstd form: 255 further, and the gap goes on


def write_gaps(gaps: NDArray[np.uint32]) -> bytes:
    """The smaller of both forms. `gaps` (at least one) count the skipped places before each position."""
    remainder_bits, rice_bytes = _rice_parameter(gaps)
    if _uneven(gaps):
        spelled = _spell(gaps)
        packed = varint(spelled.size) + frame(spelled)
        if len(packed) < rice_bytes:
            return bytes([_BYTES]) + packed
    return bytes([remainder_bits]) + _rice(gaps, remainder_bits)


def read_gaps(reader: Reader, count: int, places: int) -> NDArray[np.uint32]:
    """`count` (at least one) gaps whose positions all lie below `places`; refuses any others."""
    method = reader.byte("gap method")
    if method == _BYTES:
        size = reader.varint("gap bytes", most=count + places // _MORE)
        gaps = _unspell(reader, reader.frame(size, "gaps"), count)
    elif method <= _MAX_REMAINDER_BITS:
        gaps = _unrice(reader, count, places, method)
    else:
        reader.refuse(f"gap method {method} is unknown")
    last = int(gaps.sum()) + count - 1
    if last >= places:
        reader.refuse(f"position {last} is out of range, there are {places}")
    return gaps.astype(np.uint32)


def _uneven(gaps: NDArray[np.uint32]) -> bool:
    """Gaps cluster, repeat or are mostly zero, unlike those of independent changes: the zstd form may be smaller."""
    mean = int(gaps.sum(dtype=np.int64)) / gaps.size
    second = float(np.square(gaps, dtype=np.float64).sum()) / gaps.size
    return mean < 1 or not 0.9 < second / (2 * mean * mean + mean) < 1.1  # a geometric distribution has 1


def _rice_parameter(gaps: NDArray[np.uint32]) -> tuple[int, int]:
    """The best number of remainder bits, and how many bytes it takes after the method."""
    mean = int(gaps.sum(dtype=np.int64)) / gaps.size
    guess = max(0, int(math.log2(max(mean * math.log(2), 1.0))))

    def size_bytes(bits: int) -> int:
        quotient_bytes = -(-(int((gaps >> np.uint32(bits)).sum(dtype=np.int64)) + gaps.size) // 8)
        return len(varint(quotient_bytes)) + quotient_bytes + -(-gaps.size * bits // 8)

    sizes = [(size_bytes(bits), bits) for bits in (guess, min(guess + 1, _MAX_REMAINDER_BITS))]
    best, bits = min(sizes)
    return bits, best


def _rice(gaps: NDArray[np.uint32], remainder_bits: int) -> bytes:
    """Each quotient as that many zeros and a one; then all remainders, lowest bit first."""
    ends = np.cumsum((gaps >> np.uint32(remainder_bits)) + np.uint32(1), dtype=np.int64) - 1
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    quotients = np.packbits(unary, bitorder="little").tobytes()
    return varint(len(quotients)) + quotients + _pack_remainders(gaps, remainder_bits)


def _unrice(reader: Reader, count: int, places: int, remainder_bits: int) -> NDArray[np.int64]:
    size = reader.varint("length of quotients", most=(count + (places >> remainder_bits)) // 8 + 1)
    packed = np.frombuffer(reader.take(size, "quotients"), np.uint8)
    ends = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    if ends.size != count or int(ends[-1]) // 8 != size - 1:
        reader.refuse(f"quotients hold {ends.size} gaps, {count} are expected")
    quotients = np.diff(ends, prepend=-1) - 1
    low = np.frombuffer(reader.take(-(-count * remainder_bits // 8), "remainders"), np.uint8)
    return (quotients << remainder_bits) | _unpack_remainders(low, count, remainder_bits)


def _pack_remainders(gaps: NDArray[np.uint32], bits: int) -> bytes:
    table = np.empty((gaps.size, bits), np.uint8)
    for i in range(bits):
        table[:, i] = (gaps >> np.uint32(i)) & np.uint32(1)
    return np.packbits(table.reshape(-1), bitorder="little").tobytes()


def _unpack_remainders(packed: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.int64]:
    table = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    out = np.zeros(count, np.int64)
    for i in range(bits):
        out |= table[:, i].astype(np.int64) << i
    return out


def _spell(gaps: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Each gap as gap // 255 bytes of 255 and one of gap % 255."""
    ends = np.cumsum(gaps // np.uint32(_MORE) + np.uint32(1), dtype=np.int64) - 1
    out = np.full(int(ends[-1]) + 1, _MORE, np.uint8)
    out[ends] = gaps % np.uint32(_MORE)
    return out


def _unspell(reader: Reader, spelled: NDArray[np.uint8], count: int) -> NDArray[Any]:
    ends = np.flatnonzero(spelled != _MORE)
    if ends.size != count or ends[-1] != spelled.size - 1:
        reader.refuse(f"gap bytes hold {ends.size} gaps, {count} are expected")
    return (np.diff(ends, prepend=-1) - 1) * _MORE + spelled[ends]
