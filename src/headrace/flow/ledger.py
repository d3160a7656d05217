"""Where every prompt attempt is, and what became of every token.

    admitted   = sum of buckets + alive (running, completed, taken)
    generated  = trained + masked + wasted (by reason) + alive        tokens, after every event

`LiveGroup` is the mutable record while something can still happen to a group; `Row` is its frozen picture for the
journal. A group that is final is forgotten once its last picture was drained: totals stay, memory does not grow.

Reasons of waste: the bucket in which a group ended (its scored tokens), and besides
    retried          an attempt of one member that failed and was started again
    failed_infra     the last attempt of a member that failed for good (also in a group that trains without it)
    failed_timeout   the same, for a deadline
    late             sampled by members of a cancelled group between the decision and the actual stop
    wasted_restart   sampled by weights, or in a process, that a crash took away
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from headrace.errors import FlowError
from headrace.flow.events import Bucket, MemberEnded

State = Literal["running", "completed", "taken", "final"]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
ENDED = -1
"""In `LiveGroup.running_attempt`: this member does not run any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt attempt, as the journal keeps it. Tokens: generated = trained + masked + wasted + alive."""

    group_id: str
    ordinal: int
    attempt: int
    prompt_index: int
    admitted_version: int
    """Version that was landed at admission: no token is older."""
    state: State
    bucket: Bucket | None
    """None exactly while the state is not final."""
    oldest_version: int | None
    """Of any token of a scored member; None while there is none."""
    newest_version: int | None
    taken_version: int | None
    """Trainer's version when the group was put into a batch."""
    rewards: tuple[float, ...]
    """Of the scored members, in order of members."""
    generated_tok: int
    trained_tok: int
    masked_tok: int
    wasted: tuple[tuple[str, int], ...]
    """(reason, tokens); one group can waste for several reasons."""
    tok_by_version: tuple[tuple[int, int], ...]
    """(policy_version, tokens) of the scored members, ascending."""
    mean_response_tok: float
    """Sampled tokens per scored member; 0 while there is none."""

    @property
    def wasted_tok(self) -> int:
        return sum(tok for _, tok in self.wasted)

    @property
    def wasted_reason(self) -> str:
        """The reason that wasted most; empty if nothing was wasted."""
        return max(self.wasted, key=lambda pair: pair[1])[0] if self.wasted else ""

    @property
    def alive_tok(self) -> int:
        """Tokens whose fate is open; 0 once the row is final."""
        return self.generated_tok - self.trained_tok - self.masked_tok - self.wasted_tok

    @property
    def sampled_version(self) -> int:
        """Newest version that can have taken part in this attempt."""
        return self.admitted_version if self.newest_version is None else self.newest_version

    @property
    def oldest_or_admitted(self) -> int:
        """Oldest version of any token; the admission's while there is none."""
        return self.admitted_version if self.oldest_version is None else self.oldest_version

    def voided(self) -> Row:
        """This attempt after a restart that lost it: whatever was not wasted before is wasted now."""
        lost_tok = self.generated_tok - self.wasted_tok
        wasted = dict(self.wasted)
        if lost_tok:
            wasted["wasted_restart"] = wasted.get("wasted_restart", 0) + lost_tok
        return replace(
            self, state="final", bucket="unfinished", trained_tok=0, masked_tok=0, wasted=tuple(wasted.items())
        )


