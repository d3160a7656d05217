"""Random lives of a run: whatever happens in whatever order, every promise of FLOW holds."""

import pytest
from flow_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.config.schema import FlowConfig
from headrace.flow.events import RunEnding
from headrace.flow.stimulus import Setup, replay
from headrace.records import Outcome


@st.composite
def flow_configs(draw: st.DrawFn) -> FlowConfig:
    mode = draw(st.sampled_from(["sync", "one_step_off", "pipeline"]))
    group_size = draw(st.integers(2, 4))
    return FlowConfig(
        mode=mode,
        batch_groups=draw(st.integers(1, 4)),
        group_size=group_size,
        max_lag_steps=draw(st.integers(1, 4)) if mode == "pipeline" else None,
        on_bound=draw(st.sampled_from(["hold", "drop", "carry"])),
        max_running=draw(st.sampled_from([0, 0, group_size, 2 * group_size + 1])),
        oversample=draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])),
        retries=draw(st.integers(0, 2)),
        min_group=2,
        zero_signal=draw(st.sampled_from(["refill", "keep", "stop_after"])),
    )


class Life(RuleBasedStateMachine):
    @initialize(flow=flow_configs(), prompts=st.integers(1, 30), curriculum=st.sampled_from(["uniform", "band"]))
    def begin(self, flow: FlowConfig, prompts: int, curriculum: str) -> None:
        self.world = World(flow, prompts=prompts, curriculum=curriculum)
        self.saved = 0
        self.resumed = False
        self.seen_version = 0
        self.world.start()

    def _end(self, table: dict[str, dict[int, int]], data: st.DataObject, outcome: Outcome, reward: float) -> None:
        world = self.world
        gid = data.draw(st.sampled_from(sorted(table)))
        member = data.draw(st.sampled_from(sorted(table[gid])))
        first = world.started[gid].version
        newest = data.draw(st.integers(first, world.controller.landed))
        versions = sorted(data.draw(st.sets(st.integers(first, newest), max_size=3)) | {newest})
        toks = tuple((v, data.draw(st.integers(1, 5))) for v in versions)
        world.end(gid, member, outcome=outcome, reward=reward, tok_by_version=toks, pairs=data.draw(st.booleans()))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def member_scored(self, data: st.DataObject, reward: float) -> None:
        self._end(self.world.running, data, data.draw(st.sampled_from([Outcome.OK, Outcome.POLICY_FAIL])), reward)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), youngest=st.booleans())
    def group_scored(self, data: st.DataObject, youngest: bool) -> None:
        """A whole group, sampled by the version it started with; often the youngest overtakes the others."""
        running = sorted(self.world.running)
        gid = running[-1] if youngest else data.draw(st.sampled_from(running))
        first = self.world.started[gid].version
        self.world.finish(gid, lambda member: float(member % 2), tok_by_version=((first, 5),))

    @precondition(lambda self: self.world.batch is not None and self.world.swapping is None)
    @rule()
    def whole_step(self) -> None:
        self.world.step()
        if self.world.swapping is not None:
            self.world.land()
        self.world.want()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.INFRA_FAIL, Outcome.TIMEOUT, Outcome.CANCELLED]))
    def member_failed(self, data: st.DataObject, outcome: Outcome) -> None:
        self._end(self.world.running, data, outcome, 0.0)

    @precondition(lambda self: self.world.ghosts)
    @rule(data=st.data())
    def late_member(self, data: st.DataObject) -> None:
        self._end(self.world.ghosts, data, Outcome.CANCELLED, 0.0)

    @precondition(lambda self: self.world.batch is None)
    @rule()
    def batch_wanted(self) -> None:
        self.world.want()

    @precondition(lambda self: self.world.batch is not None)
    @rule(save=st.booleans())
    def step_ended(self, save: bool) -> None:
        self.world.step()
        if save:
            self.saved = self.world.controller.version

    @precondition(lambda self: self.world.swapping is not None)
    @rule()
    def landed(self) -> None:
        self.world.land()

    @precondition(lambda self: not self.world.stopped)
    @rule()
    def crash(self) -> None:
        self.world.crash(self.saved)
        self.resumed = True
        self.seen_version = self.saved

    @invariant()
    def versions_never_go_down(self) -> None:
        if hasattr(self, "world"):
            assert self.world.controller.version >= self.seen_version
            self.seen_version = self.world.controller.version

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if not self.resumed:
            setup = Setup(flow=world.flow, curriculum=world.curriculum, prompts=world.prompts, seed=world.seed)
            assert replay(setup, world.events) == world.decisions
        for _ in range(3):  # Fair from here on: three more steps must come.
            self._one_fair_step()
        world.feed(RunEnding(time_s=world.now_s))
        assert not world.controller.ledger.alive
        assert world.controller.ledger.admitted == sum(world.controller.ledger.buckets.values())

    def _one_fair_step(self) -> None:
        world = self.world
        for _ in range(1000):
            if world.stopped:
                return
            if world.swapping is not None:
                world.land()
            elif world.batch is not None:
                world.step()
                return
            elif not world.wanted:
                world.want()
            else:
                world.finish(min(world.running, key=world.started_ordinal))
        raise AssertionError("no step in 1000 events")


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )


class TestLife(Life.TestCase):
    settings = _settings(30)


@pytest.mark.slow
class TestManyLives(Life.TestCase):
    settings = _settings(600)
