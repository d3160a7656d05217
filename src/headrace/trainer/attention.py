"""Attention over segments (see batching.py): causal inside a segment, and to all of its parent.

Dimension letters: N tokens of the flat row, A heads, D head dimension, E key-value heads, R = A / E query heads that
share one key-value head, S segments of a chunk, L query places, J key places, B = S * E.

Why not scaled_dot_product_attention: on a CPU its backward is slow (6x slower than this for 64 members of 138 tokens,
measured), and a dense mask over a whole group multiplies work by the number of members. Here members are batched, each
against [parent's keys, own keys]; query heads that share keys are folded into the query axis. Scores are float32 from
bfloat16 operands (exact products); probabilities are stored in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headrace.trainer.batching import Segment

_CHUNK_SCORES = 1 << 25
"""Float32 scores that exist at once (128 MiB); one longer segment is computed alone."""
_KEEP_BYTES = 1 << 30
"""Probabilities kept for the backward pass over all layers; above it they are computed again."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Segments whose attention is computed together, padded to the longest."""

    query_SL: Tensor
    """Flat index of each query; N (one past the end) where padded."""
    key_SJ: Tensor
    """Flat index of each key; N where padded."""
    bias_SLJ: Tensor
    """Float32: 0 where the query sees the key, -inf where not."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one micro-batch attends; made once, used by every layer."""

    chunks: tuple[Chunk, ...]
    keep: bool
    """Keep probabilities for the backward pass."""


def plan_attention(
    segments: Sequence[Segment], *, heads: int, layers: int, itemsize: int, device: torch.device
) -> AttentionPlan:
    """Indices and masks for all segments of a micro-batch."""
    tokens = sum(s.length for s in segments)
    chunks = []
    scores = 0
    for part in _parts(segments, heads):
        chunk = _chunk(part, segments, tokens)
        scores += chunk.bias_SLJ.numel() * heads
        chunks.append(Chunk(chunk.query_SL.to(device), chunk.key_SJ.to(device), chunk.bias_SLJ.to(device)))
    return AttentionPlan(tuple(chunks), keep=scores * itemsize * layers <= _KEEP_BYTES)


