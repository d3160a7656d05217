"""Block-scaled fp8 from the served bfloat16 copy.

Scales must be a function of the bfloat16 weights. Computed from float32 masters they change in every block at every
step, and with them what the codes mean, although hardly a weight has moved: a delta would carry all scales, and
trainer and engine would disagree. Computed from the copy, a block changes only when one of its bfloat16 weights does.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import SyncError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CODE = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = np.float32(448)  # of e4m3 without infinities


def quantise_fp8_blocks(
    weight_RC: NDArray[Any], block: int = 128, *, tensor: str = ""
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """e4m3 codes (R, C) and float32 scales (ceil(R / block), ceil(C / block)); weight is about code * scale.

    A block's scale is its largest magnitude / 448, in float32; 1 for a block of zeros. Codes round to nearest even.
    Raises SyncError for anything but a finite two-dimensional bfloat16 array.
    """
    if weight_RC.dtype != _BFLOAT16:
        raise SyncError(
            f"tensor {tensor!r} is {weight_RC.dtype.name}: fp8 is made from the served bfloat16 copy, "
            "or every scale would change with every step"
        )
    if weight_RC.ndim != 2 or block < 1:
        raise SyncError(f"tensor {tensor!r} of shape {weight_RC.shape} has no blocks of {block} x {block}")
    rows, columns = weight_RC.shape
    blocks_r, blocks_c = -(-rows // block), -(-columns // block)
    padded = np.zeros((blocks_r * block, blocks_c * block), np.float32)
    padded[:rows, :columns] = weight_RC
    tiles = padded.reshape(blocks_r, block, blocks_c, block)
    peak = np.abs(tiles).max(axis=(1, 3), initial=0.0)
    if not np.isfinite(peak).all():
        raise SyncError(f"tensor {tensor!r} holds NaN or infinity")
    # A block of the smallest denormals would have a scale of 0 or too coarse a one: floor at the smallest normal.
    scales = np.where(peak > 0, np.maximum(peak / _LARGEST, np.finfo(np.float32).tiny), np.float32(1))
    scaled = np.clip(tiles / scales[:, None, :, None], -_LARGEST, _LARGEST)
    codes = scaled.reshape(padded.shape)[:rows, :columns].astype(_CODE)
    return codes, scales.astype(np.float32)
