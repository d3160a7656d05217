"""A delta as one file: the way from one checkpoint to another, which can be sent, kept and proven by itself.

Layout: 8 bytes magic, 8 bytes little-endian length of the header, its blake3 (32 bytes), the header (JSON), packs. The
header holds the hashes of all chunks of the old version and a manifest, so that a file says by itself what it
applies to and what it leads to. Every byte is bounded by the header and proven before any is decoded; the same two
checkpoints give the same file on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import Field

from headrace.clock import Clock, WallClock
from headrace.errors import DataError, SyncError, boundary
from headrace.sync.backends import sync_folder
from headrace.sync.checkpoint import Checkpoint, Progress, silent
from headrace.sync.codec import MODES, Chunk, Mode, encode_tensors, stats
from headrace.sync.packs import entry_of
from headrace.sync.staging import Place, Step, next_table
from headrace.sync.store import object_key
from headrace.sync.version import (
    CODEC_VERSION,
    MAX_DOCUMENT_BYTES,
    ChunkEntry,
    Count,
    DeltaManifest,
    Document,
    Hash,
    Name,
    PackRef,
    Table,
    TensorSpec,
    item_bytes,
    parse,
)

MAGIC = b"HRDELTA1"
RUN_ID = "delta-file"
"""Run of the manifest in a file, which belongs to none."""
_PACK_BYTES = 128 * 1024 * 1024
_LENGTH_BYTES, _PROOF_BYTES = 8, 32
_START = len(MAGIC) + _LENGTH_BYTES + _PROOF_BYTES


class Header(Document):
    """What a file says before its packs."""

    format: Literal[1]
    tensors: tuple[TensorSpec, ...]
    hashes: dict[Name, tuple[Hash, ...]]
    """Of all chunks of the old version."""
    steps: Annotated[tuple[Count, ...], Field(max_length=64)]
    """Entry i counts changes by 2^i to 2^(i+1) - 1 steps of the last place."""
    manifest: DeltaManifest

    def tables(self) -> tuple[Table, Table]:
        """The old version and the new one. Raises SyncError when the parts do not fit."""
        specs = {spec.name: spec for spec in self.tensors}
        if len(specs) != len(self.tensors) or specs.keys() != self.hashes.keys():
            raise SyncError("its hashes do not belong to its tensors")
        if any(len(self.hashes[name]) != len(spec.starts) for name, spec in specs.items()):
            raise SyncError("a tensor has more or fewer hashes than chunks")
        before = Table(specs=specs, hashes=self.hashes, aliases={})
        return before, next_table(before, self.manifest, run_id=RUN_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Where the time of making a delta went."""

    diff_s: float = 0.0
    """Hashing the old version, counting steps, computing the bound."""
    encode_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A delta in memory or in a mapped file."""

    header: Header
    before: Table
    after: Table
    packs: Sequence[bytes | memoryview]
    where: str
    """For messages."""
    times: Times = Times()

    @property
    def manifest(self) -> DeltaManifest:
        return self.header.manifest

    @cached_property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return _START + len(self.header.to_bytes()) + sum(pack.size for pack in self.manifest.packs)

    def body(self, entry: ChunkEntry) -> bytes:
        """Bytes of one chunk."""
        return bytes(self.packs[entry.pack][entry.offset : entry.offset + entry.size])

    def step(self) -> Step:
        """As a step of a path."""
        bodies: dict[Place, bytes] = {(e.tensor, e.start): self.body(e) for e in self.manifest.chunks}
        return Step(key=self.where, manifest=self.manifest, bodies=bodies)


def make_delta(
    old: Checkpoint,
    new: Checkpoint,
    *,
    threads: int,
    allowed: Sequence[Mode] = MODES,
    progress: Progress = silent,
    clock: Clock | None = None,
) -> Delta:
    """The way from `old` to `new`, which must have the same names, dtypes and shapes. Raises SyncError."""
    clock = clock or WallClock()
    begun_s = clock.now()
    bare = [Table(specs=checkpoint.specs, hashes={}, aliases={}) for checkpoint in (old, new)]
    difference = bare[0].layout_difference(bare[1])
    if difference is not None:
        raise SyncError(f"no delta leads from {old.path} to {new.path}: {difference}")
    before = old.table(threads=threads, progress=progress)
    hashed_s = clock.now()
    pairs = ((name, old.bits[name], new.bits[name], spec.dtype) for name, spec in old.specs.items())
    coded = encode_tensors(
        pairs,
        threads=threads,
        allowed=allowed,
        progress=lambda done: progress("encoding", done, old.full_bytes),
    )
    chunks = [chunk for chunk in coded if chunk.changed]
    encoded_s = clock.now()
    steps, limit_bytes = _measure(old, new, chunks, threads=threads, progress=progress)
    delta = _assembled(old, before, chunks, steps, limit_bytes)
    times = Times(diff_s=clock.now() - encoded_s + hashed_s - begun_s, encode_s=encoded_s - hashed_s)
    return dataclasses.replace(delta, times=times)


def write_delta(delta: Delta, path: Path, *, progress: Progress = silent, clock: Clock | None = None) -> Delta:
    """Write a delta's file: whole, on disk and under its name, or not at all. Returns it with the time that took."""
    clock = clock or WallClock()
    begun_s = clock.now()
    header = delta.header.to_bytes()
    if len(header) > MAX_DOCUMENT_BYTES:
        raise SyncError(f"the header would have {len(header)} bytes, at most {MAX_DOCUMENT_BYTES} can be read")
    done = 0
    with replaced(path) as temp, temp.open("wb") as file:
        start = MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + blake3(header).digest() + header
        for part in (start, *delta.packs):
            file.write(part)
            done += len(part)
            progress("writing", done, delta.file_bytes)
        file.flush()
        os.fsync(file.fileno())
    return dataclasses.replace(delta, times=dataclasses.replace(delta.times, write_s=clock.now() - begun_s))


