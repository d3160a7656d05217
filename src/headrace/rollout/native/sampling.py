"""From logits to token ids and the log-probs of the distribution that they were drawn from.

Letters: B rows, V vocabulary, K blocks of the vocabulary, W entries of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from headrace.records import SamplingParams
from headrace.rollout.counter_rng import seed_bits, uniform

BLOCK = 256
_ROWS_IN_CACHE = 4
Drawn = tuple[NDArray[np.int64], NDArray[np.float32]]


@torch.inference_mode()
def draw(logits_BV: torch.Tensor, params: Sequence[SamplingParams], position_B: Sequence[int]) -> Drawn:
    """Draw one token for each row; ids int64 [B] and log-probs float32 [B].

    Row b follows params[b]: logits / temperature, then top-k, then top-p, renormalised; temperature 0 takes the
    largest logit and reports the log-prob of temperature 1. position_B is the number of tokens drawn before, the
    second key of the random number beside the seed. Overwrites the logits.
    """
    scaled_BV = _scale(logits_BV, [p.temperature or 1.0 for p in params])
    greedy = [p.temperature == 0.0 for p in params]
    for row, p in enumerate(params):
        if (p.top_k > 0 or p.top_p < 1.0) and not greedy[row]:
            _truncate_(scaled_BV[row], p.top_k, p.top_p)
    u_B = uniform(np.array([seed_bits(p.seed) for p in params], np.uint64), np.array(position_B, np.uint64))
    return inverse_cdf(scaled_BV, torch.from_numpy(u_B), greedy)


def _scale(logits_BV: torch.Tensor, temperatures: list[float]) -> torch.Tensor:
    if all(t == 1.0 for t in temperatures):
        return logits_BV
    return logits_BV.div_(torch.tensor(temperatures, dtype=torch.float32, device=logits_BV.device)[:, None])


def _truncate_(logits_V: torch.Tensor, top_k: int, top_p: float) -> None:
    """Set logits outside the kept set to -inf, in place. Ties at the k-th place are all kept."""
    if 0 < top_k < logits_V.numel():
        kth = torch.topk(logits_V, top_k).values[-1]
        logits_V.masked_fill_(logits_V < kth, -torch.inf)
    if top_p < 1.0:
        ordered, order = torch.sort(logits_V, descending=True)
        probs = torch.softmax(ordered, -1)
        before = torch.cumsum(probs, -1) - probs
        outside = before >= top_p  # the token that crosses top_p is kept, so at least one is
        logits_V[order[outside]] = -torch.inf


@torch.inference_mode()
def inverse_cdf(logits_BV: torch.Tensor, u_B: torch.Tensor, greedy: Sequence[bool]) -> Drawn:
    """The token at which the cumulative probability passes u, found in two levels: block, then within the block.

    All passes over [B, V] are made while a few rows are in cache; after that K + W numbers a row are touched.
    Overwrites logits.
    """
    rows, vocab = logits_BV.shape
    best_B = logits_BV.argmax(-1) if any(greedy) else None
    if vocab % BLOCK:
        logits_BV = F.pad(logits_BV, (0, BLOCK - vocab % BLOCK), value=-torch.inf)
    weight_BKW = logits_BV.view(rows, -1, BLOCK)
    sum_BK = torch.empty(weight_BKW.shape[:2], device=logits_BV.device)
    for part in _parts(rows, weight_BKW.device):
        weight = logits_BV[part]
        weight.sub_(weight.amax(-1, keepdim=True)).exp_()
        torch.sum(weight_BKW[part], -1, out=sum_BK[part])
    weight_BV = logits_BV
    cum_BK = sum_BK.cpu().to(torch.float64).cumsum(-1)
    target_B1 = cum_BK[:, -1:] * u_B[:, None]
    block_B1 = (cum_BK <= target_B1).sum(-1, keepdim=True)
    upper_B1 = cum_BK.gather(-1, block_B1)
    lower_B1 = torch.where(block_B1 > 0, cum_BK.gather(-1, (block_B1 - 1).clamp_(min=0)), 0.0)
    every_B = torch.arange(rows)
    inner_BW = weight_BKW[every_B, block_B1[:, 0]].cpu().to(torch.float64).cumsum(-1)
    share_B1 = ((target_B1 - lower_B1) / (upper_B1 - lower_B1)).clamp_(0.0, 1.0 - 2.0**-40)
    id_B = block_B1[:, 0] * BLOCK + (inner_BW <= inner_BW[:, -1:] * share_B1).sum(-1)
    if best_B is not None:
        id_B = torch.where(torch.tensor(list(greedy)), best_B.cpu(), id_B)
    chosen_B = weight_BV[every_B, id_B].cpu().to(torch.float64)
    logp_B = (chosen_B.log() - cum_BK[:, -1].log()).to(torch.float32)
    return id_B.numpy(), logp_B.numpy()


def _parts(rows: int, device: torch.device) -> list[slice]:
    """On the CPU a few rows at a time: 4 x 49152 float32 stay in the second-level cache between passes."""
    step = _ROWS_IN_CACHE if device.type == "cpu" else max(rows, 1)
    return [slice(low, low + step) for low in range(0, rows, step)]
