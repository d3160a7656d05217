"""One-pass bfloat16 kernels for CPUs (numba): norm, rotation, gated activation, forward and backward.

On a CPU these blocks are bound by passes over memory and by conversions, not by arithmetic: PyTorch's operators need
5 to 12 passes where one will do (the backward pass of the gated activation is about 10 times as fast here).
bfloat16 numbers travel as uint16 bits; arithmetic is float32, rounded to nearest even where transformers rounds.

Optional: without numba, for other dtypes and on other devices, blocks.py uses PyTorch's operators.
Dimension letters: N rows (tokens, or tokens x heads), H features, D half of a head, R ranges of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    import numba as _numba
except ImportError:  # an optional speed-up
    _numba = None  # type: ignore[assignment]
numba: Any = _numba

_F32, _U32, _I32, _U16 = np.float32, np.uint32, np.int32, np.uint16


def usable(*tensors: Tensor) -> bool:
    """All tensors are contiguous bfloat16 on the CPU, and numba is there."""
    return numba is not None and all(
        t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


def _inline(function: Callable[..., Any]) -> Any:
    return function if numba is None else numba.njit(inline="always", error_model="numpy")(function)


def _kernel(function: Callable[..., Any]) -> Any:
    flags = {"contract", "reassoc", "nsz", "arcp"}  # not nnan or ninf: what is not finite must stay so
    return (
        function if numba is None else numba.njit(nogil=True, fastmath=flags, error_model="numpy", cache=True)(function)
    )


def _widen_(bits):  # type: ignore[no-untyped-def]
    return _U32(_U32(bits) << _U32(16)).view(_F32)


def _round_(value):  # type: ignore[no-untyped-def]
    bits = _F32(value).view(_U32)
    if value != value:  # NaN: rounding up its bits could make infinity of it
        return _U16(0x7FC0)
    return _U16((bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16))


def _exp_(value):  # type: ignore[no-untyped-def]
    """exp with 2e-7 relative error, vectorisable; arguments are clamped to +-87 (NaN passes through the polynomial)."""
    clamped = min(max(value, _F32(-87.0)), _F32(87.0))
    scaled = clamped * _F32(1.4426950408889634)
    whole = np.floor(scaled + _F32(0.5))
    rest = (scaled - whole) * _F32(0.6931471805599453)
    tail = _F32(0.5) + rest * (_F32(1 / 6) + rest * (_F32(1 / 24) + rest * (_F32(1 / 120) + rest * _F32(1 / 720))))
    power = _I32((_I32(whole) + _I32(127)) << _I32(23)).view(_F32)
    return (_F32(1.0) + rest * (_F32(1.0) + rest * tail)) * power


_widen, _round, _exp = _inline(_widen_), _inline(_round_), _inline(_exp_)


def _swiglu_(low, high, gate, up, out):  # type: ignore[no-untyped-def]
    for n in range(low, high):
        gate_H, up_H, out_H = gate[n], up[n], out[n]
        for h in range(gate_H.shape[0]):
            x = _widen(gate_H[h])
            y = x / (_F32(1.0) + _exp(-x))
            out_H[h] = _round(_widen(_round(y)) * _widen(up_H[h]))


def _swiglu_backward_(low, high, gate, up, grad, dgate, dup):  # type: ignore[no-untyped-def]
    for n in range(low, high):
        gate_H, up_H, grad_H, dgate_H, dup_H = gate[n], up[n], grad[n], dgate[n], dup[n]
        for h in range(gate_H.shape[0]):
            x, g = _widen(gate_H[h]), _widen(grad_H[h])
            s = _F32(1.0) / (_F32(1.0) + _exp(-x))
            y = x * s
            dup_H[h] = _round(y * g)
            dgate_H[h] = _round(g * _widen(up_H[h]) * (s + y * (_F32(1.0) - s)))


def _norm_(low, high, x, weight, eps, out, scale):  # type: ignore[no-untyped-def]
    features = x.shape[1]
    for n in range(low, high):
        x_H, out_H = x[n], out[n]
        total = _F32(0.0)
        for h in range(features):
            value = _widen(x_H[h])
            total += value * value
        r = _F32(1.0) / np.sqrt(total / _F32(features) + eps)
        scale[n] = r
        for h in range(features):
            out_H[h] = _round(_widen(_round(_widen(x_H[h]) * r)) * _widen(weight[h]))


def _norm_backward_(low, high, x, weight, scale, grad, dx, dweight_RH):  # type: ignore[no-untyped-def]
    features = x.shape[1]
    dweight_H = dweight_RH[low * dweight_RH.shape[0] // x.shape[0]]  # a row of its own for each range of rows
    for n in range(low, high):
        x_H, grad_H, dx_H, r = x[n], grad[n], dx[n], scale[n]
        dot = _F32(0.0)
        for h in range(features):
            gn = _widen(grad_H[h]) * _widen(x_H[h]) * r
            dot += gn * _widen(weight[h])
            dweight_H[h] += gn
        dot /= _F32(features)
        for h in range(features):
            dx_H[h] = _round(r * (_widen(grad_H[h]) * _widen(weight[h]) - _widen(x_H[h]) * r * dot))


def _rotate_(low, high, x, cos, sin, sign, out):  # type: ignore[no-untyped-def]
    half = cos.shape[1]
    for n in range(low, high):
        cos_D, sin_D = cos[n], sin[n]
        for a in range(x.shape[1]):
            x_H, out_H = x[n, a], out[n, a]
            for d in range(half):
                one, two, s = _widen(x_H[d]), _widen(x_H[half + d]), sign * sin_D[d]
                out_H[d] = _round(one * cos_D[d] - two * s)
                out_H[half + d] = _round(two * cos_D[d] + one * s)


_swiglu, _swiglu_backward, _rotate = _kernel(_swiglu_), _kernel(_swiglu_backward_), _kernel(_rotate_)
_norm, _norm_backward = _kernel(_norm_), _kernel(_norm_backward_)


def swiglu(gate_NH: Tensor, up_NH: Tensor) -> Tensor:
    """silu(gate) * up; PyTorch's bfloat16 result but for the last bit of exp."""
    out = torch.empty_like(gate_NH)
    _run(_swiglu, len(out), _bits(gate_NH), _bits(up_NH), _bits(out))
    return out


