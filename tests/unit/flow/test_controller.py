"""Timelines by hand: each is a paragraph of the design, played event by event."""

import pytest
from flow_world import World, train

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.errors import FlowError
from headrace.flow.controller import Controller
from headrace.flow.events import (
    BatchWanted,
    CancelGroup,
    Decision,
    Landed,
    MemberEnded,
    RetryMember,
    RunEnding,
    RunStarted,
    StartGroup,
    StepEnded,
    Stop,
    SwapWeights,
    TakeBatch,
)
from headrace.records import Outcome

A, B, C, D, E, F = (f"g{n:06d}" for n in range(6))


def pipeline(batch_groups: int, eta: int, **kwargs: object) -> FlowConfig:
    return FlowConfig.model_validate(
        {"mode": "pipeline", "batch_groups": batch_groups, "group_size": 2, "max_lag_steps": eta} | kwargs
    )


def started(out: list) -> list[str]:
    return [d.group_id for d in out if isinstance(d, StartGroup)]


def taken(out: list) -> tuple[str, ...] | None:
    return next((d.group_ids for d in out if isinstance(d, TakeBatch)), None)


def cancelled(out: list) -> dict[str, str]:
    return {d.group_id: d.bucket for d in out if isinstance(d, CancelGroup)}


# -- window ------------------------------------------------------------------------------------------------------


def test_hold_waits_for_the_group_that_would_break_the_bound() -> None:
    """FLOW 3: B = 2, eta = 1: {b, c} at v0, then a is awaited although d and e are complete."""
    world = World(pipeline(2, 1))
    assert started(world.start()) == [A, B, C, D]
    world.want()
    world.finish(B)
    assert taken(world.finish(C)) == (B, C)
    assert world.step() == [SwapWeights(version=1)]
    assert started(world.land()) == [E, F]
    world.want()
    world.finish(D)
    assert taken(world.finish(E)) is None
    out = world.finish(A)
    assert taken(out) == (A, D)
    world.step()
    world.land()
    world.want()
    assert taken(world.finish(F)) == (E, F)


def test_looking_one_step_ahead_is_not_enough() -> None:
    """B = 1, eta = 2: taking d at v1 would leave a and b both due at v2."""
    world = World(pipeline(1, 2))
    assert started(world.start()) == [A, B, C]
    world.want()
    assert taken(world.finish(C)) == (C,)
    world.step()
    assert started(world.land()) == [D]
    world.want()
    assert taken(world.finish(D)) is None
    assert taken(world.finish(B, tok_by_version=((0, 10),))) == (B,)
    world.step()
    world.land()
    world.want()
    assert world.batch is None, "d must wait: a is due now"
    assert taken(world.finish(A, tok_by_version=((0, 5), (2, 5)))) == (A,)


def test_complete_groups_are_due_by_their_real_oldest_token() -> None:
    """A group admitted at v0 that sampled only under v1 is due one version later."""
    world = World(pipeline(1, 1))
    world.start()
    world.want()
    world.finish(A)
    world.step()
    world.land()  # c starts at v1
    world.want()
    world.finish(B, tok_by_version=((1, 10),))
    assert world.batch is not None
    assert world.batch.group_ids == (B,)
    world.step()
    assert world.controller.ledger.lag_hist == {0: 40}


def test_drop_cancels_what_is_due_and_refills() -> None:
    world = World(pipeline(2, 1, on_bound="drop"))
    world.start()
    world.want()
    world.finish(B)
    world.finish(C)
    world.step()
    world.land()
    world.want()
    world.finish(D)
    out = world.finish(E)
    assert taken(out) == (D, E)
    assert cancelled(out) == {A: "dropped_stale"}
    assert len(started(out)) == 1
    world.end(A, 0, outcome=Outcome.CANCELLED, tok_by_version=((0, 7),))
    assert world.controller.ledger.wasted_tok == {"late": 7}
    assert world.journal[A].wasted_reason == "late"