def attend(q_NAD: Tensor, k_NED: Tensor, v_NED: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(scale * q k) v over what each token sees; shape [N, A, D], dtype of q."""
    out: Tensor = _Attention.apply(q_NAD, k_NED, v_NED, plan, scale)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside, float32 matrix products of operands that are exact in bfloat16 run on bfloat16 units (CPU).

    Products are exact and sums are float32, so nothing is lost; it is 2-5 times as fast as float32.
    """
    backend: Any = cast(Any, torch.backends.mkldnn).matmul
    before = backend.fp32_precision
    if dtype == torch.bfloat16:
        backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NAD: Tensor, k_NED: Tensor, v_NED: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        ctx.plan, ctx.scale = plan, scale
        out_NAD = q_NAD.new_empty(q_NAD.shape[0] + 1, *q_NAD.shape[1:])
        q, k, v = _pad(q_NAD), _pad(k_NED), _pad(v_NED)
        kept = []
        for chunk in plan.chunks:
            p = _probabilities(_queries(q, chunk, k_NED.shape[1]), _keys(k, chunk), chunk, scale)
            o = torch.bmm(p, _keys(v, chunk))
            _put(out_NAD, o, chunk, k_NED.shape[1])
            if plan.keep and ctx.needs_input_grad[0]:
                kept.append(p)
        ctx.save_for_backward(q_NAD, k_NED, v_NED, *kept)
        return out_NAD[:-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_NAD, k_NED, v_NED, *kept = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        heads = k_NED.shape[1]
        q, k, v, g = _pad(q_NAD), _pad(k_NED), _pad(v_NED), _pad(grads[0])
        dq_NAD = torch.empty_like(q)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = torch.zeros_like(dk)
        for i, chunk in enumerate(plan.chunks):
            q_BLD, k_BJD, v_BJD, g_BLD = (
                _queries(q, chunk, heads),
                _keys(k, chunk),
                _keys(v, chunk),
                _queries(g, chunk, heads),
            )
            p = kept[i] if kept else _probabilities(q_BLD, k_BJD, chunk, scale)
            _add_keys(dv, torch.bmm(p.transpose(1, 2), g_BLD), chunk)
            dp = torch.bmm(g_BLD, v_BJD.transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            _put(dq_NAD, torch.bmm(ds, k_BJD).mul_(scale), chunk, heads)
            _add_keys(dk, torch.bmm(ds.transpose(1, 2), q_BLD).mul_(scale), chunk)
        return dq_NAD[:-1], dk[:-1].to(k.dtype), dv[:-1].to(v.dtype), None, None


def _probabilities(q_BLD: Tensor, k_BJD: Tensor, chunk: Chunk, scale: float) -> Tensor:
    """Softmax of masked float32 scores in the compute dtype, [B, R*L, J]."""
    s, length, keys = chunk.bias_SLJ.shape
    with exact_products(q_BLD.dtype):
        if math.frexp(scale)[0] == 0.5:  # a power of two: scaling the query is exact
            scores = torch.bmm(q_BLD.float().mul(scale), k_BJD.float().transpose(1, 2))
        else:
            scores = torch.bmm(q_BLD.float(), k_BJD.float().transpose(1, 2)).mul_(scale)
    scores.view(s, -1, length, keys).add_(chunk.bias_SLJ[:, None])
    return torch.softmax(scores, -1).to(q_BLD.dtype)


def _pad(value: Tensor) -> Tensor:
    """Append the zero row that padded places point to."""
    return torch.cat([value, value.new_zeros(1, *value.shape[1:])])


def _queries(value: Tensor, chunk: Chunk, kv_heads: int) -> Tensor:
    """[N + 1, A, D] -> [S * E, R * L, D]."""
    s, length = chunk.query_SL.shape
    dim = value.shape[2]
    picked = value.index_select(0, chunk.query_SL.reshape(-1)).view(s, length, kv_heads, -1, dim)
    return picked.permute(0, 2, 3, 1, 4).reshape(s * kv_heads, -1, dim)


def _keys(value: Tensor, chunk: Chunk) -> Tensor:
    """[N + 1, E, D] -> [S * E, J, D]."""
    s, keys = chunk.key_SJ.shape
    picked = value.index_select(0, chunk.key_SJ.reshape(-1)).view(s, keys, value.shape[1], value.shape[2])
    return picked.transpose(1, 2).reshape(s * value.shape[1], keys, value.shape[2])


def _put(out: Tensor, value_BLD: Tensor, chunk: Chunk, kv_heads: int) -> None:
    """Inverse of `_queries`: every query place is written once, padding goes to the last row."""
    s, length = chunk.query_SL.shape
    dim = value_BLD.shape[2]
    back = value_BLD.view(s, kv_heads, -1, length, dim).permute(0, 3, 1, 2, 4).reshape(s * length, -1, dim)
    out.index_copy_(0, chunk.query_SL.reshape(-1), back)


def _add_keys(total: Tensor, value_BJD: Tensor, chunk: Chunk) -> None:
    """Transpose of `_keys`: sums over the members that share a key, in float32."""
    s, keys = chunk.key_SJ.shape
    back = value_BJD.view(s, -1, keys, value_BJD.shape[2]).transpose(1, 2).reshape(s * keys, -1, value_BJD.shape[2])
    total.index_add_(0, chunk.key_SJ.reshape(-1), back.float())


def _parts(segments: Sequence[Segment], heads: int) -> Iterator[list[Segment]]:
    """Segments of similar size, cut so that padded scores stay within the limit."""

    def keys(segment: Segment) -> int:
        return segment.length + (segments[segment.parent].length if segment.parent >= 0 else 0)

    for level in (False, True):
        chosen = sorted((s for s in segments if (s.parent >= 0) is level), key=lambda s: (keys(s), s.length))
        part: list[Segment] = []
        for segment in chosen:
            trial = [*part, segment]
            size = len(trial) * max(s.length for s in trial) * keys(segment) * heads
            if part and size > _CHUNK_SCORES:
                yield part
                trial = [segment]
            part = trial
        if part:
            yield part


def _chunk(part: Sequence[Segment], segments: Sequence[Segment], tokens: int) -> Chunk:
    """Padded indices and mask of a few segments."""
    length = max(s.length for s in part)
    prefixes = [segments[s.parent] if s.parent >= 0 else Segment(0, 0, -1) for s in part]
    prefix = max(p.length for p in prefixes)
    query_SL = np.full((len(part), length), tokens, dtype=np.int64)
    key_SJ = np.full((len(part), prefix + length), tokens, dtype=np.int64)
    seen_SLJ = np.zeros((len(part), length, prefix + length), dtype=np.bool_)
    causal_LL = np.tril(np.ones((length, length), dtype=np.bool_))
    for i, (segment, parent) in enumerate(zip(part, prefixes, strict=True)):
        own = np.arange(segment.start, segment.start + segment.length)
        query_SL[i, : segment.length] = own
        key_SJ[i, : parent.length] = np.arange(parent.start, parent.start + parent.length)
        key_SJ[i, prefix : prefix + segment.length] = own
        seen_SLJ[i, :, : parent.length] = True
        seen_SLJ[i, :, prefix:] = causal_LL  # a padded query sees something, so that its softmax is finite
    bias_SLJ = torch.zeros(seen_SLJ.shape).masked_fill_(torch.from_numpy(~seen_SLJ), -math.inf)
    return Chunk(torch.from_numpy(query_SL), torch.from_numpy(key_SJ), bias_SLJ)
