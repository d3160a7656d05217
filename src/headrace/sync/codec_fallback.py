"""The three passes over a chunk's weights in NumPy, with the results of `codec_kernels` (which is 5 to 10x faster)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.sync.bits import Bits, Layout, exponent_class


def changed_positions(old: Bits, new: Bits) -> NDArray[np.uint32]:
    """Where the bits differ, increasing."""
    return np.flatnonzero(old != new).astype(np.uint32)


def bucket_gaps(
    old: Bits, positions: NDArray[np.uint32], buckets: NDArray[np.uint16], counts: NDArray[np.int64], layout: Layout
) -> NDArray[np.uint32]:
    """For each position, how many elements of its own bucket it skips since the last; in order of bucket, position.

    `buckets` maps a class to its bucket, or to counts.size where nothing changed; `counts` are positions per bucket.
    """
    bucket_of = buckets[exponent_class(old, layout)]
    order = np.argsort(bucket_of, kind="stable")
    flagged = np.zeros(old.size, np.bool_)
    flagged[positions] = True
    ranks = np.flatnonzero(flagged[order])  # among all elements in order of bucket, position
    sizes = np.bincount(bucket_of, minlength=counts.size + 1)[: counts.size]
    before = np.diff(ranks, prepend=-1) - 1
    firsts, starts = np.cumsum(counts) - counts, np.cumsum(sizes) - sizes
    before[firsts] = ranks[firsts] - starts
    return before.astype(np.uint32)


def locate(
    old: Bits, gaps: NDArray[np.uint32], buckets: NDArray[np.uint16], counts: NDArray[np.int64], layout: Layout
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The inverse: positions, increasing, and for each its index in `gaps`. Fewer when gaps leave their bucket."""
    bucket_of = buckets[exponent_class(old, layout)]
    order = np.argsort(bucket_of, kind="stable")
    sizes = np.bincount(bucket_of, minlength=counts.size + 1)[: counts.size]
    ends = np.cumsum(gaps.astype(np.int64) + 1)
    firsts, starts = np.cumsum(counts) - counts, np.cumsum(sizes) - sizes
    done = np.where(firsts > 0, ends[firsts - 1], 0)  # what earlier buckets added to the running sum
    ranks = ends - 1 - np.repeat(done, counts)
    inside: NDArray[Any] = ranks < np.repeat(sizes, counts)
    found = order[(np.repeat(starts, counts) + ranks)[inside]]
    by_position = np.argsort(found)
    return found[by_position].astype(np.uint32), np.flatnonzero(inside)[by_position].astype(np.uint32)