def test_carry_goes_on_and_masks_what_is_too_old() -> None:
    world = World(pipeline(2, 1, on_bound="carry"))
    world.start()
    world.want()
    world.finish(B)
    world.finish(C)
    world.step()
    world.land()
    world.want()
    world.finish(D)
    assert taken(world.finish(E)) == (D, E)
    world.step()
    world.land()
    world.want()
    world.finish(A, tok_by_version=((0, 30), (1, 20), (2, 10)))
    world.finish(F)
    assert world.batch == TakeBatch(version=2, group_ids=(A, F), mask_below_version=1)
    world.step()
    row = world.journal[A]
    assert (row.trained_tok, row.masked_tok, row.bucket) == (60, 60, "trained")
    assert world.controller.ledger.lag_hist == {0: 20 + 60 + 20 + 20, 1: 40}


def test_carry_drops_a_group_of_which_every_token_is_too_old() -> None:
    world = World(pipeline(1, 1, on_bound="carry"))
    world.start()
    for _ in range(2):
        world.want()
        world.finish(max(world.running))
        world.step()
        world.land()
    world.finish(A, tok_by_version=((0, 10),))
    assert world.journal[A].bucket == "dropped_stale"


def test_carry_drops_what_became_too_old_while_the_trainer_was_busy() -> None:
    world = World(pipeline(1, 1, on_bound="carry"))
    world.start()
    world.want()
    world.finish(B)
    world.step()
    world.land()
    world.want()
    world.finish(C)  # taken at v1, although a is due
    world.finish(A, tok_by_version=((0, 10),))
    assert world.journal[A].state == "completed"
    world.step()
    assert world.journal[A].bucket == "dropped_stale"
    train(world, 2)


def test_sync_oversampling_cancels_the_surplus_only_when_the_batch_is_taken() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=2, group_size=2, oversample=1.0))
    assert started(world.start()) == [A, B, C, D]
    world.finish(D)
    world.finish(C)
    world.finish(B)
    out = world.want()
    assert taken(out) == (B, C)
    assert cancelled(out) == {A: "cancelled_oversample", D: "cancelled_oversample"}
    assert started(out) == [], "a group that started now could never be trained"
    assert world.step() == [SwapWeights(version=1)]
    assert len(started(world.land())) == 4


# -- modes -------------------------------------------------------------------------------------------------------


def test_sync_takes_turns() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2))
    assert started(world.start()) == [A]
    world.want()
    assert taken(world.finish(A)) == (A,)
    assert world.step() == [SwapWeights(version=1)]
    assert started(world.land()) == [B]
    assert world.started[B].version == 1


def test_one_step_off_swaps_between_batches() -> None:
    world = World(FlowConfig(mode="one_step_off", batch_groups=1, group_size=2))
    assert started(world.start()) == [A, B]
    world.want()
    world.finish(A)
    assert world.step() == [], "b still runs: no swap and no admission"
    world.want()
    out = world.finish(B)
    assert taken(out) == (B,)
    assert SwapWeights(version=1) in out
    assert started(world.land()) == [C]


def test_pipeline_swaps_at_once_but_one_at_a_time() -> None:
    world = World(pipeline(1, 2))
    world.start()
    for gid in (A, B):
        world.finish(gid)
    world.want()
    assert world.step() == [SwapWeights(version=1)]
    world.want()
    assert world.step() == [], "version 1 is still loading"
    out = world.land()
    assert SwapWeights(version=2) in out
    assert started(out) == [D], "only what version 1 learned from has landed"


@pytest.mark.parametrize(
    ("mode", "eta", "steps"), [("sync", 0, 5), ("one_step_off", 1, 5), ("pipeline", 1, 5), ("pipeline", 4, 9)]
)
def test_boundary_sizes_run(mode: str, eta: int, steps: int) -> None:
    world = World(FlowConfig(mode=mode, batch_groups=1, group_size=2, max_lag_steps=eta, max_running=2))
    world.start()
    train(world, steps)
    assert world.controller.version == steps
    assert world.controller.ledger.balanced


