"""The `ctx` body: which weights changed and by how many steps, given the exponent of each old weight.

A weight flips with probability |dw| / spacing(w), and spacing doubles with each exponent, so small weights flip far
more often than large ones. The receiver holds the old weights; elements are therefore split into buckets by old
exponent, and each bucket has its own gaps (counted among its own elements) and steps.

    number of buckets, then each: first class, last class, number of changes
    each bucket's gaps                                   (gaps.py)
    steps in order of bucket, position, coded by groups of buckets (steps.py): zigzag - 1, or 255 for "see below"
    new bits of those that said 255, sign lowest, in the same order: a frame per byte plane

Zeros and denormals move by whole exponents, unlike all others: they share neither a bucket nor a frame of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace.sync.bits import Bits, Layout, exponent_class, from_planes, planes, rotated, unrotated, unzigzag, zigzag
from headrace.sync.entropy import place_bits
from headrace.sync.gaps import read_gaps, write_gaps
from headrace.sync.steps import read_codes, write_codes
from headrace.sync.streams import Reader, frame, varint

_BUCKET_BITS = 80  # about what a bucket costs beyond its changes: header, padding, a poorer code
_GROUP_STEPS = 4096  # steps that pay for a table of their own
_SAMPLE_ELEMS = 1 << 16
_ESCAPE = 255
_SUBNORMAL = 0  # class of zeros and denormals, which move by whole exponents, unlike all others


class Kernels(Protocol):
    """`codec_kernels` or `codec_fallback`."""

    def changed_positions(self, old: Bits, new: Bits) -> NDArray[np.uint32]: ...

    def bucket_gaps(
        self,
        old: Bits,
        positions: NDArray[np.uint32],
        buckets: NDArray[np.uint16],
        counts: NDArray[np.int64],
        layout: Layout,
    ) -> NDArray[np.uint32]: ...

    def locate(
        self,
        old: Bits,
        gaps: NDArray[np.uint32],
        buckets: NDArray[np.uint16],
        counts: NDArray[np.int64],
        layout: Layout,
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]: ...


@cache
def kernels() -> Kernels:
    """The compiled passes where numba is installed, else NumPy's. Loaded at first use: numba takes half a second."""
    name = "codec_kernels" if find_spec("numba") is not None else "codec_fallback"
    return cast(Kernels, import_module(f"headrace.sync.{name}"))


def write_ctx(old: Bits, new: Bits, positions: NDArray[np.uint32], layout: Layout, passes: Kernels) -> bytes:
    """Body for the changes at `positions` (increasing, at least one)."""
    at = positions.astype(np.intp)
    was, now = old[at], new[at]
    classes = exponent_class(was, layout)
    ranges = _ranges(_class_elems(old, layout), np.bincount(classes, minlength=layout.classes))
    buckets = _bucket_of_class(ranges, layout)
    bucket_of = buckets[classes]
    counts = np.bincount(bucket_of, minlength=len(ranges)).astype(np.int64)
    gaps = passes.bucket_gaps(old, positions, buckets, counts, layout)
    order = np.argsort(bucket_of, kind="stable")
    steps = (zigzag(was, now, layout) - was.dtype.type(1))[order]
    far = steps >= _ESCAPE
    codes = np.where(far, _ESCAPE, steps).astype(np.uint8)
    parts = [varint(len(ranges))]
    parts += [bytes(pair) + varint(int(count)) for pair, count in zip(ranges, counts, strict=True)]
    parts += [write_gaps(part) for part in np.split(gaps, np.cumsum(counts)[:-1])]
    parts += [write_codes(codes[span]) for span in _groups(ranges, counts)]
    if far.any():
        parts += [frame(plane) for plane in planes(rotated(now[order][far], layout))]
    return b"".join(parts)