def is_delta(path: Path) -> bool:
    """Whether a file begins like a delta."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_delta(path: Path) -> Delta:
    """Map a delta's file and prove all of it. Raises DataError where there is none, SyncError where it is damaged."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such delta file")
    if not is_delta(path):
        raise DataError(f"{path} is no delta file: it does not begin with {MAGIC.decode()}")
    with boundary(SyncError, f"reading {path}"):
        data: NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        size = int.from_bytes(data[len(MAGIC) : len(MAGIC) + _LENGTH_BYTES].tobytes(), "little")
        if data.size < _START or not 0 < size <= min(MAX_DOCUMENT_BYTES, data.size - _START):
            raise SyncError(f"{path} is cut off or damaged: {data.size} bytes, a header of {size}")
        text = data[_START : _START + size].tobytes()
        if blake3(text).digest() != data[_START - _PROOF_BYTES : _START].tobytes():
            raise SyncError(f"{path} is damaged: its header is not what it was when it was written")
        header = parse(Header, text, str(path))
        try:
            before, after = header.tables()
        except SyncError as exc:
            raise SyncError(f"{path}: {exc}") from exc
        packs = _packs(data[_START + size :], header.manifest.packs, path)
    return Delta(header=header, before=before, after=after, packs=packs, where=str(path))


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes that name at the end, or goes away after an error."""
    temp = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with boundary(DataError, f"writing {path}"):
        if not path.parent.is_dir():
            raise DataError(f"writing {path}: the folder {path.parent} does not exist")
        try:
            yield temp
            temp.replace(path)
            sync_folder(path.parent)
        finally:
            temp.unlink(missing_ok=True)


def _measure(
    old: Checkpoint, new: Checkpoint, chunks: Sequence[Chunk], *, threads: int, progress: Progress
) -> tuple[tuple[int, ...], float]:
    """Changes by size in octaves of steps, and the bound in bytes."""
    sums = np.zeros(64, np.int64)
    limit_bytes = 0.0
    done, total = 0, sum(chunk.elems * item_bytes(chunk.dtype) for chunk in chunks)

    def measured(chunk: Chunk) -> tuple[tuple[int, ...], float]:
        part = slice(chunk.start, chunk.start + chunk.elems)
        found = stats(old.bits[chunk.tensor][part], new.bits[chunk.tensor][part], chunk.dtype, tensor=chunk.tensor)
        return found.step_histogram, found.l2_bytes

    with ThreadPoolExecutor(threads, thread_name_prefix="measure") as pool:
        for chunk, (histogram, bound) in zip(chunks, pool.map(measured, chunks), strict=True):
            sums[: len(histogram)] += histogram
            limit_bytes += bound
            done += chunk.elems * item_bytes(chunk.dtype)
            progress("measuring", done, total)
    used = np.flatnonzero(sums)
    return tuple(int(n) for n in sums[: used[-1] + 1]) if used.size else (), limit_bytes


def _assembled(
    old: Checkpoint, before: Table, chunks: Sequence[Chunk], steps: tuple[int, ...], limit_bytes: float
) -> Delta:
    packs: list[bytes] = []
    entries, body = [], bytearray()
    for chunk in sorted(chunks, key=lambda c: (c.tensor, c.start)):
        if body and len(body) + len(chunk.body) > _PACK_BYTES:
            packs.append(bytes(body))
            body.clear()
        entries.append(entry_of(chunk, pack=len(packs), offset=len(body)))
        body += chunk.body
    if body:
        packs.append(bytes(body))
    refs = [PackRef(key=object_key(pack, "pack"), size=len(pack)) for pack in packs]
    after = before.updated({(c.tensor, c.start): c.new_digest for c in chunks})
    manifest = DeltaManifest(
        codec=CODEC_VERSION,
        run_id=RUN_ID,
        epoch=1,
        version=1,
        from_digest=before.digest,
        to_digest=after.digest,
        packs=tuple(refs),
        chunks=tuple(entries),
        full_bytes=old.full_bytes,
        created_at_s=0.0,  # no clock: the same checkpoints give the same file
        density=sum(c.changed for c in chunks) / max(1, sum(spec.elems for spec in old.specs.values())),
        limit_bytes=limit_bytes,
        step=0,
    )
    header = Header(
        format=1, tensors=tuple(before.specs.values()), hashes=dict(before.hashes), steps=steps, manifest=manifest
    )
    return Delta(header=header, before=before, after=after, packs=packs, where="the delta")


def _packs(data: NDArray[np.uint8], refs: Sequence[PackRef], path: Path) -> list[memoryview]:
    """Split and prove what follows the header."""
    total = sum(ref.size for ref in refs)
    if data.size != total:
        raise SyncError(f"{path} is cut off or damaged: {data.size} bytes follow its header, it says {total}")
    packs, at = [], 0
    for ref in refs:
        pack = data[at : at + ref.size].data
        if object_key(pack, "pack") != ref.key:
            raise SyncError(f"{path} is damaged within bytes {at} to {at + ref.size} after its header")
        packs.append(pack)
        at += ref.size
    return packs
