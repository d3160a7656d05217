"""Bit patterns of each dtype: unsigned views, exponent classes, and a map under which neighbouring values differ by 1.

Everything here works on bits, never on values, so NaN payloads, -0.0 and denormals are patterns like any other.
All arithmetic is modulo 2^width of unsigned integers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SyncError, did_you_mean

Bits = NDArray[Any]
"""1-D array of uint8, uint16, uint32 or uint64."""

_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the bits of one dtype are used."""

    width_bytes: int
    shift: int = 0
    """Lowest bit of the exponent."""
    classes: int = 1
    """Number of exponent classes, a power of two; 1 where there is no exponent."""
    sign_magnitude: bool = False
    """The top bit is a sign and the rest a magnitude (floats), not two's complement or unsigned (integers)."""

    @property
    def unsigned(self) -> np.dtype[Any]:
        """dtype of the bits."""
        return _UNSIGNED[self.width_bytes]


def _float(width_bytes: int, exponent_bits: int) -> Layout:
    shift = 8 * width_bytes - 1 - exponent_bits
    return Layout(width_bytes=width_bytes, shift=shift, classes=1 << exponent_bits, sign_magnitude=True)


LAYOUTS: dict[str, Layout] = {
    "BF16": _float(2, 8),
    "F16": _float(2, 5),
    "F32": _float(4, 8),
    "F8_E4M3": _float(1, 4),
    "F8_E5M2": _float(1, 5),
    **{name: Layout(width_bytes=1) for name in ("F8_E8M0", "U8", "I8", "BOOL")},
    **{name: Layout(width_bytes=2) for name in ("U16", "I16")},
    **{name: Layout(width_bytes=4) for name in ("U32", "I32")},
    **{name: Layout(width_bytes=8) for name in ("U64", "I64", "F64", "C64")},
}
"""By safetensors name. Codes of less than a byte travel packed, as U8."""


def layout_of(dtype: str, tensor: str) -> Layout:
    """Layout of a safetensors dtype name; `tensor` names the owner in the SyncError for an unknown one."""
    layout = LAYOUTS.get(dtype)
    if layout is None:
        raise SyncError(f"tensor {tensor!r} has dtype {dtype!r}: {did_you_mean(dtype, LAYOUTS)}")
    return layout


def as_bits(array: NDArray[Any], dtype: str, tensor: str) -> Bits:
    """The same memory as flat unsigned integers of the dtype's width.

    Raises SyncError when the array is not C-contiguous, not little-endian, or of another width than `dtype` says.
    """
    layout = layout_of(dtype, tensor)
    if array.dtype.itemsize != layout.width_bytes:
        raise SyncError(
            f"tensor {tensor!r} is said to be {dtype} ({layout.width_bytes} bytes an element) "
            f"but its array is {array.dtype.name} ({array.dtype.itemsize})"
        )
    big = array.dtype.byteorder == ">" or (sys.byteorder == "big" and array.dtype.byteorder in "=|")
    if big and layout.width_bytes > 1:
        raise SyncError(f"tensor {tensor!r} is big-endian; a version holds little-endian bytes only")
    if not array.flags.c_contiguous:
        raise SyncError(f"tensor {tensor!r} is not contiguous; its bytes would not be its values")
    return array.reshape(-1).view(layout.unsigned)


def exponent_class(bits: Bits, layout: Layout) -> Bits:
    """Class of each element, 0 to classes - 1: the exponent, without the sign."""
    kind = bits.dtype.type
    classes: Bits = (bits >> kind(layout.shift)) & kind(layout.classes - 1)
    return classes


def ordered(bits: Bits, layout: Layout) -> Bits:
    """Bits as two's complement integers that rise with the value; its own inverse.

    Negative magnitudes are inverted, so -0.0 is -1, next to +0.0, and NaNs lie beyond the infinities: a bijection on
    all patterns, hence no step between two patterns needs a special case, only a long one a longer code.
    """
    if not layout.sign_magnitude:
        return bits
    kind, top = bits.dtype.type, 8 * layout.width_bytes - 1
    number: Bits = bits ^ (np.negative(bits >> kind(top)) & kind((1 << top) - 1))
    return number


def zigzag(old: Bits, new: Bits, layout: Layout) -> Bits:
    """Steps from old to new in ordered space, folded: -1, 1, -2, 2 are 1, 2, 3, 4. 0 only where nothing changed."""
    step = ordered(new, layout) - ordered(old, layout)
    kind, top = step.dtype.type, 8 * layout.width_bytes - 1
    folded: Bits = (step << kind(1)) ^ np.negative(step >> kind(top))
    return folded


def unzigzag(old: Bits, folded: Bits, layout: Layout) -> Bits:
    """New bits from old ones and folded steps: the inverse of `zigzag`."""
    kind = folded.dtype.type
    step = (folded >> kind(1)) ^ np.negative(folded & kind(1))
    return ordered(ordered(old, layout) + step, layout)


def rotated(bits: Bits, layout: Layout) -> Bits:
    """The sign moved to the lowest bit, so that the highest byte plane of a bfloat16 or float32 is its exponent."""
    if not layout.sign_magnitude:
        return bits
    kind, top = bits.dtype.type, 8 * layout.width_bytes - 1
    moved: Bits = (bits << kind(1)) | (bits >> kind(top))
    return moved


def unrotated(bits: Bits, layout: Layout) -> Bits:
    """The inverse of `rotated`."""
    if not layout.sign_magnitude:
        return bits
    kind, top = bits.dtype.type, 8 * layout.width_bytes - 1
    moved: Bits = (bits >> kind(1)) | (bits << kind(top))
    return moved


def planes(bits: Bits) -> list[NDArray[np.uint8]]:
    """Byte planes, lowest byte first; exponents compress when they are not mixed with mantissas."""
    table = bits.view(np.uint8).reshape(bits.size, bits.dtype.itemsize)
    return [np.ascontiguousarray(table[:, i]) for i in range(bits.dtype.itemsize)]


def from_planes(parts: list[NDArray[np.uint8]], layout: Layout) -> Bits:
    """The inverse of `planes`."""
    table = np.empty((parts[0].size, layout.width_bytes), np.uint8)
    for i, part in enumerate(parts):
        table[:, i] = part
    return table.reshape(-1).view(layout.unsigned)
