"""Weights of the Llama family in the form that decodes fastest: projections fused, and prepacked where that helps.

Letters: H hidden, O output features, V vocabulary, N rows of input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from headrace.rollout.native.head import head_weight
from headrace.rollout.native.held import Derived, Held, Place
from headrace.rollout.native.loading import to_array
from headrace.rollout.native.packing import pack as pack_weight
from headrace.rollout.native.packing import places_of, write_packed


def can_pack(dtype: torch.dtype, device: str) -> bool:
    """oneDNN's prepacked bfloat16 linear is there: 1.4 to 1.6 x faster than F.linear at 1 to 128 rows."""
    mkldnn: Any = torch.backends.mkldnn
    return (
        dtype == torch.bfloat16
        and device == "cpu"
        and mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class Linear:
    """x @ weight.T + bias for [N, H] inputs, with what follows it.

    The packed form applies what follows to the float32 sum, before the only rounding, at no cost: a decode step at
    64 rows is bound by memory, and every further operator finds its code and data evicted by the weights' stream.
    """

    def __init__(self, weight_OH: torch.Tensor, bias_O: torch.Tensor | None, *, pack: bool) -> None:
        self.bias_O = bias_O
        self.packed = pack
        self.weight_OH = pack_weight(weight_OH) if pack else weight_OH

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self._unary(x_NH, "none") if self.packed else F.linear(x_NH, self.weight_OH, self.bias_O)

    def silu(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self._unary(x_NH, "swish") if self.packed else F.silu(F.linear(x_NH, self.weight_OH, self.bias_O))

    def times(self, x_NH: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return self._binary(x_NH, other_NO, "mul")
        return other_NO * F.linear(x_NH, self.weight_OH, self.bias_O)

    def plus(self, x_NH: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return self._binary(x_NH, other_NO, "add")
        return other_NO + F.linear(x_NH, self.weight_OH, self.bias_O)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight_OH] if self.bias_O is None else [self.weight_OH, self.bias_O]

    def dense(self) -> torch.Tensor:
        """The weight [O, H] on the host; itself where it lies there unpacked."""
        return self.weight_OH.to_dense() if self.packed else self.weight_OH.cpu()

    def _unary(self, x_NH: torch.Tensor, what: str) -> torch.Tensor:
        y_NO: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x_NH, self.weight_OH, self.bias_O, what, [], "")
        return y_NO

    def _binary(self, x_NH: torch.Tensor, other_NO: torch.Tensor, what: str) -> torch.Tensor:
        y_NO: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x_NH, other_NO, self.weight_OH, self.bias_O, what
        )
        return y_NO


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    attn_norm_H: torch.Tensor
    qkv: Linear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    out: Linear
    mlp_norm_H: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear

    def tensors(self) -> list[torch.Tensor]:
        norms = [self.attn_norm_H, self.mlp_norm_H, self.q_norm_D, self.k_norm_D]
        linears = [t for linear in (self.qkv, self.out, self.gate, self.up, self.down) for t in linear.tensors()]
        return [t for t in norms if t is not None] + linears


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All of a model."""

    embed_VH: torch.Tensor
    layers: tuple[Layer, ...]
    norm_H: torch.Tensor
    head_VH: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor, in an order that depends on the architecture only."""
        return [self.embed_VH, self.norm_H, self.head_VH, *(t for layer in self.layers for t in layer.tensors())]


@dataclass(frozen=True, slots=True)
class _Packed:
    """Part of a prepacked linear, from the dense element `start` on."""

    linear: Linear
    start: int

    def write(self, where: NDArray[np.int64] | slice, values: NDArray[Any]) -> None:
        shifted = (
            slice(where.start + self.start, where.stop + self.start)
            if isinstance(where, slice)
            else (where + self.start)
        )
        self.linear.weight_OH = write_packed(self.linear.weight_OH, shifted, values.view(np.uint16))


def hold(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> Held:
    """Host arrays of all served tensors, named and shaped as in the model, which stay tied to what is served."""
    arrays: dict[str, NDArray[Any]] = {}
    derived: dict[str, list[Derived]] = {}

    def add(name: str, host: torch.Tensor, start: int, *parts: Derived) -> int:
        """`name` is part of `host`, from its element `start`; returns where it ends."""
        stop = start + int(np.prod(shapes[name], dtype=np.int64))
        arrays[name] = to_array(host).reshape(-1)[start:stop].reshape(shapes[name])
        derived[name] = list(parts)
        return stop

    def tensor(name: str, served: torch.Tensor | None) -> None:
        if served is not None:
            add(name, served, 0, *([] if served.device.type == "cpu" else [Place(served)]))

    def linear(served: Linear, prefix: str, *parts: str) -> None:
        host, at = served.dense(), 0
        if served.packed:
            places_of(*host.shape)  # found out now, not in the pause of the first swap
        for part in parts:
            off_host = served.weight_OH.device.type != "cpu"
            own: list[Derived] = [Place(served.weight_OH, at)] if off_host else []
            at = add(f"{prefix}.{part}.weight", host, at, *([_Packed(served, at)] if served.packed else own))
        if served.bias_O is not None:
            bias, at = served.bias_O.cpu(), 0
            for part in parts:
                off_host = served.bias_O.device.type != "cpu"
                at = add(f"{prefix}.{part}.bias", bias, at, *([Place(served.bias_O, at)] if off_host else []))

    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    tensor(embed, weights.embed_VH)
    if weights.head_VH.data_ptr() != weights.embed_VH.data_ptr():
        if head not in shapes:
            derived[embed].append(Place(weights.head_VH))
        elif weights.head_VH.device.type == "cpu" and weights.head_VH.dtype != weights.embed_VH.dtype:
            add(head, weights.head_VH.to(weights.embed_VH.dtype), 0, Place(weights.head_VH))
        else:
            tensor(head, weights.head_VH)
    tensor("model.norm.weight", weights.norm_H)
    for index, layer in enumerate(weights.layers):
        base = f"model.layers.{index}"
        tensor(f"{base}.input_layernorm.weight", layer.attn_norm_H)
        tensor(f"{base}.post_attention_layernorm.weight", layer.mlp_norm_H)
        tensor(f"{base}.self_attn.q_norm.weight", layer.q_norm_D)
        tensor(f"{base}.self_attn.k_norm.weight", layer.k_norm_D)
        linear(layer.qkv, f"{base}.self_attn", "q_proj", "k_proj", "v_proj")
        linear(layer.out, f"{base}.self_attn", "o_proj")
        linear(layer.gate, f"{base}.mlp", "gate_proj")
        linear(layer.up, f"{base}.mlp", "up_proj")
        linear(layer.down, f"{base}.mlp", "down_proj")
    return Held(arrays, derived)


def fuse(named: Mapping[str, torch.Tensor], *, layers: int, device: str, pack: bool) -> Weights:
    """Build weights from tensors named as in transformers' Llama-like models; `named` may be dropped afterwards."""

    def get(name: str) -> torch.Tensor:
        return named[name].to(device, copy=True)

    def linear(prefix: str, *parts: str) -> Linear:
        weight = torch.cat([named[f"{prefix}.{p}.weight"] for p in parts]).to(device)
        biased = f"{prefix}.{parts[0]}.bias" in named
        bias = torch.cat([named[f"{prefix}.{p}.bias"] for p in parts]).to(device) if biased else None
        return Linear(weight, bias, pack=pack)

    def layer(index: int) -> Layer:
        base = f"model.layers.{index}"
        qk_norm = f"{base}.self_attn.q_norm.weight" in named
        return Layer(
            attn_norm_H=get(f"{base}.input_layernorm.weight"),
            qkv=linear(f"{base}.self_attn", "q_proj", "k_proj", "v_proj"),
            q_norm_D=get(f"{base}.self_attn.q_norm.weight") if qk_norm else None,
            k_norm_D=get(f"{base}.self_attn.k_norm.weight") if qk_norm else None,
            out=linear(f"{base}.self_attn", "o_proj"),
            mlp_norm_H=get(f"{base}.post_attention_layernorm.weight"),
            gate=linear(f"{base}.mlp", "gate_proj"),
            up=linear(f"{base}.mlp", "up_proj"),
            down=linear(f"{base}.mlp", "down_proj"),
        )

    embed_VH = get("model.embed_tokens.weight")
    head = named.get("lm_head.weight")
    return Weights(
        embed_VH=embed_VH,
        layers=tuple(layer(i) for i in range(layers)),
        norm_H=get("model.norm.weight"),
        head_VH=head_weight(embed_VH if head is None else head.to(device, copy=True)),
    )
