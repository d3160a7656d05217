import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.planner.constants import Constants, MeasuredLaw, builtin
from headrace.planner.facts import Fact
from headrace.planner.hardware import chip
from headrace.planner.models import model
from headrace.planner.trainer_cost import (
    chip_rate,
    fixed_overhead_s,
    pipeline_efficiency,
    tensor_efficiency,
    trainer_cost,
    width_efficiency,
)


def fact(value: float) -> Fact:
    return Fact(value=value, unit="s", source="test", date="2026-11-29", grade="measured")


SIMPLE = Constants(name="simple", train_eff=fact(0.6), train_rate_dense=fact(0.6 * 989e12))
"""On H100, dense models train at half of 0.6 of the peak."""
RATE = 8 * 0.3 * 989e12


def cost(name="qwen3-8b", gpu="h100", gpus=8, tp=1, pp=1, ep=1, constants=None, **more):
    settings = {"precision": "bf16", "lora": False, "logprob_passes": 0, "seq_tok": 4096.0, "batch_tok": 4e6, **more}
    return trainer_cost(
        model(name), chip(gpu), gpus=gpus, tp=tp, pp=pp, ep=ep, constants=constants or SIMPLE, **settings
    )


def test_tokens_cost_six_flops_per_active_weight():
    assert cost().s_per_tok == pytest.approx(6 * 8_190_735_360 / RATE, rel=1e-3)


def test_attention_costs_its_causal_pairs_three_times():
    assert cost().s_per_tok2 == pytest.approx(3 * 4 * 32 * 128 * 36 / RATE, rel=1e-3)


@given(peak=st.floats(1e9, 1e17), eff=st.floats(0.01, 1.0), other_rate=st.floats(1e9, 1e17))
def test_a_chip_trains_below_both_its_peak_and_what_does_not_scale(peak, eff, other_rate):
    rate = chip_rate(peak, eff, other_rate)
    assert min(eff * peak, other_rate) / 2 * (1 - 1e-9) <= rate <= min(eff * peak, other_rate)
    assert rate <= chip_rate(2 * peak, eff, other_rate) <= 2 * rate * (1 + 1e-9)


def test_the_published_gain_of_newer_chips_is_less_than_their_peaks():
    # prime-rl, Qwen3-4B SFT, 16 K, FlashAttention 2: 49,717 tok/s on 8 H100, 68,356 on 8 B200; peaks 989 and 2,250.
    assert chip_rate(2250e12, 0.6, 593e12) / chip_rate(989e12, 0.6, 593e12) == pytest.approx(68356 / 49717, rel=0.05)


def test_seconds_of_the_published_235b_run():
    # SemiAnalysis 2026-06-16: 512 samples of 18,294 tokens on 64 H200 at 10.6 % MFU; 512 / 2.75 per second = 186 s.
    constants = Constants(name="run", train_eff=fact(0.106), train_rate_moe=fact(1e21))
    trainer = cost("qwen3-235b-a22b", "h200", 64, seq_tok=32768.0, batch_tok=512 * 18294.0, constants=constants)
    assert trainer.s_per_tok * 512 * 18294 == pytest.approx(186, rel=0.03)


@pytest.mark.parametrize(
    ("more", "factor"),
    [
        ({"logprob_passes": 1}, 8 / 6),
        ({"logprob_passes": 2}, 10 / 6),
        ({"lora": True}, 4 / 6),
        ({"recompute": True}, 8 / 6),
    ],
)
def test_what_is_computed_beside_the_update(more, factor):
    assert cost(**more).s_per_tok == pytest.approx(factor * cost().s_per_tok)
    assert cost(**more).s_per_tok2 == pytest.approx(factor * cost().s_per_tok2)


@given(gpus=st.sampled_from([1, 2, 4, 8, 16, 64]), tokens=st.floats(1e3, 1e9), seq_tok=st.floats(1, 1e5))
def test_more_chips_never_train_slower(gpus, tokens, seq_tok):
    few, many = (cost(gpus=n, seq_tok=seq_tok, batch_tok=tokens) for n in (gpus, 2 * gpus))
    assert many.s_per_tok <= few.s_per_tok * (1 + 1e-9)
    assert 0 < many.mfu <= 0.3 * (1 + 1e-9)


def test_a_small_batch_keeps_only_some_ranks_busy():
    few, many = (cost(gpus=n, batch_tok=8 * 4096.0) for n in (8, 512))
    assert few.s_per_tok / many.s_per_tok < 1.25  # eight packed sequences: eight ranks at most


@given(dp=st.integers(1, 4096), packs=st.floats(0.01, 1e6))
def test_width_efficiency_is_that_of_the_busy_ranks(dp, packs):
    share = width_efficiency(dp, packs)
    assert 1 / dp <= share * (1 + 1e-12)
    assert share <= min(1.0, max(packs, 1.0) / dp) * (1 + 1e-9)
    assert width_efficiency(dp, packs * 2) >= share * (1 - 1e-12)


def test_pipelines_wait_for_their_bubble():
    assert pipeline_efficiency(1, 3.0) == 1.0
    assert pipeline_efficiency(4, 12.0) == pytest.approx(12 / 15)
    assert pipeline_efficiency(8, 0.1) == pytest.approx(1 / 8)


def test_tensor_parallelism_loses_more_between_nodes():
    h100 = chip("h100")
    inside, outside = tensor_efficiency(h100, 8, 0.04), tensor_efficiency(h100, 16, 0.04)
    assert tensor_efficiency(h100, 1, 0.04) == 1.0
    assert inside == pytest.approx(1 / 1.12)
    assert outside < 0.8 * inside
    assert tensor_efficiency(chip("gb200"), 16, 0.04) == pytest.approx(1 / 1.16)


def test_fixed_overhead_is_linear_and_then_flattens():
    small, large, giant = (
        fixed_overhead_s(model(m), builtin(), lora=False) for m in ("qwen3-8b", "qwen3-32b", "kimi-k2")
    )
    assert small == pytest.approx(1.3 + 0.037 * 16.38, abs=0.01)
    assert large == pytest.approx(1.3 + 0.037 * 65.5, abs=0.01)
    assert giant == pytest.approx(1.3 + 0.037 * (2052.8 * 1400) ** 0.5, rel=0.01)
    assert fixed_overhead_s(model("qwen3-8b"), builtin(), lora=True) < small


def test_a_runs_own_law_replaces_the_formula_and_scales_with_chips():
    law = MeasuredLaw(model="qwen3-8b", chip="h100", train_gpus=8, train_s_per_tok=fact(1e-5), train_fixed_s=fact(0.3))
    trainer = cost(gpus=16, constants=SIMPLE.model_copy(update={"laws": (law,)}))
    assert trainer.batch_s(1e6, 1e12) == pytest.approx(0.5e-5 * 1e6 + 0.3)
    assert trainer.mfu == pytest.approx(0.3 * cost(gpus=16).s_per_tok / 0.5e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ({"tp": 3}, "3 x 1 must divide the trainer's 8"),
        ({"gpus": 0}, "must divide"),
        ({"pp": 2, "ep": 8}, "train_ep = 8"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout, problem):
    with pytest.raises(PlanError, match=problem):
        cost(**layout)
