"""When a group may start.

Slots = ceil((eta + 1) * B * (1 + oversample)). A group holds one from its admission until the version that learned
from it has *landed*, or until it ends in another bucket. Freeing at landing, not at the take, is why no sample is born
stale: docs/decisions/0002-deadline-feasibility.md proves that without oversampling every group can meet its deadline.
"""

from __future__ import annotations

from collections import deque

from headrace.config.schema import FlowConfig


class Admission:
    """Counts slots (groups) and seats (rollouts that run at once)."""

    __slots__ = ("_eta", "_group_size", "_in_flight", "_max_running", "_unlanded", "held", "running", "slots")

    def __init__(self, flow: FlowConfig) -> None:
        self.slots = flow.slots
        self.held = 0
        """Slots in use."""
        self.running = 0
        """Rollouts that run."""
        self._eta = flow.lag_bound
        self._group_size = flow.group_size
        self._max_running = flow.max_running
        self._in_flight = flow.in_flight
        self._unlanded: deque[tuple[int, int]] = deque()
        """(version that learned from them, groups), oldest first."""

    def has_room(self) -> bool:
        """A slot is free, and seats for all members of a group."""
        return self.held < self.slots and (
            not self._max_running or self.running + self._group_size <= self._max_running
        )

    def is_open(self, *, landed: int, published: int, next_take: int) -> bool:
        """A group that started now could still be trained in time.

        Without in-flight swaps nothing starts under weights that are about to be replaced. With oversampling a slot
        can be free although the only batch that could take the group is gone.
        """
        return landed + self._eta >= next_take and (self._in_flight or landed == published)

    def may_swap(self) -> bool:
        """Replicas may change weights now: in flight always, otherwise between rollouts."""
        return self._in_flight or self.running == 0

    def start(self) -> None:
        self.held += 1
        self.running += self._group_size

    def salvage(self) -> None:
        """A completed group of an earlier process takes a slot, even beyond the limit."""
        self.held += 1

    def release(self) -> None:
        """A group ended without training."""
        self.held -= 1

    def published(self, version: int, groups: int) -> None:
        """`version` learned from this many groups; they keep their slots until it lands."""
        self._unlanded.append((version, groups))

    def landed(self, version: int) -> None:
        while self._unlanded and self._unlanded[0][0] <= version:
            self.held -= self._unlanded.popleft()[1]
