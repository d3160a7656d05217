import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.planner.constants import MeasuredLaw, ServingSet, builtin
from headrace.planner.engine_cost import compute_precision, decode_parts, distinct_experts, engine_cost, kv_room
from headrace.planner.facts import Fact
from headrace.planner.hardware import chip
from headrace.planner.models import model

H100 = chip("h100")
SERVING = builtin().model_copy(
    update={
        name: dataclasses.replace(getattr(builtin(), name), value=1.0)
        for name in ("rollout_factor_dense", "rollout_factor_moe")
    }
)
"""The built-in constants, with decode as in serving."""
MODELS = ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b", "qwen3.5-35b-a3b", "glm-5")


def cost(name="qwen3-8b", gpu="h100", tp=1, context_tok=2000.0, max_seqs=256, precision="bf16", mem_frac=0.9, **more):
    return engine_cost(
        model(name), chip(gpu), tp=tp, precision=precision, mem_frac=mem_frac, max_seqs=max_seqs,
        context_tok=context_tok, **{"constants": SERVING, **more},
    )  # fmt: skip


def fact(value: float) -> Fact:
    return Fact(value=value, unit="s", source="test", date="2026-11-29", grade="measured")


def test_one_sequence_costs_the_weights_over_bandwidth_and_the_overheads():
    # Qwen3-8B: 8.19e9 weights less 151936 x 4096 of embedding look-up, two bytes each.
    weights_s = (8_190_735_360 - 151_936 * 4096) * 2 / 3.35e12 / 0.85
    assert cost().decode.step_s(1, 1) == pytest.approx(weights_s + 36 * 25e-6 + 1e-3, rel=1e-3)


@pytest.mark.parametrize(("name", "factor"), [("qwen3-8b", 1.63), ("qwen3-30b-a3b", 1.4)])
def test_rollouts_decode_slower_than_serving_and_prefill_alike(name, factor):
    serving, rollout = cost(name), cost(name, constants=builtin())
    for b, tok in ((1, 1), (64, 100_000)):
        assert rollout.decode.step_s(b, tok) == pytest.approx(factor * serving.decode.step_s(b, tok))
    assert dataclasses.replace(rollout, decode=serving.decode) == serving


def test_many_sequences_cost_their_products():
    decode = cost(gpu="h20", max_seqs=1024, context_tok=100.0).decode  # 148 TFLOP/s at 4 TB/s
    b = len(decode.mem_s) - 1
    slope_s = (decode.step_s(b, 0) - decode.step_s(b - 100, 0)) / 100
    per_seq_s = 2 * (8_190_735_360 - 151_936 * 4096) / 148e12 / 0.6
    assert b == 1024
    assert slope_s == pytest.approx(per_seq_s, rel=0.02)


def test_much_context_costs_its_kv_bytes():
    decode = cost().decode
    slope_s = (decode.step_s(8, 2_000_000) - decode.step_s(8, 1_000_000)) / 1e6
    assert slope_s == pytest.approx(2 * 36 * 8 * 128 * 2 / 3.35e12 / 0.85, rel=0.01)


@given(
    name=st.sampled_from(MODELS),
    tp=st.sampled_from([8, 16]),
    b=st.integers(1, 254),
    context_tok=st.floats(1, 60_000),
)
def test_steps_never_get_faster_with_more_sequences_or_context(name, tp, b, context_tok):
    decode = cost(name, "b300", tp, context_tok).decode
    tok = b * context_tok
    assert decode.step_s(b, tok) <= decode.step_s(b + 1, tok) <= decode.step_s(b + 1, tok + 1)


@given(name=st.sampled_from(MODELS), context_tok=st.floats(1, 20_000))
def test_longer_contexts_never_cost_less(name, context_tok):
    here, there = (cost(name, "b300", 8, c).decode.step_s(16, 16 * c) for c in (context_tok, context_tok * 1.01))
    assert here <= there * (1 + 1e-12)


@pytest.mark.parametrize(("name", "edge"), [("gpt-oss-120b", 128), ("glm-5", 2048)])
def test_windows_and_sparse_attention_leave_no_step_in_the_cost(name, edge):
    below, above = (cost(name, "b300", 8, c).decode.step_s(32, 32 * c) for c in (edge - 1e-3, edge + 1e-3))
    assert above == pytest.approx(below, rel=1e-5)


