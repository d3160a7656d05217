"""Corrections for training on samples of another policy. Pure functions on flat tensors.

Notation of the importance ratios (per token): m = probability given by the ENGINE that sampled the token,
q = PROXIMAL (trainer, weights at the start of the update), c = CURRENT (trainer, has gradient).
Total c/m = (q/m) * (c/q). Every function here is about q/m: numeric mismatch and lag, not the step.

Dimension letters: K target tokens of a micro-batch (flat, ragged sequences one after another), Q sequences.
Estimators are named: *product* (unbiased over the sequence, variance explodes with length) or *geometric*
(mean of log-ratios, low variance, biased). They are never mixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: exp(20) = 4.9e8 is far beyond any cap and far from overflow."""


def select(value_K: Tensor, mask_K: Tensor) -> Tensor:
    """`value_K` where the mask is true, 0 elsewhere: whatever is masked (NaN, inf) cannot reach value or gradient."""
    return torch.where(mask_K, value_K, torch.zeros((), dtype=value_K.dtype, device=value_K.device))


def log_ratio(numerator_K: Tensor, denominator_K: Tensor, mask_K: Tensor) -> Tensor:
    """log(numerator / denominator) of two log-probs, masked by selection, clamped to +-20. Shape [K]."""
    return (select(numerator_K, mask_K) - select(denominator_K, mask_K)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sum(value_K: Tensor, sequence_K: Tensor, sequences: int) -> Tensor:
    """Sum over each sequence, shape [Q]. `sequence_K` holds the index of each token's sequence."""
    zero_Q = torch.zeros(sequences, dtype=value_K.dtype, device=value_K.device)
    return zero_Q.index_add(0, sequence_K, value_K)


def sequence_mean(value_K: Tensor, mask_K: Tensor, sequence_K: Tensor, sequences: int) -> Tensor:
    """Mean over the unmasked tokens of each sequence, shape [Q]; 0 for a sequence without any."""
    count_Q = sequence_sum(mask_K.to(value_K.dtype), sequence_K, sequences)
    return sequence_sum(select(value_K, mask_K), sequence_K, sequences) / count_Q.clamp_min(1.0)


def tis(logp_q_K: Tensor, logp_m_K: Tensor, mask_K: Tensor, *, cap: float) -> Tensor:
    """Truncated importance sampling: sg(min(q/m, cap)) per token, shape [K]."""
    return log_ratio(logp_q_K, logp_m_K, mask_K).detach().exp().clamp(max=cap)


def mis(
    logp_q_K: Tensor, logp_m_K: Tensor, mask_K: Tensor, sequence_K: Tensor, sequences: int, *, cap: float
) -> Tensor:
    """Masked importance sampling, product estimator: 1 where W = prod(q/m) lies in [1/cap, cap], else 0. Shape [K]."""
    log_ratio_K = log_ratio(logp_q_K, logp_m_K, mask_K).detach()
    log_w_Q = sequence_sum(log_ratio_K, sequence_K, sequences)
    return (log_w_Q.abs() <= torch.tensor(cap).log().to(log_w_Q))[sequence_K].to(log_w_Q.dtype)


def geometric(
    logp_q_K: Tensor, logp_m_K: Tensor, mask_K: Tensor, sequence_K: Tensor, sequences: int, *, width: float
) -> Tensor:
    """Geometric mask: 1 where exp(mean log(q/m)) lies in [1 - width, 1 + width], else 0. Shape [K]."""
    log_ratio_K = log_ratio(logp_q_K, logp_m_K, mask_K).detach()
    g_Q = sequence_mean(log_ratio_K, mask_K, sequence_K, sequences).exp()
    return ((g_Q >= 1.0 - width) & (g_Q <= 1.0 + width))[sequence_K].to(g_Q.dtype)
