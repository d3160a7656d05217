"""After a crash: which prompt attempts stay, which are saved, which start again.

The checkpoint holds the weights of `version`. Sampled by lost weights = newest version above it.

    found as                                            becomes
    final, sampled at <= version, not `unfinished`      kept (counts for totals and the curriculum)
      but trained at >= version: its update is lost     completed again (its data is on disk)
    completed or taken, sampled at <= version           completed again
    everything else                                     `unfinished`, tokens `wasted_restart`, and started again:
                                                        same ordinal, attempt + 1

So nothing is skipped and nothing trains twice. Ordinals seed the sampling and restarts go first, in order of ordinals:
in sync mode a resumed run repeats the decisions of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.flow.group import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restart found."""

    kept: int
    """Prompt attempts that stay final."""
    salvaged: int
    """Completed groups that need not be sampled again."""
    restarted: int
    """Prompt attempts that start again."""
    salvaged_ids: tuple[str, ...]
    """Their data must be loaded: a TakeBatch will name them."""


@dataclass(slots=True)
class RestorePlan:
    """Rows by what becomes of them."""

    kept: list[Row] = field(default_factory=list)
    salvaged: list[Row] = field(default_factory=list)
    voided: list[Row] = field(default_factory=list)
    """Now final as `unfinished`."""
    restarts: list[Row] = field(default_factory=list)
    """Whose ordinals start again, in order."""
    latest: list[tuple[Row, bool]] = field(default_factory=list)
    """Newest row of each ordinal as found, and whether it starts again."""
    next_ordinal: int = 0

    def report(self) -> Restored:
        return Restored(
            kept=len(self.kept),
            salvaged=len(self.salvaged),
            restarted=len(self.restarts),
            salvaged_ids=tuple(row.group_id for row in self.salvaged),
        )


def sort_rows(rows: Iterable[Row], *, version: int, eta: int, carries: bool) -> RestorePlan:
    """Apply the table at the top of this file. `eta` and `carries` are those of the resumed run."""
    by_ordinal: dict[int, list[Row]] = {}
    for row in rows:
        by_ordinal.setdefault(row.ordinal, []).append(row)
    plan = RestorePlan(next_ordinal=max(by_ordinal, default=-1) + 1)
    for ordinal in sorted(by_ordinal):
        *superseded, row = sorted(by_ordinal[ordinal], key=lambda r: r.attempt)
        plan.kept += superseded
        again = False
        if row.sampled_version > version or row.state == "running" or row.bucket == "unfinished":
            again = True
        elif not _waits_for_update(row, version):
            plan.kept.append(row)
        elif _trainable(row, version=version, eta=eta, carries=carries):
            plan.salvaged.append(row)
        else:
            again = True
        if again:
            plan.restarts.append(row)
            plan.voided.append(row.voided())
        plan.latest.append((row, again))
    return plan


def _waits_for_update(row: Row, version: int) -> bool:
    """Complete, and no update that the checkpoint holds has learned from it."""
    if row.state == "final":
        return row.bucket == "trained" and row.taken_version is not None and row.taken_version >= version
    return row.state in ("completed", "taken")


def _trainable(row: Row, *, version: int, eta: int, carries: bool) -> bool:
    """A batch at `version` could still take it (always, unless the lag bound was lowered since)."""
    if carries and row.tok_by_version:
        return row.tok_by_version[-1][0] >= version - eta
    return row.oldest_or_admitted >= version - eta
