"""Holding never costs a group and always ends: docs/decisions/0002-deadline-feasibility.md."""

from flow_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.schema import FlowConfig


@given(
    batch_groups=st.integers(1, 3),
    eta=st.integers(1, 4),
    land_late=st.booleans(),
    order=st.lists(st.integers(0, 99), min_size=5, max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_hold_gives_up_no_group_in_any_order_of_ends(
    batch_groups: int, eta: int, land_late: bool, order: list[int]
) -> None:
    """The trainer is always hungry, all tokens are of the version at admission; small numbers pick the youngest."""
    world = World(FlowConfig(mode="pipeline", batch_groups=batch_groups, group_size=2, max_lag_steps=eta))
    world.start()
    world.want()
    for number in order:
        if world.running:
            youngest_first = sorted(world.running, reverse=True)
            gid = youngest_first[number // 10 % len(youngest_first)]
            world.finish(gid, tok_by_version=((world.started[gid].version, 5),))
        if world.swapping is not None and (not land_late or number % 2):
            world.land()
        if world.batch is not None:
            world.step()
            if world.swapping is not None and not land_late:
                world.land()
            world.want()
    # World.check has asserted after each event: no deadlock, no broken bound, nothing dropped. The rest ends too:
    version = world.controller.version
    while world.controller.version < version + eta + 1:
        if world.batch is not None:
            world.step()
            world.want()
        elif world.swapping is not None:
            world.land()
        else:
            gid = max(world.running)
            world.finish(gid, tok_by_version=((world.started[gid].version, 5),))
