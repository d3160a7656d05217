"""A tiny world around the controller: it obeys decisions, lets tests end members, and checks every promise."""

from collections.abc import Callable

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.flow.controller import Controller
from headrace.flow.events import (
    BatchWanted,
    CancelGroup,
    Decision,
    Event,
    Landed,
    MemberEnded,
    RetryMember,
    RunStarted,
    StartGroup,
    StepEnded,
    Stop,
    SwapWeights,
    TakeBatch,
)
from headrace.flow.group import Row
from headrace.flow.restore import Restored
from headrace.records import Outcome


class World:
    """What runs, what is trained, what the journal holds. `decisions` is everything the controller ever said."""

    def __init__(self, flow: FlowConfig, *, prompts: int = 100, seed: int = 0, curriculum: str = "uniform") -> None:
        self.flow = flow
        self.curriculum = CurriculumConfig(kind=curriculum)
        self.prompts, self.seed = prompts, seed
        self.controller = Controller(flow, self.curriculum, prompts=prompts, seed=seed)
        self.now_s = 0.0
        self.journal: dict[str, Row] = {}
        self.decisions: list[Decision] = []
        self.events: list[Event] = []
        self.trained: dict[int, int] = {}
        """ordinal -> version at which it was taken, of updates that were not lost"""
        self.started: dict[str, StartGroup] = {}
        self._fresh()

    def _fresh(self) -> None:
        self.running: dict[str, dict[int, int]] = {}
        """group -> member -> attempt"""
        self.ghosts: dict[str, dict[int, int]] = {}
        self.batch: TakeBatch | None = None
        self.swapping: int | None = None
        self.wanted = False
        self.stopped = False

    # -- events --------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Decision]:
        self.now_s = event.time_s
        out = self.controller.handle(event)
        self.events.append(event)
        self.decisions += out
        for decision in out:
            self._obey(decision)
        self.journal |= {row.group_id: row for row in self.controller.ledger.drain_changes()}
        self.check()
        return out

    def start(self) -> list[Decision]:
        return self.feed(RunStarted(time_s=self.now_s, version=self.controller.version))

    def want(self) -> list[Decision]:
        self.wanted = True
        return self.feed(BatchWanted(time_s=self.now_s))

    def step(self) -> list[Decision]:
        assert self.batch is not None
        for gid in self.batch.group_ids:
            self.trained[self.started_ordinal(gid)] = self.batch.version
        self.batch = None
        return self.feed(StepEnded(time_s=self.now_s, version=self.controller.version + 1))

    def land(self) -> list[Decision]:
        assert self.swapping is not None
        version, self.swapping = self.swapping, None
        return self.feed(Landed(time_s=self.now_s, version=version))

    def end(
        self,
        gid: str,
        member: int,
        *,
        outcome: Outcome = Outcome.OK,
        reward: float | None = None,
        tok_by_version: tuple[tuple[int, int], ...] | None = None,
        pairs: bool = True,
    ) -> list[Decision]:
        """One member ends; without more it is scored by its number and has ten tokens of the landed version."""
        table = self.running if gid in self.running else self.ghosts
        attempt = table[gid].pop(member)
        if not table[gid]:
            del table[gid]
        if tok_by_version is None:
            tok_by_version = ((self.controller.landed, 10),)
        if outcome.trains and reward is None:
            reward = float(member)
        return self.feed(
            MemberEnded(
                time_s=self.now_s,
                group_id=gid,
                member=member,
                attempt=attempt,
                outcome=outcome,
                reward=reward if outcome.trains else None,
                generated_tok=sum(tok for _, tok in tok_by_version),
                oldest_version=tok_by_version[0][0] if tok_by_version else None,
                newest_version=tok_by_version[-1][0] if tok_by_version else None,
                stale_tok_by_version=tok_by_version if pairs else (),
            )
        )

    def finish(self, gid: str, rewards: Callable[[int], float] = float, **kwargs: object) -> list[Decision]:
        """All running members of a group end."""
        out: list[Decision] = []
        for member in list(self.running[gid]):
            out += self.end(gid, member, reward=rewards(member), **kwargs)  # type: ignore[arg-type]
        return out

    def crash(self, version: int) -> Restored:
        """Lose the process; come back with the journal and the checkpoint of `version`."""
        self.trained = {o: v for o, v in self.trained.items() if v < version}
        self.controller, restored = Controller.restore(
            self.flow,
            self.curriculum,
            prompts=self.prompts,
            seed=self.seed,
            rows=list(self.journal.values()),
            version=version,
        )
        self._fresh()
        self.journal |= {row.group_id: row for row in self.controller.ledger.drain_changes()}
        waiting = self.controller.counts()["restarts_waiting"]
        alive = len(self.controller.ledger.alive)
        done = {r.ordinal for r in self.journal.values() if r.state == "final" and r.bucket != "unfinished"}
        learned = {r.ordinal for r in self.journal.values() if r.bucket == "trained"}
        assert learned == set(self.trained), "the journal and the checkpoint disagree on what was learned"
        assert len(done) + alive + waiting == len({r.ordinal for r in self.journal.values()}), "a prompt was skipped"
        self.check()
        self.start()
        return restored

    # -- decisions -----------------------------------------------------------------------------------------

    def started_ordinal(self, gid: str) -> int:
        return int(gid[1:].split("a")[0])

    def _obey(self, decision: Decision) -> None:
        if isinstance(decision, StartGroup):
            assert decision.group_id not in self.journal, "a group id was used twice"
            assert decision.version == self.controller.landed
            self.running[decision.group_id] = dict.fromkeys(range(self.flow.group_size), 0)
            self.started[decision.group_id] = decision
        elif isinstance(decision, RetryMember):
            self.running.setdefault(decision.group_id, {})[decision.member] = decision.attempt
        elif isinstance(decision, CancelGroup):
            if decision.group_id in self.running:
                self.ghosts[decision.group_id] = self.running.pop(decision.group_id)
        elif isinstance(decision, TakeBatch):
            self._obey_take(decision)
        elif isinstance(decision, SwapWeights):
            assert self.swapping is None, "two swaps at once"
            assert decision.version == self.controller.version > self.controller.landed
            assert self.flow.in_flight or not self.running, "a swap under running rollouts"
            self.swapping = decision.version
        elif isinstance(decision, Stop):
            self.stopped = True

    def _obey_take(self, batch: TakeBatch) -> None:
        assert self.wanted
        assert self.batch is None
        assert len(batch.group_ids) == len(set(batch.group_ids)) == self.flow.batch_groups
        ordinals = [self.started_ordinal(gid) for gid in batch.group_ids]
        assert ordinals == sorted(ordinals)
        assert not self.trained.keys() & set(ordinals), "a group trains twice"
        for gid in batch.group_ids:
            group = self.controller.ledger.alive[gid]
            assert gid not in self.running
            versions = [v for v, tok in group.tok_by_version.items() if tok and v >= batch.mask_below_version]
            if self.flow.on_bound != "carry":
                assert len(versions) == sum(1 for tok in group.tok_by_version.values() if tok)
            assert all(0 <= batch.version - v <= self.flow.lag_bound for v in versions), "the lag bound is broken"
        self.batch, self.wanted = batch, False

    def check(self) -> None:
        controller = self.controller
        controller.ledger.check()
        counts = controller.counts()
        running = sum(len(members) for members in self.running.values())
        assert counts["running_rollouts"] == running
        assert counts["running_groups"] == len(self.running)
        assert counts["slots_held"] >= len(controller.ledger.alive)
        if self.flow.on_bound != "carry":
            assert counts["slots_held"] <= counts["slots"]
        if self.flow.on_bound == "hold" and self.flow.oversample == 0.0:
            buckets = controller.ledger.buckets
            assert not buckets["dropped_stale"] + buckets["cancelled_oversample"], "hold gave up a group"
        if self.flow.max_running:
            assert running <= self.flow.max_running
        assert 0 <= controller.landed <= controller.version
        if self.wanted and not self.running and self.swapping is None and not self.stopped:
            raise AssertionError(f"deadlock: {counts} at version {controller.version}, landed {controller.landed}")


def train(world: World, steps: int, reward: Callable[[StartGroup, int], float] | None = None) -> list[tuple[int, ...]]:
    """Run `steps` steps, oldest rollouts first; returns the prompts of each batch, in order."""
    batches: list[tuple[int, ...]] = []
    prompt_of = lambda gid: world.journal[gid].prompt_index  # noqa: E731
    while len(batches) < steps:
        if world.batch is not None:
            batches.append(tuple(prompt_of(gid) for gid in world.batch.group_ids))
            world.now_s += 1.0
            world.step()
        elif not world.wanted:
            world.want()
        elif world.swapping is not None:
            world.land()
        else:
            assert world.running, "nothing runs and nothing happens"
            gid = min(world.running, key=world.started_ordinal)
            start = world.started[gid]
            world.now_s += 1.0
            world.finish(gid, float if reward is None else lambda m, s=start: reward(s, m))
    return batches