def test_beyond_a_window_only_full_layers_read_more():
    shape = model("gpt-oss-120b")
    decode = cost("gpt-oss-120b", tp=8, context_tok=4000.0).decode
    per_tok_s = 2 * shape.full_layers * 8 * 64 * 2 / 8 / 3.35e12 / 0.85 * 1.25
    assert shape.full_layers == 18
    assert decode.mem_s_per_tok == pytest.approx(per_tok_s)


@given(tokens=st.floats(0, 1e5), experts=st.integers(1, 512), share=st.floats(0, 1))
def test_distinct_experts_rise_from_none_over_k_to_all(tokens, experts, share):
    k = max(1, round(share * experts))
    none, one, some, more, all_ = distinct_experts(experts, k, np.array([0.0, 1.0, tokens, tokens + 1, 1e9]))
    assert none == 0.0
    assert one == pytest.approx(k)
    assert some <= more <= experts
    assert all_ == pytest.approx(experts)


def test_experts_are_those_of_the_model_shape():
    shape = model("qwen3-30b-a3b")
    running = np.array([1.0, 7.0, 200.0])
    parts = decode_parts(shape, H100, running, tp=1, precision="bf16", context_tok=1000.0)
    expected = [shape.read_elems(b) * 2 / H100.hbm_bytes_per_s for b in running]
    assert parts.mem_s == pytest.approx(expected)


def test_kv_entries_are_split_by_kv_heads_only():
    slopes = {tp: cost("qwen3-30b-a3b", tp=tp).decode.mem_s_per_tok for tp in (1, 4, 8)}  # 4 KV heads
    assert slopes[1] == pytest.approx(4 * slopes[4])
    assert slopes[8] == slopes[4]


def test_latent_kv_is_copied_to_every_chip():
    slopes = [cost("deepseek-v3", "b200", tp).decode.mem_s_per_tok for tp in (8, 16)]
    assert slopes[0] == slopes[1] > 0


def test_data_parallel_attention_shares_latent_kv_and_copies_attention_weights():
    shape, running = model("deepseek-v3"), np.array([64.0])
    plain, split = (
        decode_parts(shape, H100, running, tp=8, precision="fp8", context_tok=4000.0, attention_dp=dp) for dp in (1, 8)
    )
    assert split.mem_s_per_tok == pytest.approx(plain.mem_s_per_tok / 8)
    copied_s = shape.attention_params * 7 / 8 / H100.hbm_bytes_per_s
    assert split.mem_s[0] - plain.mem_s[0] == pytest.approx(copied_s)
    assert (plain.a2as, split.a2as) == (0, 2 * 58)


def test_leaving_the_scale_up_domain_costs_more():
    shape, running = model("deepseek-v3"), np.array([64.0])

    def parts(gpu: str, tp: int):
        return decode_parts(shape, chip(gpu), running, tp=tp, precision="fp8", context_tok=4000.0)

    inside, outside, rack = parts("h100", 8), parts("h100", 16), parts("gb200", 16)
    assert (inside.scale_outs, outside.scale_outs, rack.scale_outs) == (0, 122, 0)
    assert outside.wire_s[0] > inside.wire_s[0]
    assert parts("h100", 1).wire_s[0] == 0.0


def test_recurrent_state_is_read_and_written_per_sequence():
    shape = model("qwen3.5-35b-a3b")
    mem_s = decode_parts(shape, H100, np.array([0.0, 1e6]), tp=1, precision="bf16", context_tok=1000.0).mem_s
    experts_s = shape.moe_layers * shape.experts * shape.expert_params * 2 / H100.hbm_bytes_per_s
    assert mem_s[1] - mem_s[0] - experts_s == pytest.approx(1e6 * 2 * shape.kv_bytes(0) / H100.hbm_bytes_per_s)


@given(name=st.sampled_from(MODELS), low=st.floats(0.3, 0.95), more=st.floats(0, 0.3), context_tok=st.floats(1, 1e5))
def test_more_memory_never_holds_less(name, low, more, context_tok):
    def room(gib: float) -> tuple[int, int]:
        gpu = dataclasses.replace(chip("b300"), hbm_bytes=gib * 2**30)
        return kv_room(
            model(name), gpu, tp=8, precision="fp8", mem_frac=0.9, max_seqs=256, context_tok=context_tok,
            constants=builtin(),
        )  # fmt: skip

    small, large = room(100 * low), room(100 * (low + more))
    assert small[1] <= large[1] <= 256
    if small[1] == large[1] or not model(name).kv_bytes(0):  # further sequences take their state from the pool
        assert small[0] <= large[0]


