"""Fast decoder of the Llama family: llama, qwen2, qwen3, mistral (without sliding window).

Letters: B rows, T positions of a prompt, H hidden, Q query heads, K key heads (as many value heads), D head width,
S entries attended to, V vocabulary. Rounding follows transformers: the residual stream and every product are in the
compute dtype, norms are computed in float32 and rounded before their weight is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.rollout.native import kernels
from headrace.rollout.native.head import logits_fp32
from headrace.rollout.native.held import Held
from headrace.rollout.native.kv import KvCache
from headrace.rollout.native.loading import infos_of, to_tensor
from headrace.rollout.native.weights import Layer, Weights, can_pack, fuse, hold
from headrace.sync.manifest import TensorInfo

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_PREFILL_TOK = 2048
"""Padded tokens computed at once in a prefill; bounds its memory."""
_READ_STEP = 16
"""Entries read in attention are a multiple of this."""


def supports(config: Any, max_context_tok: int) -> bool:
    """Whether this decoder computes exactly what transformers' model of that config does."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    return (
        config.model_type in FAMILY
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _ROPE_KINDS
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
        and (window is None or window >= max_context_tok)
    )


class Decoder:
    """Weights, KV cache and arithmetic; implements `backend.Backend`."""

    can_share = True

    def __init__(
        self,
        config: Any,
        named: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: str,
        max_batch: int,
        max_context_tok: int,
        fixed_shapes: bool,
    ) -> None:
        self.infos: tuple[TensorInfo, ...] = infos_of(named)
        self.vocab: int = named["model.embed_tokens.weight"].shape[0]
        self._device, self._dtype = device, dtype
        self._max_batch, self._max_context, self._fixed = max_batch, max_context_tok, fixed_shapes
        self._n_layers: int = config.num_hidden_layers
        self._pack = can_pack(dtype, device)
        self._kernels = kernels.usable(dtype, device)
        self._eps: float = config.rms_norm_eps
        self._eps_1 = torch.tensor([config.rms_norm_eps], dtype=torch.float32, device=device)
        self._q_heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._weights = fuse(named, layers=self._n_layers, device=device, pack=self._pack)
        self._cos_CD, self._sin_CD = _rope_tables(config, self._width, max_context_tok, dtype, device)
        if self._kernels:
            kernels.warm_up(self._width, self._q_heads, self._kv_heads)
        half = self._width // 2
        self._cos_kernel = self._cos_CD[:, half:].float().contiguous().cpu().numpy()
        self._sin_kernel = self._sin_CD[:, half:].float().contiguous().cpu().numpy()
        self._kv = KvCache(
            layers=self._n_layers,
            heads=self._kv_heads,
            width=self._width,
            dtype=dtype,
            device=device,
            rows=max_batch,
            context=max_context_tok,
        )

    def prefill(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        """See Backend. Prompts of like length go together, padded on the right; with fixed shapes each goes alone."""
        order = sorted((i for i in range(len(rows)) if ids[i]), key=lambda i: len(ids[i]))
        while order:
            longest = self._max_context if self._fixed else len(ids[order[-1]])
            take = 1 if self._fixed else max(1, _PREFILL_TOK // longest)
            part, order = order[-take:], order[:-take]
            self._prefill([rows[i] for i in part], [ids[i] for i in part], longest)

    def copy_row(self, src: int, dst: int, n_tok: int) -> None:
        self._kv.copy_row(src, dst, n_tok)

    def decode(self, ids_B: Sequence[int], position_B: Sequence[int]) -> torch.Tensor:
        """See Backend."""
        count = len(ids_B)
        ids, position = list(ids_B), list(position_B)
        reach = self._max_context if self._fixed else max(position) + 1
        if self._fixed:
            ids += [0] * (self._max_batch - count)
            position += [0] * (self._max_batch - count)
        self._kv.ensure(len(ids), reach)
        reach = min(self._kv.context, -(-reach // _READ_STEP) * _READ_STEP)
        hidden_BH = self._decode(
            torch.tensor(ids, device=self._device), torch.tensor(position, device=self._device), reach
        )
        logits_BV = logits_fp32(hidden_BH, self._weights.head_VH, exact_inputs=self._dtype == torch.bfloat16)
        return logits_BV[:count]

    def stage(self, arrays: Mapping[str, NDArray[np.generic]]) -> Weights:
        """On the CPU the finished weights; for an accelerator, fused weights in host memory."""
        named = {name: to_tensor(array) for name, array in arrays.items()}
        return fuse(named, layers=self._n_layers, device="cpu", pack=self._pack)

    def held(self) -> Held:
        """See Backend."""
        return hold(self._weights, {info.name: info.shape for info in self.infos})

    def swap(self, staged: Weights, infos: tuple[TensorInfo, ...]) -> None:
        if self._device == "cpu":
            self._weights = staged
        else:
            for old, new in zip(self._weights.tensors(), staged.tensors(), strict=True):
                old.copy_(new)
        self.infos = infos

    # --- arithmetic

    def _prefill(self, rows: list[int], ids: list[Sequence[int]], length: int) -> None:
        self._kv.ensure(max(rows) + 1, length)
        batch, width = len(rows), self._width
        padded = [[*one, *([0] * (length - len(one)))] for one in ids]
        rows_B = torch.tensor(rows, device=self._device)
        x_NH = F.embedding(torch.tensor(padded, device=self._device).view(-1), self._weights.embed_VH)
        row_N = rows_B.repeat_interleave(length)
        position_N = torch.arange(length, device=self._device).repeat(batch)
        for index, (layer, kv) in enumerate(zip(self._weights.layers, self._kv.layers, strict=True)):
            qkv_NAD = layer.qkv(self._norm(x_NH, layer.attn_norm_H)).view(batch * length, -1, width)
            self._rotate_store_(qkv_NAD, layer, row_N, position_N, kv)
            if index == self._n_layers - 1:
                return  # the last layer's keys and values are stored; nothing reads its output
            qkv_BATD = qkv_NAD.view(batch, length, -1, width).transpose(1, 2)
            q, k, v = torch.split(qkv_BATD, [self._q_heads, self._kv_heads, self._kv_heads], 1)
            attended_BQTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x_NH = layer.out.plus(attended_BQTD.transpose(1, 2).reshape(batch * length, -1), x_NH)
            x_NH = self._mlp(x_NH, layer)

    def _decode(self, ids_B: torch.Tensor, position_B: torch.Tensor, reach: int) -> torch.Tensor:
        """Final normed hidden states [B, H]."""
        batch, width = len(ids_B), self._width
        x_BH = F.embedding(ids_B, self._weights.embed_VH)
        row_B = torch.arange(batch, device=self._device)
        column_S = torch.arange(reach, device=self._device)
        mask_B11S = torch.zeros(batch, 1, 1, reach, dtype=self._dtype, device=self._device)
        mask_B11S.masked_fill_((column_S > position_B[:, None])[:, None, None], -torch.inf)
        for layer, kv in zip(self._weights.layers, self._kv.layers, strict=True):
            qkv_BAD = layer.qkv(self._norm(x_BH, layer.attn_norm_H)).view(batch, -1, width)
            self._rotate_store_(qkv_BAD, layer, row_B, position_B, kv)
            k_BKSD, v_BKSD = kv[:batch, : self._kv_heads, :reach], kv[:batch, self._kv_heads :, :reach]
            attended_BQ1D = F.scaled_dot_product_attention(
                qkv_BAD[:, : self._q_heads, None], k_BKSD, v_BKSD, attn_mask=mask_B11S, enable_gqa=True
            )
            x_BH = layer.out.plus(attended_BQ1D.reshape(batch, -1), x_BH)
            x_BH = self._mlp(x_BH, layer)
        return self._norm(x_BH, self._weights.norm_H)

    def _mlp(self, x_NH: torch.Tensor, layer: Layer) -> torch.Tensor:
        """The residual stream after the layer's second half."""
        normed_NH = self._norm(x_NH, layer.mlp_norm_H)
        return layer.down.plus(layer.up.times(normed_NH, layer.gate.silu(normed_NH)), x_NH)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm over the last dimension."""
        if self._kernels and x.ndim == 2:
            return kernels.rms_norm(x, kernels.bits(weight), self._eps)
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_1, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def _rotate_store_(
        self, qkv_NAD: torch.Tensor, layer: Layer, row_N: torch.Tensor, position_N: torch.Tensor, kv: torch.Tensor
    ) -> None:
        """Norm (if the model has it) and rotate query and key heads in place; copy keys and values to the cache."""
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q, k = qkv_NAD[:, : self._q_heads], qkv_NAD[:, self._q_heads : -self._kv_heads]
            q.copy_(self._norm(q, layer.q_norm_D))
            k.copy_(self._norm(k, layer.k_norm_D))
        if self._kernels:
            kernels.rotate_store(
                qkv_NAD, self._cos_kernel, self._sin_kernel, row_N.numpy(), position_N.numpy(), kernels.bits(kv)
            )
            return
        cos_N1D, sin_N1D = self._cos_CD[position_N][:, None], self._sin_CD[position_N][:, None]
        both = qkv_NAD[:, : -self._kv_heads]
        torch.addcmul(both * cos_N1D, both.roll(self._width // 2, -1), sin_N1D, out=both)
        kv[row_N, :, position_N] = qkv_NAD[:, self._q_heads :]


def _rope_tables(
    config: Any, width: int, context: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [C, D]: rotate(x) = x * cos + roll(x, D/2) * sin, the sign of rotate_half folded into sin."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        frequency, factor = 1.0 / (config.rope_parameters["rope_theta"] ** exponent), 1.0
    else:
        frequency, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angle_CF = torch.arange(context, dtype=torch.float32)[:, None] * frequency[None]
    cos = (angle_CF.cos() * factor).to(dtype)
    sin = (angle_CF.sin() * factor).to(dtype)
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)
