"""Checkpoints and deltas together: applying to a copy or in place with a way back, and telling versions apart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import DataError, HeadraceError, SyncError, boundary
from headrace.sync.backends import sync_folder
from headrace.sync.bits import Bits
from headrace.sync.checkpoint import (
    INDEX,
    Checkpoint,
    Progress,
    carried,
    copy_files,
    journal_of,
    open_checkpoint,
    silent,
)
from headrace.sync.codec import decode_chunk
from headrace.sync.delta_file import Delta
from headrace.sync.staging import Patch, prove, stage
from headrace.sync.version import Table, item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place at which two versions differ, in order of names."""

    tensor: str
    element: int | None
    """In the flat tensor; None where the tensors themselves differ in dtype or shape, or one is absent."""
    words: str


def check_base(checkpoint: Checkpoint, delta: Delta, *, threads: int, progress: Progress = silent) -> Table:
    """Hash a checkpoint and make sure that a delta applies to it. Raises SyncError that names both digests."""
    found = checkpoint.table(threads=threads, progress=progress)
    if found.digest == delta.before.digest:
        return found
    if found.digest == delta.after.digest:
        raise SyncError(f"{checkpoint.path} is version {found.digest} already, to which {delta.where} leads")
    difference = found.layout_difference(delta.before)
    raise SyncError(
        f"wrong base: {checkpoint.path} is version {found.digest}, {delta.where} applies to {delta.before.digest}"
        + (f" ({difference} there)" if difference else "")
    )


def apply_to_copy(base: Path, delta: Delta, out: Path, *, threads: int, progress: Progress = silent) -> Checkpoint:
    """Write what `base` becomes to `out`, with the same shards and with the files beside them (config, tokenizer).

    `out` must not exist; it appears whole and proven, or not at all. Raises DataError, SyncError.
    """
    if out.exists():
        raise DataError(f"{out} exists already; name another place or delete it (--in-place changes {base} itself)")
    checkpoint = open_checkpoint(base)
    check_base(checkpoint, delta, threads=threads, progress=progress)
    folder = not base.is_file() or base.name == INDEX
    temp = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        with boundary(DataError, f"writing {out}"):
            copy_files(_copies(checkpoint, temp, folder=folder), progress)
            copy = open_checkpoint(temp, writable=True)
            _decode_into(copy, checkpoint, delta, progress)
            copy.flush()
            if copy.table(threads=threads, progress=progress, stage="proving").digest != delta.after.digest:
                raise SyncError(f"{out} would not be version {delta.after.digest}; nothing was written")
            for file in copy.files:
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            temp.rename(out)
            sync_folder(out.parent)
    finally:
        if temp.is_dir():
            shutil.rmtree(temp, ignore_errors=True)
        temp.unlink(missing_ok=True)
    return open_checkpoint(out)


def apply_in_place(base: Path, delta: Delta, *, threads: int, progress: Progress = silent) -> Checkpoint:
    """Change a checkpoint's own files: all of it or nothing, also across kill -9 and power cuts.

    Old values are on disk before the first new one; one that was cut off earlier is taken back first. Nobody else may
    read the files meanwhile. Raises DataError, SyncError.
    """
    with alone(base):
        checkpoint = open_checkpoint(base, writable=True)
        linked = [file for file in checkpoint.files if file.is_symlink()]
        if linked:
            raise DataError(f"{linked[0]} is a link to {linked[0].resolve()}, perhaps shared; use -o for a copy")
        odd = [name for name, bits in checkpoint.bits.items() if not bits.flags.aligned]
        if odd:
            raise DataError(f"{base}: tensor {odd[0]!r} lies at an odd address; use -o for a copy")
        check_base(checkpoint, delta, threads=threads, progress=progress)
        patches = stage(
            [delta.step()], after=delta.after, held=checkpoint.bits, held_table=delta.before, back={}
        )  # fmt: skip
        journal = journal_of(checkpoint)
        with boundary(DataError, f"changing {base} in place"):
            try:
                journal.begin(patches)
                _write(patches, checkpoint.bits, progress)
                prove(patches, checkpoint.bits)
            except BaseException:
                journal.recover(checkpoint.bits)
                raise
            journal.clear()
    return checkpoint


