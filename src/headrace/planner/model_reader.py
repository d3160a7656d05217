"""From a Hugging Face config.json to a `ModelShape`: parameters, KV entries and FLOPs without loading a weight.

Attention: grouped queries, latent (MLA), sliding windows, gated delta-net, sparse index. Feed-forward: gated, dense or
experts, with shared experts. A kind of layer that is not modelled is refused, never approximated in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import PlanError, did_you_mean
from headrace.planner.facts import Grade

Layer = Literal["full", "window", "recurrent"]

STATE_BYTES = 4.0
"""Per element: engines keep the recurrent state in fp32 (151 MB per sequence of Qwen3.8-27B, miles, 2026)."""
WEIGHT_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625, "fp32": 4.0}
"""Per element; fp4 with one fp8 scale per 16 elements (NVFP4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What costs need to know of a model. Counts are elements, not bytes, unless the name says so."""

    name: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    """1 for MLA: the latent is shared by all heads, so tensor parallelism copies it."""
    head_dim: int
    """Of queries and keys; for MLA the part without and with position."""
    params: int
    """All weights, tied embeddings counted once; extra prediction (MTP) layers left out."""
    active_params: int
    """That one token uses, embedding included: the number in names such as A3B."""
    attention_params: int
    """All layers, recurrent mixers included."""
    dense_params: int
    """Read by every step whatever the tokens are: attention, dense and shared feed-forward, routers, norms, output
    head. Without experts and without the embedding look-up."""
    expert_params: int
    """One expert of one layer."""
    experts: int
    """Routed experts per MoE layer; 0 = dense model."""
    experts_per_tok: int
    moe_layers: int
    full_layers: int
    """Layers that attend to the whole context."""
    window_layers: int
    window_tok: int
    recurrent_layers: int
    state_elems_per_seq: int
    """Recurrent and convolution state of all recurrent layers; independent of the context."""
    kv_elems_per_tok_full: int
    """KV elements of one token over all full-attention layers (MLA: latent and rotary key; sparse: index keys too)."""
    kv_elems_per_tok_window: int
    """Over all window layers, while the token lies in the window."""
    mla: bool
    attn_flops_per_pair: float
    """One query token against one context token, all full layers, as prefill and training compute it (MLA expanded)."""
    decode_flops_per_pair: float
    """The same in decode: MLA attends in the latent space, which costs more FLOPs and reads far fewer bytes."""
    window_flops_per_pair: float
    """Over all window layers, for pairs inside the window."""
    sparse_tok: int
    """A query attends to at most so many tokens (index top-k); 0 = to all."""
    index_flops_per_pair: float
    """Scoring every context token to choose them, all layers."""
    embed_params: int
    """Embedding table, where it is not also the output head; else 0."""
    head_params: int
    """Output head (vocab x hidden)."""
    source: str = ""
    grade: Grade = "spec"

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def matmul_params(self) -> int:
        """Weights that one token multiplies with: active_params without the embedding look-up."""
        return self.active_params - self.embed_params

    def kv_bytes(self, context_tok: float, bytes_per_elem: float = 2.0) -> float:
        """Bytes that one sequence of `context_tok` tokens occupies: KV, windows capped, recurrent state included."""
        windowed = self.kv_elems_per_tok_window * min(context_tok, self.window_tok)
        state_bytes = self.state_elems_per_seq * STATE_BYTES
        return (self.kv_elems_per_tok_full * context_tok + windowed) * bytes_per_elem + state_bytes

    def weight_bytes(self, precision: str) -> float:
        """Bytes of all weights. In fp8 and fp4 embedding and output head stay bf16, as published checkpoints do.

        Raises PlanError for an unknown precision.
        """
        if precision not in WEIGHT_BYTES:
            raise PlanError(f"precision {precision!r} is unknown; {did_you_mean(precision, WEIGHT_BYTES)}")
        size = WEIGHT_BYTES[precision]
        tables = self.embed_params + self.head_params
        return (self.params - tables) * size + tables * max(size, 2.0)

    def experts_hit(self, tokens: float) -> float:
        """Distinct experts of one layer that `tokens` tokens use, expected under uniform routing: E(1-(1-k/E)^n)."""
        if not self.experts or tokens <= 0:
            return 0.0
        return float(self.experts * (1.0 - (1.0 - self.experts_per_tok / self.experts) ** tokens))

    def read_elems(self, tokens: float) -> float:
        """Distinct weight elements that a step over `tokens` tokens reads."""
        return self.dense_params + self.moe_layers * self.experts_hit(tokens) * self.expert_params

    def attention_flops(self, context_tok: float, *, decode: bool = False) -> float:
        """FLOPs of one query token against `context_tok` tokens: windows and sparse top-k capped, indexing included."""
        per_pair = self.decode_flops_per_pair if decode else self.attn_flops_per_pair
        seen = min(context_tok, self.sparse_tok) if self.sparse_tok else context_tok
        windowed = self.window_flops_per_pair * min(context_tok, self.window_tok)
        return per_pair * seen + self.index_flops_per_pair * context_tok + windowed


@dataclass(frozen=True, slots=True)
class _Keys:
    """A config with an address: lookups that name key and file when they fail."""

    config: Mapping[str, Any]
    name: str

    def need(self, *keys: str) -> int:
        """First of several spellings that is present and not null."""
        for key in keys:
            if self.config.get(key) is not None:
                return self._whole(key, low=1)
        also = f" (also spelled {', '.join(keys[1:])})" if keys[1:] else ""
        raise PlanError(f"{self.name}: key {keys[0]!r}{also} is missing; a model's shape cannot be known without it")

    def get(self, *keys: str, default: int = 0) -> int:
        for key in keys:
            if self.config.get(key) is not None:
                return self._whole(key, low=0)
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def words(self, key: str) -> list[Any]:
        value = self.config.get(key)
        return list(value) if isinstance(value, list | tuple) else []

    def _whole(self, key: str, *, low: int) -> int:
        value = self.config[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < low:
            raise PlanError(f"{self.name}: {key} = {value!r} must be a whole number of at least {low}")
        return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """One full-attention layer."""

    params: int
    kv_elems: int
    flops_per_pair: float
    decode_flops_per_pair: float
    index_flops_per_pair: float = 0.0
    head_dim: int
    kv_heads: int


_REFUSED: Mapping[str, str] = {
    "compress_ratios": "compressed attention (DeepSeek-V4)",
    "hybrid_override_pattern": "Mamba layers (Nemotron-H)",
    "layers_block_type": "Mamba layers",
    "mamba_d_state": "Mamba layers",
    "linear_attn_config": "Kimi delta attention",
}
_REFUSED_TYPES: Mapping[str, str] = {
    "llama4": "shared experts that its config does not list",
    "gemma3n": "per-layer embeddings and shared KV",
    **dict.fromkeys(("gpt_neox", "starcoder2", "nemotron", "phi", "opt", "falcon"), "a feed-forward without a gate"),
}
_LAYER_WORDS: Mapping[str, Layer] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "recurrent",
}


def read_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Shape of a decoder described by a Hugging Face config.json; `name` is its file, for messages.

    Language models inside `text_config`, `llm_config` or `language_config` are found. Raises PlanError for a missing
    or impossible key and for layers that are not modelled.
    """
    keys = _Keys(_language_part(config), name)
    _refuse_unknown(keys)
    layers, hidden, vocab = keys.need("num_hidden_layers"), keys.need("hidden_size"), keys.need("vocab_size")
    heads = keys.need("num_attention_heads")
    kinds = _layer_kinds(keys, layers)
    window_tok = keys.need("sliding_window", "attention_chunk_size") if "window" in kinds else 0
    full, windows, recurrent = (kinds.count(kind) for kind in ("full", "window", "recurrent"))
    attention = _latent(keys, hidden, heads) if keys.get("kv_lora_rank") else _grouped(keys, hidden, heads)
    mixer_params, state_elems = _delta_net(keys, hidden) if recurrent else (0, 0)

    sparse = _moe_layers(keys, layers)
    experts, top = _routed(keys) if sparse else (0, 0)
    expert_params, moe_fixed = _experts(keys, hidden, experts) if sparse else (0, 0)
    dense_ffn = _gated(hidden, keys.need("intermediate_size"), keys.flag("mlp_bias")) if sparse < layers else 0

    attention_params = (full + windows) * attention.params + recurrent * mixer_params
    norms = 2 * hidden * layers + hidden
    tied = keys.flag("tie_word_embeddings", default=str(keys.config.get("model_type", "")).startswith("gemma"))
    head_params = vocab * hidden
    embed_params = 0 if tied else head_params
    dense_params = attention_params + sparse * moe_fixed + (layers - sparse) * dense_ffn + norms + head_params
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        params=dense_params + embed_params + sparse * experts * expert_params,
        active_params=dense_params + embed_params + sparse * top * expert_params,
        attention_params=attention_params,
        dense_params=dense_params,
        expert_params=expert_params,
        experts=experts,
        experts_per_tok=top,
        moe_layers=sparse,
        full_layers=full,
        window_layers=windows,
        window_tok=window_tok,
        recurrent_layers=recurrent,
        state_elems_per_seq=recurrent * state_elems,
        kv_elems_per_tok_full=full * attention.kv_elems,
        kv_elems_per_tok_window=windows * attention.kv_elems,
        mla=bool(keys.get("kv_lora_rank")),
        attn_flops_per_pair=full * attention.flops_per_pair,
        decode_flops_per_pair=full * attention.decode_flops_per_pair,
        window_flops_per_pair=windows * attention.flops_per_pair,
        sparse_tok=keys.get("index_topk"),
        index_flops_per_pair=full * attention.index_flops_per_pair,
        embed_params=embed_params,
        head_params=head_params,
        source=name,
    )


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's keys. Multimodal configs nest them; weight tying may stand outside."""
    for nest in ("text_config", "llm_config", "language_config"):
        inner = config.get(nest)
        if isinstance(inner, Mapping) and "hidden_size" in inner:
            outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
            return {**outer, **inner}
    return config


