"""Folders as both ends of delivery: one is published version by version, others follow it.

Every call may be a process of its own. Publishing therefore first rebuilds what the store has as its newest version
and measures the delta against that, never against what somebody believes was published.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.clock import Clock, WallClock
from headrace.errors import DataError, DeadlineError, SyncError
from headrace.sync.catalog import Catalog, Edge, Head, read_catalog, read_head
from headrace.sync.checkpoint import INDEX, Checkpoint, carried, open_checkpoint
from headrace.sync.delta_apply import alone
from headrace.sync.layout import ARRAY_DTYPES, array_of
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.receiver import Receiver
from headrace.sync.replica import VERSION, WEIGHTS, MemoryReplica, newest_layout, pull
from headrace.sync.report import SyncReport
from headrace.sync.store import Store
from headrace.sync.version import Table

RUN_ID = "weights"
"""Run of a store that was begun without another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What publishing a folder did."""

    report: SyncReport | None
    """None: the folder is what the head names already."""
    run_id: str
    version: int
    digest: str
    keyframe: bool
    """A whole version was stored: the first one, a due one, or one of other tensors."""


def publish_folder(
    path: Path,
    store: Store,
    *,
    run_id: str | None = None,
    keyframe_every: int = 25,
    threads: int = 2,
    stage: Callable[[str], None] = lambda stage: None,
) -> Published:
    """Publish a checkpoint as the next version of a store: whole if it is the first one, else as a delta.

    Needs memory for about three copies of the model. Takes the run over: another publisher at work in this store is
    fenced off. `stage` hears what is being done. Raises DataError, SyncError.
    """
    checkpoint = open_checkpoint(path)
    head = read_head(store)
    run_id = run_id or (RUN_ID if head is None else head.run_id)
    if head is not None and head.run_id != run_id:
        raise SyncError(f"{store.url} holds run {head.run_id!r}, --run-id is {run_id!r}")
    publisher = DeltaPublisher(
        store, run_id=run_id, threads=threads, keyframe_every=_until_due(store, head, keyframe_every)
    )
    if head is None:
        stage("encoding the first version")
        report = publisher.start(_arrays(checkpoint, {}), version=0)
        return Published(report=report, run_id=run_id, version=0, digest=report.digest, keyframe=True)
    stage(f"rebuilding version {head.version}")
    replica, held = _rebuilt(store, head)
    ties = {alias: owner for alias, owner in held.aliases.items() if _tied(checkpoint, alias, owner)}
    stage("hashing")
    if _tied_table(checkpoint, ties, threads).digest == head.digest:
        return Published(report=None, run_id=run_id, version=head.version, digest=head.digest, keyframe=False)
    stage("encoding")
    publisher.start(_served(replica, held), version=head.version)
    version = head.version + 1
    report = publisher.publish(_arrays(checkpoint, ties), version=version)
    new = read_head(store)
    edges = () if new is None else read_catalog(store, new).edges
    keyframe = any(edge.source is None and edge.target == report.digest for edge in edges)
    return Published(report=report, run_id=run_id, version=version, digest=report.digest, keyframe=keyframe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A folder holds a version now."""

    run_id: str
    version: int
    digest: str
    report: SyncReport | None
    """None: it held that version before."""


def follow(
    store: Store,
    folder: Path,
    *,
    once: bool = False,
    timeout_s: float | None = None,
    every_s: float = 1.0,
    lease: bool = True,
    files_from: Path | None = None,
    failed: Callable[[SyncError], None] = lambda error: None,
    wait: Callable[[float], None] = time.sleep,
    clock: Clock | None = None,
) -> Generator[Landing, None, None]:
    """Keep a folder at the head of a store, and say so each time it got there; with `once`, stop at the first time.

    What comes before the first landing raises. Later failures go to `failed`, the folder keeps its version, and the
    next try comes after `every_s`. `files_from`: a checkpoint whose other files (config, tokenizer) are copied.
    Raises DeadlineError when no new version came for `timeout_s`, DataError, SyncError.
    """
    clock = clock or WallClock()
    run_id: str | None = None
    digest: str | None = None
    until_s = None if timeout_s is None else clock.now() + timeout_s
    with _room(folder):
        _carry(files_from, folder)
        while True:
            try:
                head = read_head(store)
                if head is not None and head.digest != digest:
                    run_id = _same_run(store, head, run_id)
                    if digest is None:
                        _ours(store, head, folder)
                    landing = _land(store, folder, run_id, lease=lease)
                    digest = landing.digest
                    until_s = None if timeout_s is None else clock.now() + timeout_s
                    yield landing
                    if once:
                        return
                elif head is None and once and timeout_s is None:
                    raise SyncError(f"nothing was published in {store.url} yet (--timeout S waits for it)")
            except SyncError as exc:
                if digest is None:
                    raise
                failed(exc)
            if until_s is not None and clock.now() >= until_s:
                raise DeadlineError(f"no new version in {store.url} for {timeout_s:g} s")
            wait(every_s if until_s is None else max(0.0, min(every_s, until_s - clock.now())))


