"""Replicas without an engine: weights in memory, weights in a mapped file, and a folder that follows a run.

A folder that is followed holds model.safetensors and, written after it, version.json. Each update is a new file and a
rename, so who opens it finds one version, whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SyncError, boundary
from headrace.sync.backends import sync_folder
from headrace.sync.bits import LAYOUTS, Bits
from headrace.sync.catalog import read_catalog, read_head
from headrace.sync.journal import Journal
from headrace.sync.layout import LENGTH_BYTES, read_layout
from headrace.sync.lease import Leases
from headrace.sync.packs import read_manifest
from headrace.sync.receiver import Receiver
from headrace.sync.report import SyncReport
from headrace.sync.store import Store
from headrace.sync.version import BaseManifest, Table, TensorSpec, item_bytes

_ALIGN_BYTES = 64
WEIGHTS, VERSION, JOURNAL = "model.safetensors", "version.json", "undo.journal"


class MemoryReplica:
    """A target of plain arrays."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = dict(arrays)

    @classmethod
    def zeros(cls, table: Table) -> MemoryReplica:
        """Room for a version, tied tensors once."""
        return cls({n: np.zeros(s.elems, LAYOUTS[s.dtype].unsigned) for n, s in table.specs.items()})

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        return self._arrays

    def pause(self) -> None:
        return None

    def resume(self) -> None:
        return None

    def changed(self, names: frozenset[str]) -> None:
        return None


class MappedReplica(MemoryReplica):
    """A target whose arrays are a file, changed in place; nobody else may read it during an update.

    Opening one whose process was killed in the middle of an update puts the version before it back.
    """

    def __init__(self, folder: Path) -> None:
        self._map = np.memmap(folder / WEIGHTS, dtype=np.uint8, mode="r+")
        self.layout = read_layout(self._map, str(folder / WEIGHTS))
        super().__init__({name: part for name, (_, part) in self.layout.items()})
        self.journal = Journal(folder / JOURNAL, flush=self._map.flush)
        bits: dict[str, Bits] = {name: part for name, (_, part) in self.layout.items()}
        self.recovered = self.journal.recover(bits)
        """An update had been cut off."""

    @classmethod
    def create(cls, folder: Path, table: Table) -> MappedReplica:
        """A file of zeros with room for a version."""
        folder.mkdir(parents=True, exist_ok=True)
        header, size = _header(table)
        temp = folder / f"{WEIGHTS}.partial"
        with temp.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
        temp.replace(folder / WEIGHTS)
        return cls(folder)


def pull(store: Store, folder: Path, *, run_id: str, replica: str | None = None) -> SyncReport | None:
    """Bring a folder to the head of a run, by a delta from what it holds where that is possible.

    `replica` names the lease to take (stores that can be written to). None when it is up to date or nothing was
    published. Raises SyncError; the folder then holds what it held.
    """
    with boundary(SyncError, f"pulling run {run_id!r} into {folder}"):
        table = newest_layout(store)
        if table is None:
            return None
        target = _loaded(folder / WEIGHTS, table) or MemoryReplica.zeros(table)
        leases = None if replica is None else Leases(store, replica=replica)
        receiver = Receiver(store, target, run_id=run_id, cache=folder / ".packs", leases=leases)
        report = receiver.sync()
        assert receiver.table is not None, "a sync that returns has a version"
        if report is None or (_written(folder) == receiver.digest and not report.body_bytes):
            return None
        _write(folder, target, receiver.table)
        about = {"run_id": run_id, "version": receiver.version, "digest": receiver.digest}
        temp = folder / f"{VERSION}.partial"
        temp.write_text(json.dumps(about), encoding="utf-8")
        temp.replace(folder / VERSION)
        if leases is not None:
            leases.release()
        return report


def newest_layout(store: Store) -> Table | None:
    """Tensors of the newest keyframe that can be read; None where nothing was published."""
    head = read_head(store)
    if head is None:
        return None
    last: SyncError | None = None
    for edge in reversed(read_catalog(store, head).edges):
        if edge.source is None:
            try:
                return read_manifest(store, edge.manifest, BaseManifest).table()
            except SyncError as exc:
                last = exc
    raise last or SyncError(f"{store.url}: the run has no keyframe")


def _header(table: Table) -> tuple[bytes, int]:
    """Header of a safetensors file for a version, and the size of what follows; widest elements first, so aligned."""
    at = 0
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, spec in sorted(_files(table).items(), key=lambda item: (-item_bytes(item[1].dtype), item[0])):
        size = spec.elems * item_bytes(spec.dtype)
        about[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGN_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, at


def _files(table: Table) -> dict[str, TensorSpec]:
    """What a file holds of a version: tied tensors under each of their names, for loaders differ in which they read."""
    tied = {a: table.specs[owner].model_copy(update={"name": a}) for a, owner in table.aliases.items()}
    return {**table.specs, **tied}


def _write(folder: Path, target: MemoryReplica, table: Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header, _ = _header(table)
    temp = folder / f"{WEIGHTS}.partial"
    arrays = target.arrays()
    with temp.open("wb") as file:
        file.write(header)
        for name in json.loads(header[LENGTH_BYTES:]):
            if name != "__metadata__":
                file.write(arrays[table.owner(name)].reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    temp.replace(folder / WEIGHTS)
    sync_folder(folder)


def _loaded(path: Path, table: Table) -> MemoryReplica | None:
    """What a folder holds, when it is of these tensors."""
    if not path.exists():
        return None
    data = np.fromfile(path, np.uint8)
    try:
        layout = read_layout(data, str(path))
    except SyncError:
        return None
    if {name: spec for name, (spec, _) in layout.items()} != _files(table):
        return None
    return MemoryReplica({name: layout[name][1] for name in table.specs})


def _written(folder: Path) -> str | None:
    """Digest that version.json names."""
    try:
        digest = json.loads((folder / VERSION).read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if isinstance(digest, str) else None
