"""One engine in token intervals: all running sequences advance together, so nothing happens between two events.

The engine counts decoded tokens per sequence. A sequence that joins at counter k with n tokens to sample ends at
counter k + n; a heap of these ends is all the scheduling there is. Between two events the number b of running sequences
is constant and their context S grows by b per token, so n tokens take n * step_s(b, S + b*n/2) / accept_tok seconds.
Whoever comes in between waits for the end of the decode step under way; stalls (prefill, pauses) come before the next
step. KV entries: prompts of a group count once per engine; parked entries of rollouts in tools go first when room is
needed, then the youngest running sequence is preempted and computed again later (as in vLLM's scheduler).
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from headrace.errors import PlanError
from headrace.planner.cost import EngineCost
from headrace.planner.sim_rollout import Pairs, SimRollout, add_pairs

NEVER = float("inf")
_FUZZ = 1e-9
"""Share of a decode step: an arrival so close after a step's end does not miss it through rounding."""


class Engine:
    """Runs sequences, queues them when full. Times are those of the simulation, in seconds.

    Call `advance(now)` before anything that changes it and `plan()` afterwards; `when_s` is then the next event.
    """

    __slots__ = (
        "_accept_tok",
        "_flop_s",
        "_flop_s_per_tok",
        "_heap",
        "_keep_kv",
        "_max_running",
        "_mem_s",
        "_mem_s_per_tok",
        "_next_s",
        "_next_tok",
        "_other_s",
        "_p",
        "_pause_due_s",
        "_prefill_due_s",
        "_prompts",
        "_versions",
        "b",
        "capacity_tok",
        "changed",
        "context_tok",
        "cost",
        "decode_s",
        "decoded_tok",
        "epoch",
        "frozen",
        "idle_s",
        "index",
        "kv_peak_tok",
        "kv_tok",
        "kv_tok_s",
        "off",
        "parked",
        "paused_s",
        "preemptions",
        "prefill_s",
        "queue",
        "queued_s",
        "running",
        "running_s",
        "seats",
        "time_s",
        "when_s",
    )

    def __init__(
        self, index: int, cost: EngineCost, *, version: int = 0, keep_kv: bool = True, off: bool = False
    ) -> None:
        """`keep_kv`: of rollouts in tools. `off`: it does not exist until `switch_on` (lent chips).

        PlanError if it cannot hold anything.
        """
        table = cost.decode
        if cost.kv_capacity_tok <= 0 or cost.max_running < 1:
            raise PlanError(
                f"engine {index} holds {cost.kv_capacity_tok} KV tokens and {cost.max_running} sequences: the weights "
                "leave no room; raise gen_tp or cluster.mem_frac"
            )
        if len(table.mem_s) <= cost.max_running:
            raise PlanError(f"the decode table ends at {len(table.mem_s) - 1}, max_running is {cost.max_running}")
        self.index = index
        self.cost = cost
        self.capacity_tok = cost.kv_capacity_tok
        self.off = off
        self.frozen = False
        """Its chips train; nothing moves, newcomers wait."""
        self.time_s = 0.0
        """Accounted up to here; the end of the decode step under way may lie ahead of the clock."""
        self.when_s = NEVER
        self.epoch = 0
        """Of the plan; older ones are void."""
        self.changed = False
        """Must be planned again."""
        self.b = 0
        """Running sequences."""
        self.context_tok = 0
        self.kv_tok = 0
        """In use, parked entries included."""
        self.kv_peak_tok = 0
        self.decoded_tok = 0
        """Per running sequence: the counter."""
        self.running: dict[int, SimRollout] = {}
        """serial -> sequence, oldest first"""
        self.queue: deque[SimRollout] = deque()
        self.parked: dict[int, SimRollout] = {}
        """serial -> rollout in a tool whose KV entries are kept, longest parked first"""
        self.preemptions = 0
        self.decode_s = self.prefill_s = self.paused_s = self.idle_s = 0.0
        self.running_s = 0.0
        """Integral of `b`."""
        self.kv_tok_s = 0.0
        """Integral of `kv_tok`."""
        self.queued_s = 0.0
        """Integral of the queue's length, but for those that still wait: add their number x `time_s`."""
        self._heap: list[tuple[int, int]] = []
        """(counter at the end, serial)"""
        self.seats = 0
        """Sequences that have joined so far."""
        self._prompts: dict[int, int] = {}
        """ordinal of a group -> its sequences here that share the prompt's KV entries"""
        self._versions: list[tuple[int, int]] = [(0, version)]
        """(counter, version served from there on)"""
        self._pause_due_s = self._prefill_due_s = 0.0
        self._next_tok = 0
        """Tokens until the planned event."""
        self._next_s = 0.0
        self._mem_s, self._mem_s_per_tok = table.mem_s, table.mem_s_per_tok
        self._flop_s, self._flop_s_per_tok = table.flop_s, table.flop_s_per_tok
        self._other_s, self._p = table.other_s, table.p
        self._accept_tok = cost.accept_tok
        self._max_running = cost.max_running
        self._keep_kv = keep_kv

    # -- time --------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Go to `now_s`, or to the end of the decode step under way then."""
        ahead_s = now_s - self.time_s
        if ahead_s <= 0.0 or self.off or self.frozen:
            return
        if not self.b:
            self.idle_s += ahead_s
            self.kv_tok_s += ahead_s * self.kv_tok
            self.time_s = now_s
            return
        if self._pause_due_s or self._prefill_due_s:
            ahead_s = self._stall(ahead_s)
            if ahead_s <= 0.0:
                return
        tok, seconds = self._next_tok, self._next_s
        if ahead_s < seconds:
            exact = ahead_s / seconds * tok - _FUZZ
            until = int(exact) + 1 if exact > 0.0 else 0
            if until < tok:
                tok, seconds = until, self._seconds(until)
        self._decode(tok, seconds)
        # Another advance without a plan between has nothing left to decode.
        self._next_tok -= tok
        self._next_s -= seconds

    def arrive(self) -> list[SimRollout]:
        """Go to the planned event; the sequences that end there leave and are returned, the others make room."""
        if self._next_tok and (self._pause_due_s or self._prefill_due_s):
            self._stall(NEVER)
        self._decode(self._next_tok, self._next_s)
        ended: list[SimRollout] = []
        heap, running, now_tok = self._heap, self.running, self.decoded_tok
        while heap and heap[0][0] <= now_tok:
            rollout = running.get(heappop(heap)[1])
            if rollout is None:
                continue
            ended.append(rollout)
            from_tok = rollout.from_tok
            if rollout.episode is not None or rollout.pairs or from_tok < self._versions[-1][0]:
                self.leave(rollout, park=self._keep_kv and rollout.has_more_turns)
                continue
            # `leave`, for the most frequent kind: one call from begin to end under one version.
            del running[rollout.serial]
            rollout.place = "outside"
            tok = now_tok - from_tok
            rollout.pairs = ((self._versions[-1][1], tok),)
            rollout.sampled_tok = tok
            rollout.context_tok = context_tok = rollout.context_tok + tok
            self.b -= 1
            self.context_tok -= context_tok
            self._free(rollout)
        if not ended:
            self._make_room()
        return ended

    def plan(self) -> None:
        """Find the next event: an end, or KV memory that is full."""
        self.changed = False
        self.epoch += 1
        if not self.b or self.frozen:
            self.when_s = NEVER
            return
        heap, running = self._heap, self.running
        while heap[0][1] not in running:
            heappop(heap)
        tok = heap[0][0] - self.decoded_tok
        room_tok = (self.capacity_tok - self.kv_tok) // self.b
        if room_tok < tok:
            room_tok += self._evict(tok)
            tok = min(tok, room_tok)
        self._next_tok = tok
        if tok:
            self._next_s = seconds = self._seconds(tok)
            self.when_s = self.time_s + self._pause_due_s + self._prefill_due_s + seconds
        else:
            self._next_s = 0.0
            self.when_s = self.time_s

    def _seconds(self, tok: int) -> float:
        """To decode so many tokens of each running sequence; DecodeTable.step_s at the middle, inline."""
        b = self.b
        context_tok = self.context_tok + 0.5 * b * tok
        high = self._mem_s[b] + context_tok * self._mem_s_per_tok
        low = self._flop_s[b] + context_tok * self._flop_s_per_tok
        if low > high:
            high, low = low, high
        if low > 0.0:
            p = self._p
            high *= (1.0 + (low / high) ** p) ** (1.0 / p)
        return (high + self._other_s[b]) * tok / self._accept_tok

    def _decode(self, tok: int, seconds: float) -> None:
        b = self.b
        grown_tok = b * tok
        self.time_s += seconds
        self.decode_s += seconds
        self.running_s += b * seconds
        self.kv_tok_s += (self.kv_tok + 0.5 * grown_tok) * seconds
        self.decoded_tok += tok
        self.context_tok += grown_tok
        self.kv_tok += grown_tok
        if self.kv_tok > self.kv_peak_tok:
            self.kv_peak_tok = self.kv_tok

    def _stall(self, ahead_s: float) -> float:
        """Spend up to `ahead_s` on pauses and prefills that are due; return what is left of it."""
        pause_s = min(ahead_s, self._pause_due_s)
        prefill_s = min(ahead_s - pause_s, self._prefill_due_s)
        self._pause_due_s -= pause_s
        self._prefill_due_s -= prefill_s
        self.paused_s += pause_s
        self.prefill_s += prefill_s
        stalled_s = pause_s + prefill_s
        self.time_s += stalled_s
        self.running_s += self.b * stalled_s
        self.kv_tok_s += self.kv_tok * stalled_s
        return ahead_s - stalled_s

    # -- sequences ---------------------------------------------------------------------------------------------

    def add(self, rollout: SimRollout) -> None:
        """A sequence comes: it joins, or queues behind those that wait."""
        rollout.engine = self
        if not self.queue:
            b = self.b
            # Most often it fits even if it shares nothing; the exact answer costs more.
            fits = b < self._max_running and self.kv_tok + rollout.context_tok + b < self.capacity_tok
            if fits or self._fits(rollout):
                self._join(rollout)
                return
        rollout.place = "queued"
        self.queue.append(rollout)
        self.queued_s -= self.time_s

    def admit(self) -> None:
        """Let those in the queue join while they fit."""
        while self.queue and self._fits(self.queue[0]):
            self.queued_s += self.time_s
            self._join(self.queue.popleft())

    def _missing_tok(self, rollout: SimRollout) -> int:
        """KV entries that it would add now."""
        group = rollout.group
        if rollout.parked:
            return rollout.uncached_tok
        shared = group.ordinal in self._prompts
        return rollout.context_tok - (group.prompt_tok if shared else 0)

    def _fits(self, rollout: SimRollout) -> bool:
        """There is a seat, and KV memory for it and for one more token of everyone."""
        if self.b >= self._max_running:
            return False
        over_tok = self.kv_tok + self._missing_tok(rollout) + self.b + 1 - self.capacity_tok
        if over_tok <= 0:
            return True
        while over_tok > 0 and self._drop_parked(but=rollout):
            over_tok = self.kv_tok + self._missing_tok(rollout) + self.b + 1 - self.capacity_tok
        return over_tok <= 0

    def _join(self, rollout: SimRollout) -> None:
        context_tok = rollout.context_tok
        if rollout.parked:
            del self.parked[rollout.serial]
            rollout.parked = False
            new_tok = rollout.uncached_tok
            rollout.uncached_tok = 0
            self.kv_tok += new_tok
            self._prefill_due_s += self.cost.prefill_s(new_tok, context_tok - new_tok)
        else:
            group, prompts = rollout.group, self._prompts
            ordinal, prompt_tok = group.ordinal, group.prompt_tok
            sharing = prompts.get(ordinal, 0)
            prompts[ordinal] = sharing + 1
            if sharing:
                self.kv_tok += context_tok - prompt_tok
                if context_tok > prompt_tok:
                    self._prefill_due_s += self.cost.prefill_s(context_tok - prompt_tok, prompt_tok)
            else:
                self.kv_tok += context_tok
                if context_tok > prompt_tok:
                    self._prefill_due_s += self.cost.prefill_s(context_tok)
                else:
                    if group.prefill_cost is not self.cost:
                        group.prefill_cost, group.prefill_s = self.cost, self.cost.prefill_s(prompt_tok)
                    self._prefill_due_s += group.prefill_s
        if self.kv_tok > self.kv_peak_tok:
            self.kv_peak_tok = self.kv_tok
        serial = self.seats = self.seats + 1
        rollout.serial = serial
        rollout.place = "running"
        rollout.from_tok = now_tok = self.decoded_tok
        self.running[serial] = rollout
        self.b += 1
        self.context_tok += context_tok
        heappush(self._heap, (now_tok + rollout.left_tok, serial))

    def leave(self, rollout: SimRollout, *, park: bool = False) -> None:
        """A running sequence leaves with what it has sampled; its KV entries go too unless they are parked."""
        del self.running[rollout.serial]
        self.b -= 1
        rollout.place = "outside"
        from_tok = rollout.from_tok
        done_tok = self.decoded_tok - from_tok
        if done_tok:
            since, version = self._versions[-1]
            pairs = ((version, done_tok),) if since <= from_tok else self._sampled(from_tok)
            rollout.pairs = pairs if not rollout.pairs else add_pairs(rollout.pairs, pairs)
            rollout.left_tok -= done_tok
            rollout.context_tok += done_tok
            rollout.sampled_tok += done_tok
        self.context_tok -= rollout.context_tok
        if park:
            rollout.parked = True
            self.parked[rollout.serial] = rollout
        else:
            self._free(rollout)

    def _free(self, rollout: SimRollout) -> None:
        """Its KV entries are gone (those of the prompt with the last one that shares them)."""
        group, prompts = rollout.group, self._prompts
        sharing = prompts.pop(group.ordinal)
        if sharing > 1:
            prompts[group.ordinal] = sharing - 1
            self.kv_tok += group.prompt_tok
        self.kv_tok -= rollout.context_tok - rollout.uncached_tok

    def remove(self, rollout: SimRollout) -> None:
        """A rollout ends early, wherever it is here."""
        if rollout.place == "running":
            self.leave(rollout)
        elif rollout.place == "queued":
            self.queue.remove(rollout)
            self.queued_s += self.time_s
            rollout.place = "outside"
        if rollout.parked:
            self._drop(rollout)

    def _sampled(self, from_tok: int) -> Pairs:
        """Tokens by version since the counter was at `from_tok`."""
        pairs: list[tuple[int, int]] = []
        until_tok = self.decoded_tok
        for since, version in reversed(self._versions):
            start_tok = max(since, from_tok)
            if until_tok > start_tok:
                pairs.append((version, until_tok - start_tok))
                until_tok = start_tok
            if since <= from_tok:
                break
        return tuple(reversed(pairs))

    # -- KV memory ---------------------------------------------------------------------------------------------

    def _drop_parked(self, *, but: SimRollout | None = None) -> bool:
        """Forget the KV entries that have been parked longest; False if there are none."""
        for rollout in self.parked.values():
            if rollout is not but:
                self._drop(rollout)
                return True
        return False

    def _drop(self, rollout: SimRollout) -> None:
        """Parked KV entries go."""
        del self.parked[rollout.serial]
        self._free(rollout)
        rollout.parked = False
        rollout.uncached_tok = 0

    def _evict(self, wanted_tok: int) -> int:
        """Forget parked entries until `wanted_tok` more tokens of everyone fit; return the tokens won for each."""
        before_tok = self.kv_tok
        while (self.capacity_tok - self.kv_tok) // self.b < wanted_tok and self._drop_parked():
            pass
        room_tok = (self.capacity_tok - self.kv_tok) // self.b
        return room_tok - (self.capacity_tok - before_tok) // self.b

    def _make_room(self) -> None:
        """Preempt the youngest until everyone can go on by one token."""
        while self.b > 1 and self.kv_tok + self.b > self.capacity_tok:
            youngest = self.running[next(reversed(self.running))]
            self.leave(youngest)
            youngest.place = "queued"
            self.queue.appendleft(youngest)
            self.queued_s -= self.time_s
            self.preemptions += 1

    # -- weights and chips -------------------------------------------------------------------------------------

    def serve(self, version: int, pause_s: float, *, recompute: bool) -> None:
        """Swap weights between two steps: stand still, and with `recompute` compute all KV entries again."""
        since, _ = self._versions[-1]
        if since == self.decoded_tok:
            self._versions[-1] = (since, version)
        else:
            self._versions.append((self.decoded_tok, version))
        oldest_tok = min((r.from_tok for r in self.running.values()), default=self.decoded_tok)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest_tok:
            del self._versions[0]
        if recompute:
            while self._drop_parked():
                pass
        if self.off:
            return
        if not self.b:
            self.paused_s += pause_s
            self.time_s += pause_s
            return
        self._pause_due_s += pause_s
        if recompute:
            mean_tok = self.context_tok / self.b
            pairs = self.context_tok * mean_tok / 2
            cost = self.cost
            self._prefill_due_s += max(
                cost.prefill_s_min, self.context_tok * cost.prefill_s_per_tok + pairs * cost.prefill_s_per_tok2
            )

    def resume(self, now_s: float) -> None:
        """The chips generate again (after `frozen`)."""
        self.frozen = False
        stood_s = max(0.0, now_s - self.time_s)
        self.paused_s += stood_s
        self.running_s += self.b * stood_s
        self.kv_tok_s += self.kv_tok * stood_s
        self.time_s += stood_s

    def switch_on(self, now_s: float, version: int) -> None:
        """Lent chips begin to serve `version`."""
        self.off = False
        self.time_s = max(self.time_s, now_s)
        self._versions = [(self.decoded_tok, version)]

    def switch_off(self) -> list[SimRollout]:
        """Lent chips go back: everything leaves and must run elsewhere; what was parked lost its KV entries."""
        while self._drop_parked():
            pass
        running = list(self.running.values())
        for rollout in running:
            self.leave(rollout)
        queued = list(self.queue)
        for rollout in queued:
            rollout.place = "outside"
        self.queued_s += len(queued) * self.time_s
        self.queue.clear()
        self._heap.clear()
        self._pause_due_s = self._prefill_due_s = 0.0
        self.off = True
        return running + queued