def which(checkpoint: Checkpoint, delta: Delta, *, threads: int, progress: Progress = silent) -> str | Difference:
    """ "from" or "to", or the first place at which a checkpoint is neither."""
    found = checkpoint.table(threads=threads, progress=progress)
    if found.digest == delta.before.digest:
        return "from"
    if found.digest == delta.after.digest:
        return "to"
    difference = _layout_difference(delta.before, found)
    if difference is not None:
        return difference
    old_at: tuple[str, int] | None = None
    new_at: tuple[str, int] | None = None
    for spec, start, _ in checkpoint.chunks():
        digest, old, new = (table.chunk(spec.name, start) for table in (found, delta.before, delta.after))
        if digest not in (old, new):
            words = f"tensor {spec.name!r} is neither version's, first in the chunk at element {start}"
            return Difference(tensor=spec.name, element=start, words=words)
        if old != new:
            old_at = old_at or ((spec.name, start) if digest == old else None)
            new_at = new_at or ((spec.name, start) if digest == new else None)
    if old_at is None or new_at is None:
        raise SyncError(f"{checkpoint.path}: all chunks are of one version, but their digest is not")
    words = (
        f"a mixture: tensor {old_at[0]!r} at element {old_at[1]} is of the from-version, "
        f"tensor {new_at[0]!r} at element {new_at[1]} of the to-version"
    )
    later = max(old_at, new_at)
    return Difference(tensor=later[0], element=later[1], words=words)


def first_difference(left: Checkpoint, right: Checkpoint, tables: Sequence[Table]) -> Difference | None:
    """Where two checkpoints with these tables differ first; None when they are equal bit for bit."""
    before, after = tables
    if before.digest == after.digest:
        return None
    difference = _layout_difference(before, after)
    if difference is not None:
        return difference
    for spec, start, bits in left.chunks():
        if before.chunk(spec.name, start) == after.chunk(spec.name, start):
            continue
        other = right.bits[spec.name][start : start + bits.size]
        at = int(np.flatnonzero(bits != other)[0])
        digits = 2 * item_bytes(spec.dtype)
        words = (
            f"tensor {spec.name!r}, element {start + at}: {spec.dtype} bits "
            f"0x{int(bits[at]):0{digits}x} and 0x{int(other[at]):0{digits}x}"
        )
        return Difference(tensor=spec.name, element=start + at, words=words)
    raise SyncError("digests differ, but no chunk does")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep a second one of us from changing the same files. Raises DataError at once where one is at it."""
    with contextlib.ExitStack() as stack, boundary(DataError, f"locking {path}"):
        handle = os.open(path, os.O_RDONLY)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{path} is being changed by another process") from None
        yield


def _copies(checkpoint: Checkpoint, temp: Path, *, folder: bool) -> list[tuple[Path, Path]]:
    if not folder:
        return [(checkpoint.files[0], temp)]
    source = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    temp.mkdir()
    index = [source / INDEX] if len(checkpoint.files) > 1 or (source / INDEX).is_file() else []
    return [(file, temp / file.name) for file in (*checkpoint.files, *index, *carried(source))]


def _decode_into(copy: Checkpoint, checkpoint: Checkpoint, delta: Delta, progress: Progress) -> None:
    """Chunk by chunk; every chunk's new hash is checked as it is decoded."""
    total = sum(entry.elems * item_bytes(delta.before.specs[entry.tensor].dtype) for entry in delta.manifest.chunks)
    done = 0
    for entry in delta.manifest.chunks:
        part = slice(entry.start, entry.start + entry.elems)
        dtype = delta.before.specs[entry.tensor].dtype
        try:
            new = decode_chunk(entry.chunk(delta.body(entry), dtype), checkpoint.bits[entry.tensor][part])
        except HeadraceError as exc:
            raise SyncError(f"{delta.where}: {exc}") from exc
        copy.bits[entry.tensor][part] = new
        done += new.nbytes
        progress("applying", done, total)


def _write(patches: Sequence[Patch], held: Mapping[str, Bits], progress: Progress) -> None:
    done, total = 0, sum(patch.new.nbytes for patch in patches)
    for patch in patches:
        patch.apply(held[patch.tensor])
        done += patch.new.nbytes
        progress("applying", done, total)


def _layout_difference(before: Table, after: Table) -> Difference | None:
    for name in sorted(before.specs.keys() | after.specs.keys()):
        pair = [table.specs.get(name) for table in (before, after)]
        if pair[0] != pair[1]:
            said = [f"{spec.dtype} {list(spec.shape)}" if spec else "absent" for spec in pair]
            return Difference(tensor=name, element=None, words=f"tensor {name!r}: {said[0]} and {said[1]}")
    return None
