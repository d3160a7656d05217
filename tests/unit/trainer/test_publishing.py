from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from headrace.config.schema import SyncConfig
from headrace.errors import SyncError
from headrace.sync.catalog import read_catalog, read_head
from headrace.sync.manifest import StoreManifest
from headrace.sync.receiver import Receiver
from headrace.sync.replica import MemoryReplica, newest_layout
from headrace.sync.store import Store
from headrace.trainer.publishing import Publishing

RUN = "run-1"


class Weights:
    def __init__(self) -> None:
        self.values = np.random.default_rng(0).standard_normal(4000).astype(np.float32)

    def next(self) -> list[tuple[str, np.ndarray]]:
        self.values[::7] += 1e-3
        return [("w", self.values.copy())]


def publish(way: Publishing, weights: Weights, folder: Path, version: int) -> StoreManifest:
    manifest = way.publish(weights.next(), folder=str(folder), run_id=RUN, version=version)
    assert isinstance(manifest, StoreManifest)
    return manifest


def test_first_a_base_then_deltas_with_the_limit_now_and_then(tmp_path: Path) -> None:
    way, weights = Publishing(SyncConfig(limit_every=2), threads=1), Weights()
    reports = [publish(way, weights, tmp_path, v).report for v in range(4)]
    assert reports[0].density == 1.0
    assert all(r.density == pytest.approx(1 / 7, abs=1e-3) for r in reports[1:])
    assert [r.limit_bytes > 0 for r in reports] == [False, True, False, True]
    assert all(r.body_bytes < r.full_bytes / 2 for r in reports[1:])


def test_what_nobody_needs_is_deleted(tmp_path: Path) -> None:
    """The store stays bounded: the newest keyframe, what follows it, and a few versions before it."""
    way, weights = Publishing(SyncConfig(keyframe_every=4, limit_every=0), threads=1), Weights()
    sizes = []
    for version in range(33):
        publish(way, weights, tmp_path, version)
        for path in (tmp_path / "objects").iterdir():  # as if all of it had been there for an hour
            os.utime(path, (0, path.stat().st_mtime - 3600))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "objects").iterdir()))
    assert max(sizes) == max(sizes[:20])
    store = Store(str(tmp_path))
    head = read_head(store)
    assert head is not None
    edges = read_catalog(store, head).edges
    assert len(edges) <= 8 + 4
    layout = newest_layout(store)
    assert layout is not None
    late = MemoryReplica.zeros(layout)
    assert Receiver(store, late, run_id=RUN).sync() is not None
    assert late.arrays()["w"].tobytes() == weights.values.tobytes()


def test_a_trainer_that_was_restored_goes_on_from_what_the_store_holds(tmp_path: Path) -> None:
    weights = Weights()
    first = publish(Publishing(SyncConfig(), threads=1), weights, tmp_path, 3)
    again = Publishing(SyncConfig(), threads=1)
    same = again.publish([("w", weights.values.copy())], folder=str(tmp_path), run_id=RUN, version=3)
    assert same.digest == first.digest
    assert isinstance(same, StoreManifest)
    assert same.report.body_bytes == 0
    older = Weights()
    older.values += 1
    fork = Publishing(SyncConfig(), threads=1)
    assert publish(fork, older, tmp_path, 1).report.density == 1.0
    again.forget()
    fork.forget()
    with pytest.raises(SyncError, match="'run-1'"):
        Publishing(SyncConfig(), threads=1).publish(older.next(), folder=str(tmp_path), run_id="other", version=0)


def test_an_own_store_has_a_folder_for_each_run(tmp_path: Path) -> None:
    way = Publishing(SyncConfig(store=str(tmp_path / "own")), threads=1)
    manifest = publish(way, Weights(), tmp_path / "scratch", 0)
    assert manifest.store == str(tmp_path / "own" / RUN)
    assert not (tmp_path / "scratch").exists()
