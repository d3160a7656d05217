"""Folders that are published and followed, beside publishers of other kinds and stores that fail for a while."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.clock import VirtualClock
from headrace.errors import DeadlineError, SyncError
from headrace.sync.catalog import read_catalog, read_head
from headrace.sync.checkpoint import open_checkpoint
from headrace.sync.folder import follow, publish_folder, resolve
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.store import Store

BF16 = ml_dtypes.bfloat16


def values(seed: int) -> NDArray[np.generic]:
    return np.random.default_rng(seed).standard_normal((40, 8)).astype(BF16)


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": values(seed), "b": values(0)}, folder / "model.safetensors")
    return folder


def holds(folder: Path, seed: int) -> bool:
    return open_checkpoint(folder).bits["a"].tobytes() == values(seed).tobytes()


def store_at(root: Path) -> Store:
    return Store(str(root / "store"), durable=False)


def test_a_chain_with_tied_tensors_goes_on_from_a_folder(tmp_path: Path) -> None:
    """A trainer ties by memory; a file holds the tensor twice. That is still the same version."""
    store = store_at(tmp_path)
    publisher = DeltaPublisher(store, run_id="r")
    embed = values(1)
    publisher.start({"embed": embed, "head": embed, "norm": values(2)}, version=5)
    (landing,) = follow(store, tmp_path / "f", once=True)
    assert (landing.version, landing.run_id) == (5, "r")
    same = publish_folder(tmp_path / "f", store)
    assert (same.report, same.version) == (None, 5)
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file({"embed": values(3), "head": values(3).copy(), "norm": values(2)}, changed / "model.safetensors")
    done = publish_folder(changed, store)
    assert (done.version, done.keyframe) == (6, False)
    untied = tmp_path / "untied"
    untied.mkdir()
    save_file({"embed": values(3), "head": values(4), "norm": values(2)}, untied / "model.safetensors")
    assert publish_folder(untied, store).keyframe
    (landing,) = follow(store, tmp_path / "f", once=True)
    assert open_checkpoint(tmp_path / "f").table().digest == landing.digest == publish_folder(untied, store).digest
    with pytest.raises(SyncError, match="was fenced off"):
        publisher.publish({"embed": embed, "head": embed, "norm": values(2)}, version=6)


def test_a_follower_outlives_a_store_that_fails_for_a_while(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    publish_folder(checkpoint(tmp_path / "c", 1), store)
    head = tmp_path / "store" / "head.json"
    whole: list[bytes] = []
    failures: list[str] = []

    def wait(seconds: float) -> None:
        if not whole:
            whole.append(head.read_bytes())
            head.write_bytes(b"{}")
        elif head.read_bytes() == b"{}":
            assert holds(tmp_path / "f", 1)
            head.write_bytes(whole[0])
            publish_folder(checkpoint(tmp_path / "c", 2), store)

    landings = follow(store, tmp_path / "f", failed=lambda error: failures.append(str(error)), wait=wait)
    assert next(landings).version == 0
    assert next(landings).version == 1
    landings.close()
    assert holds(tmp_path / "f", 2)
    assert len(failures) == 1
    assert "head.json" in failures[0]


def test_no_new_version_in_time(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    clock, waits = VirtualClock(), list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.advance_to(clock.now() + seconds)

    empty = follow(store, tmp_path / "f", once=True, timeout_s=2.5, wait=wait, clock=clock)
    with pytest.raises(DeadlineError, match=r"no new version in .* for 2\.5 s"):
        next(empty)
    assert waits == [1.0, 1.0, 0.5]
    assert not (tmp_path / "f").exists()
    publish_folder(checkpoint(tmp_path / "c", 1), store)
    landings = follow(store, tmp_path / "f", timeout_s=3, wait=wait, clock=clock)
    assert next(landings).version == 0
    with pytest.raises(DeadlineError):
        next(landings)
    assert holds(tmp_path / "f", 1)


def test_keyframes_come_due_across_processes(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    whole = [publish_folder(checkpoint(tmp_path / "c", i), store, keyframe_every=3).keyframe for i in range(8)]
    assert whole == [True, False, False, True, False, False, True, False]


def test_versions_are_named_by_number_or_digest(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    digests = [publish_folder(checkpoint(tmp_path / "c", i), store).digest for i in range(3)]
    head = read_head(store)
    assert head is not None
    catalog = read_catalog(store, head)
    assert [resolve(catalog, str(i)) for i in range(3)] == digests
    assert resolve(catalog, digests[1][:8]) == digests[1]
    for name in ("9", digests[0][:3], "", "../x"):
        with pytest.raises(SyncError, match="the store knows 0, 1, 2"):
            resolve(catalog, name)
