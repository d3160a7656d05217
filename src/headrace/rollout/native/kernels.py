"""One-pass bfloat16 kernels for the CPU (numba): norm, and rotation + KV write.

A decode step streams all weights through the caches, so each of PyTorch's operators starts with its code and data
evicted (about 30 us instead of 4); one call for a whole block avoids that: 15 to 25 us for a norm of 64 rows instead
of 130. bfloat16 travels as uint16 bits; arithmetic is float32. A row's result depends on that row only.

Optional: without numba, for other dtypes and on other devices, `decoder.py` uses PyTorch's operators.
Letters: N tokens, H features, A all heads of the fused projection, K key heads (as many value heads), D head width,
R cache rows, C context capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

numba: Any = import_module("numba") if find_spec("numba") is not None else None

_F32, _U32, _U16 = np.float32, np.uint32, np.uint16


def usable(dtype: torch.dtype, device: str) -> bool:
    """The kernels can serve a model of that dtype on that device."""
    return numba is not None and dtype == torch.bfloat16 and device == "cpu"


def bits(tensor: torch.Tensor) -> Any:
    """bfloat16 tensor as a uint16 array over the same memory."""
    return tensor.view(torch.uint16).numpy()


def warm_up(width: int, heads: int, kv_heads: int) -> None:
    """Compile (or load from numba's cache) before the first request waits for it."""
    x = torch.zeros(1, heads + 2 * kv_heads, width, dtype=torch.bfloat16)
    angle_CD, place_N = np.zeros((1, width // 2), np.float32), np.zeros(1, np.int64)
    rotate_store(x, angle_CD, angle_CD, place_N, place_N, bits(x.new_zeros(1, 2 * kv_heads, 1, width)))
    rms_norm(x[0], bits(x[0, 0]), 1.0)


def _inline(function: Callable[..., Any]) -> Any:
    return function if numba is None else numba.njit(inline="always")(function)


def _kernel(function: Callable[..., Any]) -> Any:
    """Not parallel: numba's threads and PyTorch's share one OpenMP pool and disturb each other, and a norm of 64 rows
    takes less time than waking a thread. Division by zero gives infinity: checks would forbid vector instructions."""
    flags = {"contract", "reassoc", "nsz", "arcp"}  # not nnan or ninf: what is not finite must stay so
    return function if numba is None else numba.njit(fastmath=flags, error_model="numpy", cache=True)(function)


def _widen_(half):  # type: ignore[no-untyped-def]
    return _U32(_U32(half) << _U32(16)).view(_F32)


def _round_(value):  # type: ignore[no-untyped-def]
    """To nearest even; NaN stays NaN."""
    word = _F32(value).view(_U32)
    if value != value:
        return _U16(0x7FC0)
    return _U16((word + _U32(0x7FFF) + ((word >> _U32(16)) & _U32(1))) >> _U32(16))


_widen, _round = _inline(_widen_), _inline(_round_)


def _norm_(x, weight, eps, out):  # type: ignore[no-untyped-def]
    features = x.shape[1]
    for n in range(x.shape[0]):
        x_H, out_H = x[n], out[n]
        total = _F32(0.0)
        for h in range(features):
            value = _widen(x_H[h])
            total += value * value
        scale = _F32(1.0) / np.sqrt(total / _F32(features) + eps)
        for h in range(features):
            out_H[h] = _round(_widen(_round(_widen(x_H[h]) * scale)) * _widen(weight[h]))


def _rotate_store_(qkv, cos, sin, row, position, kv):  # type: ignore[no-untyped-def]
    keys, width = kv.shape[1] // 2, kv.shape[3]
    rotated, half = qkv.shape[1] - keys, width // 2
    for n in range(qkv.shape[0]):
        place = position[n]
        cos_D, sin_D = cos[place], sin[place]
        for a in range(rotated):
            x_D = qkv[n, a]
            for d in range(half):
                one, two = _widen(x_D[d]), _widen(x_D[half + d])
                x_D[d] = _round(one * cos_D[d] - two * sin_D[d])
                x_D[half + d] = _round(two * cos_D[d] + one * sin_D[d])
        for k in range(2 * keys):
            x_D, kept_D = qkv[n, rotated - keys + k], kv[row[n], k, place]
            for d in range(width):
                kept_D[d] = x_D[d]


_norm, _rotate_store = _kernel(_norm_), _kernel(_rotate_store_)


def rms_norm(x_NH: torch.Tensor, weight_H: Any, eps: float) -> torch.Tensor:
    """Root-mean-square norm of contiguous bfloat16 rows; `weight_H` as `bits`."""
    out_NH = torch.empty_like(x_NH)
    _norm(bits(x_NH), weight_H, _F32(eps), bits(out_NH))
    return out_NH


def rotate_store(qkv_NAD: torch.Tensor, cos_CD: Any, sin_CD: Any, row_N: Any, position_N: Any, kv_RKCD: Any) -> None:
    """Rotate query and key heads in place; copy keys and values to the cache's row_N at position_N.

    qkv_NAD is contiguous bfloat16, cos and sin float32 arrays [C, D/2], kv_RKCD is `bits` of a layer's cache
    [R, 2K, C, D], row and position int64 arrays.
    """
    _rotate_store(bits(qkv_NAD), cos_CD, sin_CD, row_N, position_N, kv_RKCD)
