"""The receiving side: from what is held to what the head names, by the cheapest way, and back if anything is wrong.

EMPTY -> BASE | (held weights known by their hash) -> FETCHING -> STAGED -> ACTIVATING -> VERIFYING -> SERVING
                         ACTIVATING | VERIFYING -> ROLLING_BACK -> SERVING (old) | FENCED -> resync by a keyframe

Fetching, proving and decoding happen while the old version is served; the pause covers one scatter and one hash of
what it touched. A receiver answers only in SERVING, which nothing but a proven digest leads to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.clock import Clock, WallClock
from headrace.errors import SyncError, boundary
from headrace.sync.bits import Bits
from headrace.sync.catalog import Catalog, Edge, Head, cheapest_path, read_catalog, read_head
from headrace.sync.journal import Journal
from headrace.sync.lease import Leases
from headrace.sync.packs import PackReader, UnusableError, read_manifest
from headrace.sync.report import SyncReport
from headrace.sync.staging import (
    DriftError,
    Patch,
    Place,
    fetch_steps,
    first_drift,
    hold,
    prove,
    report_of,
    stage,
    table_of,
)
from headrace.sync.store import Store
from headrace.sync.target import State, Target, pause_in_time
from headrace.sync.version import BaseManifest, Table

_MAX_REPLANS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version that is ready to be scattered."""

    head: Head
    basis: str | None
    """Digest of the version held when it was staged; the patches fit no other."""
    table: Table
    patches: tuple[Patch, ...]
    report: SyncReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """A version as this receiver knows it."""

    table: Table
    version: int
    epoch: int


