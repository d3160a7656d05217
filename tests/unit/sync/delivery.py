"""A tiny model that trains, a toy engine that serves it, and a store that misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.sync.backends import Backend, FileBackend, Stored
from headrace.sync.catalog import HEAD_KEY, read_catalog, read_head
from headrace.sync.compactor import Compactor
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.receiver import Receiver
from headrace.sync.store import Store, object_key
from headrace.sync.version import BaseManifest

RUN = "run-1"
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
Arrays = dict[str, NDArray[Any]]


class Model:
    """fp32 masters that take small random steps; served in mixed dtypes, with a tied head and odd shapes."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.master = {
            "embed.weight": self._values(50, 16),
            "layers.0.q.weight": self._values(16, 16),
            "layers.0.norm.weight": self._values(16),
            "layers.1.q.weight": self._values(16, 48),
            "layers.1.lora_A.weight": self._values(4, 16),
            "layers.1.experts.fp8": self._values(32, 16),
            "mtp.0.proj.weight": self._values(16, 32),
            "rope.inv_freq": self._values(8),
            "scale": self._values(),
        }
        self.kinds = {"rope.inv_freq": np.dtype(np.float32), "layers.1.experts.fp8": np.dtype(FP8)}

    def _values(self, *shape: int) -> NDArray[np.float32]:
        return np.asarray(self._rng.standard_normal(shape) * 0.05, dtype=np.float32)

    def train(self, size: float = 1e-4) -> Arrays:
        """One optimizer step; returns what is served after it."""
        for name, values in self.master.items():
            self.master[name] = (values + self._rng.standard_normal(values.shape) * size).astype(np.float32)
        return self.served()

    def served(self) -> Arrays:
        out = {name: v.astype(self.kinds.get(name, np.dtype(BF16))) for name, v in self.master.items()}
        out["empty"] = np.zeros((0, 7), BF16)
        out["lm_head.weight"] = out["embed.weight"]
        return out


class Engine:
    """A target with bookkeeping. `derived` stands for a layout that is rebuilt from a weight."""

    def __init__(self, like: Mapping[str, NDArray[Any]], names: Callable[[str], bool] = lambda name: True) -> None:
        self.weights = {name: np.zeros(a.size, a.dtype) for name, a in like.items() if names(name)}
        self.derived: NDArray[Any] | None = None
        self.log: list[str] = []
        self.paused = False
        self.on_changed: Callable[[frozenset[str]], None] = lambda names: None
        self.on_pause: Callable[[], None] = lambda: None

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        return self.weights

    def pause(self) -> None:
        self.on_pause()
        self.paused = True
        self.log.append("pause")

    def resume(self) -> None:
        self.paused = False
        self.log.append("resume")

    def changed(self, names: frozenset[str]) -> None:
        assert self.paused, "weights change only while paused"
        if "layers.1.experts.fp8" in names:
            self.derived = self.weights["layers.1.experts.fp8"].astype(np.float32) * 2
        self.on_changed(names)

    def bits(self) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.weights.items()}

    def holds(self, served: Mapping[str, NDArray[Any]]) -> bool:
        return self.bits() == {name: served[name].tobytes() for name in self.weights}


class Faulty:
    """A backend around a real one; hooks see each call first and may raise, change or replace."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.on_read: Callable[[str, int], None] = lambda key, start: None
        self.blocks: Callable[[str, Iterator[bytes]], Iterator[bytes]] = lambda key, blocks: blocks
        self.on_write: Callable[[str], None] = lambda key: None
        self.listed: Callable[[list[Stored]], list[Stored]] = lambda stored: stored
        self.reads: list[tuple[str, int]] = []

    def read(self, key: str, start: int, stop: int | None) -> Iterator[bytes]:
        self.reads.append((key, start))
        self.on_read(key, start)
        yield from self.blocks(key, self.inner.read(key, start, stop))

    def write(self, key: str, data: bytes) -> None:
        self.on_write(key)
        self.inner.write(key, data)

    def list(self, prefix: str) -> list[Stored]:
        return self.listed(self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def lock(self) -> contextlib.AbstractContextManager[bool]:
        return self.inner.lock()


class World:
    """One run: a model, a store in a folder, a publisher that started, and engines."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.faulty = Faulty(FileBackend(folder, durable=False))
        self.waits: list[float] = []
        self.store = Store(str(folder), backend=self.faulty, wait=self.waits.append)
        self.model = Model()
        self.options = options
        self.publisher = self.new_publisher()
        self.publisher.start(self.model.served(), version=0)
        self.version = 0

    def new_publisher(self) -> DeltaPublisher:
        return DeltaPublisher(self.store, run_id=RUN, **self.options)

    def publish(self, count: int = 1, size: float = 1e-4) -> Arrays:
        """Train and publish; returns what should be served then."""
        for _ in range(count):
            self.version += 1
            self.publisher.publish(self.model.train(size), version=self.version, step=self.version)
        return self.model.served()

    def joined(self, **options: Any) -> tuple[Engine, Receiver]:
        """A new engine at the head."""
        engine, receiver = self.receiver(**options)
        receiver.sync()
        return engine, receiver

    def receiver(self, **options: Any) -> tuple[Engine, Receiver]:
        engine = Engine(self.model.served())
        return engine, Receiver(self.store, engine, run_id=RUN, **options)

    def compactor(self) -> Compactor:
        return Compactor(self.store, run_id=RUN)

    def newest(self) -> tuple[str, dict[str, Any]]:
        """Key and content of the head's manifest."""
        head = read_head(self.store)
        assert head is not None
        return head.manifest, json.loads(self.store.get(head.manifest))

    def pack_path(self) -> Path:
        """The first pack of the head's manifest."""
        path: Path = self.folder / self.newest()[1]["packs"][0]["key"]
        return path

    def forge(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Replace the head's manifest by a changed one, with names and sums that fit: an attacker, or a bug."""
        head = read_head(self.store)
        assert head is not None
        key, manifest = self.newest()
        change(manifest)
        forged = self.store.put_object(json.dumps(manifest).encode(), "json")
        catalog = read_catalog(self.store, head).model_dump(mode="json")
        for edge in catalog["edges"]:
            if edge["manifest"] == key:
                edge["manifest"] = forged
        catalog_key = self.store.put_object(json.dumps(catalog).encode(), "json")
        new = head.model_copy(update={"manifest": forged, "catalog": catalog_key})
        self.store.put(HEAD_KEY, new.to_bytes())

    def keyframes(self) -> list[str]:
        head = read_head(self.store)
        assert head is not None
        return [edge.manifest for edge in read_catalog(self.store, head).edges if edge.source is None]

    def base(self) -> BaseManifest:
        return BaseManifest.model_validate_json(self.store.get(self.keyframes()[-1]))


def object_with(data: bytes) -> str:
    """Key of a pack with this content."""
    return object_key(data, "pack")


def copied_arrays(arrays: Arrays) -> Arrays:
    """Other memory with the same content; what was tied still is."""
    copies: dict[int, NDArray[Any]] = {}
    return {name: copies.setdefault(id(array), array.copy()) for name, array in arrays.items()}