def _refuse_unknown(keys: _Keys) -> None:
    for key, words in _REFUSED.items():
        if keys.config.get(key):
            raise PlanError(f"{keys.name}: {key} means {words}, which the planner does not model")
    kind = str(keys.config.get("model_type", "")).removesuffix("_text")
    if kind in _REFUSED_TYPES:
        raise PlanError(
            f"{keys.name}: model_type {kind!r} has {_REFUSED_TYPES[kind]}, which the planner does not model"
        )
    if 0 in keys.words("attn_type_list"):
        raise PlanError(f"{keys.name}: attn_type_list has lightning-attention layers, which the planner does not model")


def _layer_kinds(keys: _Keys, layers: int) -> list[Layer]:
    """Kind of each layer, from layer_types or from the older ways of saying it."""
    words = keys.words("layer_types")
    if words:
        unknown = next((word for word in words if word not in _LAYER_WORDS), None)
        if unknown is not None:
            raise PlanError(
                f"{keys.name}: layer_types has {unknown!r}, which the planner does not model; "
                f"known: {', '.join(_LAYER_WORDS)}"
            )
        if len(words) < layers:
            raise PlanError(f"{keys.name}: layer_types has {len(words)} entries for {layers} layers")
        return [_LAYER_WORDS[word] for word in words[:layers]]
    every = keys.get("full_attention_interval")
    if every and keys.get("linear_num_value_heads"):
        return ["full" if (i + 1) % every == 0 else "recurrent" for i in range(layers)]
    if not keys.get("sliding_window") or not keys.flag("use_sliding_window", default=True):
        return ["full"] * layers
    every = keys.get("sliding_window_pattern")
    if every:
        return ["full" if (i + 1) % every == 0 else "window" for i in range(layers)]
    if keys.config.get("model_type") in ("gpt_oss", "gemma2"):
        return ["window" if i % 2 == 0 else "full" for i in range(layers)]
    first = keys.get("max_window_layers") if keys.flag("use_sliding_window") else 0
    return ["full" if i < first else "window" for i in range(layers)]