def test_members_start_together_or_not_at_all() -> None:
    world = World(pipeline(2, 1, max_running=4))
    assert started(world.start()) == [A, B]
    assert started(world.end(A, 0)) == []
    assert started(world.end(B, 0)) == [C]


# -- outcomes ----------------------------------------------------------------------------------------------------


def test_failed_member_is_retried_then_the_group_trains_without_it() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=3, retries=1))
    world.start()
    world.want()
    world.end(A, 0)
    world.end(A, 1)
    fail = {"outcome": Outcome.INFRA_FAIL, "tok_by_version": ((0, 4),)}
    assert world.end(A, 2, **fail) == [RetryMember(group_id=A, member=2, attempt=1)]
    assert taken(world.end(A, 2, **fail)) == (A,)
    world.step()
    row = world.journal[A]
    assert row.rewards == (0.0, 1.0)
    assert dict(row.wasted) == {"retried": 4, "failed_infra": 4}
    assert (row.generated_tok, row.trained_tok, row.alive_tok) == (28, 20, 0)


def test_failed_group_is_served_again_and_quarantined_after_three() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2, retries=0), prompts=10)
    world.start()
    prompt = world.started[A].prompt_index
    for gid in (A, B, C):
        assert world.started[gid].prompt_index == prompt
        world.end(gid, 0, outcome=Outcome.TIMEOUT)
        world.end(gid, 1)
    assert [world.journal[g].bucket for g in (A, B, C)] == ["failed_timeout", "failed_timeout", "quarantined"]
    assert world.started[D].prompt_index != prompt
    assert "timed out" in world.controller.curriculum.quarantined[prompt]


def test_every_prompt_quarantined_stops_the_run() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2, retries=0), prompts=1)
    world.start()
    while not world.stopped:
        gid = next(iter(world.running))
        for member in (0, 1):
            world.end(gid, member, outcome=Outcome.INFRA_FAIL)
    assert "quarantined" in world.decisions[-1].reason


def test_zero_signal_is_refilled_until_the_budget_names_the_histogram() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2, refill_budget=2))
    world.start()
    world.want()
    assert started(world.finish(A, lambda _: 1.0)) == [B]
    assert world.journal[A].bucket == "filtered_zero_signal"
    assert started(world.finish(B, lambda _: 0.0)) == [C]
    out = world.finish(C, lambda _: 1.0)
    assert len(out) == 1
    assert isinstance(out[0], Stop)
    assert "3 groups" in out[0].reason
    assert "0: 1, " in out[0].reason
    assert "1: 2." in out[0].reason


def test_stop_after_keeps_what_comes_once_the_budget_is_spent() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2, refill_budget=1, zero_signal="stop_after"))
    world.start()
    world.want()
    world.finish(A, lambda _: 1.0)
    assert taken(world.finish(B, lambda _: 1.0)) == (B,)


def test_keep_trains_on_equal_rewards() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2, zero_signal="keep"))
    world.start()
    world.want()
    assert taken(world.finish(A, lambda _: 1.0)) == (A,)


def test_run_ending_closes_everything() -> None:
    world = World(pipeline(2, 1))
    world.start()
    world.finish(A)
    out = world.feed(RunEnding(time_s=1.0))
    assert cancelled(out) == dict.fromkeys((A, B, C, D), "unfinished")
    assert world.controller.ledger.buckets["unfinished"] == 4
    assert world.controller.ledger.wasted_tok == {"unfinished": 20}


# -- impossible events -------------------------------------------------------------------------------------------


