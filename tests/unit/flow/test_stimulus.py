"""A log is a test."""

import pytest
from flow_world import World, train

from headrace.config.schema import FlowConfig
from headrace.errors import FlowError
from headrace.flow.events import MemberEnded, SwapWeights, TakeBatch
from headrace.flow.stimulus import Setup, decode, encode, read_log, replay, write_setup, write_stimulus
from headrace.records import Outcome


def log_of(world: World, setup: Setup) -> list[str]:
    controller = setup.controller()
    return [write_setup(setup)] + [write_stimulus(event, controller.handle(event)) for event in world.events]


def played(**kwargs: object) -> tuple[World, Setup]:
    world = World(FlowConfig(mode="pipeline", batch_groups=2, group_size=2, max_lag_steps=1))
    world.start()
    train(world, 3)
    return world, Setup(flow=world.flow, curriculum=world.curriculum, prompts=100, seed=0)


def test_a_log_replays_to_the_same_decisions() -> None:
    world, setup = played()
    again, stimuli = read_log(log_of(world, setup))
    assert again == setup
    decisions = [d for s in stimuli for d in s.decisions]
    assert decisions == world.decisions
    assert replay(again, [s.event for s in stimuli]) == decisions


def test_a_resumed_run_replays_from_its_rows() -> None:
    world, setup = played()
    rows = tuple(world.journal.values())
    world.events.clear()
    world.decisions.clear()
    world.crash(2)
    train(world, 2)
    resumed = Setup(flow=setup.flow, curriculum=setup.curriculum, prompts=100, seed=0, rows=rows, version=2)
    again, stimuli = read_log(log_of(world, resumed))
    assert replay(again, [s.event for s in stimuli]) == world.decisions


def test_records_survive_json() -> None:
    event = MemberEnded(
        time_s=1.5,
        group_id="g000001",
        member=0,
        attempt=1,
        outcome=Outcome.POLICY_FAIL,
        reward=0.5,
        generated_tok=3,
        oldest_version=1,
        newest_version=2,
        stale_tok_by_version=((1, 1), (2, 2)),
    )
    assert decode(encode(event)) == event
    assert decode(encode(event)).outcome is Outcome.POLICY_FAIL
    take = TakeBatch(version=1, group_ids=("g000001",), mask_below_version=0)
    assert decode(encode(take)) == take


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_named() -> None:
    lines = log_of(*played())
    assert len(read_log([*lines[:5], lines[5][:20]])[1]) == 4
    with pytest.raises(FlowError, match="line 3"):
        read_log([*lines[:2], lines[2][:20], *lines[3:]])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"is": "SwapWeight", "version": 1}, "did you mean 'SwapWeights'"),
        ({"is": "SwapWeights", "versoin": 1}, "did you mean 'version'"),
    ],
)
def test_unknown_names_get_a_hint(data: dict[str, object], words: str) -> None:
    assert decode({"is": "SwapWeights", "version": 1}) == SwapWeights(version=1)
    with pytest.raises(FlowError, match=words):
        decode(data)


def test_empty_and_headless_logs_are_refused() -> None:
    with pytest.raises(FlowError, match="empty"):
        read_log([])
    with pytest.raises(FlowError, match="set-up"):
        read_log(['{"event": {}}'])