def _grouped(keys: _Keys, hidden: int, heads: int) -> _Attention:
    """Grouped-query attention; attn_output_gate doubles the query projection (Qwen3-Next)."""
    kv_heads = keys.get("num_key_value_heads", default=heads)
    head_dim = keys.get("head_dim") or hidden // heads
    query, kv = heads * head_dim, kv_heads * head_dim
    gated = 2 if keys.flag("attn_output_gate", default=keys.config.get("model_type") == "qwen3_next") else 1
    params = hidden * (gated * query + 2 * kv) + query * hidden
    kind = str(keys.config.get("model_type", ""))
    if keys.flag("attention_bias", default=kind.startswith("qwen2")):
        params += query + 2 * kv + (hidden if kind in ("llama", "gpt_oss") else 0)
    if kind.startswith("qwen3") or keys.flag("use_qk_norm"):
        params += 2 * head_dim
    if kind == "gpt_oss":
        params += heads  # one attention sink per head
    flops = 4.0 * query
    return _Attention(
        params=params,
        kv_elems=2 * kv,
        flops_per_pair=flops,
        decode_flops_per_pair=flops,
        head_dim=head_dim,
        kv_heads=kv_heads,
    )


def _latent(keys: _Keys, hidden: int, heads: int) -> _Attention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with the sparse index of V3.2 if any.

    Cached per token: the latent and one rotary key for all heads. Index keys are one byte each: half an element.
    """
    latent, rope = keys.need("kv_lora_rank"), keys.need("qk_rope_head_dim")
    nope, value, query_rank = keys.need("qk_nope_head_dim"), keys.need("v_head_dim"), keys.get("q_lora_rank")
    query = heads * (nope + rope)
    params = hidden * query_rank + query_rank + query_rank * query if query_rank else hidden * query
    params += hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden
    kv_elems, index_flops = latent + rope, 0.0
    if keys.get("index_topk"):
        index_heads, index_dim = keys.need("index_n_heads"), keys.need("index_head_dim")
        params += (query_rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads) + 2 * index_dim
        kv_elems += index_dim // 2
        index_flops = 2.0 * index_heads * index_dim
    return _Attention(
        params=params,
        kv_elems=kv_elems,
        flops_per_pair=2.0 * heads * (nope + rope + value),
        decode_flops_per_pair=2.0 * heads * (latent + rope + latent),
        index_flops_per_pair=index_flops,
        head_dim=nope + rope,
        kv_heads=1,
    )


def _delta_net(keys: _Keys, hidden: int) -> tuple[int, int]:
    """Gated delta-net (Qwen3-Next): parameters and state elements of one layer.

    The state is one matrix (key_dim x value_dim) per value head, and the last inputs of a short convolution.
    """
    key_heads, value_heads = keys.need("linear_num_key_heads"), keys.need("linear_num_value_heads")
    key_dim, value_dim = keys.need("linear_key_head_dim"), keys.need("linear_value_head_dim")
    kernel = keys.get("linear_conv_kernel_dim", default=4)
    key, value = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * key + value
    params = hidden * (mixed + value) + hidden * 2 * value_heads + mixed * kernel
    params += 2 * value_heads + value_dim + value * hidden
    return params, value_heads * key_dim * value_dim + (kernel - 1) * mixed


_EXPERT_COUNT = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def _routed(keys: _Keys) -> tuple[int, int]:
    experts, top = keys.need(*_EXPERT_COUNT), keys.need("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if top > experts:
        raise PlanError(f"{keys.name}: num_experts_per_tok = {top} exceeds the {experts} experts of a layer")
    return experts, top


def _moe_layers(keys: _Keys, layers: int) -> int:
    """How many layers have experts: all, less those that any of the usual keys makes dense."""
    if not keys.get(*_EXPERT_COUNT):
        return 0
    words = keys.words("mlp_layer_types")
    if words:
        return sum(word == "sparse" for word in words[:layers])
    dense = {int(i) for i in keys.words("mlp_only_layers")} | set(range(keys.get("first_k_dense_replace")))
    step = keys.get("decoder_sparse_step", "interleave_moe_layer_step", default=1) or 1
    freq = keys.config.get("moe_layer_freq")
    if isinstance(freq, list | tuple):
        dense |= {i for i, sparse in enumerate(freq) if not sparse}
    elif isinstance(freq, int) and freq > 1:
        dense |= {i for i in range(layers) if i % freq}
    return sum(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _experts(keys: _Keys, hidden: int, experts: int) -> tuple[int, int]:
    """Parameters of one routed expert, and of what every token of an MoE layer reads: router and shared experts."""
    width = keys.get("moe_intermediate_size") or keys.need("intermediate_size")
    biased = keys.config.get("model_type") == "gpt_oss"
    expert = _gated(hidden, width, biased)
    router = hidden * experts
    if biased or "n_routed_experts" in keys.config or keys.flag("use_routing_bias"):
        router += experts
    shared = keys.get("shared_expert_intermediate_size", "shared_intermediate_size")
    gate = hidden if keys.get("shared_expert_intermediate_size") else 0
    shared = shared or keys.get("n_shared_experts", "num_shared_experts") * width
    return expert, router + (_gated(hidden, shared, False) if shared else 0) + gate


def _gated(hidden: int, width: int, biased: bool) -> int:
    """Gate, up and down projections."""
    return 3 * hidden * width + (2 * width + hidden if biased else 0)
