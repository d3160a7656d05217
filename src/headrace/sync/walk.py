"""One copy of the weights that goes to any version of a run, in place: forward by deltas, back by undoing them.

    go_to(7) from 4:  4 -> 5 -> 6 -> 7, each step remembers the bits that it overwrote
    go_to(5) from 7:  the last two steps are undone; nothing is fetched
    go_to(1):         no step leads back so far: from a keyframe on

Memory: the copy itself, and at most `undo_limit_bytes` of overwritten bits; a keyframe takes another two copies while
it is put in place. Every step is proven by its hashes, there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.bits import Bits
from headrace.sync.catalog import Catalog, Edge, Head, cheapest_path, read_catalog, read_head
from headrace.sync.packs import PackReader, UnusableError
from headrace.sync.staging import DriftError, Patch, fetch_steps, hold, prove, stage
from headrace.sync.store import Store
from headrace.sync.version import Table

_MAX_REPLANS = 20
_UNDO_GAIN = 100
"""A byte that is written back from memory costs about so much less than one that is fetched, decoded and proven."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step forward that can be undone."""

    before: Table
    patches: tuple[Patch, ...]

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self.patches)

    @property
    def undo_bytes(self) -> int:
        """Written when it is undone."""
        return sum(patch.old.nbytes for patch in self.patches)


class Walker:
    """A moving replica over writable arrays (by tensor name, contiguous, all tensors of a version)."""

    def __init__(
        self,
        store: Store,
        arrays: Mapping[str, NDArray[Any]],
        *,
        run_id: str,
        undo_limit_bytes: int = 1 << 30,
        threads: int = 1,
        changed: Callable[[frozenset[str]], None] = lambda names: None,
    ) -> None:
        """What the arrays hold at first does not matter. `changed` hears which tensors got other values."""
        self._store = store
        self._packs = PackReader(store)
        self._arrays = arrays
        self._run_id = run_id
        self._undo_limit_bytes = undo_limit_bytes
        self._threads = threads
        self._changed = changed
        self._table: Table | None = None
        self._steps: list[_Step] = []
        self._known: dict[int, str] = {}
        self.fetched_bytes = self.undone = self.rebuilt = 0
        """Bodies fetched, steps undone, keyframes put in place; counters that only grow."""

    @property
    def digest(self) -> str | None:
        """Of the version held; None before the first, or after a step that failed."""
        return None if self._table is None else self._table.digest

    @property
    def undo_bytes(self) -> int:
        """Memory that the way back takes."""
        return sum(step.nbytes for step in self._steps)

    def know(self, version: int, digest: str) -> None:
        """The digest of a version. Not needed for versions that the catalog names; one that changed nothing has no
        place there."""
        self._known[version] = digest

    def go_to(self, version: int) -> None:
        """Hold `version`. SyncError when it was never published here or no way leads there any more; the arrays then
        hold some version, or (`digest` is None) none, from which the next call starts with a keyframe."""
        head = read_head(self._store)
        if head is None:
            raise SyncError(f"version {version} cannot be rebuilt: {self._store.url} holds no run")
        if head.run_id != self._run_id:
            raise SyncError(f"{self._store.url} holds run {head.run_id!r}, this is {self._run_id!r}")
        catalog = read_catalog(self._store, head)
        target = self._digest_of(version, head, catalog)
        bad: set[str] = set()
        last: SyncError | None = None
        for _ in range(_MAX_REPLANS):
            found = cheapest_path(catalog.edges, self._sources(), target, bad)
            if found is None:
                raise last or SyncError(
                    f"version {version} cannot be rebuilt: its keyframe is gone from {self._store.url}"
                )
            source, path = found
            try:
                self._back_to(source)
                for edge in path:
                    self._forward(edge)
                return
            except UnusableError as exc:
                bad.add(exc.manifest)
                last = exc
            except DriftError as exc:
                self._lose()
                last = exc
        raise last or SyncError(f"version {version} could not be rebuilt")

    def _digest_of(self, version: int, head: Head, catalog: Catalog) -> str:
        named = {edge.version: edge.target for edge in catalog.edges} | {head.version: head.digest} | self._known
        if version not in named:
            have = f"{min(named)} to {max(named)}" if named else "none"
            raise SyncError(
                f"version {version} cannot be rebuilt: the run in {self._store.url} has versions {have}; older ones go "
                "when a newer keyframe is there (sync.keyframe_every)"
            )
        return named[version]

    def _sources(self) -> dict[str | None, int]:
        """Where a way may start: nothing, here, and every version that can be gone back to, with its cost."""
        sources: dict[str | None, int] = {None: 0}
        if self._table is not None:
            sources[self._table.digest] = cost = 0
            for step in reversed(self._steps):
                cost += step.undo_bytes // _UNDO_GAIN
                sources.setdefault(step.before.digest, cost)
        return sources

    def _back_to(self, source: str | None) -> None:
        while source is not None and self.digest != source:
            step = self._steps.pop()
            held = self._hold(step.before)
            self._write(step.patches, held, back=True)
            self._table = step.before
            self.undone += 1

    def _forward(self, edge: Edge) -> None:
        """One manifest further."""
        before = None if edge.source is None else self._table
        steps, after = fetch_steps(
            self._store, self._packs, [edge], names=self._arrays.keys(), table=before, run_id=self._run_id
        )
        self.fetched_bytes += sum(len(body) for body in steps[0].bodies.values())
        held = self._hold(after)
        patches = tuple(stage(steps, after=after, held=held, held_table=before, back={}, threads=self._threads))
        if before is None:
            self._lose()
            self.rebuilt += 1
        self._write(patches, held, back=False)
        self._table = after
        if before is not None:
            self._steps.append(_Step(before, patches))
            while self.undo_bytes > self._undo_limit_bytes:
                self._steps.pop(0)

    def _write(self, patches: Iterable[Patch], held: Mapping[str, Bits], *, back: bool) -> None:
        patches = tuple(patches)
        try:
            for patch in patches:
                (patch.revert if back else patch.apply)(held[patch.tensor])
            prove(patches, held, back=back)
        except SyncError:
            self._lose()
            raise
        names = frozenset(patch.tensor for patch in patches)
        if names:
            self._changed(names)

    def _hold(self, table: Table) -> dict[str, Bits]:
        return hold(self._arrays, table, partial=False)

    def _lose(self) -> None:
        """What is held is no version."""
        self._table = None
        self._steps.clear()
