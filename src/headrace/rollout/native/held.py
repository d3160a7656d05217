"""The served weights as plain host arrays by name, which deltas are applied to; what is derived follows by element.

On a CPU an unpacked tensor *is* its array. Prepacked linears, the float32 head and weights on an accelerator are
written at exactly the elements that changed: packing is a fixed permutation, so nothing is packed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.rollout.native.loading import to_tensor
from headrace.sync.staging import Patch


class Derived(Protocol):
    """Something that holds copies of a tensor's elements."""

    def write(self, where: NDArray[np.int64] | slice, values: NDArray[Any]) -> None:
        """Elements `where` of the tensor are now `values` (the served dtype)."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Elements of a dense tensor, from `start` on; converted to its dtype and moved to its device."""

    tensor: torch.Tensor
    start: int = 0

    def write(self, where: NDArray[np.int64] | slice, values: NDArray[Any]) -> None:
        flat = self.tensor.view(-1)
        new = to_tensor(np.ascontiguousarray(values)).to(self.tensor.device, self.tensor.dtype)
        if isinstance(where, slice):
            flat[self.start + where.start : self.start + where.stop] = new
        else:
            flat[torch.from_numpy(where + self.start).to(self.tensor.device)] = new


class Held:
    """Implements `rollout.delivery.ServedTarget`. The core only lands versions between two steps: no pausing here."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], derived: Mapping[str, Sequence[Derived]]) -> None:
        self._arrays = dict(arrays)
        self._derived = derived
        self._patches: Sequence[Patch] = ()

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        return self._arrays

    def pause(self) -> None:
        return None

    def resume(self) -> None:
        return None

    def expect(self, patches: Sequence[Patch]) -> None:
        """These are about to be applied; kept, because they may also be taken back."""
        self._patches = patches

    @torch.inference_mode()
    def changed(self, names: frozenset[str]) -> None:
        for patch in self._patches:
            if patch.tensor not in names:
                continue
            where: NDArray[np.int64] | slice = slice(patch.start, patch.start + patch.elems)
            if patch.where is not None:
                where = patch.where.astype(np.int64) + patch.start
            values = self._arrays[patch.tensor].reshape(-1)[where]
            for part in self._derived.get(patch.tensor, ()):
                part.write(where, values)
