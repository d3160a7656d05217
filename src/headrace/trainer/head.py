"""Log-prob and entropy of target tokens without ever holding all logits in float32.

Dimension letters: K target tokens, C rows of one chunk, H hidden, V vocabulary.

Logits are float32 (exact products of the bfloat16 hidden state and head) / temperature, as the engine computes them.
They exist for `chunk_tok` rows at once. The backward pass needs the residual (probability minus one-hot target; rounded
to the compute dtype only after the subtraction, so that confident tokens keep their gradient): it is kept while it is
small (`_KEEP_BYTES`), else the chunk's logits are computed again. The gradient of the head's weight is added straight
into the float32 accumulator, so a tied embedding never has a second dense gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.trainer.attention import exact_products

_KEEP_BYTES = 1 << 29
"""Residuals kept for the backward pass."""
_ROWS_IN_CACHE = 16
"""Rows of float32 logits that are reduced at once: 16 x 49152 x 4 bytes stay in the second-level cache."""


def token_logp(
    hidden_KH: Tensor,
    weight_VH: Tensor,
    target_K: Tensor,
    *,
    temperature: float,
    chunk_tok: int,
    grad_VH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target [K] with gradient, entropy in nats [K] without), both float32.

    `grad_VH`: float32 accumulator for the head's gradient, None if the head is frozen.
    """
    logp_K, entropy_K = _TokenLogp.apply(  # type: ignore[no-untyped-call]
        hidden_KH, weight_VH, target_K, temperature, chunk_tok, grad_VH
    )
    return logp_K, entropy_K


class _TokenLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        target_K: Tensor,
        temperature: float,
        chunk_tok: int,
        grad_VH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = len(target_K), weight_VH.shape[0]
        logp_K = torch.empty(rows, dtype=torch.float32, device=hidden_KH.device)
        entropy_K = torch.empty_like(logp_K)
        keep = ctx.needs_input_grad[0] and rows * vocabulary * hidden_KH.element_size() <= _KEEP_BYTES
        kept = hidden_KH.new_empty(rows if keep else 0, vocabulary)
        weight_f32 = weight_VH.float()
        for low in range(0, rows, chunk_tok):
            part = slice(low, low + chunk_tok)
            logits_CV = _logits(hidden_KH[part], weight_f32, temperature)
            _reduce(logits_CV, target_K[part], logp_K[part], entropy_K[part], kept[part] if keep else None)
        ctx.save_for_backward(hidden_KH, weight_VH, target_K, kept)
        ctx.settings = (temperature, chunk_tok, keep, grad_VH)
        ctx.mark_non_differentiable(entropy_K)
        return logp_K, entropy_K

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden_KH, weight_VH, target_K, kept = ctx.saved_tensors
        temperature, chunk_tok, keep, grad_VH = ctx.settings
        upstream_K = grads[0] / temperature
        dhidden_KH = torch.empty_like(hidden_KH)
        weight_f32 = None if keep else weight_VH.float()
        for low in range(0, len(target_K), chunk_tok):
            part = slice(low, low + chunk_tok)
            target_C, upstream_C = target_K[part], upstream_K[part]
            if weight_f32 is None:
                residual_CV = kept[part]
            else:
                residual_CV = hidden_KH.new_empty(len(target_C), weight_VH.shape[0])
                unused = torch.empty(len(target_C), dtype=torch.float32, device=hidden_KH.device)
                logits_CV = _logits(hidden_KH[part], weight_f32, temperature)
                _reduce(logits_CV, target_C, unused, unused.clone(), residual_CV)
            # d logp / d logits = -residual; rows are scaled outside the products, where they are short
            dhidden_KH[part] = (residual_CV @ weight_VH) * -upstream_C[:, None]
            if grad_VH is not None:
                scaled_CH = (hidden_KH[part] * upstream_C[:, None]).to(hidden_KH.dtype)
                grad_VH.sub_(residual_CV.t() @ scaled_CH)
        return dhidden_KH, None, None, None, None, None


def _logits(hidden_CH: Tensor, weight_f32: Tensor, temperature: float) -> Tensor:
    """Float32 logits / temperature, [C, V]."""
    with exact_products(hidden_CH.dtype):
        logits = hidden_CH.float() @ weight_f32.t()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _reduce(logits_CV: Tensor, target_C: Tensor, logp_C: Tensor, entropy_C: Tensor, residual_CV: Tensor | None) -> None:
    """Fill log-prob, entropy and (if wanted) residual; overwrites the logits. A few rows at a time, in cache."""
    for low in range(0, len(target_C), _ROWS_IN_CACHE):
        part = slice(low, low + _ROWS_IN_CACHE)
        x = logits_CV[part]
        x.sub_(x.amax(-1, keepdim=True))
        e = x.exp()
        total = e.sum(-1)
        log_total = total.log()
        logp_C[part] = x.gather(-1, target_C[part, None])[:, 0] - log_total
        # H = log Z - sum p x, with x shifted by its maximum
        entropy_C[part] = log_total - torch.linalg.vecdot(e, x) / total
        if residual_CV is not None:
            e.div_(total[:, None]).scatter_add_(1, target_C[part, None], torch.full_like(total, -1.0)[:, None])
            residual_CV[part] = e
