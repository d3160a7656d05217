from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from headrace.config.schema import SyncConfig
from headrace.errors import SyncError
from headrace.sync.catalog import read_catalog, read_head
from headrace.sync.choice import Estimates
from headrace.sync.codec import MODES
from headrace.sync.manifest import StoreManifest
from headrace.sync.receiver import Receiver
from headrace.sync.replica import MemoryReplica, newest_layout
from headrace.sync.report import SyncReport
from headrace.sync.store import Store
from headrace.trainer.publishing import Publishing

RUN = "run-1"


class Weights:
    def __init__(self) -> None:
        self.values = np.random.default_rng(0).standard_normal(4000).astype(np.float32)

    def next(self) -> list[tuple[str, np.ndarray]]:
        self.values[::7] += 1e-3
        return [("w", self.values.copy())]


class HalfWeights(Weights):
    """In bfloat16, as engines get them."""

    share = 0.0164
    next_bytes = b""

    def __init__(self) -> None:
        super().__init__()
        self.values = np.random.default_rng(0).standard_normal(100_000).astype(ml_dtypes.bfloat16)

    def next(self) -> list[tuple[str, np.ndarray]]:
        bits = self.values.view(np.uint16)
        bits[:: round(1 / self.share)] ^= 1
        self.next_bytes = self.values.tobytes()
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


def after(link_bytes_per_s: float) -> SyncReport:
    """A delta of eight billion weights that went into a store over such a link."""
    body = 120_000_000
    return SyncReport(
        version=1, digest="d", density=0.0164, full_bytes=16_400_000_000, bytes_by_mode={"ctx": body},
        encode_s=30.0, put_s=body / link_bytes_per_s,
    )  # fmt: skip


def modes_of(report: SyncReport) -> list[str]:
    return [mode for mode in MODES if report.bytes_by_mode.get(mode)]


def test_the_next_delta_is_encoded_for_the_link_that_was_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow link takes the smallest mode, a fast one the cheapest; the reason is told once a change."""
    estimates, weights = Estimates(window=9), HalfWeights()
    way = Publishing(SyncConfig(choose=True, limit_every=0), threads=4, estimates=estimates)
    publish(way, weights, tmp_path, 0)
    used = []
    for version, link in enumerate((2e5, 2e5, 1e12), start=1):
        for _ in range(20):  # more than the window holds: nothing else counts
            estimates.published(after(link), threads=1)
        used.append(modes_of(publish(way, weights, tmp_path, version).report))
    assert used == [["ctx"], ["ctx"], ["raw"]]
    assert [r.message.split(" from now on; ")[0] for r in caplog.records] == [
        "deltas are published as ctx", "deltas are published as raw",
    ]  # fmt: skip
    assert "dominates" in caplog.text
    store = Store(str(tmp_path))
    layout = newest_layout(store)
    assert layout is not None
    replica = MemoryReplica.zeros(layout)
    assert Receiver(store, replica, run_id=RUN).sync() is not None
    assert replica.arrays()["w"].tobytes() == weights.next_bytes


def test_without_asking_or_before_the_first_delta_nothing_is_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Estimates()
    for _ in range(5):
        told.published(after(1e12), threads=1)
    for name, config, estimates in (
        ("off", SyncConfig(limit_every=0), told), ("first", SyncConfig(choose=True, limit_every=0), Estimates()),
    ):  # fmt: skip
        way, weights = Publishing(config, threads=1, estimates=estimates), HalfWeights()
        publish(way, weights, tmp_path / name, 0)
        assert modes_of(publish(way, weights, tmp_path / name, 1).report) == ["ctx"]
    assert not caplog.records
    assert estimates.density == pytest.approx(HalfWeights.share, rel=0.1)
