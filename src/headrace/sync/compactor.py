"""Behind the publisher, on CPUs: merged deltas for those who come late, and the end of what nobody needs.

Of 32 versions a merged delta has about a quarter of the bytes of the chain, because most elements change more than
once (measured: docs of the codec). Both jobs may run while a publisher is at work: they only ever replace the head by
one that names the same version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import SyncError
from headrace.sync.bits import Bits, as_bits
from headrace.sync.catalog import Catalog, Edge, Head, cheapest_path, read_catalog, read_head, swap_head
from headrace.sync.codec import CHUNK_ELEMS, MODES, Chunk, Mode, encode_chunk, stats
from headrace.sync.lease import leased
from headrace.sync.packs import PackReader, write_packs
from headrace.sync.publisher import edge_of
from headrace.sync.replica import MemoryReplica
from headrace.sync.staging import fetch_steps, hold, stage
from headrace.sync.store import Store
from headrace.sync.version import CODEC_VERSION, DeltaManifest, Table, elements, item_bytes

SKIPS = (2, 4, 8, 16, 32)
_HEAD_TRIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one collection did."""

    edges: int
    """Ways dropped from the catalog."""
    objects: int
    """Objects deleted."""
    bytes: int
    """Their size."""


class Compactor:
    """Merges and collects in one run's store."""

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        pack_bytes: int = 128 * 1024 * 1024,
        allowed: Sequence[Mode] = MODES,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._pack_bytes = pack_bytes
        self._allowed = allowed
        self._wall_s = wall_s

    def squash(self, source: str, target: str) -> Edge:
        """Merge the ways between two versions (digests) into one delta. Needs memory for two copies of the model."""
        head = self._head()
        catalog = read_catalog(self._store, head)
        path = cheapest_path(catalog.edges, {source: 0}, target)
        if path is None or not path[1]:
            raise SyncError(f"no chain of deltas leads from {source[:12]} to {target[:12]}")
        first = cheapest_path(catalog.edges, {None: 0}, source)
        if first is None:
            raise SyncError(f"version {source[:12]} cannot be rebuilt: no keyframe leads to it")
        before, old = self._build(first[1], None, None)
        after, new = self._build(path[1], before, {name: bits.copy() for name, bits in old.items()})
        version, span = path[1][-1].version, sum(edge.span for edge in path[1])
        edge = self._write(head.epoch, version, before, after, old, new, span)
        self._add(edge)
        return edge

    def squash_due(self, skips: Sequence[int] = SKIPS) -> list[Edge]:
        """Write the merged deltas over 2, 4, 8, ... versions that are missing.

        One over n versions ends at each version whose label n divides, so that a late receiver meets one of each size
        and nothing moves when old versions are collected.
        """
        catalog = read_catalog(self._store, self._head())
        chain = main_chain(catalog)
        label = {edge.target: edge.version for edge in catalog.edges}
        have = {(edge.source, edge.target) for edge in catalog.edges}
        due = [
            (chain[end - skip], chain[end])
            for skip in sorted(skips)
            for end in range(skip, len(chain))
            if label[chain[end]] % skip == 0
        ]
        return [self.squash(*pair) for pair in due if pair not in have]

    def collect(
        self, *, keep_versions: int = 64, grace_s: float = 3600.0, skew_s: float = 60.0, dry_run: bool = False
    ) -> Collected:
        """Drop old ways from the catalog, then delete objects that nothing names.

        Stay: what leads to one of the newest `keep_versions` labels; the newest keyframe and all after it; whatever a
        live lease names; objects younger than `grace_s` (a publisher may be about to name them). Ages and leases are
        measured by the store's clock alone, with `skew_s` of tolerance. `dry_run` only counts. Raises SyncError.
        """
        now_s = self._store.now_s()
        dropped = 0 if dry_run else self._trim(keep_versions)
        head = self._head()
        catalog = read_catalog(self._store, head)
        kept = catalog.edges
        if dry_run:
            kept = _kept(head, catalog, keep_versions)
            dropped = len(catalog.edges) - len(kept)
        live = {head.catalog, head.manifest}
        for edge in kept:
            live.update((edge.manifest, *edge.packs))
        live |= leased(self._store, now_s=now_s, skew_s=skew_s)
        count, size = 0, 0
        for stored in self._store.list("objects"):
            if stored.key not in live and stored.modified_s < now_s - grace_s - skew_s:
                if not dry_run:
                    self._store.delete(stored.key)
                count, size = count + 1, size + stored.size
        return Collected(edges=dropped, objects=count, bytes=size)

    # --- parts

    def _head(self) -> Head:
        head = read_head(self._store)
        if head is None:
            raise SyncError(f"{self._store.url} holds no run")
        if head.run_id != self._run_id:
            raise SyncError(f"{self._store.url} holds run {head.run_id!r}, this is {self._run_id!r}")
        return head

    def _replace(self, edges: Callable[[Head, Catalog], tuple[Edge, ...]]) -> int:
        """Change the catalog under the same version; returns how many edges fewer it has."""
        for _ in range(_HEAD_TRIES):
            head = self._head()
            catalog = read_catalog(self._store, head)
            after = Catalog(run_id=self._run_id, edges=edges(head, catalog))
            if after == catalog:
                return 0
            if not after.reaches(head.digest):
                raise SyncError(f"no way would be left to version {head.version}; the catalog stays as it is")
            key = self._store.put_object(after.to_bytes(), "json")
            if swap_head(self._store, head, head.model_copy(update={"catalog": key})):
                return len(catalog.edges) - len(after.edges)
        raise SyncError(f"the head of {self._store.url} changed {_HEAD_TRIES} times while its catalog was replaced")

    def _add(self, edge: Edge) -> None:
        def added(head: Head, catalog: Catalog) -> tuple[Edge, ...]:
            known = {e.target for e in catalog.edges} | {e.source for e in catalog.edges}
            useful = edge not in catalog.edges and edge.source in known
            return (*catalog.edges, edge) if useful else catalog.edges

        self._replace(added)

    def _trim(self, keep_versions: int) -> int:
        return self._replace(lambda head, catalog: _kept(head, catalog, keep_versions))

    def _build(
        self, path: Sequence[Edge], table: Table | None, held: dict[str, Bits] | None
    ) -> tuple[Table, dict[str, Bits]]:
        """Values at the end of a path, in `held` or in new memory."""
        layout = table
        reader = PackReader(self._store)
        if layout is None:
            _, layout = fetch_steps(self._store, reader, path[:1], names=(), table=None, run_id=self._run_id)
            held = hold(MemoryReplica.zeros(layout).arrays(), layout, partial=False)
        assert held is not None, "there is memory or there was no table"
        steps, after = fetch_steps(self._store, reader, path, names=layout.specs, table=table, run_id=self._run_id)
        for patch in stage(steps, after=after, held=held, held_table=table, back={}):
            patch.apply(held[patch.tensor])
        return after, held

    def _write(
        self,
        epoch: int,
        version: int,
        before: Table,
        after: Table,
        old: dict[str, Bits],
        new: dict[str, Bits],
        span: int,
    ) -> Edge:
        chunks: list[Chunk] = []
        limit_bytes = 0.0
        for name, spec in after.specs.items():
            for start in spec.starts:
                part = slice(start, start + CHUNK_ELEMS)
                was, now = as_bits(old[name][part], spec.dtype, name), as_bits(new[name][part], spec.dtype, name)
                if np.array_equal(was, now):
                    continue
                chunk = encode_chunk(was, now, tensor=name, start=start, dtype=spec.dtype, allowed=self._allowed)
                limit_bytes += stats(was, now, spec.dtype, tensor=name).l2_bytes
                chunks.append(chunk)
        packs, entries = write_packs(self._store, chunks, self._pack_bytes)
        manifest = DeltaManifest(
            codec=CODEC_VERSION,
            run_id=self._run_id,
            epoch=epoch,
            version=version,
            from_digest=before.digest,
            to_digest=after.digest,
            packs=packs,
            chunks=entries,
            full_bytes=sum(s.elems * item_bytes(s.dtype) for s in after.specs.values()),
            created_at_s=self._wall_s(),
            density=sum(c.changed for c in entries) / max(1, elements(after.specs.values())),
            limit_bytes=limit_bytes,
            step=0,
        )
        key = self._store.put_object(manifest.to_bytes(), "json")
        return edge_of(manifest, key, source=before.digest, span=span)


def _kept(head: Head, catalog: Catalog, keep_versions: int) -> tuple[Edge, ...]:
    bases = [i for i, edge in enumerate(catalog.edges) if edge.source is None]
    newest = bases[-1] if bases else 0
    needed = catalog.edges[newest].version if bases else 0
    floor = min(head.version - keep_versions, needed)
    return tuple(e for i, e in enumerate(catalog.edges) if i == newest or e.version > floor)


def main_chain(catalog: Catalog) -> list[str]:
    """Digests along plain deltas, from the oldest one that is reachable that way to the newest."""
    plain = [edge for edge in catalog.edges if edge.span == 1 and edge.source is not None]
    if not plain:
        return []
    into = {edge.target: edge.source for edge in plain}
    chain = [plain[-1].target]
    while (source := into.get(chain[-1])) is not None and source not in chain:
        chain.append(source)
    return chain[::-1]
