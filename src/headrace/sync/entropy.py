"""How small a delta can be: bounds of three models, and the numbers that explain them.

For N elements of which k changed (p = k / N) and H2 the binary entropy, all in bits with empirical frequencies:
L0 = N H2(p) + k H(old XOR new); L1 = N H2(p) + k H(step), a step being the signed distance in ordered-integer space;
L2 = sum over exponent classes e of the old value of N_e H2(k_e / N_e) + k_e H(step | e). The receiver knows e. Each is
the bound of that model only: a receiver that remembers more than the old weights could go lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.bits import Bits, Layout, as_bits, exponent_class, layout_of, zigzag

_BLOCK_ELEMS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaStats:
    """What changed in a tensor, and how many bytes saying so takes at least."""

    elems: int
    changed: int
    density_frac: float
    """changed / elems; 0 for an empty tensor."""
    l0_bytes: float
    """Independent positions, XOR values."""
    l1_bytes: float
    """Independent positions, steps."""
    l2_bytes: float
    """Positions and steps given the old exponent: what `ctx` aims at."""
    step_histogram: tuple[int, ...]
    """Entry i counts changes by 2^i to 2^(i+1) - 1 steps, either way."""

    def ratio_to_limit_frac(self, actual_bytes: int) -> float:
        """l2_bytes over the bytes really used; 1 is perfect, and also when both are 0."""
        return self.l2_bytes / actual_bytes if actual_bytes else 1.0


def place_bits(elems: float, changed: float) -> float:
    """elems * H2(changed / elems): what it takes to say which ones changed."""
    if not 0 < changed < elems:
        return 0.0
    rest = elems - changed
    return changed * math.log2(elems / changed) + rest * math.log2(elems / rest)


def symbol_bits(counts: NDArray[Any]) -> float:
    """Total bits of symbols that occur so often, at their empirical entropy."""
    counts = counts[counts > 0].astype(np.float64)
    return float((counts * np.log2(counts.sum() / counts)).sum()) if counts.size > 1 else 0.0


def stats(old: NDArray[Any], new: NDArray[Any], dtype: str, *, tensor: str = "") -> DeltaStats:
    """Density, bounds and step sizes of old -> new, two contiguous arrays of equal size and safetensors dtype `dtype`.

    Raises SyncError when sizes or dtypes do not fit.
    """
    layout = layout_of(dtype, tensor)
    before, after = as_bits(old, dtype, tensor), as_bits(new, dtype, tensor)
    if before.size != after.size:
        raise SyncError(f"tensor {tensor!r} has {before.size} old elements and {after.size} new ones")
    class_elems = np.zeros(layout.classes, np.int64)
    olds, news = [before[:0]], [after[:0]]
    for start in range(0, before.size, _BLOCK_ELEMS):
        left, right = before[start : start + _BLOCK_ELEMS], after[start : start + _BLOCK_ELEMS]
        class_elems += np.bincount(exponent_class(left, layout), minlength=layout.classes)
        at = np.flatnonzero(left != right)
        olds.append(left[at])
        news.append(right[at])
    return _summary(class_elems, np.concatenate(olds), np.concatenate(news), layout)


def _summary(class_elems: NDArray[np.int64], old: Bits, new: Bits, layout: Layout) -> DeltaStats:
    elems, changed = int(class_elems.sum()), old.size
    steps = zigzag(old, new, layout)
    classes = exponent_class(old, layout)
    class_changed = np.bincount(classes, minlength=layout.classes)
    places = place_bits(elems, changed)
    l2_bits = sum(place_bits(int(n), int(k)) for n, k in zip(class_elems, class_changed, strict=True))
    for e in np.flatnonzero(class_changed):
        l2_bits += symbol_bits(np.unique_counts(steps[classes == e]).counts)
    sizes = (steps >> steps.dtype.type(1)) + (steps & steps.dtype.type(1))
    octaves = np.bincount(np.frexp(sizes.astype(np.float64))[1] - 1) if changed else np.zeros(0, np.int64)
    return DeltaStats(
        elems=elems,
        changed=changed,
        density_frac=changed / elems if elems else 0.0,
        l0_bytes=(places + symbol_bits(np.unique_counts(old ^ new).counts)) / 8,
        l1_bytes=(places + symbol_bits(np.unique_counts(steps).counts)) / 8,
        l2_bytes=l2_bits / 8,
        step_histogram=tuple(int(count) for count in octaves),
    )