def ended(**kwargs: object) -> MemberEnded:
    return MemberEnded(
        **(
            {
                "time_s": 1.0,
                "group_id": A,
                "member": 0,
                "attempt": 0,
                "outcome": Outcome.OK,
                "reward": 1.0,
                "generated_tok": 5,
                "oldest_version": 0,
                "newest_version": 0,
            }
            | kwargs
        )
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ended(group_id="g000099"), "never started"),
        (ended(member=2), "members 0 to 1"),
        (ended(attempt=1), "is at attempt 0"),
        (ended(reward=None), "needs a finite reward"),
        (ended(reward=float("nan")), "needs a finite reward"),
        (ended(outcome=Outcome.TIMEOUT), "must not be scored"),
        (ended(newest_version=1), "beyond the published 0"),
        (ended(newest_version=-1), "must ascend"),
        (ended(oldest_version=-1), "must ascend"),
        (ended(oldest_version=None), "without a version"),
        (ended(stale_tok_by_version=((0, 4),)), "add up to 5"),
        (ended(time_s=-1.0), "time goes back"),
        (StepEnded(time_s=1.0, version=1), "no batch was taken"),
        (Landed(time_s=1.0, version=1), "were to load version None"),
        (RunStarted(time_s=1.0, version=0), "already started"),
    ],
)
def test_impossible_events_are_named(event: MemberEnded, words: str) -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2))
    world.start()
    with pytest.raises(FlowError, match=words):
        world.controller.handle(event)


def test_a_member_cannot_end_twice_nor_a_busy_trainer_ask() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2))
    world.start()
    world.want()
    world.controller.handle(ended())
    with pytest.raises(FlowError, match="has already ended"):
        world.controller.handle(ended())
    world.controller.handle(ended(member=1, reward=0.0))
    with pytest.raises(FlowError, match="still being trained"):
        world.controller.handle(BatchWanted(time_s=2.0))
    with pytest.raises(FlowError, match="makes version 1"):
        world.controller.handle(StepEnded(time_s=2.0, version=2))


# -- the end of the run --------------------------------------------------------------------------------------------


def test_nothing_starts_that_no_step_would_use() -> None:
    """B = 2, eta = 2, steps = 2: of 6 slots only 4 are used, and a filtered group is replaced."""
    controller = Controller(pipeline(2, 2), CurriculumConfig(), prompts=50, seed=0, steps=2)
    begun = started(controller.handle(RunStarted(time_s=0.0, version=0)))
    assert begun == [A, B, C, D]
    finish(controller, A, rewards=(1.0, 1.0))
    assert started(finish(controller, B, rewards=(1.0, 0.0))) == []
    assert controller.counts()["running_groups"] == 3, "e has replaced a"
    controller.handle(BatchWanted(time_s=1.0))
    assert taken(finish(controller, C, rewards=(1.0, 0.0))) == (B, C)
    controller.handle(StepEnded(time_s=2.0, version=1))
    assert started(controller.handle(Landed(time_s=3.0, version=1))) == []
    controller.handle(BatchWanted(time_s=3.0))
    finish(controller, D, rewards=(1.0, 0.0))
    assert taken(finish(controller, E, rewards=(1.0, 0.0))) == (D, E)
    controller.handle(StepEnded(time_s=4.0, version=2))
    controller.handle(Landed(time_s=5.0, version=2))
    assert controller.handle(RunEnding(time_s=6.0)) == []
    assert controller.ledger.buckets["unfinished"] == 0


def finish(controller: Controller, group_id: str, *, rewards: tuple[float, ...]) -> list[Decision]:
    """All members of a group end with these rewards."""
    out: list[Decision] = []
    for member, reward in enumerate(rewards):
        out += controller.handle(
            MemberEnded(
                time_s=float(controller.landed) * 2.0 + 1.0,
                group_id=group_id,
                member=member,
                attempt=0,
                outcome=Outcome.OK,
                reward=reward,
                generated_tok=3,
                oldest_version=controller.landed,
                newest_version=controller.landed,
            )
        )
    return out
