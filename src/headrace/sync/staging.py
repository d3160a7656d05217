"""From manifests to patches: everything is decoded, folded and proven in host memory while the old version is served.

What is left for the pause is one scatter per chunk; each patch also holds the old values of the places it touches, so
the way back costs as much as the way there and needs neither a reload nor a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, SyncError, did_you_mean
from headrace.sync.bits import Bits, as_bits
from headrace.sync.catalog import Edge, Head
from headrace.sync.codec import CHUNK_ELEMS, decode_chunk
from headrace.sync.codec_ctx import kernels
from headrace.sync.packs import Manifest, PackReader, UnusableError, read_manifest
from headrace.sync.report import SyncReport
from headrace.sync.store import Store
from headrace.sync.version import (
    BaseManifest,
    ChunkEntry,
    DeltaManifest,
    Table,
    check_chunk,
    elements,
    item_bytes,
    state_hash,
)

Place = tuple[str, int]
"""A chunk: name of a tensor (of one that is held: perhaps an alias) and first element."""
_SPARSE_SHARE = 0.25
"""Up to this share of changed elements, indices and values are smaller than two copies of the chunk."""


class DriftError(SyncError):
    """What a receiver holds is not what it should hold: nothing can be built on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """How one chunk changes, both ways."""

    tensor: str
    start: int
    elems: int
    changed: int
    where: NDArray[np.uint32] | None
    """Changed elements, relative to `start`; None: all of them."""
    new: Bits
    old: Bits
    new_hash: str
    old_hash: str
    """xxh3-128 of the whole chunk after and before."""

    @property
    def nbytes(self) -> int:
        return self.new.nbytes + self.old.nbytes + (0 if self.where is None else self.where.nbytes)

    def apply(self, tensor: Bits) -> None:
        """Write the new values into the flat tensor."""
        self._write(tensor, self.new)

    def revert(self, tensor: Bits) -> None:
        """Write the old values into the flat tensor."""
        self._write(tensor, self.old)

    def before(self, chunk: Bits) -> Bits:
        """A copy of the chunk as it was before, from the chunk as it is after."""
        copy = chunk.copy()
        copy[slice(None) if self.where is None else self.where] = self.old
        return copy

    def reversed(self) -> Patch:
        """The way back as a patch."""
        return replace(self, new=self.old, old=self.new, new_hash=self.old_hash, old_hash=self.new_hash)

    def _write(self, tensor: Bits, values: Bits) -> None:
        part = tensor[self.start : self.start + self.elems]
        part[slice(None) if self.where is None else self.where] = values


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One manifest of a path, with the bodies that this receiver needs."""

    key: str
    manifest: Manifest
    bodies: Mapping[Place, bytes]


def fetch_steps(
    store: Store, packs: PackReader, path: Iterable[Edge], *, names: Iterable[str], table: Table | None, run_id: str
) -> tuple[list[Step], Table]:
    """Fetch a path, for the tensors `names` only, and follow the hashes of the version along it.

    Returns the steps and the table of the end. Raises UnusableError that names the manifest which is no good.
    """
    steps, names = [], set(names)
    for edge in path:
        try:
            manifest: Manifest
            if edge.source is None:
                manifest = read_manifest(store, edge.manifest, BaseManifest)
            else:
                manifest = read_manifest(store, edge.manifest, DeltaManifest)
            if manifest.to_digest != edge.target:
                raise SyncError(f"it leads to {manifest.to_digest[:12]}, the catalog says {edge.target[:12]}")
            table = next_table(table, manifest, run_id=run_id)
            owners = {table.owner(name) for name in names}
            steps.append(Step(key=edge.manifest, manifest=manifest, bodies=packs.bodies(manifest, owners)))
        except HeadraceError as exc:
            raise UnusableError(edge.manifest, str(exc)) from exc
    if table is None:
        raise SyncError("an empty path leads nowhere from nothing")
    return steps, table


def next_table(table: Table | None, manifest: Manifest, *, run_id: str) -> Table:
    """The version that a manifest leads to from `table`. Raises SyncError when it does not start there."""
    if manifest.run_id != run_id:
        raise SyncError(f"version {manifest.version} belongs to run {manifest.run_id!r}, this is {run_id!r}")
    if isinstance(manifest, BaseManifest):
        after = manifest.table()
        for chunk in manifest.chunks:
            check_chunk(chunk, after.specs.get(chunk.tensor))
            if chunk.new != after.chunk(chunk.tensor, chunk.start) or chunk.old is not None:
                raise SyncError(f"keyframe: chunk {chunk.start} of {chunk.tensor!r} is not of its version")
        return after
    if table is None or manifest.from_digest != table.digest:
        have = "nothing" if table is None else table.digest[:12]
        raise SyncError(
            f"the delta to version {manifest.version} applies to {manifest.from_digest[:12]}, here is {have}"
        )
    for chunk in manifest.chunks:
        check_chunk(chunk, table.specs.get(chunk.tensor))
        if chunk.old not in (None, table.chunk(chunk.tensor, chunk.start)):
            raise SyncError(
                f"chunk {chunk.start} of {chunk.tensor!r} applies to another state than that of its version"
            )
    after = table.updated({(chunk.tensor, chunk.start): chunk.new for chunk in manifest.chunks})
    if after.digest != manifest.to_digest:
        raise SyncError(f"the delta leads to {after.digest[:12]}, it says {manifest.to_digest[:12]}")
    return after


def stage(
    steps: Sequence[Step],
    *,
    after: Table,
    held: Mapping[str, Bits],
    held_table: Table | None,
    back: Mapping[Place, Patch],
    limit_bytes: int | None = None,
    threads: int = 1,
) -> list[Patch]:
    """Fold a path, chunk by chunk, into patches against what is held now.

    `held` are flat bits per tensor; `held_table` says what they should hash to (None: unknown, only a keyframe may
    come). `back` are patches to undo first. Every intermediate hash is checked. Raises DriftError when what is held
    is not `held_table`, UnusableError that names a bad manifest, SyncError above `limit_bytes`.
    """
    names: dict[str, list[str]] = {}
    for name in held:
        names.setdefault(after.owner(name), []).append(name)
    queue: dict[Place, list[tuple[Step, ChunkEntry]]] = {place: [] for place in back}
    for step in steps:
        for chunk in step.manifest.chunks:
            for name in names.get(chunk.tensor, ()):
                queue.setdefault((name, chunk.start), []).append((step, chunk))
    patches = []
    used_bytes = sum(len(body) for step in steps for body in step.bodies.values())

    def fold(item: tuple[Place, list[tuple[Step, ChunkEntry]]]) -> Patch | None:
        place, todo = item
        return _fold(place, todo, after=after, held=held[place[0]], table=held_table, back=back.get(place))

    with ThreadPoolExecutor(threads, thread_name_prefix="delta-stage") as pool:
        waiting = [pool.submit(fold, item) for item in sorted(queue.items(), key=lambda item: item[0])]
        try:
            for future in waiting:
                patch = future.result()
                if patch is not None:
                    patches.append(patch)
                    used_bytes += patch.nbytes
                if limit_bytes is not None and used_bytes > limit_bytes:
                    raise SyncError(f"staging takes more than the {limit_bytes} bytes of memory that it may use")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return patches


def _fold(
    place: Place,
    todo: Sequence[tuple[Step, ChunkEntry]],
    *,
    after: Table,
    held: Bits,
    table: Table | None,
    back: Patch | None,
) -> Patch | None:
    name, start = place
    spec = after.specs[after.owner(name)]
    elems = min(spec.elems - start, todo[0][1].elems if todo else back.elems if back else 0)
    now = held[start : start + elems]
    now_hash = state_hash(now)
    if table is not None and now_hash != table.chunk(table.owner(name), start):
        raise DriftError(f"chunk {start} of {name!r} is not what this receiver was given: its weights were changed")
    at, at_hash = now, now_hash
    if back is not None:
        at = back.before(now)
        at_hash = state_hash(at)
        if at_hash != back.old_hash:
            raise DriftError(f"chunk {start} of {name!r}: undoing the last version does not give the one before")
    for step, chunk in todo:
        try:
            coded = chunk.chunk(step.bodies[chunk.tensor, chunk.start], spec.dtype)
            at = decode_chunk(coded, None if isinstance(step.manifest, BaseManifest) else at)
        except HeadraceError as exc:
            raise UnusableError(step.key, str(exc)) from exc
        at_hash = chunk.new
    where = kernels().changed_positions(now, at)
    if where.size == 0:
        return None
    sparse = where.size <= _SPARSE_SHARE * elems
    return Patch(
        tensor=name,
        start=start,
        elems=elems,
        changed=int(where.size),
        where=where if sparse else None,
        new=at[where] if sparse else at,
        old=now[where] if sparse else now.copy(),
        new_hash=at_hash,
        old_hash=now_hash,
    )


def prove(patches: Iterable[Patch], held: Mapping[str, Bits], *, back: bool = False) -> None:
    """Hash the chunks that patches touched: all new, or all old again. Raises SyncError that names the first other."""
    for patch in patches:
        want = patch.old_hash if back else patch.new_hash
        if state_hash(held[patch.tensor][patch.start : patch.start + patch.elems]) != want:
            raise SyncError(f"chunk {patch.start} of {patch.tensor!r} is not what it should be after the scatter")


def report_of(head: Head, after: Table, steps: Iterable[Step], patches: Iterable[Patch]) -> SyncReport:
    """What a path brings, without times."""
    sums: dict[str, int] = {}
    limit_bytes = 0.0
    for step in steps:
        for chunk in step.manifest.chunks:
            sums[chunk.mode] = sums.get(chunk.mode, 0) + len(step.bodies.get((chunk.tensor, chunk.start), b""))
        limit_bytes += step.manifest.limit_bytes if isinstance(step.manifest, DeltaManifest) else 0.0
    changed = {(after.owner(patch.tensor), patch.start): patch.changed for patch in patches}
    return SyncReport(
        version=head.version,
        digest=after.digest,
        density=sum(changed.values()) / max(1, elements(after.specs.values())),
        full_bytes=sum(spec.elems * item_bytes(spec.dtype) for spec in after.specs.values()),
        bytes_by_mode=dict(sorted(sums.items())),
        limit_bytes=limit_bytes,
    )


def hold(arrays: Mapping[str, NDArray[Any]], table: Table, *, partial: bool) -> dict[str, Bits]:
    """Flat writable bits of the arrays that an engine holds, each piece of memory once.

    Raises SyncError where one does not fit the version or, unless `partial`, where the version has more tensors.
    """
    held: dict[str, Bits] = {}
    seen: set[tuple[int, int]] = set()
    for name in sorted(arrays, key=lambda n: (n in table.aliases, n)):
        array = arrays[name]
        spec = table.specs.get(table.owner(name))
        if spec is None:
            raise SyncError(
                f"the engine holds tensor {name!r}, the version does not: {did_you_mean(name, table.specs)}"
            )
        if array.size != spec.elems or array.dtype.itemsize != item_bytes(spec.dtype):
            raise SyncError(
                f"tensor {name!r}: the engine holds {array.size} x {array.dtype.name}, "
                f"the version {list(spec.shape)} {spec.dtype}"
            )
        if not array.flags.writeable:
            raise SyncError(f"tensor {name!r} of the engine cannot be written to")
        memory = (array.__array_interface__["data"][0], array.nbytes)
        if array.size and memory in seen:
            continue
        seen.add(memory)
        held[name] = as_bits(array, spec.dtype, name)
    missing = table.specs.keys() - {table.owner(name) for name in arrays}
    if missing and not partial:
        raise SyncError(f"the version has tensors that the engine does not hold: {', '.join(sorted(missing)[:5])}")
    return held


def first_drift(table: Table, held: Mapping[str, Bits], skip: Container[Place] = ()) -> Place | None:
    """The first chunk held that is not that of the version."""
    for name, bits in held.items():
        spec = table.specs[table.owner(name)]
        for start in spec.starts:
            if (name, start) not in skip and state_hash(bits[start : start + CHUNK_ELEMS]) != table.chunk(
                spec.name, start
            ):
                return name, start
    return None


def table_of(layout: Table, held: Mapping[str, Bits]) -> Table | None:
    """The version that an engine really holds, by hashing it; None when it is none, or only some of the tensors."""
    owners = {layout.owner(name): name for name in reversed(list(held))}
    if not layout.specs.keys() <= owners.keys():
        return None
    hashes = {name: chunk_hashes(spec.starts, held[owners[name]]) for name, spec in layout.specs.items()}
    table = Table(specs=layout.specs, hashes=hashes, aliases=layout.aliases)
    return None if first_drift(table, {n: b for n, b in held.items() if n in table.aliases}) else table


def chunk_hashes(starts: range, bits: Bits) -> tuple[str, ...]:
    """Hash of each chunk of a flat tensor."""
    return tuple(state_hash(bits[start : start + CHUNK_ELEMS]) for start in starts)
