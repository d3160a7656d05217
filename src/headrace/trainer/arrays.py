"""Weights between PyTorch and NumPy, without copies on a CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_array(weight: Tensor) -> NDArray[np.generic]:
    """A C-contiguous NumPy view (or copy) of a tensor; bfloat16 through ml_dtypes."""
    weight = weight.detach().cpu().contiguous()
    if weight.dtype == torch.bfloat16:
        bits: NDArray[np.generic] = weight.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return bits
    array: NDArray[np.generic] = weight.numpy()
    return array


def to_tensor(array: NDArray[np.generic]) -> Tensor:
    """A CPU tensor on a writable array's memory; bfloat16 through ml_dtypes."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
