"""Seconds of a decode step and of a prefill, and how much context fits, for one engine of one model.

Roofline parts at full efficiency come first (they depend on model, chip and width only); constants then price them.
The fit to measured rows (calibrate_serving.py) prices the same parts, so what is fitted is what is planned with.
Equations and sources: docs/planner.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import PlanError
from headrace.planner.constants import Constants, MeasuredLaw
from headrace.planner.cost import DecodeTable, EngineCost
from headrace.planner.hardware import Chip
from headrace.planner.memory import divides, engine_fixed_bytes, kv_split
from headrace.planner.model_reader import WEIGHT_BYTES, ModelShape

FloatArray = NDArray[np.float64]

KV_BLOCK_TOK = 16
"""Engines give out KV memory in blocks of so many tokens."""
ACTIVATION_BYTES = 2.0
"""Of one element on the wire between chips."""
INDEX_KEY_FRAC = 0.1
"""Sparse attention reads an index key of every context token: 128 one-byte elements beside 576 two-byte ones
(DeepSeek-V3.2 technical report, 2025-09)."""
_WIDER = {"fp4": "fp8", "fp8": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """Decode steps at full efficiency, for an array of running sequences b. Seconds unless said otherwise."""

    mem_s: FloatArray
    """Weights, capped windows and recurrent state."""
    mem_s_per_tok: float
    flop_s: FloatArray
    flop_s_per_tok: float
    wire_s: FloatArray
    """Bytes between chips."""
    allreduces: int
    a2as: int
    scale_outs: int
    """Collectives that leave the scale-up domain."""
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParts:
    """Prefill at full efficiency."""

    flop_s_per_tok: float
    flop_s_per_pair: float
    wire_s_per_tok: float
    mem_s: float
    """Every weight read once."""


def distinct_experts(experts: int, per_tok: int, tokens: FloatArray) -> FloatArray:
    """Expected number of experts that `tokens` tokens hit under uniform routing: E * (1 - (1 - k/E)^tokens)."""
    if experts == 0:
        return np.zeros_like(tokens)
    return np.asarray(experts * (1.0 - (1.0 - per_tok / experts) ** tokens), dtype=np.float64)


def compute_precision(chip: Chip, precision: str) -> str:
    """Number format of the products: that of the weights, or the next wider one that the chip computes in."""
    while precision not in chip.flops_per_s and precision in _WIDER:
        precision = _WIDER[precision]
    return precision


def decode_parts(
    shape: ModelShape,
    chip: Chip,
    running: FloatArray,
    *,
    tp: int,
    precision: str,
    context_tok: float,
    attention_dp: int = 1,
    verify_tok: int = 1,
) -> DecodeParts:
    """`running` sequences of mean context `context_tok` on an engine of `tp` chips.

    attention_dp: attention is replicated so many times inside the engine, each copy on tp / attention_dp chips with
    its share of the sequences. verify_tok: tokens per sequence and step (speculative decoding).
    """
    attention_tp = tp // attention_dp
    tokens = running * float(verify_tok)
    dense_bytes, expert_bytes = _read_bytes(shape, precision)
    copies_bytes = (attention_dp - 1) * shape.attention_params * WEIGHT_BYTES[precision]
    hit = distinct_experts(shape.experts, shape.experts_per_tok, tokens)
    weight_bytes = (dense_bytes + copies_bytes + hit * expert_bytes) / tp
    slope_bytes, seq_bytes = _context_bytes(shape, context_tok)
    per_chip = 1.0 / (attention_dp * kv_split(shape, attention_tp))
    state_bytes = 2.0 * shape.kv_bytes(0.0)  # read and written
    seq_bytes = seq_bytes * per_chip + state_bytes / tp
    peak = chip.peak(compute_precision(chip, precision)) * tp
    window_flops = shape.window_flops_per_pair * min(context_tok, shape.window_tok)
    pair_flops = shape.decode_flops_per_pair * chosen_share(shape, context_tok) + shape.index_flops_per_pair
    wire_s_per_tok, scale_outs = _wire(shape, chip, tp, attention_dp)
    return DecodeParts(
        mem_s=(weight_bytes + running * seq_bytes) / chip.hbm_bytes_per_s,
        mem_s_per_tok=slope_bytes * per_chip / chip.hbm_bytes_per_s,
        flop_s=(2.0 * shape.matmul_params + window_flops) * tokens / peak,
        flop_s_per_tok=verify_tok * pair_flops / peak,
        wire_s=tokens * wire_s_per_tok,
        allreduces=_allreduces(shape, tp, attention_dp),
        a2as=2 * shape.moe_layers if attention_dp > 1 else 0,
        scale_outs=scale_outs,
        layers=shape.layers,
    )


def prefill_parts(
    shape: ModelShape, chip: Chip, *, tp: int, precision: str, context_tok: float, attention_dp: int = 1
) -> PrefillParts:
    """Of prompts of about `context_tok` tokens on an engine of `tp` chips; arguments as in decode_parts."""
    peak = chip.peak(compute_precision(chip, precision)) * tp
    wire_s_per_tok, _ = _wire(shape, chip, tp, attention_dp)
    dense_bytes, expert_bytes = _read_bytes(shape, precision)
    pair_flops = shape.attn_flops_per_pair * chosen_share(shape, context_tok / 2) + shape.index_flops_per_pair
    window_flops = shape.window_flops_per_pair * min(context_tok / 2, shape.window_tok)
    return PrefillParts(
        flop_s_per_tok=(2.0 * shape.matmul_params + window_flops) / peak,
        flop_s_per_pair=pair_flops / peak,
        wire_s_per_tok=wire_s_per_tok,
        mem_s=(dense_bytes + shape.experts * expert_bytes) / tp / chip.hbm_bytes_per_s,
    )


def _read_bytes(shape: ModelShape, precision: str) -> tuple[float, float]:
    """Bytes of what every step reads, and of one expert in all layers. The output head stays in 16 bits or more."""
    size = WEIGHT_BYTES[precision]
    dense = (shape.dense_params - shape.head_params) * size + shape.head_params * max(size, 2.0)
    return dense, float(shape.moe_layers * shape.expert_params) * size


def _context_bytes(shape: ModelShape, context_tok: float) -> tuple[float, float]:
    """KV bytes that a step reads per context token, and per sequence whatever its length (full windows)."""
    full, window = 2.0 * shape.kv_elems_per_tok_full, 2.0 * shape.kv_elems_per_tok_window
    if shape.sparse_tok:
        full *= INDEX_KEY_FRAC + (1.0 - INDEX_KEY_FRAC) * chosen_share(shape, context_tok)
    if window and context_tok > shape.window_tok:
        return full, window * shape.window_tok
    return full + window, 0.0


def chosen_share(shape: ModelShape, context_tok: float) -> float:
    """Part of the context that sparse attention attends to."""
    return min(1.0, shape.sparse_tok / context_tok) if shape.sparse_tok and context_tok > 0 else 1.0


def _allreduces(shape: ModelShape, tp: int, attention_dp: int) -> int:
    if tp == 1:
        return 0
    if attention_dp == 1:
        return 2 * shape.layers
    attention = shape.layers if tp > attention_dp else 0
    return attention + shape.layers - shape.moe_layers


def _wire(shape: ModelShape, chip: Chip, tp: int, attention_dp: int) -> tuple[float, int]:
    """Seconds on the wire per token, and collectives per step that leave the scale-up domain.

    A ring all-reduce moves 2 (t-1)/t of the activations; over nodes it is hierarchical: each chip takes its share of
    a node's sum to the other nodes. Experts behind data-parallel attention exchange k copies of each token instead.
    """
    if tp == 1:
        return 0.0, 0
    inside = max(1, min(tp, chip.scale_up_chips))
    nodes = math.ceil(tp / inside)
    token_bytes = shape.hidden * ACTIVATION_BYTES
    allreduce_s = 2.0 * (inside - 1) / inside * token_bytes / chip.scale_up_bytes_per_s
    allreduce_s += 2.0 * (nodes - 1) / nodes * token_bytes / inside / chip.scale_out_bytes_per_s
    wire_s = _allreduces(shape, tp, attention_dp) * allreduce_s / attention_dp
    exchanges = 2 * shape.moe_layers if attention_dp > 1 else 0
    slowest = chip.scale_out_bytes_per_s if nodes > 1 else chip.scale_up_bytes_per_s
    wire_s += exchanges * shape.experts_per_tok * token_bytes / tp / slowest
    crossing = (_allreduces(shape, tp, attention_dp) + exchanges) if nodes > 1 else 0
    return wire_s, crossing


def decode_table(parts: DecodeParts, constants: Constants, *, moe: bool, stretch: float = 1.0) -> DecodeTable:
    """Price the parts. `stretch` multiplies every term (drafting in speculative decoding)."""
    factor = stretch * (constants.moe_decode_factor.value if moe else 1.0)
    mem, flop = factor / constants.mem_eff.value, factor / constants.flop_eff.value
    other_s = stretch * (parts.wire_s / constants.net_eff.value + _latency_s(parts, constants))
    return DecodeTable(
        mem_s=tuple((parts.mem_s * mem).tolist()),
        mem_s_per_tok=parts.mem_s_per_tok * mem,
        flop_s=tuple((parts.flop_s * flop).tolist()),
        flop_s_per_tok=parts.flop_s_per_tok * flop,
        other_s=tuple(other_s.tolist()),
        p=constants.smooth_p.value,
    )


def _latency_s(parts: DecodeParts, constants: Constants) -> float:
    """Of a step, whatever its batch."""
    return (
        parts.allreduces * constants.allreduce_s.value
        + parts.a2as * constants.a2a_s.value
        + parts.scale_outs * constants.scale_out_s.value
        + parts.layers * constants.layer_s.value
        + constants.step_s.value
    )


def kv_room(
    shape: ModelShape,
    chip: Chip,
    *,
    tp: int,
    precision: str,
    mem_frac: float,
    max_seqs: int,
    context_tok: float,
    constants: Constants,
    colocated_bytes: float = 0.0,
) -> tuple[int, int]:
    """Context tokens that fit one engine, and sequences at once at most. (0, 0) if the weights leave no room.

    A token's bytes are those of a sequence of `context_tok` tokens, so that windows cap what long sequences hold.
    Recurrent state is taken from the same pool, for as many sequences as fit with that context.
    """
    fixed_bytes = engine_fixed_bytes(shape, chip, tp=tp, precision=precision, max_seqs=max_seqs, c=constants)
    free_bytes = mem_frac * chip.hbm_bytes - colocated_bytes - fixed_bytes
    state_bytes = shape.kv_bytes(0.0) / tp
    context_tok = max(context_tok, 1.0)
    tok_bytes = (shape.kv_bytes(context_tok) - shape.kv_bytes(0.0)) / context_tok / kv_split(shape, tp)
    each_tok = context_tok if state_bytes else float(KV_BLOCK_TOK)
    seqs = min(max_seqs, int(free_bytes / (state_bytes + tok_bytes * each_tok))) if free_bytes > 0 else 0
    if seqs < 1:
        return 0, 0
    if tok_bytes == 0.0:
        return int(context_tok) * seqs, seqs  # no attention at all: the state alone decides
    capacity_tok = (free_bytes - seqs * state_bytes) / tok_bytes
    return int(capacity_tok // KV_BLOCK_TOK) * KV_BLOCK_TOK, seqs


def engine_cost(
    shape: ModelShape,
    chip: Chip,
    *,
    tp: int,
    precision: str,
    mem_frac: float,
    max_seqs: int,
    context_tok: float,
    constants: Constants,
    accept_tok: float = 1.0,
    draft_frac: float = 0.0,
    colocated_bytes: float = 0.0,
    engine: str = "",
) -> EngineCost:
    """Cost of one engine of `tp` chips whose sequences have `context_tok` tokens on average.

    accept_tok > 1: speculative decoding; a step verifies ceil(accept_tok) tokens per sequence, takes draft_frac
    longer, and yields accept_tok. `engine` picks the serving set; a run's own law replaces the formula where it has
    one for this width. Raises PlanError for a width that is not positive or that does not divide the heads.
    """
    if not divides(shape, chip, tp):
        raise PlanError(f"gen_tp = {tp} does not divide the {shape.heads} attention heads of {shape.name}")
    if accept_tok < 1.0 or draft_frac < 0.0:
        raise PlanError(f"accept_tok = {accept_tok:g} must be >= 1 and draft_frac = {draft_frac:g} >= 0")
    measured = constants.law(shape.name, chip.name, gen_tp=tp)
    constants = constants.for_serving(chip.name, precision, engine)
    capacity_tok, seqs = kv_room(
        shape, chip, tp=tp, precision=precision, mem_frac=mem_frac, max_seqs=max_seqs, context_tok=context_tok,
        constants=constants, colocated_bytes=colocated_bytes,
    )  # fmt: skip
    running = np.arange(seqs + 1, dtype=np.float64)
    verify_tok = math.ceil(accept_tok)
    parts = decode_parts(
        shape, chip, running, tp=tp, precision=precision, context_tok=context_tok, verify_tok=verify_tok
    )
    stretch = (constants.rollout_factor_moe if shape.is_moe else constants.rollout_factor_dense).value
    stretch *= 1.0 + (draft_frac if accept_tok > 1.0 else 0.0)
    prefill = prefill_parts(shape, chip, tp=tp, precision=precision, context_tok=context_tok)
    per_tok_s = prefill.flop_s_per_tok / constants.prefill_eff.value + prefill.wire_s_per_tok / constants.net_eff.value
    per_tok2_s = prefill.flop_s_per_pair / constants.prefill_eff.value
    least_s = prefill.mem_s / constants.mem_eff.value + _latency_s(parts, constants)
    if measured is not None and measured.prefill_s_per_tok is not None:  # its prompts paid for attention too
        per_tok_s, per_tok2_s, least_s = measured.prefill_s_per_tok.value, 0.0, 0.0
    return EngineCost(
        decode=_measured_table(measured, running) or decode_table(parts, constants, moe=shape.is_moe, stretch=stretch),
        prefill_s_per_tok=per_tok_s,
        prefill_s_per_tok2=per_tok2_s,
        prefill_s_min=least_s,
        kv_capacity_tok=capacity_tok,
        max_running=seqs,
        accept_tok=accept_tok,
    )


def _measured_table(law: MeasuredLaw | None, running: FloatArray) -> DecodeTable | None:
    """A run's linear law as a table; it knows nothing of where a step's time goes."""
    if law is None or law.base_s is None or law.per_request_s is None or law.per_context_tok_s is None:
        return None
    nothing = (0.0,) * len(running)
    return DecodeTable(
        mem_s=tuple((law.base_s.value + law.per_request_s.value * running).tolist()),
        mem_s_per_tok=law.per_context_tok_s.value,
        flop_s=nothing,
        flop_s_per_tok=0.0,
        other_s=nothing,
    )
