"""The whole way in good weather: what travels, what is kept, what is collected, and replicas without engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from delivery import BF16, RUN, World, copied_arrays
from safetensors import safe_open

from headrace.errors import SyncError
from headrace.sync.catalog import cheapest_path, read_catalog, read_head
from headrace.sync.compactor import main_chain
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.receiver import Receiver
from headrace.sync.replica import MappedReplica, newest_layout, pull
from headrace.sync.report import SyncReport
from headrace.sync.store import Store


def test_what_a_delta_costs(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    sent = world.publisher.publish(world.model.train(), version=1, step=7)
    got = receiver.sync()
    assert got is not None
    assert (got.bytes_by_mode, got.density, got.limit_bytes) == (sent.bytes_by_mode, sent.density, sent.limit_bytes)
    assert 0 < sent.density < 0.5
    assert sent.body_bytes < sent.full_bytes / 2
    assert 0 < sent.ratio_to_limit < 1
    assert sent.ratio == sent.full_bytes / sent.body_bytes
    assert got.pause_s >= got.apply_s + got.verify_s > 0
    assert min(sent.encode_s, sent.put_s, sent.diff_s, got.get_s, got.decode_s) > 0
    assert world.newest()[1]["step"] == 7
    assert engine.holds(world.model.served())


def test_report_of_nothing() -> None:
    report = SyncReport(version=1, digest="0", full_bytes=10)
    assert (report.body_bytes, report.ratio, report.ratio_to_limit) == (0, 10.0, 0.0)


def test_publish_comes_after_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(SyncError, match="publish comes after start"):
        world.new_publisher().publish(world.model.served(), version=1)


def test_labels_do_not_fall(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish(2)
    with pytest.raises(SyncError, match="version 1 comes after version 2"):
        world.publisher.publish(world.model.served(), version=1)


def test_keyframes_are_stored_but_not_pushed(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=2)
    engine, receiver = world.joined()
    healthy = 0
    for _ in range(6):
        world.publish()
        report = receiver.sync()
        assert report is not None
        assert not report.resynced
        healthy += report.body_bytes
    assert engine.holds(world.model.served())
    assert len(world.keyframes()) == 4
    head = read_head(world.store)
    assert head is not None
    deltas = [e for e in read_catalog(world.store, head).edges if e.source is not None]
    assert healthy == sum(e.bytes for e in deltas)
    late = world.receiver()[1].sync()
    assert late is not None
    assert late.bytes_by_mode.keys() <= {"dense", "raw"}, "the newest keyframe, and nothing else"


def test_small_packs(tmp_path: Path) -> None:
    world = World(tmp_path, pack_bytes=200)
    engine, receiver = world.joined()
    new = world.publish(2, size=1e-2)
    packs = world.newest()[1]["packs"]
    assert len(packs) > 3
    receiver.sync()
    assert engine.holds(new)


def test_engines_that_hold_a_version_already_fetch_only_deltas(tmp_path: Path) -> None:
    """Seeded by what it really holds: the hash says which version that is."""
    world = World(tmp_path)
    first = world.model.served()
    new = world.publish(2)
    engine, receiver = world.receiver()
    for name, array in engine.weights.items():
        array[:] = first[name].reshape(-1)
    world.faulty.reads.clear()
    report = receiver.sync()
    assert report is not None
    assert "dense" not in report.bytes_by_mode
    assert engine.holds(new)
    known, other = world.receiver()
    for name, array in known.weights.items():
        array[:] = new[name].reshape(-1)
    report = other.sync()
    assert report is not None
    assert "dense" not in report.bytes_by_mode


def test_publisher_copies_what_it_is_given(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    new = world.model.train()
    world.publisher.publish(new, version=1)
    kept = copied_arrays(new)
    for array in new.values():
        array.reshape(-1).view(np.uint8)[:] = 0
    later = copied_arrays(kept)
    later["scale"] = np.asarray(np.float32(9)).astype(BF16)
    world.publisher.publish(later, version=2)
    receiver.sync()
    assert engine.holds(later)


def test_non_contiguous_tensors_travel_as_their_values(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    publisher = DeltaPublisher(store, run_id=RUN)
    publisher.start({"w": wide.T, "half": wide[::2]}, version=0)
    table = newest_layout(store)
    assert table is not None
    assert {n: s.shape for n, s in table.specs.items()} == {"half": (2, 6), "w": (6, 4)}
    assert table.aliases == {}
    pull(store, tmp_path / "out", run_id=RUN)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("w"), wide.T)
        assert np.array_equal(file.get_tensor("half"), wide[::2])


def test_collect_keeps_what_the_head_needs(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=8)
    world.publish(20)
    before = len(world.store.list("objects"))
    assert world.compactor().collect(keep_versions=0, grace_s=3600).objects == 0, "all are young"
    world.publish(1)
    gone = world.compactor().collect(keep_versions=0, grace_s=0, skew_s=-1)
    assert gone.objects > before / 2
    assert gone.bytes > 0
    head = read_head(world.store)
    assert head is not None
    catalog = read_catalog(world.store, head)
    assert [e.version for e in catalog.edges] == [16, 17, 18, 19, 20, 21], "the newest keyframe and all after it"
    named = {head.catalog, head.manifest, *(k for e in catalog.edges for k in (e.manifest, *e.packs))}
    assert {s.key for s in world.store.list("objects")} == named
    assert world.compactor().collect(keep_versions=0, grace_s=0, skew_s=-1).objects == 0
    new = world.publish()
    assert world.joined()[0].holds(new)


def test_collector_and_publisher_at_the_same_moment(tmp_path: Path) -> None:
    """The catalog is replaced while the publisher is about to replace the head: it looks again and keeps both."""
    world = World(tmp_path, keyframe_every=4)
    engine, receiver = world.joined()
    world.publish(9)
    done = False

    def collector_runs(key: str) -> None:
        nonlocal done
        if key.endswith(".json") and not done:
            done = True
            world.compactor().squash_due()
            world.compactor().collect(keep_versions=2, grace_s=60, skew_s=0)

    world.faulty.on_write = collector_runs
    new = world.publish()
    assert done
    receiver.sync()
    assert engine.holds(new)
    assert world.joined()[0].holds(new)
    head = read_head(world.store)
    assert head is not None
    assert any(e.span > 1 for e in read_catalog(world.store, head).edges)


def test_squash_needs_a_chain(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish()
    head = read_head(world.store)
    assert head is not None
    with pytest.raises(SyncError, match="no chain of deltas leads from 000000000000"):
        world.compactor().squash("0" * 64, head.digest)


def test_squashes_stay_where_they_are_when_the_chain_moves(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=4)
    world.publish(8)
    assert sorted((e.version, e.span) for e in world.compactor().squash_due((2, 4))) == [
        (2, 2), (4, 2), (4, 4), (6, 2), (8, 2), (8, 4),
    ]  # fmt: skip
    world.compactor().collect(keep_versions=3, grace_s=0, skew_s=-1)
    world.publish(2)
    assert [(e.version, e.span) for e in world.compactor().squash_due((2, 4))] == [(10, 2)]
    head = read_head(world.store)
    assert head is not None
    chain = main_chain(read_catalog(world.store, head))
    assert chain[-1] == head.digest


def test_pull_follows_a_run(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    folder = tmp_path / "follow"
    sizes = []
    for version in range(3):
        report = pull(world.store, folder, run_id=RUN, replica="follower")
        assert report is not None
        sizes.append(report.body_bytes)
        about = json.loads((folder / "version.json").read_text())
        assert about == {"run_id": RUN, "version": version, "digest": world.publisher.baseline_digest}
        with safe_open(folder / "model.safetensors", "np") as file:
            assert set(file.keys()) == set(world.model.served()), "tied tensors under both names"
            assert np.array_equal(file.get_tensor("rope.inv_freq"), world.model.served()["rope.inv_freq"])
        assert pull(world.store, folder, run_id=RUN) is None
        world.publish()
    assert sizes[1] < sizes[0] / 2, "by a delta from what the folder holds"
    assert sorted(p.name for p in folder.iterdir()) == [".packs", "model.safetensors", "version.json"]
    assert world.store.list("leases") == []
    layout = newest_layout(world.store)
    assert layout is not None
    held = MappedReplica(folder)
    for name, array in world.model.served().items():
        assert held.layout[name][0].shape == array.shape


@pytest.mark.parametrize("text", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0{}"])
def test_pull_replaces_what_is_no_version(tmp_path: Path, text: bytes) -> None:
    world = World(tmp_path / "store")
    folder = tmp_path / "follow"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(text)
    (folder / "version.json").write_bytes(text)
    assert pull(world.store, folder, run_id=RUN) is not None
    with safe_open(folder / "model.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("rope.inv_freq"), world.model.served()["rope.inv_freq"])


def test_pull_of_nothing_and_of_another_run(tmp_path: Path) -> None:
    assert pull(Store(str(tmp_path / "empty")), tmp_path / "a", run_id=RUN) is None
    world = World(tmp_path / "store")
    with pytest.raises(SyncError, match="holds run 'run-1', this is 'other'"):
        pull(world.store, tmp_path / "a", run_id="other")
    assert not (tmp_path / "a").exists()


def test_mapped_replica_is_changed_in_place(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    layout = newest_layout(world.store)
    assert layout is not None
    replica = MappedReplica.create(tmp_path / "mapped", layout)
    receiver = Receiver(world.store, replica, run_id=RUN, journal=replica.journal)
    receiver.sync()
    new = world.publish(2)
    receiver.sync()
    before = {n: a.tobytes() for n, a in MappedReplica(tmp_path / "mapped").arrays().items()}
    assert all(before[n] == a.tobytes() for n, a in new.items() if n in layout.specs)
    receiver.rollback()
    receiver.audit()
    assert not (tmp_path / "mapped" / "undo.journal").exists()


def test_damaged_journal_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    layout = newest_layout(world.store)
    assert layout is not None
    MappedReplica.create(tmp_path / "mapped", layout)
    (tmp_path / "mapped" / "undo.journal").write_bytes(b"\0" * 100)
    with pytest.raises(SyncError, match="is damaged; delete it"):
        MappedReplica(tmp_path / "mapped")


def test_receivers_on_one_host_fetch_once(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    cache = tmp_path / "cache"
    one, two = world.joined(cache=cache), world.joined(cache=cache)
    world.publish()
    world.faulty.reads.clear()
    for engine, receiver in (one, two):
        receiver.sync()
        assert engine.holds(world.model.served())
    packs = [key for key, _ in world.faulty.reads if key.endswith(".pack")]
    assert len(packs) == 1
    assert len(list(cache.glob("*.pack"))) == 1, "older packs are dropped"


def test_the_way_over_the_undo_log_is_in_the_plan(tmp_path: Path) -> None:
    """A receiver one version ahead of a fork goes back to it and on, without a keyframe."""
    world = World(tmp_path)
    checkpoint = copied_arrays(world.model.served())
    engine, receiver = world.joined()
    world.publish()
    receiver.sync()
    world.publisher = world.new_publisher()
    world.publisher.start(checkpoint, version=0)
    report = receiver.sync()
    assert report is not None
    assert not report.resynced
    assert report.body_bytes == 0
    assert engine.holds(checkpoint)
    head = read_head(world.store)
    assert head is not None
    assert cheapest_path(read_catalog(world.store, head).edges, {None: 0}, head.digest) is not None
