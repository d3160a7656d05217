"""Losses: pure functions from log-probs and advantages to one loss value per token.

Notation (per token): m = ENGINE's probability when it sampled the token, q = PROXIMAL (trainer kernels, weights at the
start of this update; PPO's "old"), c = CURRENT (trainer kernels, has gradient), A = advantage, sg = stop-gradient.
Which ratio a loss uses is in its docstring. With one update per batch q = sg(c), so c/q = 1 and only its gradient acts.

Dimension letters: K target tokens of a micro-batch (flat), Q sequences.

Contract of every loss, built in or your own ("module:attr" in loss.kind):

    loss(logp_c, logp_m, advantage, mask, ctx) -> (loss_K, info)

- logp_c [K] float32 with gradient; logp_m [K], advantage [K] float32; mask [K] bool; ctx: `LossContext`.
- loss_K [K]: the token's loss BEFORE aggregation (the learner multiplies by the weights of `token_weights` and sums);
  0 where the mask is false. Never average inside: the denominator is the whole batch's, so that micro-batches add up.
- info: name -> [K] tensor (bool or float), reported as its mean over the mask.
- Nothing under a false mask may matter: select before exp (`corrections.select`), never multiply by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError, did_you_mean
from headrace.trainer.corrections import geometric, log_ratio, mis, select, sequence_mean, tis

LossResult = tuple[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContext:
    """Everything a loss may need beside its four tensors."""

    sequence_K: Tensor
    """Index of each token's sequence, 0 .. sequences - 1 (int64)."""
    sequences: int
    logp_q_K: Tensor | None
    """Proximal log-probs; None when the learner runs without them (pg, cispo)."""
    clip_low: float
    clip_high: float
    is_cap: float

    def proximal(self, logp_c_K: Tensor) -> Tensor:
        """log q, or sg(log c) where no separate pass was made (first update of a batch: the same weights)."""
        return logp_c_K.detach() if self.logp_q_K is None else self.logp_q_K


LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, LossContext], LossResult]


def pg(logp_c: Tensor, logp_m: Tensor, advantage: Tensor, mask: Tensor, ctx: LossContext) -> LossResult:
    """Policy gradient with truncated importance weight: -sg(min(c/m, is_cap)) * A * log c.

    The whole ratio c/m (numeric * lag * step) is corrected, at token level (AIPO, arXiv 2505.24034).
    """
    weight = log_ratio(logp_c, logp_m, mask).detach().exp()
    loss = -weight.clamp(max=ctx.is_cap) * select(advantage, mask) * select(logp_c, mask)
    return loss, {"clip_frac/high": (weight > ctx.is_cap) & mask}


def ppo(logp_c: Tensor, logp_m: Tensor, advantage: Tensor, mask: Tensor, ctx: LossContext) -> LossResult:
    """Clipped surrogate on c/q: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347; DAPO 2503.14476).

    m is not used: combine with a correction when q and m differ.
    """
    ratio = log_ratio(logp_c, ctx.proximal(logp_c), mask).exp()
    return _clipped(ratio, select(advantage, mask), mask, ctx)


def cispo(logp_c: Tensor, logp_m: Tensor, advantage: Tensor, mask: Tensor, ctx: LossContext) -> LossResult:
    """Clipped weight on c/m, gradient kept: -sg(clip(c/m, 1 - clip_low, 1 + clip_high)) * A * log c (2506.13585)."""
    ratio = log_ratio(logp_c, logp_m, mask).detach().exp()
    low, high = 1.0 - ctx.clip_low, 1.0 + ctx.clip_high
    loss = -ratio.clamp(low, high) * select(advantage, mask) * select(logp_c, mask)
    return loss, {"clip_frac/low": (ratio < low) & mask, "clip_frac/high": (ratio > high) & mask}


def gspo(logp_c: Tensor, logp_m: Tensor, advantage: Tensor, mask: Tensor, ctx: LossContext) -> LossResult:
    """Clipped surrogate on the sequence's geometric ratio s = exp(mean log(c/q)) (arXiv 2507.18071).

    Every token of a sequence carries the sequence's objective, so any aggregation works; the paper's is sequence_mean.
    """
    log_ratio_K = log_ratio(logp_c, ctx.proximal(logp_c), mask)
    ratio = sequence_mean(log_ratio_K, mask, ctx.sequence_K, ctx.sequences).exp()[ctx.sequence_K]
    return _clipped(ratio, select(advantage, mask), mask, ctx)