class Receiver:
    """Keeps one target at the head of one run. Calls come from one thread."""

    def __init__(
        self,
        store: Store,
        target: Target,
        *,
        run_id: str,
        cache: Path | None = None,
        journal: Journal | None = None,
        leases: Leases | None = None,
        partial: bool = False,
        threads: int = 2,
        verify_every: int = 8,
        stage_limit_bytes: int | None = None,
        pause_limit_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`cache`: folder for packs, shared by receivers on a host. `journal`: for targets that outlive the process.
        `partial`: the target is one rank of several and holds only some tensors. `threads`: for decoding.
        `verify_every`: updates between two hashes of *everything* held; what an update touches is always hashed.
        `pause_limit_s`: a target that has not paused by then keeps serving the old version."""
        self._store = store
        self._target = target
        self._run_id = run_id
        self._packs = PackReader(store, cache)
        self._journal = journal
        self._leases = leases
        self._partial = partial
        self._threads = threads
        self._verify_every = verify_every
        self._stage_limit_bytes = stage_limit_bytes
        self._pause_limit_s = pause_limit_s
        self._clock = clock or WallClock()
        self._served: _Served | None = None
        self._before: _Served | None = None
        self._undo: dict[Place, Patch] = {}
        self._can_go_back = False
        self._trusted = self._before_trusted = True
        self._since_audit = 0
        self._seen_epoch = 0
        self.state = State.EMPTY
        self.updates = self.resyncs = self.rollbacks = self.faults = 0
        """Counters that only grow."""

    @property
    def digest(self) -> str | None:
        """Of the version held; None where there is none."""
        return None if self._served is None else self._served.table.digest

    @property
    def table(self) -> Table | None:
        """Of the version held."""
        return None if self._served is None else self._served.table

    @property
    def version(self) -> int | None:
        """Label of the version held."""
        return None if self._served is None else self._served.version

    @property
    def names(self) -> frozenset[str]:
        """Tensors that the target holds."""
        return frozenset(self._target.arrays())

    @property
    def serving(self) -> bool:
        """Requests may run: a proven version is held, and it is not being changed at this moment."""
        settled = self.state in (State.SERVING, State.BASE, State.FETCHING, State.STAGED)
        return settled and self._trusted and self._served is not None

    def require(self, *, min_version: int | None = None, exact_version: int | None = None) -> None:
        """Raise SyncError (worth a retry after the next update) unless a request for such a version may run here."""
        if not self.serving or self._served is None:
            raise SyncError(f"nothing is served now: the receiver is {self.state}; try again later")
        have = self._served.version
        if min_version is not None and have < min_version:
            raise SyncError(f"version {have} is served, the request wants at least {min_version}; try again later")
        if exact_version is not None and have != exact_version:
            raise SyncError(f"version {have} is served, the request wants exactly {exact_version}; try again later")

    def sync(self, head: Head | None = None) -> SyncReport | None:
        """Serve the head (or a given one); None when it is served already or nothing was published.

        Raises SyncError with the old version served, or FENCED when not even that is possible.
        """
        staged = self.prepare(head)
        if staged is None:
            return None
        report = self.commit(staged)
        self.finish()
        return report

    def prepare(self, head: Head | None = None) -> Staged | None:
        """Fetch, prove and decode; the target is not touched. None when there is nothing to do."""
        head = head or read_head(self._store)
        if head is None:
            return None
        self._check_head(head)
        if self._trusted and self._served is not None and head.digest == self.digest:
            self._served = replace(self._served, version=head.version, epoch=head.epoch)
            return None
        try:
            with boundary(SyncError, f"staging version {head.version}"):
                return self._stage_any(head)
        finally:
            if self.state is not State.STAGED:
                self.state = self._resting

    def abandon(self) -> None:
        """Forget what `prepare` staged."""
        self.state = self._resting

    def commit(self, staged: Staged) -> SyncReport:
        """Pause, scatter, prove; the target stays paused until `finish` or `revert`.

        On SyncError it goes on as it was, or is FENCED and stays paused.
        """
        if staged.basis != self.digest:
            raise SyncError(f"version {staged.head.version} was staged on {staged.basis}, {self.digest} is held now")
        held = self._hold(staged.table)
        if self._journal is not None:
            self._journal.begin(staged.patches)
        begun_s = self._clock.now()
        try:
            pause_in_time(self._target, self._pause_limit_s)
        except SyncError:
            self.faults += 1
            self._clear_journal()
            self.state = self._resting
            raise
        paused_s = self._clock.now()
        try:
            with boundary(SyncError, f"activating version {staged.head.version}"):
                self.state = State.ACTIVATING
                self._scatter(staged.patches, held)
                applied_s = self._clock.now()
                self.state = State.VERIFYING
                prove(staged.patches, held)
        except SyncError:
            self.faults += 1
            self._take_back(staged.patches, held)
            raise
        self._clear_journal()
        self._before, self._before_trusted, self._can_go_back = self._served, self._trusted, True
        self._undo = {(patch.tensor, patch.start): patch for patch in staged.patches}
        self._served = _Served(table=staged.table, version=staged.head.version, epoch=staged.head.epoch)
        self._trusted = True
        self.updates += 1
        now_s = self._clock.now()
        return replace(staged.report, pause_s=now_s - begun_s, apply_s=applied_s - paused_s, verify_s=now_s - applied_s)

    def finish(self) -> None:
        """Serve what `commit` proved."""
        self.state = State.SERVING
        self._target.resume()

    def revert(self) -> None:
        """Go back from a committed version that is not served yet: another rank failed."""
        self._back(pause=False)

    def rollback(self) -> None:
        """Go back to the version before, bit for bit. One step is remembered; SyncError where there is none."""
        if self._before is None or not self._before_trusted:
            raise SyncError("there is no version to go back to: one step is remembered")
        self._back(pause=True)

    def audit(self) -> None:
        """Hash everything held. Raises SyncError and fences the receiver when it is not the version it serves."""
        if self._served is None:
            raise SyncError("nothing is held that could be audited")
        drift = first_drift(self._served.table, self._hold(self._served.table))
        if drift is not None:
            self._distrust()
            self.state = State.FENCED
            raise SyncError(f"tensor {drift[0]!r} at {drift[1]} is not that of version {self._served.version} any more")

    # --- preparing

    def _check_head(self, head: Head) -> None:
        if head.run_id != self._run_id:
            raise SyncError(f"{self._store.url} holds run {head.run_id!r}, this is {self._run_id!r}")
        if head.epoch < self._seen_epoch:
            raise SyncError(f"head of epoch {head.epoch} refused: epoch {self._seen_epoch} of the run was seen")
        served = self._served
        if served is not None and head.epoch == served.epoch and head.version < served.version:
            raise SyncError(f"head of version {head.version} refused: version {served.version} of its epoch is served")
        self._seen_epoch = head.epoch

    def _stage_any(self, head: Head) -> Staged:
        """Try ways from the cheapest on until one can be had."""
        bad: set[str] = set()
        catalog = read_catalog(self._store, head)
        known = self._known(catalog, bad)
        last: SyncError | None = None
        for _ in range(_MAX_REPLANS):
            sources: dict[str | None, int] = {None: 0}
            if known is not None:
                sources[known.digest] = 0
                if self._before is not None and self._before_trusted:
                    sources[self._before.table.digest] = 0
            found = cheapest_path(catalog.edges, sources, head.digest, bad)
            if found is None:
                raise last or SyncError(f"no way leads to version {head.version}: its keyframe is gone")
            try:
                return self._stage(head, *found, known)
            except UnusableError as exc:
                self.faults += 1
                bad.add(exc.manifest)
                last = exc
            except DriftError as exc:
                self.faults += 1
                self._distrust()
                known, last = None, exc
        raise last or SyncError(f"version {head.version} could not be staged")

    def _known(self, catalog: Catalog, bad: set[str]) -> Table | None:
        """The version held: remembered, or found by hashing what the engine came with."""
        if not self._trusted:
            return None
        if self._served is not None:
            return self._served.table
        for edge in reversed(catalog.edges):
            if edge.source is None:
                self.state = State.BASE
                try:
                    table = read_manifest(self._store, edge.manifest, BaseManifest).table()
                except SyncError:
                    bad.add(edge.manifest)
                    continue
                return table_of(table, self._hold(table))
        return None

    def _stage(self, head: Head, source: str | None, path: list[Edge], known: Table | None) -> Staged:
        self.state = State.FETCHING
        if self._leases is not None:
            self._leases.hold(key for edge in path for key in (edge.manifest, *edge.packs))
        begun_s = self._clock.now()
        before = self._before if source is not None and known is not None and source != known.digest else None
        start = before.table if before is not None else known if source is not None else None
        arrays = self._target.arrays()
        steps, after = fetch_steps(
            self._store, self._packs, path, names=arrays.keys(), table=start, run_id=self._run_id
        )  # fmt: skip
        fetched_s = self._clock.now()
        held = self._hold(after)
        trusted = known if source is not None else None
        patches = stage(
            steps,
            after=after,
            held=held,
            held_table=trusted,
            back=self._undo if before is not None else {},
            limit_bytes=self._stage_limit_bytes,
            threads=self._threads,
        )
        self._since_audit += trusted is not None
        if trusted is not None and self._since_audit >= self._verify_every:
            drift = first_drift(trusted, held, skip={(patch.tensor, patch.start) for patch in patches})
            if drift is not None:
                raise DriftError(f"tensor {drift[0]!r} has changed at {drift[1]}, where no update touched it")
            self._since_audit = 0
        self._packs.keep_only(step.manifest for step in steps)
        self.state = State.STAGED
        resynced = source is None and self._served is not None
        self.resyncs += resynced
        report = replace(
            report_of(head, after, steps, patches),
            resynced=resynced,
            get_s=fetched_s - begun_s,
            decode_s=self._clock.now() - fetched_s,
        )
        return Staged(head=head, basis=self.digest, table=after, patches=tuple(patches), report=report)

    def _hold(self, table: Table) -> dict[str, Bits]:
        return hold(self._target.arrays(), table, partial=self._partial)

    def _distrust(self) -> None:
        """What is held is no version: only a keyframe helps."""
        self._trusted = False
        self._before, self._undo = None, {}

    @property
    def _resting(self) -> State:
        """Where a receiver stands when nothing goes on."""
        if not self._trusted:
            return State.FENCED
        return State.EMPTY if self._served is None else State.SERVING

    # --- activating

    def _scatter(self, patches: Iterable[Patch], held: Mapping[str, Bits], *, back: bool = False) -> None:
        names = set()
        for patch in patches:
            (patch.revert if back else patch.apply)(held[patch.tensor])
            names.add(patch.tensor)
        if names:
            self._target.changed(frozenset(names))

    def _take_back(self, patches: Collection[Patch], held: Mapping[str, Bits]) -> None:
        """Undo a scatter, whole or half, while paused; FENCED, and still paused, when that fails."""
        self.state = State.ROLLING_BACK
        self.rollbacks += 1
        try:
            with boundary(SyncError, "going back"):
                self._scatter(patches, held, back=True)
                prove(patches, held, back=True)
        except SyncError:
            self._distrust()
            self.state = State.FENCED
            return
        self._clear_journal()
        self.state = self._resting
        if self._trusted:
            self._target.resume()

    def _back(self, *, pause: bool) -> None:
        if self._served is None or not self._can_go_back:
            raise SyncError("there is no version to go back to: one step is remembered")
        held = self._hold(self._served.table)
        undo = self._undo
        if self._journal is not None:
            self._journal.begin([patch.reversed() for patch in undo.values()])
        if pause:
            pause_in_time(self._target, self._pause_limit_s)
        self._served, self._before, self._undo, self._can_go_back = self._before, None, {}, False
        self._trusted = self._before_trusted
        self._take_back(undo.values(), held)
        if self.state is State.FENCED:
            raise SyncError("going back failed: what is held is no version; nothing is served until a resync")

    def _clear_journal(self) -> None:
        if self._journal is not None:
            self._journal.clear()
