"""The policy: token ids of a micro-batch in, log-probs of its targets out.

Dimension letters: N tokens of the flat row, K targets, H hidden, A heads, E key-value heads, D head dimension, V vocab.

Weights and configuration are transformers' `AutoModelForCausalLM`. For the Llama family (llama, mistral without a
sliding window, qwen2, qwen3) the forward pass is our own, on the flat row: no padding, prompts once, attention by
segments. Any other architecture runs transformers' own layers on padded rows with a 4D mask, from the same micro-batch
and with the same result (tested on the Llama family in float32).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headrace.errors import DataError, LearnerError, boundary
from headrace.trainer.attention import attend, plan_attention
from headrace.trainer.batching import MicroBatch, Segment
from headrace.trainer.blocks import embed, linear, rms_norm, rotate, swiglu
from headrace.trainer.head import token_logp
from headrace.trainer.past import Past

_FLAT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Policy:
    """A causal language model for training."""

    def __init__(self, model_dir: str, *, dtype: torch.dtype, device: torch.device, head_chunk_tok: int) -> None:
        """Load a folder in Hugging Face layout. DataError when transformers cannot."""
        if not (Path(model_dir) / "config.json").is_file():
            raise DataError(f"model folder {model_dir!r} has no config.json; it must be in Hugging Face layout")
        with boundary(DataError, f"loading the model in {model_dir}"):
            module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        self.module: Any = cast(nn.Module, module).to(device).eval()
        self.config: Any = module.config
        self.dtype, self.device, self.head_chunk_tok = dtype, device, head_chunk_tok
        self.tied = bool(self.config.tie_word_embeddings)
        self.flat = self.config.model_type in _FLAT_FAMILIES and not _slides(self.config)
        """Use our own forward pass; may be set to False to compare."""
        self.embedding_grad_VH: Tensor | None = None
        """Float32 accumulators that bypass autograd; None while those weights are frozen."""
        self.head_grad_VH: Tensor | None = None
        self.linear_grads: dict[nn.Module, Tensor] = {}
        """The same for linear layers inside our own forward pass; without an entry autograd does it."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Hugging Face names; a tied head is not listed."""
        yield from self.module.named_parameters()

    @property
    def embedding_name(self) -> str:
        return self._name_of(self.module.get_input_embeddings().weight)

    @property
    def head_name(self) -> str:
        return self._name_of(self.module.get_output_embeddings().weight)

    def collect(self, grad_of: Mapping[str, Tensor]) -> None:
        """Send gradients of embedding, head and linear layers straight into these float32 accumulators, by name."""
        self.embedding_grad_VH = grad_of.get(self.embedding_name)
        self.head_grad_VH = grad_of.get(self.head_name)
        linears = {n: m for n, m in self.module.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
        self.linear_grads = {m: grad_of[f"{n}.weight"] for n, m in linears.items() if f"{n}.weight" in grad_of}

    def logp(self, micro: MicroBatch, temperature: float, past: Past | None = None) -> tuple[Tensor, Tensor]:
        """(log-probs of the targets with gradient, entropy in nats), float32 [K].

        `past`: the tokens go on from keys and values computed before, perhaps by other weights (our own layers only).
        """
        with boundary(LearnerError, f"forward pass over {micro.tokens} tokens"):
            hidden_NH = self._flat_hidden(micro, past) if self.flat or past else self._padded_hidden(micro)
            source_K = torch.from_numpy(micro.source_K).to(self.device)
            return token_logp(
                hidden_NH.index_select(0, source_K),
                self.module.get_output_embeddings().weight,
                torch.from_numpy(micro.target_K).to(self.device),
                temperature=temperature,
                chunk_tok=self.head_chunk_tok,
                grad_VH=self.head_grad_VH,
            )

    def _flat_hidden(self, micro: MicroBatch, past: Past | None) -> Tensor:
        """Final normed hidden states [N, H], our own layers."""
        config, body = self.config, self.module.model
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        plan = plan_attention(
            micro.segments if past is None else past.segments,
            heads=heads,
            layers=config.num_hidden_layers,
            itemsize=torch.finfo(self.dtype).bits // 8,
            device=self.device,
        )
        ids_N = torch.from_numpy(micro.ids_N).to(self.device)
        x_NH = embed(ids_N, body.embed_tokens.weight, self.embedding_grad_VH)
        position_1N = torch.from_numpy(micro.position_N).to(self.device)[None]
        cos, sin = body.rotary_emb(torch.empty(0, dtype=torch.float32, device=self.device), position_1N)
        half = head_dim // 2
        cos_N1D, sin_N1D = cos[0, :, None, :half], sin[0, :, None, :half]
        for index, layer in enumerate(body.layers):
            attention = layer.self_attn
            h_NH = rms_norm(x_NH, layer.input_layernorm.weight, config.rms_norm_eps)
            q_NAD = self._linear(h_NH, attention.q_proj).view(-1, heads, head_dim)
            k_NED = self._linear(h_NH, attention.k_proj).view(-1, kv_heads, head_dim)
            v_NED = self._linear(h_NH, attention.v_proj).view(-1, kv_heads, head_dim)
            if config.model_type == "qwen3":
                q_NAD = rms_norm(q_NAD, attention.q_norm.weight, config.rms_norm_eps)
                k_NED = rms_norm(k_NED, attention.k_norm.weight, config.rms_norm_eps)
            q_NAD, k_NED = rotate(q_NAD, cos_N1D, sin_N1D), rotate(k_NED, cos_N1D, sin_N1D)
            if past is None:
                out_NAD = attend(q_NAD, k_NED, v_NED, plan, attention.scaling)
            else:
                out_NAD = past.attend(index, q_NAD, k_NED, v_NED, plan, attention.scaling)
            x_NH = x_NH + self._linear(out_NAD.reshape(len(x_NH), -1), attention.o_proj)
            h_NH = rms_norm(x_NH, layer.post_attention_layernorm.weight, config.rms_norm_eps)
            gate_NF, up_NF = self._linear(h_NH, layer.mlp.gate_proj), self._linear(h_NH, layer.mlp.up_proj)
            x_NH = x_NH + self._linear(swiglu(gate_NF, up_NF), layer.mlp.down_proj)
        return rms_norm(x_NH, body.norm.weight, config.rms_norm_eps)

    def _linear(self, x_NI: Tensor, module: nn.Linear) -> Tensor:
        """A linear layer whose weight's gradient, if collected, goes straight into its float32 accumulator."""
        return linear(x_NI, module, self.linear_grads.get(module))

    def _padded_hidden(self, micro: MicroBatch) -> Tensor:
        """Final hidden states [N, H] from transformers' layers: one padded row per family of segments, 4D mask."""
        families = _families(micro.segments)
        width = max(sum(micro.segments[i].length for i in f) for f in families)
        index_FW = np.full((len(families), width), micro.tokens, dtype=np.int64)
        seen_FWW = np.tile(np.eye(width, dtype=np.bool_), (len(families), 1, 1))
        for row, family in enumerate(families):
            at = 0
            place: dict[int, slice] = {}
            for i in family:
                segment = micro.segments[i]
                here = place[i] = slice(at, at + segment.length)
                at = here.stop
                index_FW[row, here] = np.arange(segment.start, segment.start + segment.length)
                seen_FWW[row, here, here] = np.tril(np.ones((segment.length,) * 2, dtype=np.bool_))
                if segment.parent >= 0:
                    seen_FWW[row, here, place[segment.parent]] = True
        index = torch.from_numpy(index_FW).to(self.device)
        ids_FW = torch.from_numpy(np.append(micro.ids_N, 0)).to(self.device)[index]
        position_FW = torch.from_numpy(np.append(micro.position_N, 0)).to(self.device)[index]
        seen = torch.from_numpy(seen_FWW).to(self.device)
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        x_FWH = embed(ids_FW.reshape(-1), self.module.get_input_embeddings().weight, self.embedding_grad_VH)
        out = self.module.base_model(
            inputs_embeds=x_FWH.view(*ids_FW.shape, -1),
            attention_mask=bias[:, None],
            position_ids=position_FW,
            use_cache=False,
        )
        back_N = np.empty(micro.tokens, dtype=np.int64)
        real = index_FW.reshape(-1) < micro.tokens
        back_N[index_FW.reshape(-1)[real]] = np.flatnonzero(real)
        hidden: Tensor = out.last_hidden_state.reshape(-1, out.last_hidden_state.shape[-1])
        return hidden.index_select(0, torch.from_numpy(back_N).to(self.device))

    def _name_of(self, weight: Tensor) -> str:
        found: str = next(name for name, p in self.module.named_parameters() if p is weight)
        return found


def _slides(config: Any) -> bool:
    """The model attends through a sliding window somewhere."""
    kinds = getattr(config, "layer_types", None) or ()
    uses = getattr(config, "use_sliding_window", True)
    return any(k != "full_attention" for k in kinds) or (bool(getattr(config, "sliding_window", None)) and uses)


def _families(segments: tuple[Segment, ...]) -> list[list[int]]:
    """Indices of segments that belong together: a parent followed by its children."""
    families: dict[int, list[int]] = {}
    for i, segment in enumerate(segments):
        families.setdefault(segment.parent if segment.parent >= 0 else i, []).append(i)
    return list(families.values())