def decoupled_ppo(logp_c: Tensor, logp_m: Tensor, advantage: Tensor, mask: Tensor, ctx: LossContext) -> LossResult:
    """sg(min(q/m, is_cap)) times the clipped surrogate on c/q (arXiv 2505.24298, with a cap).

    q/m carries numeric mismatch and lag, c/q the step: the clip is centred on weights that are near.
    """
    proximal = ctx.proximal(logp_c)
    loss, info = ppo(logp_c, logp_m, advantage, mask, ctx)
    return loss * tis(proximal, logp_m, mask, cap=ctx.is_cap), info


LOSSES: dict[str, LossFunction] = {"pg": pg, "ppo": ppo, "cispo": cispo, "gspo": gspo, "decoupled_ppo": decoupled_ppo}

_CARRIES_Q_OVER_M = ("pg", "cispo", "decoupled_ppo")


def check_loss(kind: str, correction: str) -> None:
    """Raise ConfigError for an unknown name or a pair that would apply q/m twice."""
    if ":" not in kind and kind not in LOSSES:
        raise ConfigError(f"loss.kind = {kind!r} is unknown; {did_you_mean(kind, LOSSES)} (or 'module:attr')")
    if correction == "tis" and kind in _CARRIES_Q_OVER_M:
        raise ConfigError(
            f"loss.correction = 'tis' with loss.kind = {kind!r} applies proximal / engine twice: {kind} has it "
            "already; use correction = 'none', or kind = 'ppo'"
        )


def correction_factor(
    kind: str, logp_c: Tensor, logp_m: Tensor, mask: Tensor, ctx: LossContext, *, geo_width: float
) -> Tensor:
    """Factor [K] that multiplies the loss of each token, from q/m, without gradient. ConfigError if unknown."""
    if kind == "none":
        return torch.ones_like(logp_c)
    proximal = ctx.proximal(logp_c).detach()
    if kind == "tis":
        return tis(proximal, logp_m, mask, cap=ctx.is_cap)
    if kind == "mis":
        return mis(proximal, logp_m, mask, ctx.sequence_K, ctx.sequences, cap=ctx.is_cap)
    if kind == "geometric":
        return geometric(proximal, logp_m, mask, ctx.sequence_K, ctx.sequences, width=geo_width)
    raise ConfigError(
        f"loss.correction = {kind!r} is unknown; {did_you_mean(kind, ('none', 'tis', 'mis', 'geometric'))}"
    )


def kl_to_reference(logp_c: Tensor, logp_m: Tensor, logp_ref: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """KL penalty per token: sg(min(c/m, cap)) * (log(c/ref))^2 / 2, shape [K].

    k2 as a *loss* has the gradient of KL(c || ref) on samples of c (arXiv 2512.21852); c/m corrects for samples of m
    (DeepSeek-V3.2, arXiv 2512.02556).
    """
    difference = log_ratio(logp_c, logp_ref.detach(), mask)
    return tis(logp_c, logp_m, mask, cap=cap) * difference.square() / 2


def token_weights(aggregate: str, *, sample_K: NDArray[np.int64], group_K: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weight of each trained token of the WHOLE batch, so that loss = sum of weight * token loss. Shape [K].

    The denominator counts tokens under the loss mask, before any correction drops some: a dropped token contributes 0
    and still counts, so a correction shrinks the step and never rescales it. It is the whole batch's, so the result
    does not depend on micro-batches.
    token_mean: 1 / tokens. sequence_mean: 1 / (samples * tokens of the sample). prompt_mean: 1 / (groups * tokens of
    the group). Samples and groups without a trained token do not count.
    """
    tokens = len(sample_K)
    if aggregate == "token_mean":
        return np.full(tokens, 1.0 / max(tokens, 1))
    if aggregate not in ("sequence_mean", "prompt_mean"):
        names = ("token_mean", "sequence_mean", "prompt_mean")
        raise ConfigError(f"loss.aggregate = {aggregate!r} is unknown; {did_you_mean(aggregate, names)}")
    unit_K = sample_K if aggregate == "sequence_mean" else group_K
    _, index_K, count_U = np.unique(unit_K, return_inverse=True, return_counts=True)
    weight_K: NDArray[np.float64] = 1.0 / (len(count_U) * count_U[index_K].astype(np.float64))
    return weight_K


def _clipped(ratio: Tensor, advantage: Tensor, mask: Tensor, ctx: LossContext) -> LossResult:
    """PPO's pessimistic bound; the info marks tokens whose gradient the clip took away."""
    low, high = 1.0 - ctx.clip_low, 1.0 + ctx.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped_low = (ratio < low) & (advantage < 0) & mask
    clipped_high = (ratio > high) & (advantage > 0) & mask
    return select(loss, mask), {"clip_frac/low": clipped_low, "clip_frac/high": clipped_high}