def read_ctx(
    reader: Reader, old: Bits, changed: int, layout: Layout, passes: Kernels
) -> tuple[NDArray[np.uint32], Bits]:
    """Positions (increasing) and new bits of `changed` (at least one) elements; refuses what does not fit `old`."""
    ranges, counts = _read_table(reader, changed, layout)
    gaps = np.concatenate([read_gaps(reader, int(count), old.size) for count in counts])
    codes = np.concatenate([read_codes(reader, span.stop - span.start) for span in _groups(ranges, counts)])
    far = np.flatnonzero(codes == _ESCAPE)
    if far.size:
        parts = [reader.frame(far.size, "far values") for _ in range(layout.width_bytes)]
        far_bits = unrotated(from_planes(parts, layout), layout)
    reader.end()
    positions, indices = passes.locate(old, gaps, _bucket_of_class(ranges, layout), counts, layout)
    if positions.size != changed:
        reader.refuse(f"{changed - positions.size} positions are out of the range of their exponents")
    folded = codes.astype(layout.unsigned) + layout.unsigned.type(1)
    bits = unzigzag(old[positions], folded[indices], layout)
    if far.size:
        is_far = np.flatnonzero(codes[indices] == _ESCAPE)
        bits[is_far] = far_bits[np.searchsorted(far, indices[is_far])]
    return positions, bits


def _read_table(reader: Reader, changed: int, layout: Layout) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
    """Class ranges, increasing and apart, and changes of each bucket, which add up to `changed`."""
    ranges: list[tuple[int, int]] = []
    counts: list[int] = []
    after = -1
    for _ in range(reader.varint("number of buckets", most=layout.classes)):
        first, last = reader.byte("first class"), reader.byte("last class")
        if not after < first <= last < layout.classes:
            reader.refuse(f"classes {first} to {last} do not follow class {after} of {layout.classes}")
        counts.append(reader.varint("changes of a bucket", most=changed))
        if not counts[-1]:
            reader.refuse(f"the bucket of classes {first} to {last} is empty")
        ranges.append((first, last))
        after = last
    if sum(counts) != changed:
        reader.refuse(f"its buckets hold {sum(counts)} changes, {changed} are declared")
    return ranges, np.array(counts, np.int64)


def _class_elems(old: Bits, layout: Layout) -> NDArray[np.int64]:
    """Elements of each class, estimated from an evenly spaced sample: only the choice of buckets depends on it."""
    stride = max(1, old.size // _SAMPLE_ELEMS) | 1  # odd: not in step with rows of even length
    return np.bincount(exponent_class(old[::stride], layout), minlength=layout.classes) * stride


def _ranges(elems: NDArray[np.int64], changed: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of classes that share a bucket: neighbours join while that costs less than a bucket of their own."""
    out: list[tuple[int, int]] = []
    held_n = held_k = 0
    for e in np.flatnonzero(changed).tolist():
        k = int(changed[e])
        n = max(int(elems[e]), k)
        if out and out[-1][1] != _SUBNORMAL:
            # what lies between without a change would join too
            first, last = out[-1]
            both_n, both_k = held_n + n + int(elems[last + 1 : e].sum()), held_k + k
            if place_bits(both_n, both_k) - place_bits(held_n, held_k) - place_bits(n, k) < _BUCKET_BITS:
                out[-1] = (first, e)
                held_n, held_k = both_n, both_k
                continue
        out.append((e, e))
        held_n, held_k = n, k
    return out


def _bucket_of_class(ranges: list[tuple[int, int]], layout: Layout) -> NDArray[np.uint16]:
    """Bucket of each class; len(ranges) for classes without changes."""
    buckets = np.full(layout.classes, len(ranges), np.uint16)
    for bucket, (first, last) in enumerate(ranges):
        buckets[first : last + 1] = bucket
    return buckets


def _groups(ranges: list[tuple[int, int]], counts: NDArray[np.int64]) -> Iterator[slice]:
    """Spans of steps that share a frame: whole buckets, until there are enough; zeros and denormals by themselves."""
    start = stop = 0
    total = int(counts.sum())
    for (_, last), count in zip(ranges, counts.tolist(), strict=True):
        stop += count
        if stop - start >= _GROUP_STEPS or stop == total or last == _SUBNORMAL:
            yield slice(start, stop)
            start = stop
