"""The publishing side: a version becomes packs, a manifest, a catalog and at last the head, in that order.

Whenever it dies, receivers see either the old head or the new one, and everything that the head names is there; what
nothing names is left to the collector. Deltas start from the *baseline*, the last version that enough receivers
acknowledged: a version that they did not take is folded into the next delta instead of being built upon.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.clock import Clock, WallClock
from headrace.errors import SyncError, boundary
from headrace.sync.bits import Bits, as_bits
from headrace.sync.catalog import HEAD_KEY, Catalog, Edge, Head, read_catalog, read_head, swap_head
from headrace.sync.codec import MODES, Chunk, Mode, encode_tensors, stats
from headrace.sync.packs import Manifest, write_packs
from headrace.sync.report import SyncReport
from headrace.sync.staging import chunk_hashes
from headrace.sync.store import Store
from headrace.sync.version import (
    CODEC_VERSION,
    BaseManifest,
    DeltaManifest,
    Table,
    TensorSpec,
    dtype_name,
    elements,
    item_bytes,
)

Tensors = Mapping[str, NDArray[Any]]
_KEYFRAME_MODES: tuple[Mode, ...] = ("dense", "raw")
_HEAD_TRIES = 10


def always(acked: frozenset[str]) -> bool:
    """Quorum rule for receivers that pull on their own: what is durable can be built upon."""
    return True


def at_least(count: int) -> Callable[[frozenset[str]], bool]:
    """Quorum rule: so many replicas acknowledged."""
    return lambda acked: len(acked) >= count


@dataclass(frozen=True)
class _State:
    """A version with its values."""

    table: Table
    bits: Mapping[str, Bits]
    """Flat copies, tied tensors once."""


class DeltaPublisher:
    """Publishes the versions of one run. One per run: a second one that starts fences this one off."""

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        quorum: Callable[[frozenset[str]], bool] = always,
        keyframe_every: int = 25,
        pack_bytes: int = 128 * 1024 * 1024,
        threads: int = 2,
        allowed: Sequence[Mode] = MODES,
        with_limit: bool = True,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`keyframe_every` published versions a keyframe is stored for late joiners; `with_limit` computes the
        entropy bound of each delta, which takes about as long as encoding it."""
        self._store = store
        self._run_id = run_id
        self._quorum = quorum
        self._keyframe_every = keyframe_every
        self._pack_bytes = pack_bytes
        self._threads = threads
        self._allowed = allowed
        self._with_limit = with_limit
        self._clock = clock or WallClock()
        self._wall_s = wall_s
        self._writer = uuid.uuid4().hex
        self._epoch = 0
        self._baseline: _State | None = None
        self._pending: _State | None = None
        self._acked: set[str] = set()
        self._since_keyframe = 0

    @property
    def baseline_digest(self) -> str | None:
        """What the next delta starts from, as far as known now."""
        state = self._pending if self._promotable() else self._baseline
        return None if state is None else state.table.digest

    @property
    def epoch(self) -> int:
        """Of this publisher; 0 before `start`."""
        return self._epoch

    def start(self, tensors: Tensors, *, version: int) -> SyncReport:
        """Take the run over with these weights, which are `version`.

        The head's digest is theirs: the chain goes on. Nothing was published yet, or something else was (a restart
        from an older checkpoint): a keyframe. The epoch rises either way. Raises SyncError.
        """
        begun_s = self._clock.now()
        state = _state(tensors, None)
        diff_s = self._clock.now() - begun_s
        for _ in range(_HEAD_TRIES):
            head = read_head(self._store)
            self._epoch = 1 if head is None else head.epoch + 1
            if head is not None and head.run_id != self._run_id:
                raise SyncError(f"{self._store.url} holds run {head.run_id!r}, this is {self._run_id!r}")
            catalog = None if head is None else read_catalog(self._store, head)
            if head is not None and catalog is not None and head.digest == state.table.digest:
                new = head.model_copy(update={"epoch": self._epoch, "writer": self._writer, "version": version})
                report = SyncReport(version=version, digest=head.digest, full_bytes=_bytes(state), diff_s=diff_s)
                edges: tuple[Edge, ...] = ()
                if not catalog.reaches(head.digest):
                    edge, _, report = self._keyframe(state, version, report)
                    edges = (edge,)
                    new = self._with_catalog(new, (*catalog.edges, *edges))
            else:
                report = SyncReport(version=version, digest=state.table.digest, full_bytes=_bytes(state), diff_s=diff_s)
                edge, key, report = self._keyframe(state, version, report)
                new = self._with_catalog(self._head(state, version, key), (edge,))
            if swap_head(self._store, head, new):
                self._baseline, self._pending, self._since_keyframe = state, None, 0
                self._acked.clear()
                return report
        raise SyncError(f"{self._store.url}/{HEAD_KEY} changed {_HEAD_TRIES} times while this publisher started")

    def publish(
        self,
        tensors: Tensors,
        *,
        version: int,
        step: int = 0,
        with_limit: bool | None = None,
        allowed: Sequence[Mode] | None = None,
        threads: int | None = None,
    ) -> SyncReport:
        """Publish weights as `version`: a delta from the baseline, or a keyframe where the tensors are other ones.

        `with_limit`, `allowed` and `threads` (see `choice`) override the publisher's own for this version.
        `tensors` are copied. After a SyncError nothing has changed here, and the call can be repeated.
        """
        if self._baseline is None:
            raise SyncError("publish comes after start, which says what the first delta is measured against")
        head = self._owned_head()
        if version < head.version:
            raise SyncError(
                f"version {version} comes after version {head.version} of the same start: it cannot be lower"
            )
        self._promote()
        baseline = self._baseline
        begun_s = self._clock.now()
        state, chunks = self._encode(tensors, baseline, allowed or self._allowed, threads or self._threads)
        encode_s = self._clock.now() - begun_s
        report = SyncReport(version=version, digest=state.table.digest, full_bytes=_bytes(state), encode_s=encode_s)
        edges: list[Edge] = []
        if chunks is not None:
            wanted = self._with_limit if with_limit is None else with_limit
            limit_bytes = self._limit_bytes(baseline, state, chunks) if wanted else 0.0
            report = dataclasses.replace(report, diff_s=self._clock.now() - begun_s - encode_s, limit_bytes=limit_bytes)
            edge, key, report = self._delta(baseline, state, chunks, version, step, report)
            edges = [] if edge.source == edge.target else [edge]
        due = self._since_keyframe + 1 >= self._keyframe_every
        if chunks is None or due:
            base, base_key, with_base = self._keyframe(state, version, report)
            edges.append(base)
            if chunks is None:
                key, report = base_key, with_base
        self._advance_head(state, version, key, edges, fresh=chunks is None)
        self._since_keyframe = 0 if chunks is None or due else self._since_keyframe + 1
        self._pending = state
        self._acked.clear()
        return report

    def ack(self, replica: str, digest: str) -> None:
        """A replica serves `digest`. Only the newest published version counts."""
        if self._pending is not None and digest == self._pending.table.digest:
            self._acked.add(replica)

    def _promotable(self) -> bool:
        return self._pending is not None and self._quorum(frozenset(self._acked))

    def _promote(self) -> None:
        if self._promotable():
            self._baseline, self._pending = self._pending, None

    def _encode(
        self, tensors: Tensors, baseline: _State, allowed: Sequence[Mode], threads: int
    ) -> tuple[_State, list[Chunk] | None]:
        """The new version and its chunks; None for these when no delta leads there."""
        specs, aliases, flat = _layout(tensors)
        if Table(specs=specs, hashes={}, aliases=aliases).layout_difference(baseline.table) is not None:
            return _state(tensors, None), None
        pairs = ((name, baseline.bits[name], flat[name].reshape(-1), spec.dtype) for name, spec in specs.items())
        coded = encode_tensors(pairs, threads=threads, allowed=allowed)
        chunks = [chunk for chunk in coded if chunk.changed]
        table = baseline.table.updated({(c.tensor, c.start): c.new_digest for c in chunks})
        return _state(tensors, table), chunks

    def _limit_bytes(self, baseline: _State, state: _State, chunks: Iterable[Chunk]) -> float:
        parts = ((c, slice(c.start, c.start + c.elems)) for c in chunks)
        return sum(
            stats(baseline.bits[c.tensor][at], state.bits[c.tensor][at], c.dtype, tensor=c.tensor).l2_bytes
            for c, at in parts
        )

    def _delta(
        self, baseline: _State, state: _State, chunks: list[Chunk], version: int, step: int, report: SyncReport
    ) -> tuple[Edge, str, SyncReport]:
        begun_s = self._clock.now()
        packs, entries = write_packs(self._store, chunks, self._pack_bytes)
        density = sum(c.changed for c in entries) / max(1, elements(state.table.specs.values()))
        manifest = DeltaManifest(
            codec=CODEC_VERSION,
            run_id=self._run_id,
            epoch=self._epoch,
            version=version,
            from_digest=baseline.table.digest,
            to_digest=state.table.digest,
            packs=packs,
            chunks=entries,
            full_bytes=report.full_bytes,
            created_at_s=self._wall_s(),
            density=density,
            limit_bytes=report.limit_bytes,
            step=step,
        )
        key = self._store.put_object(manifest.to_bytes(), "json")
        put_s = self._clock.now() - begun_s
        report = dataclasses.replace(report, density=density, bytes_by_mode=by_mode(manifest), put_s=put_s)
        return edge_of(manifest, key, source=manifest.from_digest, span=1), key, report

    def _keyframe(self, state: _State, version: int, report: SyncReport) -> tuple[Edge, str, SyncReport]:
        begun_s = self._clock.now()
        pairs = ((name, None, state.bits[name], spec.dtype) for name, spec in state.table.specs.items())
        chunks = encode_tensors(pairs, threads=self._threads, allowed=_KEYFRAME_MODES)
        encode_s = self._clock.now() - begun_s
        packs, entries = write_packs(self._store, (c for c in chunks if c.elems), self._pack_bytes)
        manifest = BaseManifest(
            codec=CODEC_VERSION,
            run_id=self._run_id,
            epoch=self._epoch,
            version=version,
            to_digest=state.table.digest,
            packs=packs,
            chunks=entries,
            full_bytes=report.full_bytes,
            created_at_s=self._wall_s(),
            tensors=tuple(state.table.specs.values()),
            aliases=dict(state.table.aliases),
            hashes=dict(state.table.hashes),
        )
        key = self._store.put_object(manifest.to_bytes(), "json")
        put_s = self._clock.now() - begun_s - encode_s
        report = dataclasses.replace(
            report,
            density=1.0,
            bytes_by_mode=by_mode(manifest),
            encode_s=report.encode_s + encode_s,
            put_s=report.put_s + put_s,
        )
        return edge_of(manifest, key, source=None, span=0), key, report

    def _head(self, state: _State, version: int, manifest: str) -> Head:
        return Head(
            run_id=self._run_id,
            epoch=self._epoch,
            writer=self._writer,
            version=version,
            digest=state.table.digest,
            manifest=manifest,
            catalog=manifest,  # replaced by `_with_catalog` before anything is written
            created_at_s=self._wall_s(),
        )

    def _with_catalog(self, head: Head, edges: Sequence[Edge]) -> Head:
        catalog = Catalog(run_id=self._run_id, edges=tuple(edges))
        return head.model_copy(update={"catalog": self._store.put_object(catalog.to_bytes(), "json")})

    def _owned_head(self) -> Head:
        head = read_head(self._store)
        if head is None or head.writer != self._writer:
            now = "is gone" if head is None else f"belongs to epoch {head.epoch}"
            raise SyncError(
                f"{self._store.url}/{HEAD_KEY} {now}; this publisher has epoch {self._epoch} of run {self._run_id!r} "
                "and was fenced off: another one was started"
            )
        return head

    def _advance_head(self, state: _State, version: int, manifest: str, edges: Sequence[Edge], *, fresh: bool) -> None:
        """Name the version. `fresh`: of other tensors, so that no older edge can be part of a way to it.

        The compactor and the collector also replace the head, hence more than one try.
        """
        for _ in range(_HEAD_TRIES):
            head = self._owned_head()
            catalog = read_catalog(self._store, head)
            known = () if fresh else catalog.edges
            new = self._with_catalog(self._head(state, version, manifest), (*known, *edges))
            if swap_head(self._store, head, new):
                return
        raise SyncError(f"{self._store.url}/{HEAD_KEY} changed {_HEAD_TRIES} times while version {version} was named")


