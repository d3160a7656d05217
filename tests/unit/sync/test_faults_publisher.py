"""Faults 16 to 26 of the list: what happens to those who publish."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from delivery import BF16, RUN, Arrays, Engine, World, copied_arrays

from headrace.errors import SyncError
from headrace.sync.catalog import HEAD_KEY, read_catalog, read_head
from headrace.sync.packs import read_manifest
from headrace.sync.publisher import DeltaPublisher, at_least
from headrace.sync.receiver import Receiver
from headrace.sync.staging import next_table
from headrace.sync.version import DeltaManifest


class Killed(BaseException):
    """The process ends here. (`test_kill.py` does it with a real signal at every step.)"""


def dies_before(kind: Callable[[str], bool]) -> Callable[[str], None]:
    def on_write(key: str) -> None:
        if kind(key):
            raise Killed

    return on_write


def interrupted(world: World, kind: Callable[[str], bool]) -> tuple[Engine, Receiver, Arrays, Arrays]:
    """Publish version 1 and die at a write; returns a receiver, what was served and what was not published."""
    engine, receiver = world.joined()
    old = world.model.served()
    new = world.model.train()
    world.faulty.on_write = dies_before(kind)
    with pytest.raises(Killed):
        world.publisher.publish(new, version=1)
    world.faulty.on_write = lambda key: None
    assert receiver.sync() is None, "nothing was named"
    assert engine.holds(old)
    return engine, receiver, old, new


def resumes_from_the_last_step(world: World, kind: Callable[[str], bool]) -> None:
    engine, receiver, _, new = interrupted(world, kind)
    world.publisher = world.new_publisher()
    world.publisher.start(new, version=1)
    assert receiver.sync() is not None
    assert engine.holds(new)
    engine2, _ = world.joined()
    assert engine2.holds(new)
    assert world.compactor().collect(keep_versions=1, grace_s=0, skew_s=-1).objects > 0, "orphans are collected"
    late, _ = world.joined()
    assert late.holds(new)


def test_fault_16_crash_after_packs_before_manifest(tmp_path: Path) -> None:
    resumes_from_the_last_step(World(tmp_path), lambda key: key.endswith(".json"))


def test_fault_17_crash_after_manifest_before_head(tmp_path: Path) -> None:
    resumes_from_the_last_step(World(tmp_path), lambda key: key == HEAD_KEY)


def test_fault_17_the_same_publisher_tries_again(tmp_path: Path) -> None:
    """A failed write is not a dead process: the call is repeated."""
    world = World(tmp_path)
    engine, receiver, _, new = interrupted(world, lambda key: key == HEAD_KEY)
    world.publisher.publish(new, version=1)
    assert receiver.sync() is not None
    assert engine.holds(new)


def test_fault_18_restart_with_the_same_digest_continues(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    at = world.publish(2)
    receiver.sync()
    frames = world.keyframes()
    world.publisher = world.new_publisher()
    report = world.publisher.start(copied_arrays(at), version=2)
    assert report.body_bytes == 0, "nothing travels: the chain goes on"
    assert world.keyframes() == frames
    head = read_head(world.store)
    assert head is not None
    assert head.epoch == 2
    assert receiver.sync() is None
    new = world.publish()
    delta = receiver.sync()
    assert delta is not None
    assert not delta.resynced
    assert engine.holds(new)


def test_fault_19_fork_from_an_older_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    checkpoint = copied_arrays(world.model.served())
    engine, receiver = world.joined()
    world.publish()
    receiver.sync()
    abandoned = world.publish(2)
    receiver.sync()
    assert engine.holds(abandoned)
    world.publisher = world.new_publisher()
    world.publisher.start(checkpoint, version=0)
    after_fork = world.model.train()
    world.publisher.publish(after_fork, version=1)
    delta = read_manifest(world.store, world.newest()[0], DeltaManifest)
    with pytest.raises(SyncError, match="applies to"):
        next_table(receiver.table, delta, run_id=RUN)
    report = receiver.sync()
    assert report is not None
    assert report.resynced
    assert engine.holds(after_fork)
    assert receiver.version == 1, "the label may fall when the epoch rises"


def test_fault_19_heads_of_the_old_epoch_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, receiver = world.joined()
    world.publish(2)
    old_head = read_head(world.store)
    assert old_head is not None
    world.new_publisher().start(world.model.train(), version=1)
    receiver.sync()
    with pytest.raises(SyncError, match="epoch 1 refused: epoch 2"):
        receiver.sync(old_head)


def test_fault_20_two_publishers_with_one_run_id(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    first, second = world.publisher, world.new_publisher()
    second.start(world.model.served(), version=0)
    stranger = {name: (array + array).astype(array.dtype) for name, array in world.model.served().items()}
    with pytest.raises(SyncError, match=r"belongs to epoch 2; this publisher has epoch 1.*fenced off"):
        first.publish(stranger, version=1)
    new = world.model.train()
    second.publish(new, version=1)
    receiver.sync()
    assert engine.holds(new)


@pytest.mark.parametrize("at", range(3))
def test_fault_20_a_publisher_is_fenced_also_between_check_and_write(tmp_path: Path, at: int) -> None:
    """The other one starts at the worst moment, up to just before the head is replaced."""
    world = World(tmp_path)
    engine, receiver = world.joined()
    first, second = world.publisher, world.new_publisher()
    mine, other = world.model.served(), world.model.train()

    writes = iter(range(3))

    def other_starts(key: str) -> None:
        if next(writes) == at:  # a pack, the manifest, the catalog
            world.faulty.on_write = lambda key: None
            second.start(mine, version=0)

    world.faulty.on_write = other_starts
    with pytest.raises(SyncError, match="fenced off"):
        first.publish(other, version=1)
    assert receiver.sync() is None
    assert engine.holds(mine)


def test_fault_20_another_runs_store(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(SyncError, match=r"holds run 'run-1', this is 'run-2'"):
        DeltaPublisher(world.store, run_id="run-2").start(world.model.served(), version=0)
    with pytest.raises(SyncError, match=r"holds run 'run-1', this is 'run-2'"):
        Receiver(world.store, Engine(world.model.served()), run_id="run-2").sync()


@pytest.mark.parametrize("full_at", [0, 1, 2, 3])
def test_fault_21_disk_full(tmp_path: Path, full_at: int) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    old, new = world.model.served(), world.model.train()
    writes = 0

    def full(key: str) -> None:
        nonlocal writes
        if writes >= full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        writes += 1

    baseline = world.publisher.baseline_digest
    world.faulty.on_write = full
    with pytest.raises(SyncError, match=r"writing .*No space left on device.*try 1"):
        world.publisher.publish(new, version=1)
    assert world.publisher.baseline_digest == baseline
    assert receiver.sync() is None
    assert engine.holds(old)
    world.faulty.on_write = lambda key: None
    world.publisher.publish(new, version=1)
    assert receiver.sync() is not None
    assert engine.holds(new)
    assert not [s.key for s in world.store.list("") if "partial" in s.key]


def test_fault_22_baseline_waits_for_the_quorum(tmp_path: Path) -> None:
    world = World(tmp_path, quorum=at_least(2))
    engine, receiver = world.joined()
    base = world.publisher.baseline_digest
    world.publish()
    receiver.sync()
    assert receiver.digest is not None
    world.publisher.ack("r0", receiver.digest)
    world.publisher.ack("r0", receiver.digest)
    world.publisher.ack("r1", "0" * 64)
    assert world.publisher.baseline_digest == base, "one replica, however often, is not two"
    new = world.publish()
    assert world.newest()[1]["from_digest"] == base, "version 1 is folded into the next delta"
    report = receiver.sync()
    assert report is not None
    assert not report.resynced, "who took version 1 goes back over its undo log, without a keyframe"
    assert engine.holds(new)
    slow, _ = world.joined()
    assert slow.holds(new)
    for replica in ("r0", "r1"):
        world.publisher.ack(replica, receiver.digest)
    assert world.publisher.baseline_digest == receiver.digest
    new = world.publish()
    assert world.newest()[1]["from_digest"] == receiver.digest
    receiver.sync()
    assert engine.holds(new)


def test_fault_23_skipped_step_is_an_empty_delta(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    same = world.model.served()
    report = world.publisher.publish(same, version=1, step=1)
    assert (report.body_bytes, report.density) == (0, 0.0)
    _, manifest = world.newest()
    assert (manifest["chunks"], manifest["packs"]) == ([], [])
    assert manifest["from_digest"] == manifest["to_digest"]
    pauses = len(engine.log)
    assert receiver.sync() is None
    assert receiver.version == 1
    assert len(engine.log) == pauses, "nobody is paused for nothing"
    world.version = 1
    new = world.publish()
    receiver.sync()
    assert engine.holds(new)


def test_fault_24_density_spike_goes_dense(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    new = world.model.served()
    rng = np.random.default_rng(1)
    for array in new.values():
        if array.size > 1 and array.dtype == BF16:
            flat = array.reshape(-1).view(np.uint16)
            hit = rng.random(flat.size) < 0.5
            flat[hit] = rng.integers(0, 2**16, flat.size, dtype=np.uint16)[hit]
    report = world.publisher.publish(new, version=1)
    assert 0.3 < report.density < 0.6
    assert report.body_bytes <= report.full_bytes * 1.01 + 100
    assert report.bytes_by_mode.keys() & {"dense", "raw", "set", "xor"}
    receiver.sync()
    assert engine.holds(new)


def changed_layout(tmp_path: Path, change: Callable[[Arrays], None], match: str) -> None:
    """Other tensors: a keyframe, refused by engines that do not have them, taken by those that do."""
    world = World(tmp_path)
    engine, receiver = world.joined()
    old, new = world.model.served(), world.model.train()
    change(new)
    report = world.publisher.publish(new, version=1)
    assert report.density == 1.0
    head = read_head(world.store)
    assert head is not None
    assert [edge.source for edge in read_catalog(world.store, head).edges] == [None], "no delta leads across"
    with pytest.raises(SyncError, match=match):
        receiver.sync()
    assert engine.holds(old)
    rebuilt = Engine(new)
    assert Receiver(world.store, rebuilt, run_id=RUN).sync() is not None
    assert rebuilt.holds(new)
    new["scale"] = np.asarray(np.float32(3)).astype(BF16)
    world.publisher.publish(new, version=2)
    assert read_manifest(world.store, world.newest()[0], DeltaManifest).density > 0, "then deltas again"


def renamed(arrays: Arrays) -> None:
    arrays["mtp.1.proj.weight"] = arrays.pop("mtp.0.proj.weight")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a.update({"extra.weight": np.ones((3, 3), BF16)}), "the engine does not hold: extra.weight"),
        (lambda a: a.pop("rope.inv_freq"), "the engine holds tensor 'rope.inv_freq', the version does not"),
        (renamed, "'mtp.0.proj.weight', the version does not: did you mean 'mtp.1.proj.weight'"),
        (lambda a: a.update({"embed.weight": np.ones((50, 17), BF16)}), "tensor 'embed.weight': the engine holds 800"),
    ],
    ids=["added", "removed", "renamed", "reshaped"],
)
def test_fault_25_tensors_change(tmp_path: Path, change: Callable[[Arrays], None], match: str) -> None:
    changed_layout(tmp_path, change, match)


def test_fault_25_a_tie_that_ends_is_another_layout(tmp_path: Path) -> None:
    world = World(tmp_path)
    new = world.model.train()
    new["lm_head.weight"] = new["lm_head.weight"].copy()
    assert world.publisher.publish(new, version=1).density == 1.0


def test_fault_26_dtype_change(tmp_path: Path) -> None:
    changed_layout(
        tmp_path,
        lambda a: a.update({"layers.0.norm.weight": a["layers.0.norm.weight"].astype(np.float32)}),
        "16 x bfloat16, the version .* F32",
    )


def test_fault_26_dtypes_that_no_version_holds(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(SyncError, match="dtype complex128"):
        world.publisher.publish({**world.model.served(), "c": np.zeros(2, np.complex128)}, version=1)
