"""Where rollouts are: on engines, in their queues, in tools and sandboxes; and which chips generate right now.

    start -> (wait for a sandbox -> it starts) -> engine -> tool -> engine -> ... -> grade -> `ended`

A model call goes to the engine that keeps the rollout's KV entries, else to the least loaded one (fewest sequences,
lowest index). Chips change sides in two ways. Colocated: all engines freeze while the chips train. Lent: engines on the
trainer's chips exist while it waits for data, if its waits have been long enough (as in verl's hybrid modes, 2026).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappush
from typing import Any

from headrace.clock import VirtualClock
from headrace.config.schema import FlowConfig
from headrace.errors import PlanError
from headrace.planner.cost import EngineCost, HandOffCost, TrainerCost
from headrace.planner.sim_engine import Engine
from headrace.planner.sim_metrics import Tally
from headrace.planner.sim_rollout import Cut, DrawsLike, SimGroup, SimRollout, check_fits
from headrace.planner.sim_trace import ENGINES, Trace
from headrace.planner.spec import HandOffPolicy
from headrace.records import Outcome

_OFF = 1 << 60
"""Load of an engine that does not exist now; sandboxes when there is no limit."""
_WAITS = 3
"""Past waits of the trainer whose mean predicts the next one (verl's hybrid modes look at as many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a plan consists of: flow settings, and the costs of each side."""

    flow: FlowConfig
    engines: Sequence[EngineCost]
    """One per engine."""
    trainer: TrainerCost
    hand_off: HandOffCost
    colocated: bool = False
    """The same chips generate and train, in turns."""
    updates: int = 1
    """Optimizer steps per batch: the trainer's fixed costs come that often."""
    lent: Sequence[EngineCost] = ()
    """Further engines on the trainer's chips, there only while the trainer waits for data."""
    hand_off_policy: HandOffPolicy = "in_flight"
    """stop: engines stand still during the transfer; otherwise only for the swap."""
    keep_kv: bool = True
    """KV entries stay in the engine while a tool runs."""
    recompute_kv: bool = False
    """After a swap under running requests their KV entries are computed again."""
    sandboxes: int = 0
    """At once; 0 = as many as rollouts."""
    share_prompts: bool = False
    """The trainer computes the prompt that a group shares once."""


class Timeline(VirtualClock):
    """The clock of a simulation, and what will happen when."""

    def __init__(self, engines: int) -> None:
        super().__init__()
        self.heap: list[tuple[float, int, Any]] = []
        """(seconds, engine index, epoch of its plan), or (seconds, unique number, call)."""
        self._number = engines

    def at(self, time_s: float, call: Callable[..., None], *args: object) -> None:
        """Call it then; calls for one moment come in the order in which they were asked for."""
        self._number += 1
        heappush(self.heap, (time_s, self._number, (call, args)))


class Pool:
    """All engines and sandboxes of a plan. `ended` is told of every rollout that ends by itself."""

    def __init__(
        self,
        parts: Parts,
        draws: DrawsLike,
        *,
        ended: Callable[[SimRollout, Outcome], None],
        trace: Trace | None,
    ) -> None:
        """PlanError for plans without a usable engine."""
        if not parts.engines:
            raise PlanError("the plan has no engine: gen_gpus is smaller than gen_tp; give generation more chips")
        if parts.colocated and parts.lent:
            raise PlanError("colocated chips cannot be lent: they generate whenever they do not train")
        ordinary = len(parts.engines)
        self.engines = [
            Engine(index, cost, keep_kv=parts.keep_kv, off=index >= ordinary)
            for index, cost in enumerate((*parts.engines, *parts.lent))
        ]
        self.line = self._line = Timeline(len(self.engines))
        self.tally = Tally()
        self.dirty: list[Engine] = []
        """Engines that must be planned again."""
        self.awake_s = 0.0
        """Colocated: the chips generate again from then on."""
        self._lent = self.engines[ordinary:]
        self._parts, self._draws, self._ended, self._trace = parts, draws, ended, trace
        self._loads = [_OFF if e.off else 0 for e in self.engines]
        """Running and queued sequences of each engine."""
        self._capacity_tok = min(e.capacity_tok for e in self.engines)
        self._free_sandboxes = parts.sandboxes or _OFF
        self._for_sandbox: deque[SimRollout] = deque()
        self._served = 0
        """Version in the engines."""
        self._sleeps = 0
        """Colocated: how often the chips began to train; a wake-up for an earlier time is void."""
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._wait_since_s: float | None = None
        self._wait_number = 0
        self._lending = 0
        """Number of the wait in which the trainer's chips are lent or about to be; 0 = they are not."""

    def plan(self) -> None:
        """Find the next event of every engine that changed."""
        heap, trace = self._line.heap, self._trace
        for engine in self.dirty:
            engine.plan()
            if engine.b:
                heappush(heap, (engine.when_s, engine.index, engine.epoch))
            if trace is not None:
                trace.counter(
                    ENGINES, f"engine {engine.index}", engine.time_s, running=engine.b, queued=len(engine.queue)
                )
        self.dirty.clear()

    def _changed(self, engine: Engine) -> None:
        if not engine.changed:
            engine.changed = True
            self.dirty.append(engine)

    # -- rollouts ----------------------------------------------------------------------------------------------

    def start(self, group: SimGroup, member: int, attempt: int, tok: int) -> None:
        """One attempt of a member of so many sampled tokens (of its episode, if it has one)."""
        rollout = SimRollout(group, member, attempt, tok, self._line.now_s)
        if attempt:
            group.rollouts[member] = rollout
        else:
            group.rollouts.append(rollout)
        episode = None if group.plain else self._draws.episode(group.ordinal, member, attempt)
        if episode is None:
            group.plain = True
            if group.prompt_tok + tok > self._capacity_tok:
                check_fits(group, tok, 0, self._capacity_tok)
            self._generate(rollout)
            return
        if episode.fails:
            episode = Cut(episode)
        turns = len(episode.turn_tok)
        check_fits(group, sum(episode.turn_tok), sum(episode.tool_tok[: turns - 1]), self._capacity_tok)
        rollout.episode, rollout.left_tok = episode, episode.turn_tok[0]
        if self._free_sandboxes:
            self._enter_sandbox(rollout)
        else:
            self._for_sandbox.append(rollout)
            self.tally.waiting += 1
            self.tally.waiting_s -= self._line.now_s

    def _enter_sandbox(self, rollout: SimRollout) -> None:
        self._free_sandboxes -= 1
        assert rollout.episode is not None
        self._go_outside(rollout, rollout.episode.start_s, self._generate)

    def leave_sandbox(self) -> None:
        """A rollout with an episode ended; the next one may have its sandbox."""
        self._free_sandboxes += 1
        if self._for_sandbox:
            self.tally.waiting -= 1
            self.tally.waiting_s += self._line.now_s
            self._enter_sandbox(self._for_sandbox.popleft())

    def _go_outside(self, rollout: SimRollout, seconds: float, then: Callable[[SimRollout], None]) -> None:
        """A tool, a starting sandbox or a grader has it for so long."""
        if seconds <= 0.0:
            then(rollout)
            return
        self.tally.outside += 1
        self.tally.outside_s -= self._line.now_s
        self._line.at(self._line.now_s + seconds, self._came_back, rollout, then)

    def _came_back(self, rollout: SimRollout, then: Callable[[SimRollout], None]) -> None:
        self.tally.outside -= 1
        self.tally.outside_s += self._line.now_s
        if rollout.place == "ended":  # cancelled meanwhile: its sandbox was busy until now
            self.leave_sandbox()
        else:
            then(rollout)

    def _generate(self, rollout: SimRollout) -> None:
        """The next model call: on the engine that keeps its KV entries, else on the least loaded one."""
        engine = rollout.engine
        loads = self._loads
        if engine is not None and rollout.parked:
            loads[engine.index] += 1
        else:
            least = min(loads)
            index = loads.index(least)
            loads[index] = least + 1
            engine = self.engines[index]
        now_s = self._line.now_s
        if engine.time_s < now_s:
            engine.advance(now_s)
        engine.add(rollout)
        if not engine.changed:
            engine.changed = True
            self.dirty.append(engine)

    def arrived(self, engine: Engine) -> None:
        """An engine is at its planned event."""
        ended = engine.arrive()
        if engine.queue:
            engine.admit()
        engine.changed = True
        self.dirty.append(engine)
        self._loads[engine.index] -= len(ended)
        for rollout in ended:
            if rollout.episode is None:
                self._ended(rollout, Outcome.OK)
            elif rollout.place == "ended":  # another end in this very decode step led to its group's cancellation
                self.leave_sandbox()
            else:
                self._turn_ended(rollout)

    def _turn_ended(self, rollout: SimRollout) -> None:
        episode = rollout.episode
        assert episode is not None
        if rollout.has_more_turns:
            self._go_outside(rollout, episode.tool_s[rollout.turn], self._tool_done)
        elif episode.fails:
            self._ended(rollout, Outcome.INFRA_FAIL)
        else:
            self._go_outside(rollout, episode.grade_s, self._graded)

    def _tool_done(self, rollout: SimRollout) -> None:
        assert rollout.episode is not None
        tool_tok = rollout.episode.tool_tok[rollout.turn]
        rollout.turn += 1
        rollout.left_tok = rollout.episode.turn_tok[rollout.turn]
        rollout.context_tok += tool_tok
        rollout.uncached_tok += tool_tok if rollout.parked else 0
        self._generate(rollout)

    def _graded(self, rollout: SimRollout) -> None:
        self._ended(rollout, Outcome.OK)

    def cancel(self, rollout: SimRollout) -> None:
        """End it wherever it is. A tool or grader that has it goes on, and so does its sandbox until then."""
        engine, was = rollout.engine, rollout.place
        if engine is not None and (was != "outside" or rollout.parked):
            engine.advance(self._line.now_s)
            engine.remove(rollout)
            self._loads[engine.index] -= was != "outside"
            engine.admit()
            self._changed(engine)
        elif engine is None and rollout in self._for_sandbox:
            self._for_sandbox.remove(rollout)
            self.tally.waiting -= 1
            self.tally.waiting_s += self._line.now_s
        rollout.place = "ended"
        if was != "outside" and rollout.episode is not None:
            self.leave_sandbox()

    def settle(self) -> None:
        """Bring every engine's sums up to now."""
        for engine in self.engines:
            engine.advance(self._line.now_s)
            self._changed(engine)

    def swap(self, version: int, pause_s: float) -> None:
        """Every engine changes weights between two of its decode steps and stands still for so long."""
        self._served = version
        for engine in self.engines:
            engine.advance(self._line.now_s)
            if self._trace is not None and not engine.off:
                self._trace.span(ENGINES, engine.index, "swap", engine.time_s, engine.time_s + pause_s, version=version)
            engine.serve(version, pause_s, recompute=self._parts.recompute_kv)
            self._changed(engine)

    # -- chips that change sides -------------------------------------------------------------------------------

    def trainer_waits(self) -> None:
        """It asked for a batch and got none: lend its chips if the wait will probably outlast both switches."""
        self._wait_since_s = self._line.now_s
        self._wait_number += 1
        switch_s = self._parts.hand_off.switch_s
        if self._lent and (not self._waits or sum(self._waits) / len(self._waits) > 2 * switch_s):
            self._lending = self._wait_number
            self._line.at(self._line.now_s + switch_s, self._lend, self._wait_number)

    def trainer_takes(self) -> float:
        """It got a batch: chips that generate go back to it. Returns the seconds of the switch."""
        if self._wait_since_s is not None:
            self._waits.append(self._line.now_s - self._wait_since_s)
            self._wait_since_s = None
        if self._parts.colocated:
            return self._put_to_sleep()
        return self._reclaim_lent() if self._lending else 0.0

    def trainer_ended(self) -> None:
        """Its step is published: colocated chips go back to generating."""
        if self._parts.colocated:
            self.awake_s = self._line.now_s + self._parts.hand_off.switch_s
            self._line.at(self.awake_s, self._wake, self._sleeps)

    def _put_to_sleep(self) -> float:
        self._sleeps += 1
        asleep = all(engine.frozen for engine in self.engines)
        for engine in self.engines:
            engine.advance(self._line.now_s)
            engine.frozen = True
            self._changed(engine)
        return 0.0 if asleep else self._parts.hand_off.switch_s

    def _wake(self, sleep: int) -> None:
        if sleep == self._sleeps:
            for engine in self.engines:
                engine.resume(self._line.now_s)
                self._changed(engine)

    def _lend(self, wait_number: int) -> None:
        if self._lending != wait_number:
            return
        for engine in self._lent:
            engine.switch_on(self._line.now_s, self._served)
            self._loads[engine.index] = 0
        # What waits in queues moves over, last come first; what runs stays with its KV entries.
        for engine in self.engines[: -len(self._lent)]:
            target = min(self._loads[-len(self._lent) :])
            while engine.queue and self._loads[engine.index] > target + 1 and not engine.queue[-1].parked:
                rollout = engine.queue[-1]
                engine.remove(rollout)
                self._loads[engine.index] -= 1
                self._generate(rollout)
                target = min(self._loads[-len(self._lent) :])

    def _reclaim_lent(self) -> float:
        """What runs on the trainer's chips is computed again elsewhere."""
        self._lending = 0
        moved: list[SimRollout] = []
        for engine in self._lent:
            if not engine.off:
                engine.advance(self._line.now_s)
                moved += engine.switch_off()
                self._changed(engine)
            self._loads[engine.index] = _OFF
        for rollout in moved:
            self._generate(rollout)
        return self._parts.hand_off.switch_s