def edge_of(manifest: Manifest, key: str, *, source: str | None, span: int) -> Edge:
    """A manifest as an edge of the catalog."""
    return Edge(
        source=source,
        target=manifest.to_digest,
        version=manifest.version,
        span=span,
        bytes=manifest.body_bytes,
        manifest=key,
        packs=tuple(pack.key for pack in manifest.packs),
    )


def by_mode(manifest: Manifest) -> dict[str, int]:
    """Bytes of bodies per codec mode."""
    sums: dict[str, int] = {}
    for chunk in manifest.chunks:
        sums[chunk.mode] = sums.get(chunk.mode, 0) + chunk.size
    return dict(sorted(sums.items()))


def _layout(tensors: Tensors) -> tuple[dict[str, TensorSpec], dict[str, str], dict[str, NDArray[Any]]]:
    """Specs in order of names, aliases of tied tensors, and the arrays under their owners' names, contiguous.

    Tied are arrays that are the same memory with the same shape and strides; the first name owns them.
    """
    owners: dict[tuple[object, ...], str] = {}
    specs, aliases, arrays = {}, {}, {}
    for name in sorted(tensors):
        array = tensors[name]
        where = (array.__array_interface__["data"][0], array.dtype.name, array.shape, array.strides)
        owner = owners.setdefault(where, name) if array.size else name
        if owner != name:
            aliases[name] = owner
            continue
        shape = tuple(int(n) for n in array.shape)
        with boundary(SyncError, f"tensor {name!r}"):
            specs[name] = TensorSpec(name=name, dtype=dtype_name(name, array), shape=shape)
        arrays[name] = np.ascontiguousarray(array)
    return specs, aliases, arrays


def _state(tensors: Tensors, table: Table | None) -> _State:
    """Copy the values; hash them where the table is not known already."""
    specs, aliases, arrays = _layout(tensors)
    bits = {name: as_bits(array, specs[name].dtype, name).copy() for name, array in arrays.items()}
    if table is None:
        hashes = {name: chunk_hashes(spec.starts, bits[name]) for name, spec in specs.items()}
        table = Table(specs=specs, hashes=hashes, aliases=aliases)
    return _State(table=table, bits=bits)


def _bytes(state: _State) -> int:
    return sum(spec.elems * item_bytes(spec.dtype) for spec in state.table.specs.values())
