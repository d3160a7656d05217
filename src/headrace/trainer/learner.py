"""The Learner seam: something that holds master weights and takes optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardReport:
    """Every number is a mean over the trained tokens unless named otherwise."""

    loss: float
    trained_tok: int
    forward_tok: int
    """Tokens that went through the model (shared prompts once, padding included)."""
    micro_batches: int
    busy_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Flat names as in docs/metrics.md: entropy, kl_infer_train/k1, kl_infer_train/k3, ess/token_raw, ratio/p99,
    clip_frac/low, clip_frac/high, mask_frac/token, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimReport:
    """One optimizer step."""

    step: int
    """Completed optimizer steps, this one included."""
    lr: float
    grad_norm: float
    """Before clipping."""
    busy_s: float


class Learner(Protocol):
    """`tests/contracts/learner_contract.py` checks any implementation."""

    def forward_backward(self, batch: Batch) -> ForwardBackwardReport:
        """Add the batch's gradients. NonFiniteError names the sample and leaves weights and optimizer untouched."""
        ...

    def optim_step(self) -> OptimReport:
        """Clip, step, clear gradients. NonFiniteError if the gradient norm is not finite; then nothing changed."""
        ...

    def named_arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """The weights to serve, in serving dtype (ml_dtypes for bfloat16), with Hugging Face names; LoRA is merged."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that a bit-exact resume needs into an existing empty folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; DataError when it does not fit this learner's model or settings."""
        ...


LossOutput = tuple[Any, Mapping[str, Any]]
