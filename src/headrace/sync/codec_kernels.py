"""The three passes over a chunk's weights, compiled by numba. `codec_fallback` says what they return.

Written for one core each, without the GIL: chunks are the unit of parallel work.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.sync.bits import Bits, Layout

numba: Any = import_module("numba") if find_spec("numba") is not None else None

_NEVER = np.uint32(0xFFFFFFFF)  # more than the elements of a chunk
_ONE = np.uint32(1)
_WORD_BYTES = 8


def _kernel(function: Callable[..., Any]) -> Any:
    return function if numba is None else numba.njit(nogil=True, error_model="numpy", cache=True)(function)


def _changed_(old, new, old_words, new_words, per_word, positions):  # type: ignore[no-untyped-def]
    found = np.int64(0)
    for word in range(old_words.size):
        if old_words[word] != new_words[word]:
            for i in range(word * per_word, (word + 1) * per_word):
                positions[found] = i  # overwritten unless it counts: cheaper than a branch
                found += np.int64(old[i] != new[i])
    for i in range(old_words.size * per_word, old.size):
        positions[found] = i
        found += np.int64(old[i] != new[i])
    return found


def _gaps_(old, positions, buckets, shift, mask, fill, out):  # type: ignore[no-untyped-def]
    seen = np.zeros(fill.size, np.uint32)  # of each bucket since its last change
    done = 0
    for position in positions:
        for i in range(done, position):
            seen[buckets[(old[i] >> shift) & mask]] += _ONE
        bucket = buckets[(old[position] >> shift) & mask]
        out[fill[bucket]] = seen[bucket]
        fill[bucket] += 1
        seen[bucket] = 0
        done = position + 1


def _locate_(old, gaps, buckets, shift, mask, fill, ends, positions, indices):  # type: ignore[no-untyped-def]
    left = np.full(fill.size, _NEVER, np.uint32)  # of each bucket until its next change
    for bucket in range(ends.size):
        left[bucket] = gaps[fill[bucket]]
    found = 0
    for i in range(old.size):
        bucket = buckets[(old[i] >> shift) & mask]
        until = left[bucket]
        left[bucket] = until - _ONE
        if until == 0:
            at = fill[bucket]
            positions[found], indices[found] = i, at
            found += 1
            fill[bucket] = at + 1
            left[bucket] = gaps[at + 1] if at + 1 < ends[bucket] else _NEVER
    return found


_changed, _gaps, _locate = _kernel(_changed_), _kernel(_gaps_), _kernel(_locate_)


def changed_positions(old: Bits, new: Bits) -> NDArray[np.uint32]:
    """See `codec_fallback.changed_positions`. Most words of 8 bytes are equal and cost one comparison."""
    positions = np.empty(old.size + 1, np.uint32)
    per_word = _WORD_BYTES // old.itemsize
    words = [bits[: bits.size // per_word * per_word].view(np.uint64) for bits in (old, new)]
    if not all(part.flags.aligned for part in words):
        words = [np.zeros(0, np.uint64)] * 2  # numba would compile anew
    found = _changed(_fixed(old), _fixed(new), *(_fixed(part) for part in words), per_word, positions)
    return positions[:found].copy()


def bucket_gaps(
    old: Bits, positions: NDArray[np.uint32], buckets: NDArray[np.uint16], counts: NDArray[np.int64], layout: Layout
) -> NDArray[np.uint32]:
    """See `codec_fallback.bucket_gaps`."""
    out = np.empty(positions.size, np.uint32)
    _gaps(_fixed(old), positions, buckets, *_field(old, layout), _firsts(counts), out)
    return out


def locate(
    old: Bits, gaps: NDArray[np.uint32], buckets: NDArray[np.uint16], counts: NDArray[np.int64], layout: Layout
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """See `codec_fallback.locate`."""
    positions, indices = np.empty(gaps.size, np.uint32), np.empty(gaps.size, np.uint32)
    ends = np.cumsum(counts)
    found = _locate(_fixed(old), gaps, buckets, *_field(old, layout), _firsts(counts), ends, positions, indices)
    return positions[:found], indices[:found]


def _fixed(bits: Bits) -> Bits:
    """A read-only view: numba compiles anew for arrays that are read-only, so all of them are."""
    view = bits.view()
    view.flags.writeable = False
    return view


def _field(old: Bits, layout: Layout) -> tuple[Any, Any]:
    """Shift and mask of the exponent in the dtype of the bits."""
    return old.dtype.type(layout.shift), old.dtype.type(layout.classes - 1)


def _firsts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each bucket begins, and one place more for elements of no bucket."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
