"""The controller: one pure state machine that the run and the simulator share. Events in, decisions out.

One group (a prompt attempt):

    StartGroup            enough members scored         TakeBatch           StepEnded            Landed
    ----------> running ------------------------> completed --------> taken ---------> trained ---------> slot free
                  |                                   |                                (final)
                  |-- all ended, too few scored ------+--> failed_infra, failed_timeout, quarantined
                  |-- all ended, equal rewards -------+--> filtered_zero_signal
                  |-- deadline passed ----------------+--> dropped_stale, cancelled_oversample
                  `-- RunEnding ----------------------+--> unfinished
                                                           (final, slot free at once)

The trainer and the replicas:

    BatchWanted -> wait_data | wait_bound -> TakeBatch -> (optimizer step) -> StepEnded(v + 1) -> SwapWeights(v + 1)
                                                                                 -> (replicas load) -> Landed(v + 1)

After every event that can change something, in this order: take a batch if one is wanted, swap weights if a version is
published and the mode allows it, admit groups while slots and seats are free. Every wait therefore ends with an event:
    wait_data    a running group ends, or a version lands and frees slots
    wait_bound   the older group that still runs ends
    swap         (sync, one_step_off) the last running rollout ends
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.errors import FlowError
from headrace.flow.admission import Admission
from headrace.flow.curriculum import Curriculum
from headrace.flow.events import (
    BatchWanted,
    Bucket,
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
from headrace.flow.group import LiveGroup, Row, end_member
from headrace.flow.health import Health
from headrace.flow.ledger import Ledger
from headrace.flow.restore import Restored, sort_rows
from headrace.flow.window import Window
from headrace.flow.zero_signal import SignalFilter
from headrace.records import Outcome

_OK, _POLICY_FAIL, _TIMEOUT = Outcome.OK, Outcome.POLICY_FAIL, Outcome.TIMEOUT


class Controller:
    """Decides what starts, what trains and when weights swap. `handle` is the only way in.

    Groups that end without training are final in `ledger`; only those of which something may still run are named by
    a CancelGroup decision.
    """

    def __init__(
        self, flow: FlowConfig, curriculum: CurriculumConfig, *, prompts: int, seed: int, steps: int = 0
    ) -> None:
        """`prompts` in the data set; `steps` of the whole run (0 = open end): nothing starts that no step would use."""
        self.flow = flow
        self._steps = steps
        self.ledger = Ledger()
        self.health = Health(in_flight=flow.in_flight, lag_bound=flow.lag_bound)
        self.curriculum = Curriculum(curriculum, prompts=prompts, seed=seed)
        self.version = 0
        """Trainer's: completed and published optimizer steps."""
        self.landed = 0
        """What every replica serves."""
        self._eta = flow.lag_bound
        self._group_size = flow.group_size
        # Without in-flight swaps a running group gets no newer tokens: carrying it on could only delay its end.
        self._carries = flow.on_bound == "carry" and flow.in_flight
        self._admission = Admission(flow)
        self._window = Window(
            batch_groups=flow.batch_groups,
            eta=self._eta,
            holds=not self._carries and flow.on_bound != "drop" and flow.oversample == 0.0,
        )
        self._signal = SignalFilter(flow)
        self._next_ordinal = 0
        self._restarts: deque[Row] = deque()
        """Attempts that a crash took away, oldest first; they are started again before anything new."""
        self._wanted = False
        self._batch: list[LiveGroup] = []
        """In the optimizer step now."""
        self._swapping: int | None = None
        """Version that the replicas are loading."""
        self._started = False
        self._admits = False
        """Between RunStarted and RunEnding or Stop."""
        self._time_s = float("-inf")
        self._handlers: dict[type[Event], Callable[[Any, list[Decision]], None]] = {
            MemberEnded: self._member_ended,
            BatchWanted: self._batch_wanted,
            StepEnded: self._step_ended,
            Landed: self._weights_landed,
            RunStarted: self._run_started,
            RunEnding: self._run_ending,
        }

    @classmethod
    def restore(
        cls,
        flow: FlowConfig,
        curriculum: CurriculumConfig,
        *,
        prompts: int,
        seed: int,
        rows: Iterable[Row],
        version: int,
        steps: int = 0,
    ) -> tuple[Controller, Restored]:
        """A controller that goes on from a checkpoint of `version` and the journal's rows (flow/restore.py)."""
        self = cls(flow, curriculum, prompts=prompts, seed=seed, steps=steps)
        self.version = self.landed = version
        plan = sort_rows(rows, version=version, eta=self._eta, carries=self._carries)
        for row in plan.kept:
            self.ledger.adopt(row)
        for row in plan.voided:
            self.ledger.adopt(row, changed=True)
        for row in plan.salvaged:
            group = LiveGroup.from_row(row, deadline=row.oldest_or_admitted + self._eta)
            self.ledger.admit(group)
            self._admission.salvage()
            self._window.add_completed(group)
        for row in (*plan.salvaged, *plan.restarts):
            self.curriculum.occupy(row.prompt_index)
        self.curriculum.resume(plan.latest)
        self._signal.resume(plan.kept, version=version)
        self._restarts.extend(plan.restarts)
        self._next_ordinal = plan.next_ordinal
        return self, plan.report()

    # -- in and out --------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Decision]:
        """Take in what happened; return what shall be done, in this order. FlowError names an impossible event."""
        if event.time_s < self._time_s:
            raise FlowError(f"{event}: time goes back from {self._time_s}")
        handler = self._handlers.get(type(event))
        if handler is None:
            raise FlowError(f"{event!r} is no event of flow/events.py")
        self._time_s = event.time_s
        decisions: list[Decision] = []
        handler(event, decisions)
        if (self._admission.running == 0) is not self.health.blocked:
            self.health.generator(not self.health.blocked, event.time_s)
        return decisions

    def counts(self) -> dict[str, int]:
        """How much is where, now."""
        return {
            "running_rollouts": self._admission.running,
            "running_groups": self._window.running,
            "completed_groups": self._window.completed,
            "taken_groups": len(self._batch),
            "slots_held": self._admission.held,
            "slots": self._admission.slots,
            "zero_signal_since_take": self._signal.filtered,
            "restarts_waiting": len(self._restarts),
        }

    # -- events ------------------------------------------------------------------------------------------------

    def _run_started(self, event: RunStarted, out: list[Decision]) -> None:
        if self._started:
            raise FlowError(f"{event}: the run has already started")
        if self.ledger.admitted and event.version != self.version:
            raise FlowError(f"{event}: the ledger was restored for version {self.version}")
        self.version = self.landed = event.version
        self._started = self._admits = True
        self.health.trainer("idle", event.time_s)
        self.health.generator(True, event.time_s)
        self._advance(out)

    def _member_ended(self, event: MemberEnded, out: list[Decision]) -> None:
        group = self.ledger.alive.get(event.group_id)
        if group is None:
            self.ledger.late(event)
            return
        end_member(group, event)
        outcome, reward = event.outcome, event.reward
        if outcome is _OK or outcome is _POLICY_FAIL:
            if reward is None or not isfinite(reward):
                raise FlowError(f"{event}: a rollout that ended as {outcome} needs a finite reward")
            if event.newest_version is not None and event.newest_version > self.version:
                raise FlowError(f"{event}: newest version is beyond the published {self.version}")
            group.rewards[event.member] = reward
            self.ledger.member_scored(group, event)
        elif reward is not None:
            raise FlowError(f"{event}: a rollout that ended as {outcome} must not be scored")
        elif self._retried(group, event, out):
            return
        admission = self._admission
        admission.running -= 1
        if not group.pending:
            self._group_ended(group, out)
            self._advance(out)
        elif admission.has_room():
            self._admit(out)

    def _batch_wanted(self, event: BatchWanted, out: list[Decision]) -> None:
        if self._batch:
            raise FlowError(f"{event}: the batch of version {self.version} is still being trained")
        if not self._wanted:
            self._wanted = True
            self._advance(out)

    def _step_ended(self, event: StepEnded, out: list[Decision]) -> None:
        if not self._batch:
            raise FlowError(f"{event}: no batch was taken")
        if event.version != self.version + 1:
            raise FlowError(f"{event}: the step after version {self.version} makes version {self.version + 1}")
        mask_below = self._mask_below()
        samples = 0
        for group in self._batch:
            samples += len(group.scored)
            self.ledger.train(group, mask_below)
            self.curriculum.released(group.prompt_index)
        self._admission.published(event.version, len(self._batch))
        self._batch = []
        self.version = event.version
        self.health.step_ended(samples, event.time_s)
        if self._carries:
            self._drop_fully_stale()
        self.ledger.check()
        self._advance(out)

    def _weights_landed(self, event: Landed, out: list[Decision]) -> None:
        if event.version != self._swapping:
            raise FlowError(f"{event}: the replicas were to load version {self._swapping}")
        self._swapping = None
        self.landed = event.version
        self._admission.landed(event.version)
        self.health.landed(event.time_s)
        self._advance(out)

    def _run_ending(self, event: RunEnding, out: list[Decision]) -> None:
        """Everything alive ends, a batch in training too: its update is not part of the run any more."""
        self._admits = self._wanted = False
        self._batch = []
        for group in tuple(self.ledger.alive.values()):
            self._cancel(group, "unfinished", out)
        self.health.trainer("idle", event.time_s)

    # -- consequences ------------------------------------------------------------------------------------------

    def _advance(self, out: list[Decision]) -> None:
        if self._wanted:
            self._take(out)
        if self.version > self.landed and self._swapping is None and self._admission.may_swap():
            self._swapping = self.version
            out.append(SwapWeights(version=self.version))
        self._admit(out)

    def _admit(self, out: list[Decision]) -> None:
        admission = self._admission
        if not self._admits or not admission.is_open(
            landed=self.landed, published=self.version, next_take=self.version + (1 if self._batch else 0)
        ):
            return
        while admission.has_room() and self._is_needed():
            if self._restarts:
                lost = self._restarts.popleft()
                ordinal, attempt, prompt = lost.ordinal, lost.attempt + 1, lost.prompt_index
            else:
                picked = self.curriculum.pick(self._next_ordinal, self.version)
                if picked is None:
                    self._stop(
                        f"every prompt is quarantined: {dict(list(self.curriculum.quarantined.items())[:3])}", out
                    )
                    return
                ordinal, attempt, prompt = self._next_ordinal, 0, picked
                self._next_ordinal += 1
            self._start(ordinal, attempt, prompt, out)

    def _is_needed(self) -> bool:
        """One more group could still train in a step of this run (with oversampling: that share more)."""
        if not self._steps:
            return True
        left = (self._steps - self.version) * self.flow.batch_groups
        outstanding = self._window.running + self._window.completed + len(self._batch)
        return outstanding < left * (1.0 + self.flow.oversample)

    def _start(self, ordinal: int, attempt: int, prompt: int, out: list[Decision]) -> None:
        group = LiveGroup(
            group_id=f"g{ordinal:06d}" + (f"a{attempt}" if attempt else ""),
            ordinal=ordinal,
            attempt=attempt,
            prompt_index=prompt,
            version=self.landed,
            deadline=self.landed + self._eta,
            members=self._group_size,
        )
        self._admission.start()
        self._window.add_running(group)
        self.ledger.admit(group)
        out.append(
            StartGroup(
                group_id=group.group_id, ordinal=ordinal, attempt=attempt, prompt_index=prompt, version=self.landed
            )
        )

    def _take(self, out: list[Decision]) -> None:
        readiness = self._window.readiness(self.version)
        if readiness != "take":
            self.health.trainer(readiness, self._time_s)
            return
        batch = self._window.take()
        mask_below = self._mask_below()
        for group in batch:
            oldest = max(group.oldest, mask_below) if self._carries else group.oldest
            if not 0 <= self.version - oldest <= self._eta or group.only_older_than(mask_below):
                raise FlowError(
                    f"group {group.group_id} with versions {sorted(group.tok_by_version)} breaks the lag bound "
                    f"{self._eta} at version {self.version}"
                )
            self.ledger.take(group, self.version)
        self._batch = batch
        self._wanted = False
        self._signal.batch_taken()
        self.health.trainer("busy", self._time_s)
        out.append(
            TakeBatch(
                version=self.version, group_ids=tuple(g.group_id for g in batch), mask_below_version=max(0, mask_below)
            )
        )
        if not self._carries:
            for group in self._window.overdue(self.version):
                dropped = self.flow.oversample == 0.0 or (self.flow.on_bound == "drop" and group.pending > 0)
                self._cancel(group, "dropped_stale" if dropped else "cancelled_oversample", out)

    def _mask_below(self) -> int:
        """Tokens of older versions are beyond the lag bound in a batch that is taken now."""
        return self.version - self._eta

    def _retried(self, group: LiveGroup, event: MemberEnded, out: list[Decision]) -> bool:
        """Start a failed member again if it may; otherwise book its failure. Returns whether it runs again."""
        if event.attempt < self.flow.retries:
            self.ledger.waste(group, event.generated_tok, "retried")
            group.running_attempt[event.member] = event.attempt + 1
            group.pending += 1
            out.append(RetryMember(group_id=group.group_id, member=event.member, attempt=event.attempt + 1))
            return True
        timed_out = event.outcome is _TIMEOUT
        self.ledger.waste(group, event.generated_tok, "failed_timeout" if timed_out else "failed_infra")
        if timed_out:
            group.timeouts += 1
        else:
            group.infra_fails += 1
        return False

    def _group_ended(self, group: LiveGroup, out: list[Decision]) -> None:
        """No member runs any more: the group is complete, filtered or failed."""
        rewards = group.scored
        if len(rewards) < self.flow.min_scored:
            bucket: Bucket = "failed_timeout" if group.timeouts > group.infra_fails else "failed_infra"
            reason = f"{group.infra_fails} rollouts lost, {group.timeouts} timed out in group {group.group_id}"
            self._close(group, "quarantined" if self.curriculum.failed(group.prompt_index, reason) else bucket)
            return
        newest = group.admitted_version if group.newest_version is None else group.newest_version
        self.curriculum.scored(group.prompt_index, rewards, newest)
        filtered = self._signal.filters(rewards)
        self.health.scored(len(rewards), group.scored_tok, zero_signal=filtered)
        if filtered:
            self._close(group, "filtered_zero_signal")
            if self._signal.spent:
                self._stop(self._signal.explain(), out)
        elif self._carries and group.only_older_than(self._mask_below()):
            self._close(group, "dropped_stale")
        else:
            self._window.complete(group)
            self.ledger.complete(group)

    def _drop_fully_stale(self) -> None:
        """After a carry: completed groups of which no token is young enough any more."""
        mask_below = self._mask_below()
        for group in self._window.waiting(self.version):
            if group.only_older_than(mask_below):
                self._close(group, "dropped_stale")

    def _cancel(self, group: LiveGroup, bucket: Bucket, out: list[Decision]) -> None:
        """End a group early; what still runs of it stops and frees its seats."""
        self._admission.running -= group.pending
        self._close(group, bucket)
        out.append(CancelGroup(group_id=group.group_id, bucket=bucket))

    def _close(self, group: LiveGroup, bucket: Bucket) -> None:
        if group.state != "taken":
            self._window.remove(group)
        self._admission.release()
        self.ledger.close(group, bucket)
        self.curriculum.released(group.prompt_index)

    def _stop(self, reason: str, out: list[Decision]) -> None:
        if self._admits:
            self._admits = False
            out.append(Stop(reason=reason))
