"""What the trainer may take next: earliest deadline first, and a wait when a later batch would break the bound.

A group whose oldest token has version x must be in a batch that is taken at a version <= x + eta: its deadline. Looking
one step ahead is not enough. B = 1, eta = 2: a, b (slow) and c (fast) start at v0, c is taken; d (fast) starts at v1.
Taking d at v1 would leave a and b both due at v2, where one batch has one place. So a batch is taken only if for every
k >= 0 at most k * B of the groups that stay behind are due by v + k. The check costs O(eta).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal

from headrace.flow.group import LiveGroup

Readiness = Literal["take", "wait_data", "wait_bound"]
_ordinal = attrgetter("ordinal")


class Window:
    """Outstanding groups (running and completed) by deadline.

    `holds`: wait rather than let an outstanding group miss its deadline.
    """

    def __init__(self, *, batch_groups: int, eta: int, holds: bool) -> None:
        self.completed = 0
        """Groups that a batch may take."""
        self.running = 0
        """Groups that still run."""
        self._batch_groups = batch_groups
        self._eta = eta
        self._holds = holds
        self._running: dict[int, dict[str, LiveGroup]] = {}
        """deadline -> groups in order of admission"""
        self._completed: dict[int, list[LiveGroup]] = {}
        """deadline -> groups by ordinal"""

    def add_running(self, group: LiveGroup) -> None:
        self._running.setdefault(group.deadline, {})[group.group_id] = group
        self.running += 1

    def complete(self, group: LiveGroup) -> None:
        """A running group is complete; its deadline follows its real oldest token from now on."""
        self.remove(group)
        group.deadline = group.oldest + self._eta
        self.add_completed(group)

    def add_completed(self, group: LiveGroup) -> None:
        insort(self._completed.setdefault(group.deadline, []), group, key=_ordinal)
        self.completed += 1

    def remove(self, group: LiveGroup) -> None:
        """Forget an outstanding group. Call it while `group.state` still says which kind it is."""
        if group.state == "running":
            running = self._running[group.deadline]
            del running[group.group_id]
            self.running -= 1
            if not running:
                del self._running[group.deadline]
        else:
            completed = self._completed[group.deadline]
            completed.remove(group)
            self.completed -= 1
            if not completed:
                del self._completed[group.deadline]

    def readiness(self, version: int) -> Readiness:
        """Whether a batch may be taken at `version`, else what the trainer waits for."""
        if self.completed < self._batch_groups:
            return "wait_data"
        # With nothing running, waiting cannot help: only a changed config on resume leads here.
        if self._holds and self.running and not self._feasible_after_take(version):
            return "wait_bound"
        return "take"

    def _feasible_after_take(self, version: int) -> bool:
        places = self._batch_groups
        staying = 0
        for deadline in range(version, version + self._eta + 1):
            completed = len(self._completed.get(deadline, ()))
            taken = min(places, completed)
            places -= taken
            staying += completed - taken + len(self._running.get(deadline, ()))
            if staying > (deadline - version) * self._batch_groups:
                return False
        return True

    def take(self) -> list[LiveGroup]:
        """Remove and return the next batch: by (deadline, ordinal), exactly B; in order of admission."""
        batch: list[LiveGroup] = []
        for deadline in sorted(self._completed):
            completed = self._completed[deadline]
            missing = self._batch_groups - len(batch)
            batch += completed[:missing]
            if missing < len(completed):
                del completed[:missing]
                break
            del self._completed[deadline]
        self.completed -= len(batch)
        batch.sort(key=_ordinal)
        return batch

    def overdue(self, version: int) -> list[LiveGroup]:
        """Outstanding groups that no batch after that of `version` may take: youngest first, running ones first."""
        running = [
            g for d in sorted(self._running, reverse=True) if d <= version for g in reversed(self._running[d].values())
        ]
        completed = [
            g for d in sorted(self._completed, reverse=True) if d <= version for g in reversed(self._completed[d])
        ]
        return running + completed

    def waiting(self, before: int) -> Iterator[LiveGroup]:
        """Completed groups whose deadline lies before the version `before` (only `carry` keeps any)."""
        for deadline in sorted(self._completed):
            if deadline >= before:
                return
            yield from tuple(self._completed[deadline])
