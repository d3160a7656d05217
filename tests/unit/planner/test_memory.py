import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.planner.constants import builtin
from headrace.planner.hardware import chip
from headrace.planner.memory import (
    divides,
    generator_memory,
    generator_widths,
    kv_split,
    smallest_parallelism,
    trainer_memory,
)
from headrace.planner.models import model

PARAMS = 8_190_735_360
"""Of Qwen3-8B."""


def trainer(name="qwen3-8b", gpu="h100", gpus=8, seq_tok=8192.0, **more):
    return trainer_memory(model(name), chip(gpu), gpus=gpus, seq_tok=seq_tok, constants=builtin(), **more)


def layouts(name="qwen3-8b", gpu="h100", gpus=8, seq_tok=8192.0, **more):
    return smallest_parallelism(model(name), chip(gpu), gpus, seq_tok=seq_tok, constants=builtin(), **more)


def widths(name, gpu="h100", gpus=8, precision="bf16", context_tok=8192.0):
    return generator_widths(
        model(name), chip(gpu), gpus, precision=precision, mem_frac=0.9, max_seqs=64, context_tok=context_tok,
        constants=builtin(),
    )  # fmt: skip


def test_a_sharded_trainer_holds_its_share_of_twenty_bytes_a_parameter():
    fit = trainer()  # weights 2, gradients 2, master and moments 12, a float32 copy of the update 4
    assert fit.instants["optimizer step"] == pytest.approx(20 * PARAMS / 8)
    assert trainer(sharding="optimizer").instants["optimizer step"] == pytest.approx((2 + 2) * PARAMS + 16 * PARAMS / 8)
    assert trainer(precision="fp32").instants["optimizer step"] == pytest.approx((4 + 4 + 8 + 4) * PARAMS / 8)


def test_a_side_needs_its_worst_instant_and_not_the_sum():
    fit = trainer()
    assert fit.used_bytes == max(fit.instants.values()) == fit.instants[fit.worst] < sum(fit.instants.values())
    assert fit.worst == "backward"
    assert trainer(seq_tok=16.0).worst == "optimizer step"


def test_lora_needs_the_weights_and_little_more():
    assert trainer(lora=True).instants["optimizer step"] == pytest.approx((2 + 0.01 * 18) * PARAMS / 8)


def test_a_reference_model_is_a_second_copy_of_the_weights():
    more = trainer(reference=True).instants["log-prob pass"] - trainer().instants["log-prob pass"]
    assert more == pytest.approx(2 * PARAMS / 8)


@given(
    gpus=st.sampled_from([1, 2, 8, 64]),
    seq_tok=st.floats(1, 1e6),
    name=st.sampled_from(["qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"]),
)
def test_more_chips_and_shorter_samples_never_need_more(gpus, seq_tok, name):
    here = trainer(name, gpus=gpus, seq_tok=seq_tok).used_bytes
    assert trainer(name, gpus=2 * gpus, seq_tok=seq_tok).used_bytes <= here
    assert trainer(name, gpus=gpus, seq_tok=seq_tok / 2).used_bytes <= here


def test_layouts_are_feasible_divide_and_come_smallest_first():
    found = layouts("qwen3-30b-a3b", gpus=16)
    assert found[0] == min(found, key=lambda layout: layout[0] * layout[1])
    shape = model("qwen3-30b-a3b")
    for tp, pp, ep in found:
        assert 16 % (tp * pp) == 0
        assert tp <= 8
        assert shape.heads % tp == 0
        assert 16 // pp % ep == 0
        assert shape.experts % ep == 0
        assert trainer("qwen3-30b-a3b", gpus=16, tp=tp, pp=pp, ep=ep).fits


def test_a_dense_model_has_no_expert_width():
    assert {ep for _, _, ep in layouts()} == {1}


def test_what_does_not_fit_names_the_chips_that_would_do():
    with pytest.raises(PlanError, match=r"qwen3-32b .* the trainer's 4 h100: .* needs at least (\d+) h100") as caught:
        layouts("qwen3-32b", gpus=4)
    enough = int(str(caught.value).split("needs at least ")[1].split()[0])
    assert layouts("qwen3-32b", gpus=enough)
    with pytest.raises(PlanError):
        layouts("qwen3-32b", gpus=enough // 2)


def test_a_sample_too_long_for_any_number_of_chips_says_so():
    with pytest.raises(PlanError, match="no number of rtx-4090 would do"):
        layouts("llama-3.1-405b", "rtx-4090", gpus=8, seq_tok=4e6)


def test_engine_widths_fit_and_ascend():
    assert widths("qwen3-8b") == [1, 2, 4, 8]
    assert widths("llama-3.1-70b") == [2, 4, 8]
    with pytest.raises(PlanError, match=r"the generator's 1 h100: .* needs at least 2 h100"):
        widths("llama-3.1-70b", gpus=1)


def test_a_generator_holds_weights_reserve_and_one_sequence():
    shape, h100 = model("qwen3-8b"), chip("h100")
    short, long = (
        generator_memory(
            shape, h100, tp=1, precision="bf16", mem_frac=0.9, max_seqs=64, context_tok=c, constants=builtin()
        )
        for c in (1.0, 100_001.0)
    )
    assert long.used_bytes - short.used_bytes == pytest.approx(100_000 * 2 * 36 * 8 * 128 * 2)
    assert short.instants["load"] == 2 * PARAMS
    assert short.limit_bytes == 0.9 * h100.hbm_bytes


def test_kv_is_split_by_heads_and_mla_is_copied():
    assert [kv_split(model("qwen3-30b-a3b"), tp) for tp in (1, 2, 8)] == [1, 2, 4]
    assert kv_split(model("deepseek-v3"), 8) == 1


def test_heads_are_dealt_out_whole_except_to_threads():
    shape = model("qwen3-8b")
    assert [divides(shape, chip("h100"), tp) for tp in (0, 3, 8)] == [False, False, True]
    assert divides(shape, chip("cpu"), 3)
