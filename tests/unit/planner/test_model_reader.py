"""Reading config.json: every spelling of the same shape gives the same shape; what is not modelled is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.planner.model_reader import ModelShape, read_config

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
MOE: dict[str, Any] = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    **DENSE,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
DELTA: dict[str, Any] = {
    **DENSE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def read(config: dict[str, Any], **changes: Any) -> ModelShape:
    return read_config({**config, **changes}, name="config.json")


def test_a_dense_model_by_hand() -> None:
    shape = read(DENSE)
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    layer = attention + 3 * 64 * 96 + 2 * 64
    assert shape.head_dim == 16
    assert shape.attention_params == 4 * attention
    assert shape.params == 4 * layer + 64 + 2 * 6400
    assert shape.dense_params == shape.params - 6400
    assert shape.kv_elems_per_tok_full == 4 * 2 * 32


def test_tied_heads_count_once() -> None:
    tied, untied = read(DENSE, tie_word_embeddings=True), read(DENSE)
    assert untied.params - tied.params == 6400
    assert tied.dense_params == untied.dense_params
    assert read(DENSE, model_type="gemma2", sliding_window=8).embed_params == 0


def test_without_kv_heads_every_head_has_its_own() -> None:
    config = {key: value for key, value in DENSE.items() if key != "num_key_value_heads"}
    assert read(config).kv_heads == 4


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    shape = read(DENSE, head_dim=32)
    assert shape.attn_flops_per_pair == 4 * 4 * 4 * 32
    assert shape.attention_params == 4 * (2 * 64 * 128 + 2 * 64 * 64)


def test_biases_of_qwen2_are_there_without_a_key() -> None:
    assert read(DENSE, model_type="qwen2").params - read(DENSE).params == 4 * (64 + 2 * 32)


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_spellings_of_experts(key: str) -> None:
    config = {name: value for name, value in MOE.items() if name != "num_experts"}
    shape = read(config, **{key: 8})
    assert (shape.experts, shape.experts_per_tok, shape.moe_layers) == (8, 2, 4)
    assert shape.expert_params == 3 * 64 * 32


def test_without_an_expert_width_the_usual_one_is_the_experts() -> None:
    config = {name: value for name, value in MOE.items() if name != "moe_intermediate_size"}
    assert read(config).expert_params == 3 * 64 * 96


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, 4),
        ({"first_k_dense_replace": 1}, 3),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"decoder_sparse_step": 2}, 2),
        ({"moe_layer_freq": 2}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 3),
        ({"mlp_layer_types": ["dense", "dense", "dense", "sparse"]}, 1),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], sparse: int) -> None:
    shape = read(MOE, **changes)
    assert shape.moe_layers == sparse
    dense_ffn, router = 3 * 64 * 96, 64 * 8
    assert read(MOE).dense_params + (4 - sparse) * (dense_ffn - router) == shape.dense_params


def test_shared_experts_are_always_read() -> None:
    plain = read(MOE).dense_params
    assert read(MOE, n_shared_experts=2).dense_params - plain == 4 * 3 * 64 * 64
    assert read(MOE, shared_expert_intermediate_size=32).dense_params - plain == 4 * (3 * 64 * 32 + 64)


def test_latent_attention_by_hand() -> None:
    shape = read(LATENT)
    query = 64 * 24 + 24 + 24 * 4 * 16
    kv = 64 * 20 + 16 + 16 * 4 * 22
    assert shape.mla
    assert shape.attention_params == 4 * (query + kv + 4 * 10 * 64)
    assert shape.kv_elems_per_tok_full == 4 * 20
    whole = {key: value for key, value in LATENT.items() if key != "q_lora_rank"}
    assert read(whole).attention_params == 4 * (64 * 4 * 16 + kv + 4 * 10 * 64)


def test_sparse_index_needs_its_sizes() -> None:
    shape = read(LATENT, index_topk=32, index_n_heads=2, index_head_dim=8)
    assert shape.sparse_tok == 32
    assert shape.index_flops_per_pair == 4 * 2 * 2 * 8
    assert shape.kv_elems_per_tok_full == 4 * (20 + 4)
    with pytest.raises(PlanError, match="'index_n_heads' is missing"):
        read(LATENT, index_topk=32)


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"sliding_window": 8}, 0),  # Mistral 7B v0.1: every layer
        ({"sliding_window": None}, 4),
        ({"sliding_window": 8, "use_sliding_window": False}, 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, 3),
        ({"sliding_window": 8, "sliding_window_pattern": 4}, 1),
        ({"sliding_window": 8, "model_type": "gpt_oss"}, 2),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, 3),
    ],
)
def test_ways_to_say_window(changes: dict[str, Any], full: int) -> None:
    shape = read(DENSE, **changes)
    assert (shape.full_layers, shape.window_layers) == (full, 4 - full)
    assert shape.window_tok == (8 if full < 4 else 0)
    assert shape.kv_bytes(100, 1.0) == 2 * 32 * (full * 100 + (4 - full) * 8)


def test_a_window_layer_without_a_window_is_refused() -> None:
    with pytest.raises(PlanError, match="'sliding_window'"):
        read(DENSE, layer_types=["sliding_attention"] * 4)


def test_delta_net_by_interval_or_by_list() -> None:
    by_list = read(DELTA, layer_types=["linear_attention"] * 3 + ["full_attention"])
    by_interval = read(DELTA, full_attention_interval=4)
    assert by_list == by_interval
    key, value = 2 * 8, 4 * 8
    mixed = 2 * key + value
    mixer = 64 * (mixed + value) + 64 * 8 + mixed * 4 + 8 + 8 + value * 64
    assert by_list.recurrent_layers == 3
    assert by_list.attention_params - read(DENSE).attention_params // 4 == 3 * mixer
    assert by_list.state_elems_per_seq == 3 * (4 * 8 * 8 + 3 * mixed)


def test_language_part_of_a_multimodal_config() -> None:
    for nest in ("text_config", "llm_config"):
        config = {"model_type": "seeing", nest: DENSE, "tie_word_embeddings": True, "vision_config": {"hidden_size": 9}}
        assert read_config(config, name="config.json") == read(DENSE, tie_word_embeddings=True)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
def test_a_missing_key_is_named_with_its_file(key: str) -> None:
    config = {name: value for name, value in DENSE.items() if name != key}
    with pytest.raises(PlanError, match=rf"config\.json: key '{key}' is missing"):
        read(config)


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True])
def test_an_impossible_value_is_named(value: object) -> None:
    with pytest.raises(PlanError, match=r"config\.json: hidden_size = .* must be a whole number of at least 1"):
        read(DENSE, hidden_size=value)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["mamba"] * 4},
        {"compress_ratios": [128, 4]},
        {"hybrid_override_pattern": "M-M*"},
        {"attn_type_list": [0, 1, 1, 1]},
        {"model_type": "llama4_text"},
        {"model_type": "gpt_neox"},
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="does not model"):
        read(DENSE, **changes)


def test_short_layer_types_and_too_many_active_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="2 entries for 4 layers"):
        read(DENSE, layer_types=["full_attention"] * 2)
    with pytest.raises(PlanError, match="num_experts_per_tok = 9 exceeds the 8 experts"):
        read(MOE, num_experts_per_tok=9)
    with pytest.raises(PlanError, match="'num_experts_per_tok'"):
        read({name: value for name, value in MOE.items() if name != "num_experts_per_tok"})


@given(
    layers=st.integers(1, 8),
    heads=st.integers(1, 8),
    groups=st.integers(1, 4),
    experts=st.integers(1, 16),
    data=st.data(),
)
def test_counts_add_up(layers: int, heads: int, groups: int, experts: int, data: st.DataObject) -> None:
    shape = read(
        MOE,
        num_hidden_layers=layers,
        num_attention_heads=heads * groups,
        num_key_value_heads=heads,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=data.draw(st.integers(1, experts)),
        first_k_dense_replace=data.draw(st.integers(0, layers)),
        tie_word_embeddings=data.draw(st.booleans()),
    )
    assert shape.params == shape.dense_params + shape.embed_params + (
        shape.moe_layers * shape.experts * shape.expert_params
    )
    assert shape.active_params <= shape.params
    assert shape.read_elems(1) == pytest.approx(shape.matmul_params)
    tokens = data.draw(st.floats(1, 1e5))
    assert shape.matmul_params * (1 - 1e-9) <= shape.read_elems(tokens) <= shape.params