def swiglu_backward(gate_NH: Tensor, up_NH: Tensor, grad_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dgate, dup = torch.empty_like(gate_NH), torch.empty_like(up_NH)
    _run(_swiglu_backward, len(dup), *(_bits(t) for t in (gate_NH, up_NH, grad_NH, dgate, dup)))
    return dgate, dup


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed rows times weight, 1 / rms of each row as float32 [N])."""
    out = torch.empty_like(x_NH)
    scale_N = torch.empty(len(x_NH), dtype=torch.float32)
    _run(_norm, len(out), _bits(x_NH), _bits(weight_H), _F32(eps), _bits(out), scale_N.numpy())
    return out, scale_N


def rms_norm_backward(x_NH: Tensor, weight_H: Tensor, scale_N: Tensor, grad_NH: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of x, float32 gradient of the weight)."""
    dx = torch.empty_like(x_NH)
    dweight_RH = torch.zeros(torch.get_num_threads(), x_NH.shape[1])
    arrays = (_bits(x_NH), _bits(weight_H), scale_N.numpy(), _bits(grad_NH), _bits(dx), dweight_RH.numpy())
    _run(_norm_backward, len(dx), *arrays)
    return dx, dweight_RH.sum(0)


def rotate(x_NAH: Tensor, cos_ND: Tensor, sin_ND: Tensor, *, back: bool) -> Tensor:
    """Rotary embedding of each head (half-split layout), or its transpose. cos and sin are float32."""
    out = torch.empty_like(x_NAH)
    sign = _F32(-1.0 if back else 1.0)
    _run(_rotate, len(out), _bits(x_NAH), cos_ND.numpy(), sin_ND.numpy(), sign, _bits(out))
    return out


def _bits(tensor: Tensor) -> Any:
    """bfloat16 tensor as a uint16 array over the same memory."""
    return tensor.detach().view(torch.uint16).numpy()


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _run(kernel: Any, rows: int, *arrays: Any) -> None:
    """Run a kernel over all rows, on as many threads as PyTorch uses.

    Not numba's own threads: its OpenMP layer shares PyTorch's runtime and changes how many threads PyTorch uses.
    """
    threads = torch.get_num_threads()
    if threads == 1 or rows < threads:
        kernel(0, rows, *arrays)
        return
    # ceiling division, so that range i starts at a row whose share is exactly i (the norm's partial sums rely on it)
    bounds = [-(-rows * i // threads) for i in range(threads + 1)]
    parts = [_pool(threads).submit(kernel, low, high, *arrays) for low, high in pairwise(bounds)]
    for part in parts:
        part.result()