def test_capacity_is_what_the_weights_leave_in_whole_blocks():
    shape = model("qwen3-8b")
    engine = cost()
    free = 0.9 * 80 * 2**30 - 2 * 8_190_735_360 - 8192 * 4096 * 16 - 256 * 151936 * 4 - 2e9 - 0.02 * 80 * 2**30
    assert engine.kv_capacity_tok == int(free / shape.kv_bytes(1) // 16) * 16
    assert engine.max_running == len(engine.decode.mem_s) - 1 == 256
    colocated = cost(colocated_bytes=20e9)
    assert colocated.kv_capacity_tok == pytest.approx(engine.kv_capacity_tok - 20e9 / shape.kv_bytes(1), abs=16)


def test_weights_that_do_not_fit_leave_nothing():
    engine = cost("llama-3.1-70b")
    assert (engine.kv_capacity_tok, engine.max_running) == (0, 0)
    assert len(engine.decode.mem_s) == 1


def test_recurrent_state_limits_sequences_at_once():
    engine = cost("qwen3.5-35b-a3b", mem_frac=0.93, max_seqs=1024, context_tok=4000.0)
    shape = model("qwen3.5-35b-a3b")
    held = engine.max_running * shape.kv_bytes(0) + engine.kv_capacity_tok * (shape.kv_bytes(1) - shape.kv_bytes(0))
    assert 0 < engine.max_running < 1024
    assert held < 0.93 * H100.hbm_bytes - shape.weight_bytes("bf16")


def test_speculation_gains_less_than_it_accepts():
    plain, guessing = cost(tp=8), cost(tp=8, accept_tok=3.32, draft_frac=0.15)
    gain = guessing.accept_tok * plain.decode.step_s(32, 64_000) / guessing.decode.step_s(32, 64_000)
    assert 1.5 < gain < 3.32


def test_prefill_is_products_attention_and_at_least_one_read_of_the_weights():
    engine = cost()
    products_s = 2 * (8_190_735_360 - 151_936 * 4096) / 989e12 / 0.7
    pairs_s = 4 * 32 * 128 * 36 / 989e12 / 0.7
    assert engine.prefill_s(4096) == pytest.approx(4096 * products_s + 4096**2 / 2 * pairs_s, rel=1e-3)
    assert engine.prefill_s(1) == engine.prefill_s_min > 16e9 / 3.35e12 / 0.9


def test_a_runs_own_law_replaces_the_formula_for_its_width():
    law = MeasuredLaw(
        model="qwen3-8b", chip="h100", gen_tp=2, base_s=fact(0.01), per_request_s=fact(1e-4),
        per_context_tok_s=fact(1e-8), prefill_s_per_tok=fact(3e-5),
    )  # fmt: skip
    measured = cost(tp=2, constants=SERVING.model_copy(update={"laws": (law,)}))
    assert measured.decode.step_s(10, 5000) == pytest.approx(0.01 + 1e-3 + 5e-5)
    assert measured.prefill_s(1000, 500) == pytest.approx(0.03)
    assert cost(tp=4, constants=SERVING.model_copy(update={"laws": (law,)})) == cost(tp=4)


def test_the_serving_set_of_the_engine_is_used():
    slow = ServingSet(chip="h100", engine="vllm", precision="bf16", facts={"step_s": fact(0.1)})
    c = SERVING.model_copy(update={"serving": (slow,)})
    assert cost(constants=c, engine="vllm").decode.step_s(1, 1) > 0.1
    assert cost(constants=c, engine="sglang") == cost()


def test_weights_narrower_than_the_chip_computes_use_the_next_wider_products():
    assert compute_precision(H100, "fp4") == "fp8"
    assert compute_precision(chip("a100"), "fp4") == "bf16"
    assert cost("gpt-oss-120b", precision="fp4").max_running > 0


@pytest.mark.parametrize(
    ("more", "problem"),
    [({"tp": 3}, "gen_tp = 3 does not divide the 32"), ({"tp": 0}, "gen_tp = 0"), ({"accept_tok": 0.5}, "accept_tok")],
)
def test_impossible_engines_are_refused(more, problem):
    with pytest.raises(PlanError, match=problem):
        cost(**more)


def test_cpu_threads_need_not_divide_heads():
    assert cost("qwen3-0.6b", "cpu", tp=3).kv_capacity_tok > 0
