"""Folded steps, one byte each, as signs and magnitudes or as they are, whichever is smaller.

Most weights move by one step, up or down as by the toss of a coin. A Huffman code spends 1.6 bits on that and cannot do
better; a bit for the sign, and positions of the few larger magnitudes among all, take little more than 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.sync.gaps import read_gaps, write_gaps
from headrace.sync.streams import Reader, frame, varint

_WHOLE, _SPLIT = 0, 1


def write_codes(codes: NDArray[np.uint8]) -> bytes:
    """`codes` (at least one) are 2 * (magnitude - 1) + sign."""
    whole = bytes([_WHOLE]) + frame(codes)
    large = np.flatnonzero(codes > 1)
    parts = [bytes([_SPLIT]), np.packbits(codes & 1, bitorder="little").tobytes(), varint(large.size)]
    if large.size:
        parts += [write_gaps((np.diff(large, prepend=-1) - 1).astype(np.uint32)), frame(codes[large] >> 1)]
    split = b"".join(parts)
    return split if len(split) < len(whole) else whole


def read_codes(reader: Reader, count: int) -> NDArray[np.uint8]:
    """`count` (at least one) codes; refuses bodies that do not hold them."""
    form = reader.byte("form of steps")
    if form == _WHOLE:
        return reader.frame(count, "steps")
    if form != _SPLIT:
        reader.refuse(f"form {form} of steps is unknown")
    signs = np.frombuffer(reader.take(-(-count // 8), "signs"), np.uint8)
    codes = np.unpackbits(signs, count=count, bitorder="little")
    larger = reader.varint("larger steps", most=count)
    if larger:
        at = np.cumsum(read_gaps(reader, larger, count).astype(np.int64) + 1) - 1
        codes[at] |= reader.frame(larger, "larger steps") << 1
    return codes