def resolve(catalog: Catalog, name: str) -> str:
    """The digest of a version that is named by its number or by the first digits of its digest. Raises SyncError."""
    labels = {str(edge.version): edge.target for edge in catalog.edges}
    digests = {edge.target for edge in catalog.edges} | {edge.source for edge in catalog.edges if edge.source}
    if name in labels:
        return labels[name]
    found = sorted(d for d in digests if d.startswith(name)) if re.fullmatch(r"[0-9a-f]{4,64}", name) else []
    if len(found) == 1:
        return found[0]
    known = ", ".join(sorted(labels, key=int)) or "none"
    many = f" ({len(found)} versions begin so)" if found else ""
    raise SyncError(f"version {name!r}: the store knows {known}, or a digest's first digits, at least 4{many}")


def newest(store: Store) -> tuple[Head, Catalog]:
    """Head and catalog of a store. Raises SyncError where nothing was published."""
    head = read_head(store)
    if head is None:
        raise SyncError(f"nothing was published in {store.url}: there is no head.json")
    return head, read_catalog(store, head)


# --- publishing


def _until_due(store: Store, head: Head | None, keyframe_every: int) -> int:
    """What to tell a publisher that counts from its own start: 1 when the next version is due a keyframe."""
    if head is None:
        return keyframe_every
    since = 0
    for edge in reversed(read_catalog(store, head).edges):
        if edge.source is None:
            break
        since += edge.span == 1
    return 1 if since + 1 >= keyframe_every else sys.maxsize


def _rebuilt(store: Store, head: Head) -> tuple[MemoryReplica, Table]:
    layout = newest_layout(store)
    if layout is None:
        raise SyncError(f"{store.url}: the head went away")
    replica = MemoryReplica.zeros(layout)
    receiver = Receiver(store, replica, run_id=head.run_id)
    receiver.sync(head)
    if receiver.table is None:
        raise SyncError(f"version {head.version} could not be rebuilt from {store.url}")
    return replica, receiver.table


def _served(replica: MemoryReplica, table: Table) -> dict[str, NDArray[Any]]:
    """Rebuilt bits as arrays of their dtypes, tied ones under all of their names."""
    bits = replica.arrays()
    arrays = {n: array_of(s, bits[n]) for n, s in table.specs.items()}
    return {**arrays, **{alias: arrays[owner] for alias, owner in table.aliases.items()}}


def _arrays(checkpoint: Checkpoint, ties: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    arrays = {}
    for name, spec in checkpoint.specs.items():
        if spec.dtype not in ARRAY_DTYPES:
            raise DataError(f"{checkpoint.path}: tensor {name!r} is {spec.dtype}; {', '.join(ARRAY_DTYPES)} can travel")
        arrays[name] = array_of(spec, checkpoint.bits[name])
    return {name: arrays[ties.get(name, name)] for name in arrays}


def _tied(checkpoint: Checkpoint, alias: str, owner: str) -> bool:
    """Whether a file holds, under two names, what the store has once."""
    specs = [checkpoint.specs.get(name) for name in (alias, owner)]
    if specs[0] is None or specs[1] is None or specs[0].model_copy(update={"name": owner}) != specs[1]:
        return False
    return bool(np.array_equal(checkpoint.bits[alias], checkpoint.bits[owner]))


def _tied_table(checkpoint: Checkpoint, ties: Mapping[str, str], threads: int) -> Table:
    found = checkpoint.table(threads=threads)
    own = {name: spec for name, spec in found.specs.items() if name not in ties}
    return Table(specs=own, hashes={name: found.hashes[name] for name in own}, aliases=dict(ties))


# --- following


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """A folder that we alone write to; what an interrupted update left goes away."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; --follow names a folder")
    if (folder / INDEX).is_file():
        raise DataError(f"{folder} holds shards ({INDEX}); what follows is one {WEIGHTS}: name another folder")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone(folder):
            yield
    finally:
        for name in (WEIGHTS, VERSION):
            (folder / f"{name}.partial").unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


def _carry(source: Path | None, folder: Path) -> None:
    if source is not None:
        if not source.is_dir():
            raise DataError(f"{source}: there is no such folder to take config and tokenizer from")
        for file in carried(source):
            shutil.copyfile(file, folder / file.name)


def _same_run(store: Store, head: Head, run_id: str | None) -> str:
    if run_id not in (None, head.run_id):
        raise SyncError(f"{store.url} holds run {head.run_id!r} now, it was {run_id!r}")
    return head.run_id


def _ours(store: Store, head: Head, folder: Path) -> None:
    """Refuse to replace weights that did not come from this run: they may be somebody's only copy."""
    if not (folder / WEIGHTS).exists() or (folder / VERSION).exists():
        return
    found = open_checkpoint(folder / WEIGHTS).table().digest
    edges: Sequence[Edge] = read_catalog(store, head).edges
    if found not in {edge.target for edge in edges} | {edge.source for edge in edges}:
        raise DataError(
            f"{folder / WEIGHTS} is version {found[:12]}, which is none of run {head.run_id!r}; "
            "it would be replaced: move it away or name another folder"
        )


def _land(store: Store, folder: Path, run_id: str, *, lease: bool) -> Landing:
    replica = _replica_name(folder) if lease and not store.url.startswith(("http://", "https://")) else None
    report = pull(store, folder, run_id=run_id, replica=replica)
    about = json.loads((folder / VERSION).read_text(encoding="utf-8"))
    return Landing(run_id=run_id, version=about["version"], digest=about["digest"], report=report)


def _replica_name(folder: Path) -> str:
    """Of the lease: this folder on this machine."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:60]
    return f"{host}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
