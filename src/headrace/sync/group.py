"""One replica on several ranks: all of them serve a version, or none does."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import SyncError
from headrace.sync.catalog import Head, read_head
from headrace.sync.receiver import Receiver, Staged
from headrace.sync.report import SyncReport
from headrace.sync.store import Store
from headrace.sync.target import State


class GroupReceiver:
    """Prepares on all ranks, then activates on all. Each rank holds some of the tensors; together they hold all."""

    def __init__(self, store: Store, ranks: Sequence[Receiver]) -> None:
        if not ranks:
            raise SyncError("a group of no ranks cannot hold a version")
        self._store = store
        self._ranks = tuple(ranks)

    @property
    def digest(self) -> str | None:
        """Of the version that every rank serves; None while they differ or one serves nothing."""
        digests = {rank.digest if rank.serving else None for rank in self._ranks}
        return digests.pop() if len(digests) == 1 else None

    def require(self, *, min_version: int | None = None, exact_version: int | None = None) -> None:
        """As `Receiver.require`, of all ranks; a replica whose ranks differ serves nothing."""
        for rank in self._ranks:
            rank.require(min_version=min_version, exact_version=exact_version)
        if self.digest is None:
            raise SyncError("the ranks hold different versions: nothing is served until they agree")

    def sync(self) -> list[SyncReport]:
        """Bring every rank to the head; one report for each rank that had something to do.

        Raises the first rank's SyncError with every rank as it was before (or FENCED).
        """
        head = read_head(self._store)
        return [] if head is None else self._sync(head)

    def _sync(self, head: Head) -> list[SyncReport]:
        staged: list[tuple[Receiver, Staged]] = []
        try:
            for rank in self._ranks:
                ready = rank.prepare(head)
                if ready is not None:
                    staged.append((rank, ready))
            self._check_cover(staged)
        except SyncError:
            for rank, _ in staged:
                rank.abandon()
            raise
        reports, done = [], 0
        try:
            for rank, ready in staged:
                reports.append(rank.commit(ready))
                done += 1
        except SyncError:
            for rank, _ in staged[:done]:
                rank.revert()
            for rank, _ in staged[done + 1 :]:
                rank.abandon()
            raise
        for rank, _ in staged:
            rank.finish()
        return reports

    def _check_cover(self, staged: Sequence[tuple[Receiver, Staged]]) -> None:
        """Every tensor of the version has a rank."""
        if not staged:
            return
        table = staged[0][1].table
        held = {table.owner(name) for rank in self._ranks for name in rank.names}
        missing = sorted(table.specs.keys() - held)
        if missing:
            raise SyncError(f"no rank holds {', '.join(missing[:5])} ({len(missing)} tensors of the version)")

    @property
    def fenced(self) -> bool:
        """A rank holds no version: the replica must not get traffic."""
        return any(rank.state is State.FENCED for rank in self._ranks)
