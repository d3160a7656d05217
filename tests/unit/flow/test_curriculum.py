"""Which prompt next."""

import random
from collections import Counter

import numpy as np
import pytest
from flow_world import World, train

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.flow.curriculum import Band, Curriculum
from headrace.flow.events import StartGroup


def make(kind: str = "uniform", *, prompts: int = 10, **kwargs: object) -> Curriculum:
    config = CurriculumConfig.model_validate({"kind": kind} | kwargs)
    return Curriculum(config, prompts=prompts, seed=3)


def picks(curriculum: Curriculum, count: int, *, keep: bool = False, version: int = 0) -> list[int]:
    out = []
    for ordinal in range(count):
        prompt = curriculum.pick(ordinal, version)
        assert prompt is not None
        out.append(prompt)
        if not keep:
            curriculum.released(prompt)
    return out


def test_uniform_serves_every_prompt_once_per_epoch_in_new_orders() -> None:
    served = picks(make(), 30)
    epochs = [served[:10], served[10:20], served[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert served == picks(make(), 30)


def test_outstanding_prompt_waits_while_others_are_free_and_comes_when_it_is() -> None:
    curriculum = make(prompts=4)
    first = picks(curriculum, 4)
    held = curriculum.pick(4, 0)
    assert held is not None
    rest = picks(curriculum, 7)
    assert held not in rest
    assert sorted(rest[:3]) == sorted(set(first) - {held}), "epoch 1 without the held one"
    curriculum.released(held)
    assert curriculum.pick(20, 0) == held


def test_all_outstanding_still_serves() -> None:
    assert Counter(picks(make(prompts=2), 6, keep=True)) == {0: 3, 1: 3}


def test_failed_prompt_is_served_first_and_quarantined_after_three() -> None:
    curriculum = make()
    prompt = curriculum.pick(0, 0)
    assert prompt is not None
    for failure in range(3):
        quarantined = curriculum.failed(prompt, "lost sandbox")
        curriculum.released(prompt)
        assert quarantined is (failure == 2)
        if not quarantined:
            assert curriculum.pick(failure + 1, 0) == prompt
    assert prompt not in picks(curriculum, 40)
    assert "lost sandbox" in curriculum.quarantined[prompt]


def test_success_between_failures_resets_the_count() -> None:
    curriculum = make()
    for _ in range(5):
        assert not curriculum.failed(0, "x")
        curriculum.scored(0, (1.0, 0.0), 0)


def test_no_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts = 0"):
        make(prompts=0)


def test_band_prefers_the_middle() -> None:
    curriculum = make("band", prompts=30, explore=0.0)
    for _ in range(3):
        for prompt in range(30):
            passes = (0, 4, 7)[prompt % 3]
            curriculum.scored(prompt, (1.0,) * passes + (0.0,) * (8 - passes), 0)
    served = Counter(p % 3 for p in picks(curriculum, 200))
    assert served[1] > 150


def test_band_retires_and_revisits() -> None:
    curriculum = make("band", prompts=5, revisit_steps=10)
    for _ in range(3):
        curriculum.scored(2, (1.0,) * 8, 4)
    assert isinstance(curriculum.strategy, Band)
    assert curriculum.strategy.pass_rate(2) > 0.95
    assert 2 not in picks(curriculum, 200, version=13)
    assert 2 in picks(curriculum, 400, version=14)


def test_band_serves_when_everything_is_retired_or_outstanding() -> None:
    curriculum = make("band", prompts=3)
    for prompt in range(3):
        for _ in range(3):
            curriculum.scored(prompt, (1.0,) * 8, 0)
    served = picks(curriculum, 5, keep=True)
    assert sorted(served[:3]) == [0, 1, 2]


def test_band_depends_on_ordinal_and_evidence_only() -> None:
    one, two = make("band", prompts=50), make("band", prompts=50)
    picks(two, 7)
    assert one.pick(9, 0) == two.pick(9, 0)


def zero_signal_frac(kind: str) -> float:
    """Share of zero-signal groups in the second half of a run whose prompts are mostly too easy or too hard."""
    pass_rate = np.random.default_rng(0).beta(0.25, 0.25, size=80)
    flow = FlowConfig(mode="pipeline", batch_groups=4, group_size=4, max_lag_steps=1, refill_budget=10_000)
    world = World(flow, prompts=80, curriculum=kind)
    rng = random.Random(1)

    def reward(start: StartGroup, member: int) -> float:
        return float(rng.random() < pass_rate[start.prompt_index])

    world.start()
    train(world, 20, reward)
    early = len(world.journal)
    train(world, 20, reward)
    late = list(world.journal.values())[early:]
    return sum(r.bucket == "filtered_zero_signal" for r in late) / len(late)


def test_band_lowers_the_zero_signal_share_by_three_tenths() -> None:
    uniform, band = zero_signal_frac("uniform"), zero_signal_frac("band")
    assert uniform > 0.5
    assert band < 0.7 * uniform
