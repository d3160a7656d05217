"""Model folder to named tensors, and between torch and NumPy without losing bfloat16."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from headrace.errors import DataError, boundary
from headrace.sync.manifest import TensorInfo
from headrace.sync.publish import tensor_info


def load_config(model_dir: str) -> Any:
    """The model's transformers config. Raises DataError."""
    with boundary(DataError, f"reading the model config in {model_dir}"):
        return AutoConfig.from_pretrained(model_dir)


def load_model(model_dir: str, dtype: torch.dtype) -> Any:
    """The model on the CPU in evaluation mode. Raises DataError."""
    progress: Any = transformers_logging
    progress.disable_progress_bar()
    with boundary(DataError, f"loading the model in {model_dir}"):
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        return model.eval()


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's state_dict, each storage once: a tied head appears under the embedding's name only."""
    seen: set[tuple[int, torch.Size]] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.is_floating_point() and key not in seen:
            seen.add(key)
            tensors[name] = tensor.detach()
    return tensors


def to_array(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A C-contiguous NumPy array; shares memory with contiguous CPU tensors."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        array: NDArray[np.generic] = tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return array
    return tensor.numpy()


def to_tensor(array: NDArray[np.generic]) -> torch.Tensor:
    """A CPU tensor that shares memory with the array; read it only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def infos_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorInfo, ...]:
    """Identities of the tensors, sorted by name, as `sync` computes them."""
    return tuple(tensor_info(name, to_array(tensors[name])) for name in sorted(tensors))


def end_ids(model_dir: str, config: Any) -> frozenset[int]:
    """Token ids that end a completion: eos_token_id of generation_config.json and of the config."""
    found: set[int] = set()
    path = Path(model_dir) / "generation_config.json"
    sources = [config.eos_token_id]
    if path.is_file():
        with boundary(DataError, f"reading {path}"):
            sources.append(json.loads(path.read_text()).get("eos_token_id"))
    for value in sources:
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(int(i) for i in found)
