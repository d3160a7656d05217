"""A run in virtual time: the real flow controller decides, cost laws take the time.

    heap of (seconds, what)                     the run's own parts        here
        engine reaches its planned event   ->   rollout/ engine            sim_engine.Engine
        tool, sandbox or grade is done     ->   envs/ episode              sim_pool.Pool
        optimizer batch is published       ->   trainer/                   _train, _step_ended
        version is loaded                  ->   loop/ landing              _swap, _landed
                     |
                     v
        Controller.handle(event) -> decisions, carried out at once        flow/: the same objects as in a run

Order mirrors loop/pipeline.py and loop/run.py: RunStarted, BatchWanted; after a step is trained and published comes
StepEnded, then at once BatchWanted; a swap lands on its own, and Landed is fed when every engine serves the version.
Everything random comes from `draws`, keyed by admission, so two plans meet the same rollouts (common random numbers).
"""

from __future__ import annotations

import gc
from collections import deque
from heapq import heappop

from headrace.config.schema import CurriculumConfig
from headrace.errors import PlanError
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
from headrace.planner.outcome import Metrics
from headrace.planner.sim_pool import Parts, Pool
from headrace.planner.sim_rollout import DrawsLike, SimGroup, SimRollout, member_ended
from headrace.planner.sim_trace import TRAINER, Trace
from headrace.records import Outcome

__all__ = ["DrawsLike", "Parts", "Simulation", "Trace", "simulate"]


def simulate(
    parts: Parts,
    draws: DrawsLike,
    *,
    steps: int,
    warm_up: int = 2,
    seed: int = 0,
    prompts: int = 0,
    trace: Trace | None = None,
    whole_run: bool = False,
) -> Metrics:
    """Simulate `steps` optimizer batches; rates, shares, percentiles and lags leave out the first `warm_up`.

    Token and group totals, the wall time, preemptions and the KV peak are those of all steps. `prompts`: in the data
    set; 0 = so many that none is ever short. `whole_run`: the run ends after `steps`, so nothing starts that no step
    would use and the last landing counts; without it the simulation stops in the middle of a longer run.
    PlanError when nothing fits, nothing ever finishes, every group is filtered, or everything takes no time.
    """
    simulation = Simulation(
        parts, draws, steps=steps, warm_up=warm_up, seed=seed, prompts=prompts, trace=trace, whole_run=whole_run
    )
    return simulation.run()