class LiveGroup:
    """The mutable record of one prompt attempt. Only Ledger changes token counts, only Controller the rest."""

    __slots__ = (
        "admitted_version",
        "attempt",
        "bucket",
        "deadline",
        "generated_tok",
        "group_id",
        "infra_fails",
        "masked_tok",
        "newest_version",
        "oldest_version",
        "ordinal",
        "pending",
        "prompt_index",
        "rewards",
        "running_attempt",
        "scored_tok",
        "state",
        "taken_version",
        "timeouts",
        "tok_by_version",
        "trained_tok",
        "wasted",
    )

    def __init__(
        self, *, group_id: str, ordinal: int, attempt: int, prompt_index: int, version: int, deadline: int, members: int
    ) -> None:
        self.group_id = group_id
        self.ordinal = ordinal
        self.attempt = attempt
        self.prompt_index = prompt_index
        self.admitted_version = version
        self.deadline = deadline
        """Last trainer version at which a batch may still take this group within the lag bound."""
        self.state: State = "running"
        self.bucket: Bucket | None = None
        self.running_attempt = [0] * members
        """Per member: number of the attempt that runs, or ENDED."""
        self.pending = members
        """Members that still run."""
        self.rewards: list[float | None] = [None] * members
        self.infra_fails = 0
        self.timeouts = 0
        self.oldest_version: int | None = None
        self.newest_version: int | None = None
        self.taken_version: int | None = None
        self.generated_tok = 0
        self.scored_tok = 0
        """Tokens of scored members: alive until the group is final."""
        self.trained_tok = 0
        self.masked_tok = 0
        self.wasted: dict[str, int] = {}
        self.tok_by_version: dict[int, int] = {}

    @classmethod
    def from_row(cls, row: Row, *, deadline: int) -> LiveGroup:
        """A completed group from its row: what a restart salvages."""
        group = cls(
            group_id=row.group_id,
            ordinal=row.ordinal,
            attempt=row.attempt,
            prompt_index=row.prompt_index,
            version=row.admitted_version,
            deadline=deadline,
            members=0,
        )
        group.state = "completed"
        group.rewards = list(row.rewards)
        group.oldest_version = row.oldest_version
        group.newest_version = row.newest_version
        group.generated_tok = row.generated_tok
        group.scored_tok = row.generated_tok - row.wasted_tok
        group.wasted = dict(row.wasted)
        group.tok_by_version = dict(row.tok_by_version)
        return group

    @property
    def scored(self) -> tuple[float, ...]:
        """Rewards of the scored members, in order of members."""
        return tuple(r for r in self.rewards if r is not None)

    @property
    def oldest(self) -> int:
        """Oldest version of any token; the admission's while nothing says better."""
        return self.admitted_version if self.oldest_version is None else self.oldest_version

    @property
    def alive_tok(self) -> int:
        return 0 if self.state == "final" else self.scored_tok

    def only_older_than(self, version: int) -> bool:
        """There are scored tokens, and none of them is of `version` or newer."""
        return bool(self.tok_by_version) and max(self.tok_by_version) < version

    def row(self) -> Row:
        scored = self.scored
        return Row(
            group_id=self.group_id,
            ordinal=self.ordinal,
            attempt=self.attempt,
            prompt_index=self.prompt_index,
            admitted_version=self.admitted_version,
            state=self.state,
            bucket=self.bucket,
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            taken_version=self.taken_version,
            rewards=scored,
            generated_tok=self.generated_tok,
            trained_tok=self.trained_tok,
            masked_tok=self.masked_tok,
            wasted=tuple(self.wasted.items()),
            tok_by_version=tuple(sorted(self.tok_by_version.items())),
            mean_response_tok=self.scored_tok / len(scored) if scored else 0.0,
        )


