"""What the scheduler needs from a model.

Letters: B running requests, V vocabulary.
A *row* is a place for one request's KV. Rows 0..B-1 are in use during a decode step. A row that holds n entries has
seen the first n tokens of its request; a decode step feeds token n at position n and yields the logits of token n+1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.rollout.native.held import Held
from headrace.sync.manifest import TensorInfo


class Backend(Protocol):
    """A model's arithmetic. All calls come from one thread."""

    infos: tuple[TensorInfo, ...]
    """Identities of the served tensors, sorted by name."""
    vocab: int
    can_share: bool
    """copy_row may copy, not only move: requests may share a prefix."""

    def prefill(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        """Write the KV of ids[i] (positions 0..len-1) into rows[i]."""
        ...

    def copy_row(self, src: int, dst: int, n_tok: int) -> None:
        """Make the first n_tok entries of row dst equal to those of row src."""
        ...

    def decode(self, ids_B: Sequence[int], position_B: Sequence[int]) -> torch.Tensor:
        """One token for each of the rows 0..B-1; float32 logits [B, V], valid until the next call."""
        ...

    def stage(self, arrays: Mapping[str, NDArray[np.generic]]) -> Any:
        """Weights in the form that `swap` wants; the served ones stay untouched."""
        ...

    def held(self) -> Held:
        """The served weights for deltas to be applied to, in place. A `swap` ends its validity."""
        ...

    def swap(self, staged: Any, infos: tuple[TensorInfo, ...]) -> None:
        """Serve what `stage` returned. KV is left alone."""
        ...
