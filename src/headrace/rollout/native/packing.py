"""oneDNN's prepacked weights, written element by element.

Packing only moves elements, in a way that depends on the shape alone. Two packed matrices whose elements spell out
their own numbers show where each one goes. Letters: O output features, H hidden.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PACK_ROWS = 64
"""Batch size that the packed layout is chosen for; measured: layouts for 1 to 256 are equally fast at 64."""


def pack(weight_OH: torch.Tensor) -> torch.Tensor:
    """A bfloat16 matrix in the layout that decodes fastest."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OH.contiguous(), PACK_ROWS)
    return packed


def write_packed(packed: torch.Tensor, where: NDArray[np.int64] | slice, bits: NDArray[np.uint16]) -> torch.Tensor:
    """Set elements (numbered as in the dense matrix) of a packed one; returns it, or a new one where it cannot be
    written to in place."""
    places = places_of(*packed.shape)
    if places is not None:
        _memory(packed)[places[where]] = bits
        return packed
    dense = packed.to_dense()
    dense.view(-1).view(torch.int16).numpy().view(np.uint16)[where] = bits
    return pack(dense)


@lru_cache(maxsize=64)
def places_of(outputs: int, hidden: int) -> NDArray[np.int64] | None:
    """Where each element of a dense [O, H] matrix lies in the packed one; None when that cannot be found out."""
    if not hasattr(torch.ops.mkldnn, "data_ptr") or not hasattr(torch.ops.mkldnn, "_nbytes"):
        return None
    count = outputs * hidden
    numbers = np.arange(1, count + 1, dtype=np.uint32)
    low, high = (pack(_spelled(part, outputs, hidden)) for part in (numbers & 0xFFFF, numbers >> 16))
    found = _memory(low).astype(np.uint32) | (_memory(high).astype(np.uint32) << 16)
    at = np.flatnonzero(found)  # the rest is padding
    if at.size != count or not np.array_equal(np.sort(found[at]), numbers):
        return None
    places = np.empty(count, np.int64)
    places[found[at] - 1] = at
    return places


def _spelled(numbers: NDArray[Any], outputs: int, hidden: int) -> torch.Tensor:
    bits = numbers.astype(np.uint16).view(np.int16).reshape(outputs, hidden)
    return torch.from_numpy(bits).view(torch.bfloat16)


def _memory(packed: torch.Tensor) -> NDArray[np.uint16]:
    """The memory of a packed matrix, writable; valid as long as it lives."""
    ops: Any = torch.ops.mkldnn
    size = int(ops._nbytes(packed)) // 2
    return np.ctypeslib.as_array((ctypes.c_uint16 * size).from_address(int(ops.data_ptr(packed))))