class Ledger:
    """All prompt attempts of a run: the alive ones as records, the final ones as totals."""

    def __init__(self) -> None:
        self.alive: dict[str, LiveGroup] = {}
        self.admitted = 0
        self.buckets: dict[Bucket, int] = dict.fromkeys(BUCKETS, 0)
        """Final prompt attempts by bucket (every bucket, zeros included)."""
        self.generated_tok = 0
        self.trained_tok = 0
        self.masked_tok = 0
        self.wasted_tok: dict[str, int] = {}
        """By reason."""
        self.lag_hist: dict[int, int] = {}
        """Trained tokens by lag: trainer's version at the take minus the token's policy version."""
        self._cancelled: dict[str, LiveGroup] = {}
        """Final groups of which members may still report."""
        self._changed: dict[str, LiveGroup | Row] = {}
        self._length_tok = array("d")
        self._length_trained = bytearray()

    # -- life of a group ---------------------------------------------------------------------------------------

    def admit(self, group: LiveGroup) -> None:
        """A group starts (or is salvaged by a restart with what it has)."""
        self.alive[group.group_id] = group
        self.admitted += 1
        self.generated_tok += group.generated_tok
        for reason, tok in group.wasted.items():
            self.wasted_tok[reason] = self.wasted_tok.get(reason, 0) + tok
        self._changed[group.group_id] = group

    def member_scored(self, group: LiveGroup, event: MemberEnded) -> None:
        """Book a rollout that may train. Raises FlowError when versions or token counts cannot be."""
        tok = event.generated_tok
        oldest = event.oldest_version
        if oldest is not None:
            newest = event.newest_version
            if newest is None or newest < oldest or oldest < group.admitted_version:
                raise FlowError(
                    f"{event}: versions [{oldest}, {newest}] must ascend and not lie below version "
                    f"{group.admitted_version}, which was landed when the group started"
                )
            if group.oldest_version is None or oldest < group.oldest_version:
                group.oldest_version = oldest
            if group.newest_version is None or newest > group.newest_version:
                group.newest_version = newest
            pairs = event.stale_tok_by_version
            by_version = group.tok_by_version
            if pairs:
                for version, count in pairs:
                    by_version[version] = by_version.get(version, 0) + count
                if sum(count for _, count in pairs) != tok or pairs[0][0] != oldest or pairs[-1][0] != newest:
                    raise FlowError(
                        f"{event}: tokens by version must ascend from {oldest} to {newest} and add up to {tok}"
                    )
            else:  # Unknown mix: all count as the oldest, which errs on the safe side of the lag bound.
                by_version[oldest] = by_version.get(oldest, 0) + tok
        elif tok:
            raise FlowError(f"{event}: {tok} tokens without a version")
        group.generated_tok += tok
        group.scored_tok += tok
        self.generated_tok += tok
        self._changed[group.group_id] = group

    def waste(self, group: LiveGroup, tok: int, reason: str) -> None:
        """Book freshly sampled tokens that can never train."""
        self._changed[group.group_id] = group
        if tok:
            group.generated_tok += tok
            self.generated_tok += tok
            self._lose(group, tok, reason)

    def late(self, event: MemberEnded) -> None:
        """Book the tokens of a cancelled group's member. Raises FlowError for a group that nobody knows."""
        group = self._cancelled.get(event.group_id)
        if group is None:
            raise FlowError(f"{event}: group {event.group_id!r} was never started or has no member that still runs")
        end_member(group, event)
        self.waste(group, event.generated_tok, "late")
        if not group.pending:
            del self._cancelled[event.group_id]

    def complete(self, group: LiveGroup) -> None:
        group.state = "completed"
        self._changed[group.group_id] = group

    def take(self, group: LiveGroup, version: int) -> None:
        if group.state != "completed":
            raise FlowError(f"group {group.group_id} cannot be taken: it is {group.state}")
        group.state = "taken"
        group.taken_version = version
        self._changed[group.group_id] = group

    def train(self, group: LiveGroup, mask_below_version: int) -> None:
        """The optimizer step on a taken group is done: its tokens are trained, or masked where too old."""
        if group.taken_version is None:
            raise FlowError(f"group {group.group_id} cannot be trained: it was never taken")
        for version, tok in group.tok_by_version.items():
            if version < mask_below_version:
                group.masked_tok += tok
            else:
                group.trained_tok += tok
                lag = group.taken_version - version
                self.lag_hist[lag] = self.lag_hist.get(lag, 0) + tok
        self.masked_tok += group.masked_tok
        self.trained_tok += group.trained_tok
        self._finish(group, "trained")

    def close(self, group: LiveGroup, bucket: Bucket) -> None:
        """The group ends without training; its scored tokens are wasted for that reason."""
        if group.scored_tok:
            self._lose(group, group.scored_tok, bucket)
        self._finish(group, bucket)
        if group.pending:
            self._cancelled[group.group_id] = group

    def _lose(self, group: LiveGroup, tok: int, reason: str) -> None:
        group.wasted[reason] = group.wasted.get(reason, 0) + tok
        self.wasted_tok[reason] = self.wasted_tok.get(reason, 0) + tok

    def _finish(self, group: LiveGroup, bucket: Bucket) -> None:
        if self.alive.pop(group.group_id, None) is None:
            raise FlowError(f"group {group.group_id} ends as {bucket} but is already {group.state} ({group.bucket})")
        group.state = "final"
        group.bucket = bucket
        self.buckets[bucket] += 1
        self._changed[group.group_id] = group
        scored = sum(r is not None for r in group.rewards)
        self._note_length(bucket, group.scored_tok / scored if scored else 0.0)

    # -- restart -----------------------------------------------------------------------------------------------

    def adopt(self, row: Row, *, changed: bool = False) -> None:
        """Add a final row of an earlier process to the totals. `changed` journals it again."""
        if row.state != "final" or row.bucket is None or row.alive_tok:
            raise FlowError(f"row {row.group_id} is not final and balanced: {row}")
        self.admitted += 1
        self.buckets[row.bucket] += 1
        self.generated_tok += row.generated_tok
        self.trained_tok += row.trained_tok
        self.masked_tok += row.masked_tok
        for reason, tok in row.wasted:
            self.wasted_tok[reason] = self.wasted_tok.get(reason, 0) + tok
        if row.bucket == "trained" and row.taken_version is not None:
            # What was masked is the oldest: walk from the newest down until the trained tokens are used up.
            left_tok = row.trained_tok
            for version, tok in reversed(row.tok_by_version):
                tok = min(tok, left_tok)
                left_tok -= tok
                if tok:
                    lag = row.taken_version - version
                    self.lag_hist[lag] = self.lag_hist.get(lag, 0) + tok
        self._note_length(row.bucket, row.mean_response_tok)
        if changed:
            self._changed[row.group_id] = row

    # -- reports -----------------------------------------------------------------------------------------------

    @property
    def alive_tok(self) -> int:
        """Tokens whose fate is open. O(alive groups)."""
        return sum(group.alive_tok for group in self.alive.values())

    @property
    def balanced(self) -> bool:
        """Both identities at the top of this file hold."""
        ended = self.trained_tok + self.masked_tok + sum(self.wasted_tok.values())
        return (
            self.admitted == sum(self.buckets.values()) + len(self.alive)
            and self.generated_tok == ended + self.alive_tok
        )

    def rows(self) -> Iterable[Row]:
        """Pictures of the alive groups, oldest admission first."""
        return [group.row() for group in self.alive.values()]

    def drain_changes(self) -> list[Row]:
        """Rows that changed since the last drain, in the order of their first change. The journal upserts them."""
        rows = [entry if isinstance(entry, Row) else entry.row() for entry in self._changed.values()]
        self._changed.clear()
        return rows

    def accept_by_length(self) -> tuple[float, ...]:
        """Share of finished groups that trained, by decile of their mean response length, short to long.

        The check against starving long, hard tasks. Empty below ten groups. Groups without any scored member have
        no length and do not count; neither do `unfinished` ones, which no rule rejected.
        """
        if len(self._length_tok) < 10:
            return ()
        order = np.argsort(np.frombuffer(self._length_tok), kind="stable")
        trained = np.frombuffer(bytes(self._length_trained), dtype=np.uint8)[order]
        return tuple(float(part.mean()) for part in np.array_split(trained, 10))

    def _note_length(self, bucket: Bucket, mean_response_tok: float) -> None:
        if mean_response_tok > 0.0 and bucket != "unfinished":
            self._length_tok.append(mean_response_tok)
            self._length_trained.append(bucket == "trained")

    def check(self) -> None:
        """Raise FlowError that names the offending row, or the totals that do not balance. O(alive groups)."""
        for group in self.alive.values():
            wasted_tok = sum(group.wasted.values())
            if group.generated_tok != group.scored_tok + wasted_tok:
                raise FlowError(
                    f"row {group.group_id}: generated {group.generated_tok} tok is not "
                    f"scored {group.scored_tok} + wasted {wasted_tok}"
                )
            if group.bucket is not None or group.state == "final":
                raise FlowError(f"row {group.group_id} is alive and {group.state} in bucket {group.bucket}")
            if (group.pending > 0) != (group.state == "running"):
                raise FlowError(f"row {group.group_id} is {group.state} with {group.pending} members running")
            if (group.taken_version is not None) != (group.state == "taken"):
                raise FlowError(f"row {group.group_id} is {group.state}, taken at version {group.taken_version}")
        if not self.balanced:
            raise FlowError(f"the ledger does not balance: {self.summary()}")

    def summary(self) -> Mapping[str, object]:
        """Totals as plain data, for reports and errors."""
        return {
            "admitted": self.admitted,
            "buckets": dict(self.buckets),
            "alive": len(self.alive),
            "generated_tok": self.generated_tok,
            "trained_tok": self.trained_tok,
            "masked_tok": self.masked_tok,
            "wasted_tok": dict(self.wasted_tok),
            "alive_tok": self.alive_tok,
        }


def end_member(group: LiveGroup, event: MemberEnded) -> None:
    """Mark the member as ended. Raises FlowError unless exactly this attempt of it was running."""
    member = event.member
    if not 0 <= member < len(group.running_attempt):
        raise FlowError(f"{event}: group {group.group_id} has members 0 to {len(group.running_attempt) - 1}")
    attempt = group.running_attempt[member]
    if attempt != event.attempt:
        now = "has already ended" if attempt == ENDED else f"is at attempt {attempt}"
        raise FlowError(f"{event}: member {member} of group {group.group_id} {now}")
    group.running_attempt[member] = ENDED
    group.pending -= 1
