"""After a crash: nothing is skipped, nothing trains twice, and sync mode repeats itself."""

import random

import pytest
from flow_world import World, train
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.schema import FlowConfig
from headrace.flow.controller import Controller
from headrace.flow.events import RunEnding, StartGroup
from headrace.records import Outcome


def reward(start: StartGroup, member: int) -> float:
    """Depends on what the seed of sampling depends on: ordinal and member, not the attempt."""
    return float(random.Random(f"{start.ordinal}/{member}").random() < 0.4)


def batches_of(world: World) -> list[tuple[int, int]]:
    return sorted((version, ordinal) for ordinal, version in world.trained.items())


@given(
    saved=st.integers(0, 5),
    more_events=st.integers(0, 12),
    batch_groups=st.integers(1, 3),
    prompts=st.sampled_from([4, 7, 50]),
    seed=st.integers(0, 3),
)
@settings(max_examples=30, deadline=None)
def test_sync_run_with_a_crash_trains_the_same_prompts_in_the_same_order(
    saved: int, more_events: int, batch_groups: int, prompts: int, seed: int
) -> None:
    flow = FlowConfig(mode="sync", batch_groups=batch_groups, group_size=3, refill_budget=1000)
    whole = World(flow, prompts=prompts, seed=seed)
    whole.start()
    expected = train(whole, 9, reward)

    world = World(flow, prompts=prompts, seed=seed)
    world.start()
    got = train(world, saved, reward)
    # Beyond the checkpoint: some groups end, perhaps whole steps are made, then the process dies.
    for _ in range(more_events):
        if world.batch is not None:
            world.step()
        elif world.swapping is not None:
            world.land()
        elif not world.wanted:
            world.want()
        else:
            gid = min(world.running, key=world.started_ordinal)
            world.finish(gid, lambda m, s=world.started[gid]: reward(s, m))
    world.crash(saved)
    got += train(world, 9 - saved, reward)
    assert got == expected
    assert batches_of(world) == batches_of(whole)


def test_lost_updates_are_salvaged_and_lost_samples_start_again() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=2, group_size=2))
    world.start()
    train(world, 1)  # ordinals 0, 1 -> version 1, saved
    train(world, 1)  # ordinals 2, 3 -> version 2, lost
    world.land()
    assert sorted(world.running) == ["g000004", "g000005"]
    world.end("g000004", 0)
    restored = world.crash(1)
    assert (restored.kept, restored.salvaged, restored.restarted) == (2, 2, 2)
    assert restored.salvaged_ids == ("g000002", "g000003")
    assert world.running == {}, "salvaged groups hold the slots"
    assert world.journal["g000004"].bucket == "unfinished"
    assert dict(world.journal["g000004"].wasted) == {"wasted_restart": 10}
    out = world.want()
    assert out[0].group_ids == ("g000002", "g000003")
    world.step()
    world.land()
    assert sorted(world.running) == ["g000004a1", "g000005a1"]
    assert world.started["g000004a1"].prompt_index == world.started["g000004"].prompt_index
    assert world.started["g000004a1"].ordinal == 4


def test_samples_of_lost_weights_are_wasted_whatever_became_of_them() -> None:
    world = World(FlowConfig(mode="pipeline", batch_groups=1, group_size=2, max_lag_steps=1))
    world.start()
    train(world, 4)
    trained_tok = world.controller.ledger.trained_tok
    restored = world.crash(0)
    ledger = world.controller.ledger
    assert trained_tok == 80
    assert restored.kept == 0
    assert ledger.trained_tok == 0
    assert ledger.alive_tok + ledger.wasted_tok["wasted_restart"] == ledger.generated_tok
    train(world, 4)
    assert sorted(world.trained) == [0, 1, 2, 3]


def test_what_a_graceful_end_left_unfinished_starts_again() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=2, group_size=2))
    world.start()
    train(world, 1)
    world.land()
    world.end("g000002", 0)
    world.feed(RunEnding(time_s=world.now_s))
    restored = world.crash(1)
    assert restored.restarted == 2
    assert sorted(world.running) == ["g000002a1", "g000003a1"]
    assert world.controller.ledger.wasted_tok == {"unfinished": 10}


def test_crash_after_crash_keeps_one_alive_attempt_per_ordinal() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2))
    world.start()
    for _ in range(3):
        world.crash(0)
    assert list(world.running) == ["g000000a3"]
    assert world.controller.ledger.buckets["unfinished"] == 3


def test_failed_prompt_is_still_owed_after_a_restart() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=2, group_size=2, retries=0), prompts=20)
    world.start()
    for member in (0, 1):
        world.end("g000000", member, outcome=Outcome.INFRA_FAIL)
    prompt = world.started["g000000"].prompt_index
    assert world.started["g000002"].prompt_index == prompt
    world.crash(0)
    prompts = [world.started[g].prompt_index for g in ("g000001a1", "g000002a1")]
    assert prompts == [world.started["g000001"].prompt_index, prompt]
    train(world, 3)
    picked = [world.started[g].prompt_index for g in world.started if world.started[g].attempt == 0]
    assert len(set(picked)) == len(picked) - 1, "only the failed prompt comes twice"


def test_lowered_lag_bound_on_resume_starts_old_groups_again() -> None:
    world = World(FlowConfig(mode="pipeline", batch_groups=1, group_size=2, max_lag_steps=3))
    world.start()
    train(world, 2)
    for gid in list(world.running):
        world.finish(gid, tok_by_version=((world.started[gid].version, 10),))
    complete = [r for r in world.journal.values() if r.state == "completed"]
    assert {r.oldest_version for r in complete} == {0, 1}
    low = FlowConfig(mode="pipeline", batch_groups=1, group_size=2, max_lag_steps=1)
    _, restored = Controller.restore(low, world.curriculum, prompts=100, seed=0, rows=world.journal.values(), version=2)
    assert restored.kept == 2
    assert restored.salvaged == sum(r.oldest_version == 1 for r in complete)
    assert restored.restarted == sum(r.oldest_version == 0 for r in complete)


@pytest.mark.parametrize("version", [0, 2])
def test_totals_survive(version: int) -> None:
    world = World(FlowConfig(mode="sync", batch_groups=2, group_size=2, refill_budget=1000))
    world.start()
    train(world, 2, reward)
    before = world.controller.ledger.summary()
    controller, _ = Controller.restore(
        world.flow, world.curriculum, prompts=100, seed=0, rows=world.journal.values(), version=version
    )
    after = controller.ledger.summary()
    assert after["generated_tok"] == before["generated_tok"]
    assert after["admitted"] == before["admitted"]
    if version == 2:
        assert after == before
        assert controller.ledger.lag_hist == {0: before["trained_tok"]}
