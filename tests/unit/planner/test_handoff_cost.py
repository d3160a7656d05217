import pytest

from headrace.errors import PlanError
from headrace.planner.constants import Constants, MeasuredLaw, builtin
from headrace.planner.facts import Fact
from headrace.planner.handoff_cost import hand_off_cost
from headrace.planner.hardware import chip
from headrace.planner.models import model


def fact(value: float) -> Fact:
    return Fact(value=value, unit="s", source="test", date="2026-11-29", grade="measured")


def cost(name="qwen3-8b", gpu="h100", train=8, gen=8, tp=1, policy="in_flight", gen_gpu="", constants=None, **more):
    settings = {"precision": "bf16", "lora": False, "colocated": False, **more}
    return hand_off_cost(
        model(name), chip(gpu), chip(gen_gpu or gpu), policy=policy, train_gpus=train, gen_gpus=gen, gen_tp=tp,
        constants=constants or builtin(), **settings,
    )  # fmt: skip


def whole_s(cost):
    return cost.publish_s + cost.transfer_s + cost.pause_s


@pytest.mark.parametrize(
    ("name", "gpu", "train", "gen", "published_s"),
    [
        ("glm-4.5-air", "h800", 4, 4, 3.47),  # checkpoint-engine, 8 H800, broadcast
        ("qwen3-235b-a22b", "h800", 4, 4, 6.22),
        ("qwen3-30b-a3b", "h100", 16, 16, 4.38),  # verl's checkpoint engine, trainer + rollout ranks
        ("qwen3-235b-a22b", "h100", 64, 64, 23.70),
    ],
)
def test_transfers_within_a_fifth_of_published_seconds(name, gpu, train, gen, published_s):
    assert cost(name, gpu, train, gen, tp=4).transfer_s == pytest.approx(published_s, rel=0.2)


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "tp", "precision", "published_s"),
    [
        ("glm-4.5-air", "h800", 8, 8, "bf16", 3.47),  # checkpoint-engine, broadcast
        ("qwen3-235b-a22b", "h800", 8, 8, "bf16", 6.22),
        ("deepseek-v3", "h20", 16, 16, "fp8", 10.19),
        ("kimi-k2", "h20", 256, 16, "fp8", 16.04),
    ],
)
def test_shared_pools_within_a_fifth_of_published_seconds_on_any_scale_up_link(
    name, gpu, gpus, tp, precision, published_s
):
    shared = cost(name, gpu, gpus, gpus, tp=tp, precision=precision, colocated=True)
    assert whole_s(shared) == pytest.approx(published_s, rel=0.2)


def test_bytes_are_those_of_the_serving_weights():
    assert cost().bytes == 2 * 8_190_735_360
    assert cost(precision="fp8").bytes == model("qwen3-8b").weight_bytes("fp8")


def test_the_number_of_engines_does_not_matter():
    assert cost(train=64, gen=64) == cost(train=64, gen=1024)


def test_one_domain_is_faster_than_two_nodes_and_a_mixed_pool_takes_the_slower_link():
    assert cost(train=4, gen=4).transfer_s < cost(train=8, gen=8).transfer_s
    mixed = cost(gpu="b200", gen_gpu="l40s", train=8, gen=8)
    assert mixed.transfer_s == pytest.approx(0.5 + 16.38e9 / (0.4 * 25e9), rel=1e-3)


def test_a_delta_sends_and_scatters_a_fortieth():
    whole, delta = cost("qwen3-32b"), cost("qwen3-32b", policy="delta")
    assert delta.bytes == pytest.approx(whole.bytes / 40)
    assert delta.transfer_s < whole.transfer_s
    assert 0 < delta.pause_s < whole.pause_s
    assert delta.publish_s > whole.publish_s  # it has to be found first


def test_adapters_are_tiny():
    assert cost(lora=True).bytes == pytest.approx(0.01 * 2 * 8_190_735_360)
    assert whole_s(cost(lora=True)) < 1.0


def test_colocated_sides_move_trainer_state_to_the_host_instead():
    split, together = cost(), cost(colocated=True)
    assert together.publish_s == 0.0
    assert together.transfer_s < split.transfer_s
    host = chip("h100").host_bytes_per_s
    assert together.switch_s == pytest.approx(1.0 + 14 * 8_190_735_360 / 8 / (0.7 * host))
    assert split.switch_s == 0.0
    assert 1.0 < cost(colocated=True, lora=True).switch_s < together.switch_s + 1.0


def test_a_runs_own_times_replace_the_formula():
    law = MeasuredLaw(model="qwen3-8b", chip="h100", publish_s=fact(0.4), pause_s=fact(0.0))
    measured = cost(constants=Constants(name="run", laws=(law,)))
    assert (measured.publish_s, measured.pause_s) == (0.4, 0.0)
    assert measured.transfer_s == cost().transfer_s


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(PlanError, match="did you mean 'in_flight'"):
        cost(policy="inflight")
