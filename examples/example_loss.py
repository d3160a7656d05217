"""A loss of one's own: REINFORCE that learns faster from what worked (weight 1) than from what did not (weight 1/2).

The contract is in headrace/trainer/losses.py: one value per token, nothing averaged, selection before exp.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headrace.trainer.corrections import log_ratio, select
from headrace.trainer.losses import LossContext


def asymmetric(
    logp_c: Tensor, logp_m: Tensor, advantage: Tensor, mask: Tensor, ctx: LossContext
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """-w * sg(min(c/m, is_cap)) * A * log c with w = 1 for A >= 0 and 1/2 below."""
    ratio = log_ratio(logp_c, logp_m, mask).detach().exp().clamp(max=ctx.is_cap)
    chosen = select(advantage, mask)
    weight = 0.5 + 0.5 * (chosen >= 0)
    return -weight * ratio * chosen * select(logp_c, mask), {"positive_frac": (chosen > 0) & mask}
