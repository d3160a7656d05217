"""What the benchmarks of weight delivery share: weights, a link of limited speed, toy replicas and their receivers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.sync.backends import Backend, FileBackend, Stored
from headrace.sync.layout import read_layout
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.receiver import Receiver
from headrace.sync.replica import MemoryReplica
from headrace.sync.store import Store

DEFAULT_PAIRS = Path.home() / ".cache" / "headrace" / "weight-pairs"
RUN = "benchmark"
LR = 1e-6
Arrays = dict[str, NDArray[Any]]
_SLICE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Series:
    """Versions of one model, all different; at least three, so that none is what a replica held just before."""

    what: str
    arrays: tuple[Arrays, ...]
    single: frozenset[int]
    """Versions that are one optimizer step away from the one before."""

    @property
    def full_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays[0].values())


def series(pairs: Path | None, elems: int) -> Series:
    """Pairs of a run under way at LR from a folder that weights_pairs.py made, else synthetic weights."""
    if pairs is None:
        return synthetic(elems)
    index = json.loads((pairs / "index.json").read_text(encoding="utf-8"))
    rows = [row for row in index["pairs"] if row["start"] == "running" and row["lr"] == LR]
    files = list(dict.fromkeys(file for row in rows for file in (row["old"], row["new"])))
    what = f"{index['model']} at {LR:g}, steps {', '.join(str(row['step']) for row in rows)}"
    single = frozenset(files.index(row["new"]) for row in rows)
    return Series(what, tuple(loaded(pairs / file) for file in files), single)


def loaded(path: Path) -> Arrays:
    """Tensors of a safetensors file, in memory of their own, shaped; bfloat16 as such."""
    layout = read_layout(np.fromfile(path, np.uint8), str(path))
    kinds = {"BF16": ml_dtypes.bfloat16}
    return {n: bits.view(kinds.get(s.dtype, bits.dtype)).reshape(s.shape) for n, (s, bits) in layout.items()}


def synthetic(elems: int) -> Series:
    """Normal weights of deviation 0.03 that move by up to 1e-6 a step, uniformly: about 1 in 100 changes."""
    rng = np.random.default_rng(0)
    masters = [rng.standard_normal(max(elems // 30, 1), np.float32) * np.float32(0.03) for _ in range(30)]
    versions = []
    for _ in range(4):
        named = {f"model.layers.{i}.mlp.up_proj.weight": m.astype(ml_dtypes.bfloat16) for i, m in enumerate(masters)}
        versions.append(named)
        for master in masters:
            master += (rng.random(master.size, np.float32) * 2 - 1) * np.float32(1e-6)
    return Series(f"synthetic, {30 * masters[0].size} elements", tuple(versions), frozenset({1, 2, 3}))


def nudged(arrays: Arrays, seed: int) -> Arrays:
    """Another version: one in a hundred elements moves by one step, up in its bits."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, array in arrays.items():
        out[name] = array.copy()
        bits = out[name].reshape(-1).view(np.uint16)
        bits[rng.integers(0, bits.size, max(1, bits.size // 100))] ^= 1
    return out


class Link:
    """A line that all reads of a store share: `gbit_s` gigabits per second, None for as fast as the machine is."""

    def __init__(self, gbit_s: float | None = None) -> None:
        self.gbit_s = gbit_s
        self.bytes = 0
        self._free_s = 0.0
        self._lock = threading.Lock()

    def carry(self, size: int) -> None:
        """Return when that many bytes have passed, after all that came before."""
        with self._lock:
            self.bytes += size
            if self.gbit_s is None:
                return
            now_s = time.perf_counter()
            self._free_s = max(self._free_s, now_s) + size * 8e-9 / self.gbit_s
            wait_s = self._free_s - now_s
        if wait_s > 0.001:  # shorter ones add up in `_free_s` until they are worth a sleep
            time.sleep(wait_s)


class Shaped:
    """A folder behind a link. Hooks may raise, or change what is read: faults."""

    def __init__(self, root: Path, link: Link) -> None:
        self._inner: Backend = FileBackend(root, durable=False)
        self._link = link
        self.blocks: Callable[[str, Iterator[bytes]], Iterator[bytes]] = lambda key, blocks: blocks
        self.on_write: Callable[[str], None] = lambda key: None

    def read(self, key: str, start: int, stop: int | None) -> Iterator[bytes]:
        for block in self.blocks(key, self._inner.read(key, start, stop)):
            for at in range(0, len(block), _SLICE_BYTES):
                self._link.carry(min(_SLICE_BYTES, len(block) - at))
            yield block

    def write(self, key: str, data: bytes) -> None:
        self.on_write(key)
        self._inner.write(key, data)

    def list(self, prefix: str) -> list[Stored]:
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def lock(self) -> contextlib.AbstractContextManager[bool]:
        return self._inner.lock()


class Replica(MemoryReplica):
    """Plain arrays, with hooks."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(arrays)
        self.on_pause: Callable[[], None] = lambda: None
        self.on_changed: Callable[[], None] = lambda: None

    def pause(self) -> None:
        self.on_pause()

    def changed(self, names: frozenset[str]) -> None:
        self.on_changed()

    def holds(self, arrays: Arrays) -> bool:
        mine = self.arrays()
        return all(np.array_equal(mine[n].reshape(-1), a.reshape(-1).view(mine[n].dtype)) for n, a in arrays.items())


class World:
    """A store in a folder with a publisher that writes to it directly, and receivers behind one link."""

    def __init__(self, folder: Path, first: Arrays, *, keyframe_every: int = 1000) -> None:
        self.folder = folder
        self.link = Link()
        self.backend = Shaped(folder, self.link)
        self.far = Store(str(folder), backend=self.backend, durable=False, wait=lambda wait_s: None)
        self.near_backend = Shaped(folder, Link())
        self.near = Store(str(folder), backend=self.near_backend, durable=False)
        self.keyframe_every = keyframe_every
        self.publisher = self.new_publisher()
        self.publisher.start(first, version=0)

    def new_publisher(self) -> DeltaPublisher:
        return DeltaPublisher(self.near, run_id=RUN, keyframe_every=self.keyframe_every, with_limit=False)

    def joined(self, like: Arrays, **options: Any) -> tuple[Replica, Receiver]:
        """A replica that holds `like`, which was published, and knows it."""
        replica = Replica({name: array.copy() for name, array in like.items()})
        receiver = Receiver(self.far, replica, run_id=RUN, **options)
        receiver.sync()
        return replica, receiver
