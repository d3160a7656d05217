"""Logits in float32. Letters: B rows, H hidden, V vocabulary.

Both sides of a run (engine and learner) compute logits this way: operands are exact in the compute dtype, products
are summed in float32, and the sum is not rounded back. A one-sided float32 head makes the mismatch worse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def head_weight(weight_VH: torch.Tensor) -> torch.Tensor:
    """The head's weight as `logits_fp32` wants it: float32 on the CPU, else unchanged [V, H]."""
    return weight_VH.float().contiguous() if weight_VH.device.type == "cpu" else weight_VH


def logits_fp32(hidden_BH: torch.Tensor, weight_VH: torch.Tensor, *, exact_inputs: bool) -> torch.Tensor:
    """hidden @ weight.T as float32 [B, V].

    `exact_inputs` says that both operands are bfloat16 values (whatever their dtype); then the CPU may multiply in
    bfloat16 and sum in float32, which loses nothing. Weights of another dtype than hidden's are converted.
    """
    if hidden_BH.device.type == "cuda" and hidden_BH.dtype == weight_VH.dtype != torch.float32:
        return torch.mm(hidden_BH, weight_VH.t(), out_dtype=torch.float32)
    hidden, weight = hidden_BH.float(), weight_VH.float()
    setting: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch >= 2.9
    if hidden.device.type != "cpu" or not exact_inputs or setting is None:
        return F.linear(hidden, weight)
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        return F.linear(hidden, weight)
    finally:
        setting.fp32_precision = before