class Simulation:
    """One simulated run; `simulate` is the short way. `advance` goes event by event, for tests and live views."""

    def __init__(
        self,
        parts: Parts,
        draws: DrawsLike,
        *,
        steps: int,
        warm_up: int = 2,
        seed: int = 0,
        prompts: int = 0,
        trace: Trace | None = None,
        whole_run: bool = False,
    ) -> None:
        if steps < 1:
            raise PlanError(f"steps = {steps}: simulate at least one")
        flow = parts.flow
        self.parts = parts
        self.controller = Controller(
            flow,
            CurriculumConfig(),
            prompts=prompts or 4 * (flow.slots + flow.batch_groups),
            seed=seed,
            steps=steps if whole_run else 0,
        )
        self.pool = Pool(parts, draws, ended=self._rollout_ended, trace=trace)
        self.engines, self.tally = self.pool.engines, self.pool.tally
        self._line = self.pool.line
        """The virtual clock, too."""
        self._draws, self._steps, self._whole_run = draws, steps, whole_run
        self._warm_up = min(warm_up, steps - 1)
        self._trace = trace
        self._handle = self.controller.handle
        self._groups: dict[str, SimGroup] = {}
        """Those that may still train."""
        self._late: deque[MemberEnded] = deque()
        """Ends of cancelled rollouts, which the controller hears of after it has decided."""
        self._hand_off_s = 0.0
        """Part of the batch under way that is publishing and switching."""
        self._batch_samples = 0
        self._stepped_s = 0.0
        """End of the last step."""
        self._started = self._ended = False

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> Metrics:
        """To the end."""
        # Nothing here makes cycles (a group forgets its rollouts when it is final); looking for some takes a sixth of
        # the time.
        collects = gc.isenabled()
        gc.disable()
        try:
            while self.advance(1_000_000):
                pass
        finally:
            if collects:
                gc.enable()
        return self.metrics()

    def metrics(self) -> Metrics:
        """Of a simulation that has ended."""
        return self.tally.metrics(
            steps=self._steps, ledger=self.controller.ledger, engines=self.engines, wall_s=self._line.now_s
        )

    def advance(self, events: int = 1) -> bool:
        """Take so many events; False when the run has ended."""
        if not self._started:
            self._start()
        pool, line, late = self.pool, self._line, self._late
        heap, engines, dirty = line.heap, pool.engines, pool.dirty
        count, arrived = len(engines), pool.arrived
        for _ in range(events):
            if self._ended:
                return False
            if not heap:
                raise PlanError(f"nothing ever finishes: no event is left, {self.controller.counts()}")
            time_s, key, what = heappop(heap)
            if key < count:
                engine = engines[key]
                if engine.epoch != what:
                    continue
            # An engine's own sums may lie a rounding error behind the clock.
            if time_s > line.now_s:
                line.now_s = time_s
            if key < count:
                arrived(engine)
            else:
                call, args = what
                call(*args)
            while late:
                self._feed(late.popleft())
            if dirty:
                pool.plan()
        return True

    def _start(self) -> None:
        self._started = True
        if self._warm_up <= 0:
            self.tally.begin(self.controller.ledger, self.engines, 0.0)
        self._feed(RunStarted(time_s=0.0, version=0))
        self._want_batch()
        self.pool.plan()

    # -- controller --------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        decisions = self._handle(event)
        if self._trace is not None:
            self._trace.handled(event, decisions)
        for decision in decisions:
            self._act(decision)

    def _act(self, decision: Decision) -> None:
        match decision:
            case StartGroup():
                self._start_group(decision)
            case RetryMember():
                group = self._groups[decision.group_id]
                tok = self._draws.lengths(group.ordinal, decision.attempt)[decision.member]
                self.pool.start(group, decision.member, decision.attempt, tok)
            case CancelGroup():
                self._cancel(decision)
            case TakeBatch():
                self._train(decision)
            case SwapWeights():
                from_s = max(self._line.now_s, self.pool.awake_s)
                if self.parts.hand_off_policy == "stop":
                    self._line.at(from_s, self._swap, decision.version, self.parts.hand_off.transfer_s)
                else:
                    self._line.at(from_s + self.parts.hand_off.transfer_s, self._swap, decision.version, 0.0)
            case Stop():
                raise PlanError(f"the controller stops the run: {decision.reason}")

    # -- rollouts ----------------------------------------------------------------------------------------------

    def _start_group(self, start: StartGroup) -> None:
        draws, ordinal = self._draws, start.ordinal
        group = SimGroup(
            group_id=start.group_id,
            ordinal=ordinal,
            prompt_tok=draws.prompt_tok(ordinal),
            rewards=draws.rewards(ordinal),
            started_s=self._line.now_s,
        )
        self._groups[start.group_id] = group
        if self._trace is not None:
            self._trace.group_started(start.group_id, self._line.now_s)
        for member, tok in enumerate(draws.lengths(ordinal)):
            self.pool.start(group, member, 0, tok)

    def _rollout_ended(self, rollout: SimRollout, outcome: Outcome) -> None:
        """Report it, as loop/pipeline.py does."""
        if rollout.place == "ended":  # cancelled by what another end in this very decode step led to
            return
        group, pairs, now_s = rollout.group, rollout.pairs, self._line.now_s
        reward = None
        if outcome is Outcome.OK:
            reward = group.rewards[rollout.member]
            context_tok = rollout.context_tok
            group.tok += context_tok
            group.tok2 += context_tok * context_tok
            group.ended_s = now_s
            group.versions.append((pairs[0][0], pairs[-1][0]))
        if self.tally.measuring:
            self.tally.rollout_s.append(now_s - rollout.started_s)
        rollout.place = "ended"
        if rollout.episode is not None:
            self.pool.leave_sandbox()
        event = member_ended(now_s, rollout, outcome, reward, rollout.sampled_tok)
        decisions = self._handle(event)
        if self._trace is not None:
            self._trace.handled(event, decisions)
        for decision in decisions:
            self._act(decision)

    def _cancel(self, decision: CancelGroup) -> None:
        group = self._groups.pop(decision.group_id)
        if self._trace is not None:
            self._trace.group_ended(decision.group_id, self._line.now_s, decision.bucket)
        for rollout in group.rollouts:
            if rollout.place != "ended":
                self.pool.cancel(rollout)
                tok = rollout.sampled_tok
                self._late.append(member_ended(self._line.now_s, rollout, Outcome.CANCELLED, None, tok))
        group.rollouts.clear()

    # -- trainer -----------------------------------------------------------------------------------------------

    def _want_batch(self) -> None:
        self._feed(BatchWanted(time_s=self._line.now_s))
        if self.controller.health.state in ("wait_data", "wait_bound"):
            self.pool.trainer_waits()

    def _train(self, taken: TakeBatch) -> None:
        parts, now_s = self.parts, self._line.now_s
        groups = [self._groups.pop(group_id) for group_id in taken.group_ids]
        for group in groups:
            group.rollouts.clear()
        switch_s = self.pool.trainer_takes()
        tok = sum([g.tok for g in groups])
        if parts.share_prompts:
            tok -= sum([(len(g.versions) - 1) * g.prompt_tok for g in groups])
        train_s = parts.trainer.batch_s(tok, sum([g.tok2 for g in groups]))
        train_s += (parts.updates - 1) * parts.trainer.fixed_s
        self._hand_off_s = switch_s + parts.hand_off.publish_s
        self._batch_samples = sum([len(g.versions) for g in groups])
        if self.tally.measuring:
            self.tally.taken(taken, groups, now_s)
        end_s = now_s + switch_s + train_s + parts.hand_off.publish_s
        if self._trace is not None:
            lags = [taken.version - oldest for g in groups for oldest, _ in g.versions]
            self._trace.counter(TRAINER, "lag", now_s, mean=sum(lags) / len(lags), max=max(lags))
            for group in groups:
                self._trace.group_ended(group.group_id, now_s, "trained")
            self._trace.span(TRAINER, 0, "switch", now_s, now_s + switch_s)
            self._trace.span(TRAINER, 0, "train", now_s + switch_s, now_s + switch_s + train_s, version=taken.version)
            self._trace.span(TRAINER, 0, "publish", now_s + switch_s + train_s, end_s, version=taken.version + 1)
        self._line.at(end_s, self._step_ended, taken.version + 1)

    def _step_ended(self, version: int) -> None:
        ledger = self.controller.ledger
        before_tok = ledger.trained_tok
        self.pool.trainer_ended()
        self._feed(StepEnded(time_s=self._line.now_s, version=version))
        for row in ledger.drain_changes():
            group = self._groups.pop(row.group_id, None) if row.bucket is not None else None
            if group is not None:
                group.rollouts.clear()
                if self._trace is not None:
                    self._trace.group_ended(row.group_id, self._line.now_s, str(row.bucket))
        if self._trace is not None:
            self._trace.counter(TRAINER, "trained tokens", self._line.now_s, tok=ledger.trained_tok - before_tok)
        if self.tally.measuring:
            self.tally.step_ended(self.controller.health, self._stepped_s, self._line.now_s, self._hand_off_s)
            self.tally.samples += self._batch_samples
        self._stepped_s = self._line.now_s
        if version == self._warm_up or version == self._steps:
            self.pool.settle()
            if version == self._warm_up:
                self.tally.begin(ledger, self.engines, self._line.now_s)
            else:
                self.tally.end(self.engines, self._line.now_s)
        if version < self._steps:
            self._want_batch()
        elif not self._whole_run:
            self._ended = True

    def _swap(self, version: int, transfer_s: float) -> None:
        """Engines that stop for the transfer swap at its begin: no token lies between."""
        pause_s = transfer_s + self.parts.hand_off.pause_s
        self.pool.swap(version, pause_s)
        self._line.at(self._line.now_s + pause_s, self._landed, version)

    def _landed(self, version: int) -> None:
        self._feed(Landed(time_s=self._line.now_s, version=version))
        if self._whole_run and version == self._steps:
            self._feed(RunEnding(time_s=self._line.now_s))
            self._ended = True
