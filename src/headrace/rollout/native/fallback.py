"""Any causal LM through transformers' own forward: correct, not fast. One request at a time, no shared prefixes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from headrace.rollout.native.held import Held, Place
from headrace.rollout.native.loading import infos_of, named_tensors, to_array, to_tensor
from headrace.sync.manifest import TensorInfo


class Fallback:
    """Implements `backend.Backend` with one DynamicCache a row."""

    can_share = False

    def __init__(self, model: Any, *, device: str) -> None:
        self._model = model.to(device)
        self._device = device
        self._caches: dict[int, Any] = {}
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.x
        self.infos: tuple[TensorInfo, ...] = infos_of(named_tensors(model))
        self.vocab: int = model.get_output_embeddings().weight.shape[0]

    def prefill(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, ids, strict=True):
            self._caches[row] = DynamicCache()
            if prompt:
                self._forward(row, prompt, 0)

    def copy_row(self, src: int, dst: int, n_tok: int) -> None:
        """Hands the cache over: the scheduler moves rows here, but never shares them (see `can_share`)."""
        self._caches[dst] = self._caches.pop(src)

    def decode(self, ids_B: Sequence[int], position_B: Sequence[int]) -> torch.Tensor:
        return torch.stack(
            [self._forward(row, [i], p) for row, (i, p) in enumerate(zip(ids_B, position_B, strict=True))]
        )

    def _forward(self, row: int, ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits after the last of `ids`, float32 [V]; the row's cache takes them in."""
        positions = torch.arange(start, start + len(ids), device=self._device)[None]
        out = self._model(
            input_ids=torch.tensor([list(ids)], device=self._device),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._caches[row]},
        )
        logits_V: torch.Tensor = out.logits[0, -1].float()
        return logits_V

    def stage(self, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        return {name: to_tensor(array) for name, array in arrays.items()}

    def held(self) -> Held:
        named = named_tensors(self._model)
        off_host = {name: [Place(tensor)] for name, tensor in named.items() if tensor.device.type != "cpu"}
        return Held({name: to_array(tensor) for name, tensor in named.items()}, off_host)

    def swap(self, staged: dict[str, torch.Tensor], infos: tuple[TensorInfo, ...]) -> None:
        for name, tensor in named_tensors(self._model).items():
            tensor.copy_(staged[name])
        self.infos = infos
