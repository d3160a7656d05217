"""The concurrent loops of a run. Read this first.

    rollouts (one task per group member)               consume StartGroup / RetryMember, wait for the engine,
                                                       produce MemberEnded
        episode: engine.generate ... env.step ... grade
                          │ MemberEnded
                          v
    ┌──────────── controller.handle(event) -> decisions ────────────┐      flow/: pure, also run by the simulator
    │ StartGroup RetryMember CancelGroup   TakeBatch    SwapWeights │
    └───────┬────────────────────────────────┬──────────────┬───────┘
            v                                v              v
        rollouts                    trainer's loop      landing loop
                                             │              │
    trainer (the user's `async for`)                   consumes TakeBatch, waits for complete groups,
        BatchWanted -> batch -> train -> publish       produces StepEnded
    landing                                            consumes SwapWeights, waits for stage and swap,
        SwapWeights -> engine.stage, swap              produces Landed: slots free, admission goes on

Nothing here decides. Every event goes through `feed`, which asks the controller, carries its decisions out, and
writes the ledger before anything else happens. The first failure of any task ends the run with its cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from headrace.clock import Clock
from headrace.config.schema import RunConfig
from headrace.envs.env import Task
from headrace.errors import FlowError, SignalStarvedError
from headrace.flow.controller import Controller
from headrace.flow.events import (
    BatchWanted,
    CancelGroup,
    Decision,
    Event,
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
from headrace.loop.handoff import Handoff
from headrace.loop.journal import Journal
from headrace.loop.player import Player
from headrace.loop.recorder import Recorder
from headrace.loop.waits import Waits
from headrace.records import Batch, Group, Rollout
from headrace.rollout.stitch import mask_stale, samples
from headrace.sync.manifest import Manifest

T = TypeVar("T")


@dataclass(slots=True)
class _Live:
    """A group that may still train: its prompt and what its members have brought so far."""

    start: StartGroup
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class Interrupted(Exception):
    """The wait for a batch was ended by `interrupt`."""


class Pipeline:
    """Turns the controller's decisions into rollouts, batches and swaps, and what they bring into events."""

    def __init__(
        self,
        config: RunConfig,
        *,
        controller: Controller,
        task: Task,
        player: Player,
        handoff: Handoff,
        journal: Journal,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._task = task
        self._player = player
        self._handoff = handoff
        self._journal = journal
        self._clock = clock
        self._recorder = recorder
        self.controller = controller
        self.waits = Waits(clock)
        self._origin_s = clock.now()
        self._live: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._batch: asyncio.Future[TakeBatch] | None = None
        self._published: dict[int, Manifest] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._landed = asyncio.Condition()
        self._interrupted = False

    # --- what the trainer's loop calls -------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """Weights of `version` are served and held by the trainer: complete groups come back, admission begins."""
        for row in self.controller.ledger.rows():
            self._live[row.group_id] = _Live(
                StartGroup(
                    group_id=row.group_id,
                    ordinal=row.ordinal,
                    attempt=row.attempt,
                    prompt_index=row.prompt_index,
                    version=row.admitted_version,
                ),
                {r.member: r for r in self._journal.rollouts(row.group_id)},
            )
        self._origin_s = self._clock.now()
        self._recorder.training_begins()
        self.feed(RunStarted(time_s=self.now(), version=version))

    async def next_batch(self) -> Batch:
        """Ask for a batch and wait until the controller gives one."""
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
            self.feed(BatchWanted(time_s=self.now()))
        if self._interrupted:
            raise Interrupted
        taken = await self.until(
            self._batch, owner="trainer", what="a batch", deadline_s=self._config.launch.step_deadline_s
        )
        self._batch = None
        groups = tuple(self._group(group_id) for group_id in taken.group_ids)
        sampled_tok = _mask_tok(groups)
        groups = tuple(_without_stale(g, taken.mask_below_version) for g in groups)
        batch = Batch(
            version=taken.version,
            groups=groups,
            temperature=self._config.sampling.temperature,
            masked_stale_tok=sampled_tok - _mask_tok(groups),
        )
        self._recorder.batch_taken(batch)
        return batch

    def published(self, manifest: Manifest) -> None:
        """The step is done and its weights are on disk."""
        self._published[manifest.version] = manifest
        self.feed(StepEnded(time_s=self.now(), version=manifest.version))

    async def landed(self, version: int) -> None:
        """Wait until every replica serves at least `version`."""

        async def wait() -> None:
            async with self._landed:
                await self._landed.wait_for(lambda: self.controller.landed >= version)

        what = f"version {version} to land"
        await self.until(wait(), owner="trainer", what=what, deadline_s=self._config.launch.call_deadline_s)

    async def end(self) -> None:
        """No more admissions; cancel what runs, account for its tokens, and wait for every task."""
        self.feed(RunEnding(time_s=self.now()))
        await self.drain()

    async def drain(self) -> None:
        """Wait for all running tasks (they were told to end)."""
        tasks = list(self._tasks)
        if tasks:
            gathered = asyncio.gather(*tasks, return_exceptions=True)
            await self.waits.wait_for(gathered, owner="shutdown", what="rollouts to end", deadline_s=60.0)

    async def abandon(self) -> None:
        """Cancel every task without telling the controller: the ledger stays as it is, for resume."""
        for task in list(self._tasks):
            task.cancel()
        await self.drain()

    async def until(self, awaitable: Awaitable[T], *, owner: str, what: str, deadline_s: float) -> T:
        """Wait for it, or for the first failure of anything in the run."""
        main: asyncio.Future[T] = asyncio.ensure_future(awaitable)
        waiting: set[asyncio.Future[Any]] = {main, self._failed}
        both = asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        try:
            await self.waits.wait_for(both, owner=owner, what=what, deadline_s=deadline_s)
            if self._failed.done():
                self._failed.result()
            return main.result()
        finally:
            main.cancel()

    def interrupt(self) -> None:
        """End a wait for a batch with Interrupted, now and later."""
        self._interrupted = True
        if self._batch is not None and not self._batch.done():
            self._batch.set_exception(Interrupted())

    def fail(self, error: BaseException) -> None:
        """End the run with this cause; later ones are consequences and are dropped."""
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()

    def now(self) -> float:
        """Seconds since this process started the run."""
        return self._clock.now() - self._origin_s

    # --- events in, decisions out ------------------------------------------------------------------------------

    def feed(self, event: Event, rollouts: Sequence[Rollout] = ()) -> None:
        """Hand one event to the controller, store what changed, carry out what it decided."""
        decisions = self.controller.handle(event)
        changed = self.controller.ledger.drain_changes()
        self._journal.write(changed, rollouts)
        self._recorder.on_event(event, decisions)
        for decision in decisions:
            self._act(decision)
        for row in changed:
            if row.bucket is not None:  # final: its rollouts are in the ledger
                self._live.pop(row.group_id, None)

    def _act(self, decision: Decision) -> None:
        match decision:
            case StartGroup():
                self._live[decision.group_id] = _Live(decision)
                for member in range(self._config.flow.group_size):
                    self._spawn(self._member(decision, member, 0), f"{decision.group_id}/{member}")
            case RetryMember():
                start = self._live[decision.group_id].start
                self._spawn(self._member(start, decision.member, decision.attempt), f"{decision.group_id} retry")
            case CancelGroup():
                self._live.pop(decision.group_id, None)
                cancel = self._player.engine.cancel_group(decision.group_id)
                self._spawn(cancel, f"cancelling {decision.group_id}")
            case TakeBatch():
                if self._batch is None or (self._batch.done() and not self._interrupted):
                    raise FlowError(f"the controller gave a batch at version {decision.version} that nobody asked for")
                if not self._interrupted:
                    self._batch.set_result(decision)
            case SwapWeights():
                self._spawn(self._land(decision.version), f"landing of version {decision.version}")
            case Stop():
                self.fail(SignalStarvedError(decision.reason))

    # --- tasks -------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _member(self, start: StartGroup, member: int, attempt: int) -> None:
        prompt = self._task.train[start.prompt_index]
        rollout = await self._player.play(
            prompt, group_id=start.group_id, ordinal=start.ordinal, member=member, attempt=attempt
        )
        if (live := self._live.get(start.group_id)) is not None:
            live.rollouts[member] = rollout
        self._recorder.on_rollout(rollout)
        self.feed(_member_ended(rollout, self.now()), [rollout])

    async def _land(self, version: int) -> None:
        manifest = self._published[version]
        await self._handoff.land(manifest)
        self._published = {v: m for v, m in self._published.items() if v >= version}
        self.feed(Landed(time_s=self.now(), version=version))
        async with self._landed:
            self._landed.notify_all()

    def _group(self, group_id: str) -> Group:
        live = self._live[group_id]
        scored = [r for _, r in sorted(live.rollouts.items()) if r.outcome.trains]
        return Group(
            group_id=group_id,
            prompt=self._task.train[live.start.prompt_index],
            samples=tuple(s for r in scored for s in samples(r)),
        )


def _mask_tok(groups: Sequence[Group]) -> int:
    return sum(int(s.loss_mask_T.sum()) for g in groups for s in g.samples)


def _without_stale(group: Group, below_version: int) -> Group:
    return replace(group, samples=tuple(mask_stale(s, below_version) for s in group.samples))


def _member_ended(rollout: Rollout, time_s: float) -> MemberEnded:
    by_version: dict[int, int] = {}
    for turn in rollout.turns:
        for span in turn.completion.spans:
            by_version[span.policy_version] = by_version.get(span.policy_version, 0) + span.stop - span.start
    return MemberEnded(
        time_s=time_s,
        group_id=rollout.group_id,
        member=rollout.member,
        attempt=rollout.attempt,
        outcome=rollout.outcome,
        reward=rollout.reward,
        generated_tok=rollout.generated_tok,
        oldest_version=rollout.oldest_version,
        newest_version=rollout.newest_version,
        stale_tok_by_version=tuple(sorted(by_version.items())),
    )
