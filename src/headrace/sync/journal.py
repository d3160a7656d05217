"""Undo on disk: a replica whose weights lie in a file can be killed in the middle of a scatter and still go back.

The journal is complete on disk before the first element changes and goes away after the last one is on disk, so what
is found at the next start is nothing, a torn journal (nothing was changed yet), or a whole one (old values go back).
Layout: 8 bytes little-endian length of the header, JSON header, arrays, blake3 of all before (32 bytes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from headrace.errors import SyncError
from headrace.sync.backends import sync_folder
from headrace.sync.bits import Bits
from headrace.sync.staging import Patch

_LENGTH_BYTES = 8
_PROOF_BYTES = 32


class Journal:
    """Old values of one update, in one file."""

    def __init__(self, path: Path, *, flush: Callable[[], None]) -> None:
        """`flush` brings the weights themselves to disk."""
        self._path = path
        self._flush = flush

    def begin(self, patches: Sequence[Patch]) -> None:
        """Record what the patches will overwrite; durable when this returns."""
        rows, arrays = [], []
        for patch in patches:
            where = np.arange(patch.elems, dtype=np.uint32) if patch.where is None else patch.where
            rows.append([patch.tensor, patch.start, int(where.size), patch.old.dtype.str])
            arrays += [where.astype("<u4").tobytes(), patch.old.tobytes()]
        header = json.dumps(rows).encode()
        data = b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *arrays])
        temp = self._path.with_name(self._path.name + ".partial")
        with temp.open("wb") as file:
            file.write(data + blake3(data).digest())
            file.flush()
            os.fsync(file.fileno())
        temp.replace(self._path)
        sync_folder(self._path.parent)

    def clear(self) -> None:
        """The update is whole, one way or the other."""
        self._flush()
        self._path.unlink(missing_ok=True)

    def recover(self, tensors: Mapping[str, Bits]) -> bool:
        """Put old values back where an update was cut off; True if there was one."""
        self._path.with_name(self._path.name + ".partial").unlink(missing_ok=True)
        if not self._path.exists():
            return False
        data = self._path.read_bytes()
        body, proof = data[:-_PROOF_BYTES], data[-_PROOF_BYTES:]
        if len(data) < _LENGTH_BYTES + _PROOF_BYTES or blake3(body).digest() != proof:
            raise SyncError(f"{self._path} is damaged; delete it and the weights beside it, and pull them again")
        at = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        for name, start, count, kind in json.loads(body[_LENGTH_BYTES:at]):
            where = np.frombuffer(body, "<u4", count, at)
            old = np.frombuffer(body, np.dtype(kind), count, at + where.nbytes)
            at += where.nbytes + old.nbytes
            tensors[name][start + where.astype(np.int64)] = old
        self.clear()
        return True
