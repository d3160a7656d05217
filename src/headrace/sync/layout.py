"""Where tensors lie in a safetensors file, and which NumPy dtype each of the format's names is.

Format: 8 bytes little-endian header length, JSON header, raw tensors. Files are mapped, not read (the safetensors
package offers bfloat16 to NumPy as copied bytes only), hence the few lines that read the header here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import SyncError, boundary
from headrace.sync.bits import LAYOUTS, Bits
from headrace.sync.version import TensorSpec, item_bytes

LENGTH_BYTES = 8
ARRAY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "BOOL": np.dtype(np.bool_), "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16), "U32": np.dtype(np.uint32), "I32": np.dtype(np.int32), "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
}  # fmt: skip


def read_layout(data: NDArray[np.uint8], where: str) -> dict[str, tuple[TensorSpec, Bits]]:
    """Tensors of a safetensors file as specs and flat bits, views of `data`. Raises SyncError on anything odd."""
    with boundary(SyncError, f"{where} is no valid safetensors file"):
        header, start = _header(data)
        header.pop("__metadata__", None)
        found = {}
        for name, about in header.items():
            spec = TensorSpec(name=name, dtype=about["dtype"], shape=tuple(about["shape"]))
            begin, end = about["data_offsets"]
            if end - begin != spec.elems * item_bytes(spec.dtype) or start + end > data.size or begin < 0:
                raise ValueError(f"tensor {name!r} lies at bytes {begin} to {end} of {data.size - start}")
            found[name] = (spec, data[start + begin : start + end].view(LAYOUTS[spec.dtype].unsigned))
        return found


def read_metadata(data: NDArray[np.uint8], where: str) -> dict[str, str]:
    """What the writer noted beside the tensors. Raises SyncError on anything odd."""
    with boundary(SyncError, f"{where} is no valid safetensors file"):
        return dict(_header(data)[0].get("__metadata__", {}))


def array_of(spec: TensorSpec, bits: Bits) -> NDArray[Any]:
    """Flat bits as an array of the tensor's dtype and shape, without a copy."""
    array: NDArray[Any] = bits.view(ARRAY_DTYPES[spec.dtype]).reshape(spec.shape)
    return array


def _header(data: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    length = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    start = LENGTH_BYTES + length
    if start > data.size:
        raise ValueError(f"cut off: its header has {length} bytes, the file {data.size}")
    return dict(json.loads(data[LENGTH_BYTES:start].tobytes())), start
