"""The table of models against what their publishers say: parameters, active parameters, KV bytes per token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import PlanError
from headrace.planner.facts import table
from headrace.planner.models import ModelShape, model, models

PUBLISHED_B: dict[str, tuple[float, float]] = {
    # name: billions of parameters, allowed relative error (names and cards are rounded)
    "smollm2-135m-instruct": (0.134515008, 1e-9),
    "llama-3.1-8b": (8.03, 0.001),
    "llama-3.1-70b": (70.55, 0.001),
    "llama-3.1-405b": (405.85, 0.001),
    "qwen2.5-0.5b": (0.494, 0.002),
    "qwen2.5-1.5b": (1.54, 0.005),
    "qwen2.5-7b": (7.62, 0.002),
    "qwen2.5-math-7b": (7.62, 0.002),
    "qwen2.5-14b": (14.77, 0.002),
    "qwen2.5-32b": (32.76, 0.002),
    "qwen2.5-72b": (72.71, 0.002),
    "qwen3-0.6b": (0.596, 0.002),
    "qwen3-1.7b": (1.72, 0.002),
    "qwen3-4b": (4.02, 0.002),
    "qwen3-8b": (8.19, 0.002),
    "qwen3-14b": (14.77, 0.002),
    "qwen3-32b": (32.8, 0.003),
    "qwen3-30b-a3b": (30.5, 0.003),
    "qwen3-235b-a22b": (235.0, 0.002),
    "qwen3-coder-480b-a35b": (480.0, 0.002),
    "qwen3.5-35b-a3b": (35.0, 0.015),
    "qwen3.5-397b-a17b": (397.0, 0.005),
    "qwen3.8-27b": (27.0, 0.01),
    "deepseek-v3": (671.0, 0.001),
    "deepseek-v3.2": (671.9, 0.001),
    "kimi-k2": (1026.0, 0.001),
    "glm-4.5": (355.0, 0.01),
    "glm-4.5-air": (106.0, 0.01),
    "glm-5": (744.0, 0.001),
    "gpt-oss-20b": (20.91, 0.001),
    "gpt-oss-120b": (116.83, 0.001),
    "minimax-m2.5": (229.0, 0.005),
}


@pytest.mark.parametrize("name", [entry.name for entry in models()])
def test_parameters_are_the_published_ones(name: str) -> None:
    billions, error = PUBLISHED_B[name]
    assert model(name).params / 1e9 == pytest.approx(billions, rel=error)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.1),
        ("qwen3-coder-480b-a35b", 35.4),
        ("deepseek-v3", 37.4),
        ("qwen3.5-397b-a17b", 17.3),
        ("glm-5", 41.0),
    ],
)
def test_active_parameters_with_embedding(name: str, billions: float) -> None:
    assert model(name).active_params / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("kimi-k2", 32.0), ("glm-4.5", 32.5), ("minimax-m2.5", 10.3)],
)
def test_active_parameters_where_publishers_leave_the_look_up_out(name: str, billions: float) -> None:
    assert model(name).matmul_params / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("qwen3-8b", 144),  # 2 x 36 x 8 x 128 x 2 bytes
        ("qwen3-0.6b", 112),
        ("llama-3.1-8b", 128),
        ("qwen3-30b-a3b", 96),
        ("deepseek-v3", 68.625),  # 61 x (512 + 64) x 2 bytes
        ("kimi-k2", 68.625),
        ("smollm2-135m-instruct", 22.5),
    ],
)
def test_kv_bytes_per_token(name: str, kib: float) -> None:
    shape = model(name)
    assert shape.kv_bytes(1) == kib * 1024
    assert shape.kv_bytes(1000) == kib * 1024 * 1000
    assert shape.kv_bytes(1000, 1.0) == kib * 512 * 1000


def test_a_window_stops_growing() -> None:
    shape = model("gpt-oss-20b")
    per_layer = 2 * 8 * 64 * 2
    assert (shape.full_layers, shape.window_layers, shape.window_tok) == (12, 12, 128)
    assert shape.kv_bytes(100) == 24 * per_layer * 100
    assert shape.kv_bytes(10_000) == 12 * per_layer * 10_000 + 12 * per_layer * 128
    assert shape.attention_flops(10_000) == 12 * 4 * 64 * 64 * (10_000 + 128)


def test_recurrent_layers_keep_a_constant_state() -> None:
    shape = model("qwen3.5-35b-a3b")
    assert (shape.full_layers, shape.recurrent_layers) == (10, 30)
    assert shape.state_elems_per_seq == 30 * (32 * 128 * 128 + 3 * 8192)
    assert shape.kv_bytes(0) == 4 * shape.state_elems_per_seq
    assert shape.kv_bytes(1000) - shape.kv_bytes(0) == 10 * 2 * 2 * 256 * 2 * 1000


def test_recurrent_state_of_qwen_27b_is_the_reported_151_mb() -> None:
    shape = model("qwen3.8-27b")
    convolution = 48 * 3 * (2 * 16 * 128 + 48 * 128)
    assert 4 * (shape.state_elems_per_seq - convolution) == 150_994_944  # miles: 151 MB per sequence, weights 53 GB
    assert shape.weight_bytes("bf16") / 1e9 == pytest.approx(53, rel=0.02)


def test_latent_attention_has_two_prices() -> None:
    shape = model("deepseek-v3")
    assert shape.mla
    assert shape.kv_heads == 1
    assert shape.attn_flops_per_pair == 61 * 128 * 2 * (128 + 64 + 128)
    assert shape.decode_flops_per_pair == 61 * 128 * 2 * (512 + 64 + 512)
    assert shape.attention_flops(10, decode=True) == 10 * shape.decode_flops_per_pair


def test_sparse_attention_is_capped_but_indexes_everything() -> None:
    shape = model("deepseek-v3.2")
    index = 61 * 2 * 64 * 128
    assert shape.sparse_tok == 2048
    assert shape.attention_flops(1000) == 1000 * (shape.attn_flops_per_pair + index)
    assert shape.attention_flops(100_000) == 2048 * shape.attn_flops_per_pair + 100_000 * index
    assert shape.kv_bytes(1) == 61 * (512 + 64 + 64) * 2


def test_dense_attention_flops_follow_the_formula() -> None:
    shape = model("qwen3-8b")
    assert shape.attn_flops_per_pair == shape.decode_flops_per_pair == 4 * 32 * 128 * 36
    assert shape.attention_flops(7) == 7 * shape.attn_flops_per_pair


def test_experts_hit_runs_from_top_k_to_all() -> None:
    shape = model("qwen3-30b-a3b")
    assert shape.experts_hit(0) == 0
    assert shape.experts_hit(1) == pytest.approx(8)
    assert shape.experts_hit(16) == pytest.approx(128 * (1 - (120 / 128) ** 16))
    assert shape.experts_hit(1e6) == pytest.approx(128)
    hits = [shape.experts_hit(n) for n in range(200)]
    assert hits == sorted(hits)


@pytest.mark.parametrize("name", [entry.name for entry in models()])
def test_counts_add_up(name: str) -> None:
    shape = model(name)
    routed = shape.moe_layers * shape.experts * shape.expert_params
    assert shape.params == shape.dense_params + shape.embed_params + routed
    assert shape.read_elems(1) == pytest.approx(shape.matmul_params)
    assert shape.read_elems(1e9) == pytest.approx(shape.dense_params + routed)
    assert shape.full_layers + shape.window_layers + shape.recurrent_layers == shape.layers
    assert shape.attention_params < shape.dense_params
    assert shape.is_moe == (shape.experts > 0) == (shape.active_params < shape.params)
    assert shape.source
    assert shape.weight_bytes("bf16") == 2 * shape.params
    assert shape.weight_bytes("fp4") < shape.weight_bytes("fp8") < shape.weight_bytes("bf16")


def test_published_quantised_checkpoints_weigh_as_much() -> None:
    assert model("gpt-oss-20b").weight_bytes("fp4") / 1e9 == pytest.approx(13.8, rel=0.05)  # its download, MXFP4
    with pytest.raises(PlanError, match="precision 'fp16'"):
        model("qwen3-8b").weight_bytes("fp16")


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("QWEN3_8B", "qwen3-8b"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("zhipuai/GLM-5", "glm-5"),
        ("moonshotai/Kimi-K2.5", "kimi-k2"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m-instruct"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-math-7b"),
    ],
)
def test_names_are_forgiving(spelled: str, name: str) -> None:
    assert model(spelled).name == name


def test_an_unknown_model_names_its_neighbours() -> None:
    with pytest.raises(PlanError, match=r"unknown model 'qwen3-9b'.*'qwen3-8b'"):
        model("qwen3-9b")


def test_aliases_and_titles_resolve() -> None:
    rows = table("models.toml")
    assert set(rows["aliases"].values()) <= set(rows["models"])
    for entry in models():
        assert model(entry.title).name == entry.name


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = dict(table("models.toml")["models"]["qwen3-0.6b"]["config"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in (folder, folder / "config.json"):
        shape: ModelShape = model(str(path))
        assert shape.name == "mine"
        assert shape.source == str(folder / "config.json")
        assert shape.params == model("qwen3-0.6b").params


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read .*absent\.json"):
        model(str(tmp_path / "absent.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(PlanError, match=r"broken\.json is not JSON"):
        model(str(broken))
    broken.write_text("[]", encoding="utf-8")
    with pytest.raises(PlanError, match="holds no JSON object"):
        model(str(broken))
    broken.write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    with pytest.raises(PlanError, match=r"broken\.json: key 'hidden_size' is missing"):
        model(str(broken))
