"""Seconds of one optimizer batch on the trainer's chips. Equations and sources: docs/planner.md."""

from __future__ import annotations

import math

from headrace.errors import PlanError
from headrace.planner.constants import Constants
from headrace.planner.cost import TrainerCost
from headrace.planner.engine_cost import chosen_share
from headrace.planner.hardware import Chip
from headrace.planner.models import ModelShape

WIDTH_P = 4.0
"""Exponent of the smooth minimum of data-parallel ranks and packed sequences."""


def trainer_cost(
    shape: ModelShape,
    chip: Chip,
    *,
    gpus: int,
    tp: int,
    pp: int,
    ep: int,
    precision: str,
    lora: bool,
    logprob_passes: int,
    seq_tok: float,
    batch_tok: float,
    constants: Constants,
    recompute: bool = False,
) -> TrainerCost:
    """Cost of batches of about `batch_tok` tokens, packed into sequences of `seq_tok` tokens.

    Work per token: 6 N_active FLOPs for the update (8 with recompute: fitted MFUs count without it; 4 with LoRA,
    which needs no gradient of the base weights), and 2 N_active for each log-prob pass. Attention: a quadratic term
    of p/2 forward passes. The MFU is that of the model class, less what tensor and pipeline parallelism and a batch
    too small for the data-parallel width cost. A run's own law replaces it where it has one.
    Raises PlanError for a layout that does not divide `gpus`.
    """
    if min(gpus, tp, pp, ep) < 1 or gpus % (tp * pp):
        raise PlanError(f"train_tp x train_pp = {tp} x {pp} must divide the trainer's {gpus} chips")
    if (gpus // pp) % ep:
        raise PlanError(f"train_ep = {ep} must divide the {gpus // pp} chips of a pipeline stage")
    c = constants
    dp = gpus // (tp * pp)
    packs = max(1.0, batch_tok / max(seq_tok, 1.0))
    other_rate = (c.train_rate_moe if shape.is_moe else c.train_rate_dense).value
    mfu = chip_rate(chip.peak(precision), c.train_eff.value, other_rate) / chip.peak(precision)
    mfu *= tensor_efficiency(chip, tp, c.tp_loss_per_doubling.value)
    mfu *= pipeline_efficiency(pp, packs / dp) * width_efficiency(dp, packs)
    update = 4.0 if lora else 6.0
    update += 2.0 if recompute else 0.0
    logprob = 2.0 * logprob_passes / c.mfu_logprob_factor.value
    rate = gpus * chip.peak(precision) * mfu
    window_flops = shape.window_flops_per_pair * min(seq_tok / 2, shape.window_tok)
    pair_flops = shape.attn_flops_per_pair * chosen_share(shape, seq_tok / 2) + shape.index_flops_per_pair
    s_per_tok = (update + logprob) * (shape.active_params + window_flops / 2.0) / rate
    s_per_tok2 = (update + logprob) / 2.0 * pair_flops / rate
    fixed_s = fixed_overhead_s(shape, constants, lora=lora)
    law = constants.law(shape.name, chip.name, train_gpus=gpus)
    if law is not None and law.train_s_per_tok is not None:  # its tokens paid for attention too
        measured_s_per_tok = law.train_s_per_tok.value * law.train_gpus / gpus
        mfu *= s_per_tok / measured_s_per_tok if measured_s_per_tok > 0 else 1.0
        s_per_tok, s_per_tok2 = measured_s_per_tok, 0.0
    if law is not None and law.train_fixed_s is not None:
        fixed_s = law.train_fixed_s.value
    return TrainerCost(s_per_tok=s_per_tok, s_per_tok2=s_per_tok2, fixed_s=fixed_s, mfu=mfu)


def chip_rate(peak: float, eff: float, other_rate: float) -> float:
    """FLOP/s of one chip: matrix products at `eff` of the peak, and what does not speed up with it at `other_rate`."""
    return 1.0 / (1.0 / (eff * peak) + 1.0 / other_rate)


def tensor_efficiency(chip: Chip, tp: int, loss_per_doubling: float) -> float:
    """Share that tensor parallelism leaves: a fixed loss per doubling; beyond the scale-up domain the loss of each
    further doubling grows with the ratio of the links."""
    inside = min(tp, max(1, chip.scale_up_chips))
    loss = loss_per_doubling * math.log2(inside)
    if tp > inside:
        ratio = max(1.0, chip.scale_up_bytes_per_s / chip.scale_out_bytes_per_s)
        loss += loss_per_doubling * ratio * math.log2(tp / inside)
    return 1.0 / (1.0 + loss)


def pipeline_efficiency(pp: int, micro_batches: float) -> float:
    """Share that the bubble of a 1F1B pipeline leaves: m / (m + pp - 1) (Narayanan et al. 2021)."""
    micro_batches = max(1.0, micro_batches)
    return micro_batches / (micro_batches + pp - 1)


def width_efficiency(dp: int, packs: float) -> float:
    """Share of `dp` data-parallel ranks that `packs` packed sequences keep busy: a smooth min(dp, packs) / dp."""
    packs = max(1.0, packs)
    busy = (dp**-WIDTH_P + packs**-WIDTH_P) ** (-1.0 / WIDTH_P) if dp > 1 else 1.0
    return max(busy, 1.0) / dp


def fixed_overhead_s(shape: ModelShape, constants: Constants, *, lora: bool) -> float:
    """Per batch: a constant, and a part linear in the bf16 weights up to the largest model it was fitted on.

    Beyond that knee it grows with the square root: the linear law overshoots by 3 x when it is extrapolated to a
    model class it has not seen. With LoRA only the adapters are stepped and exchanged.
    """
    weights_gb = shape.weight_bytes("bf16") / 1e9 * (constants.lora_frac.value if lora else 1.0)
    knee_gb = constants.fixed_knee_gb.value
    counted_gb = weights_gb if weights_gb <= knee_gb else math.sqrt(weights_gb * knee_gb)
    return constants.fixed_s.value + constants.fixed_s_per_gb.value * counted_gb
