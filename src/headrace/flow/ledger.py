"""Where every prompt attempt is, and what became of every token.

    admitted   = sum of buckets + alive (running, completed, taken)
    generated  = trained + masked + wasted (by reason) + alive        tokens, after every event

A group that is final is forgotten once its last row was drained: totals stay, memory does not grow.

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
from typing import get_args

import numpy as np

from headrace.errors import FlowError
from headrace.flow.events import Bucket, MemberEnded
from headrace.flow.group import LiveGroup, Row, end_member

__all__ = ["BUCKETS", "Ledger", "Row"]

BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


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
                left_tok = tok
                for version, count in pairs:
                    by_version[version] = by_version.get(version, 0) + count
                    left_tok -= count
                if left_tok or pairs[0][0] != oldest or pairs[-1][0] != newest:
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
