"""Faults 27 to 45 of the list: what happens to those who receive.

36 to 38 (running requests, prefix cache, aborted requests) need an engine that decodes: they are tests of engines.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from delivery import FP8, RUN, Arrays, Engine, Model, World

from headrace.errors import SyncError
from headrace.sync.catalog import Edge, cheapest_path, read_catalog, read_head
from headrace.sync.group import GroupReceiver
from headrace.sync.lease import Leases
from headrace.sync.receiver import Receiver
from headrace.sync.target import State


class Killed(BaseException):
    """The process ends here. (`test_kill.py` does it with a real signal at every step.)"""


def test_fault_27_crash_while_staging(tmp_path: Path) -> None:
    """A new process on the same host finds what was fetched, and the engine as it was."""
    world = World(tmp_path / "store")
    cache = tmp_path / "cache"
    engine, _ = world.joined(cache=cache)
    old, new = world.model.served(), world.publish(3)
    reads = 0

    def dies(key: str, start: int) -> None:
        nonlocal reads
        reads += key.endswith(".pack")
        if reads == 3:
            raise Killed

    world.faulty.on_read = dies
    with pytest.raises(Killed):
        Receiver(world.store, engine, run_id=RUN, cache=cache).sync()
    assert engine.holds(old)
    world.faulty.on_read = lambda key, start: None
    world.faulty.reads.clear()
    assert Receiver(world.store, engine, run_id=RUN, cache=cache).sync() is not None
    assert engine.holds(new)
    packs = [key for key, _ in world.faulty.reads if key.endswith(".pack")]
    assert len(packs) == 1, "two of three had been fetched, and the held weights were known by their hash"


@pytest.mark.parametrize("wrong", ["raises", "corrupts"])
def test_fault_28_failure_in_mid_scatter_rolls_back(tmp_path: Path, wrong: str) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    old, new = world.model.served(), world.publish()

    def fails(names: frozenset[str]) -> None:
        engine.on_changed = lambda names: None
        if wrong == "raises":
            raise RuntimeError("the device is gone")
        engine.weights["embed.weight"].view(np.uint16)[3] ^= 1

    engine.on_changed = fails
    with pytest.raises(SyncError, match="device is gone" if wrong == "raises" else "after the scatter"):
        receiver.sync()
    if wrong == "raises":
        assert (receiver.state, receiver.version) == (State.SERVING, 0)
        assert engine.holds(old)
        assert not engine.paused
    else:  # a place that no undo covers: what is held is no version
        assert receiver.state in (State.FENCED, State.SERVING)
        assert engine.holds(old) == receiver.serving
    assert receiver.rollbacks == 1
    assert receiver.sync() is not None
    assert engine.holds(new)
    receiver.require(exact_version=1)


def test_fault_28_a_rollback_that_fails_fences_until_a_keyframe(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    new = world.publish()

    def breaks(names: frozenset[str]) -> None:
        raise RuntimeError("the device is gone")

    engine.on_changed = breaks
    with pytest.raises(SyncError, match="device is gone"):
        receiver.sync()
    assert receiver.state is State.FENCED
    assert engine.paused, "it must not go on with weights that are no version"
    with pytest.raises(SyncError, match="nothing is served now: the receiver is fenced"):
        receiver.require()
    engine.on_changed = lambda names: None
    report = receiver.sync()
    assert report is not None
    assert report.resynced
    assert engine.holds(new)
    assert not engine.paused
    receiver.require(exact_version=1)
    with pytest.raises(SyncError, match="no version to go back to"):
        receiver.rollback()


def test_fault_28_nothing_proven_to_go_back_to(tmp_path: Path) -> None:
    """The weights had drifted and the keyframe's scatter fails too: the engine must stay paused."""
    world = World(tmp_path)
    engine, receiver = world.joined()
    engine.weights["embed.weight"].view(np.uint16)[3] ^= 1
    new = world.publish()

    def fails(names: frozenset[str]) -> None:
        engine.on_changed = lambda names: None
        raise RuntimeError("the device is gone")

    engine.on_changed = fails
    with pytest.raises(SyncError, match="device is gone"):
        receiver.sync()
    assert receiver.state is State.FENCED
    assert engine.paused
    receiver.sync()
    assert engine.holds(new)
    assert not engine.paused


def ranks(world: World, count: int = 3) -> tuple[list[Engine], list[Receiver], GroupReceiver]:
    served = world.model.served()
    names = sorted(served)
    engines = [
        Engine(served, lambda name, i=i: names.index(name) % count == i)  # type: ignore[misc]
        for i in range(count)
    ]
    receivers = [Receiver(world.store, engine, run_id=RUN, partial=True) for engine in engines]
    return engines, receivers, GroupReceiver(world.store, receivers)


def test_fault_29_one_rank_fails_its_hash(tmp_path: Path) -> None:
    world = World(tmp_path)
    engines, receivers, group = ranks(world)
    assert len(group.sync()) == 3
    assert group.digest == world.publisher.baseline_digest
    old, new = world.model.served(), world.publish()

    def corrupts(names: frozenset[str]) -> None:
        engines[1].on_changed = lambda names: None
        name = min(names)
        engines[1].weights[name].view(np.uint8)[0] ^= 1

    engines[1].on_changed = corrupts
    with pytest.raises(SyncError, match="after the scatter"):
        group.sync()
    assert all(engine.holds(old) for engine in (engines[0], engines[2])), "nobody serves what one could not prove"
    assert [r.version for r in receivers] == [0, 0, 0]
    assert not group.fenced or engines[1].paused
    assert group.sync()
    assert all(engine.holds(new) for engine in engines)
    group.require(exact_version=1)


def test_fault_29_one_rank_cannot_stage(tmp_path: Path) -> None:
    world = World(tmp_path)
    engines, receivers, group = ranks(world)
    group.sync()
    old = world.model.served()
    world.publish()
    receivers[2]._stage_limit_bytes = 1
    with pytest.raises(SyncError, match="1 bytes of memory"):
        group.sync()
    assert all(engine.holds(old) for engine in engines)
    group.require(exact_version=0)
    assert [engine.log.count("pause") for engine in engines] == [1, 1, 1], "nobody was paused for it"


def test_fault_29_first_landing_of_a_group_fails(tmp_path: Path) -> None:
    world = World(tmp_path)
    engines, receivers, group = ranks(world)

    def fails(names: frozenset[str]) -> None:
        engines[2].on_changed = lambda names: None
        raise RuntimeError("no")

    engines[2].on_changed = fails
    with pytest.raises(SyncError):
        group.sync()
    assert [r.state for r in receivers] == [State.EMPTY] * 3
    with pytest.raises(SyncError, match="nothing is served"):
        group.require()
    group.sync()
    assert all(engine.holds(world.model.served()) for engine in engines)


def test_fault_29_a_tensor_that_no_rank_holds(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, receivers, _ = ranks(world)
    with pytest.raises(SyncError, match="no rank holds"):
        GroupReceiver(world.store, receivers[:2]).sync()


@pytest.mark.parametrize("how", ["limit", "allocation"])
def test_fault_30_out_of_memory_at_staging(tmp_path: Path, how: str) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined(stage_limit_bytes=100_000)
    old, new = world.model.served(), world.publish(size=1e-2)
    if how == "limit":
        receiver._stage_limit_bytes = 1000
    else:

        def short(key: str, start: int) -> None:
            raise MemoryError

        world.faulty.on_read = lambda key, start: short(key, start) if key.endswith(".pack") else None
    with pytest.raises(SyncError, match=r"1000 bytes of memory|MemoryError"):
        receiver.sync()
    assert engine.holds(old)
    receiver.require(exact_version=0)
    receiver._stage_limit_bytes = 100_000
    world.faulty.on_read = lambda key, start: None
    assert receiver.sync() is not None
    assert engine.holds(new)


def test_fault_31_the_same_delta_twice(tmp_path: Path) -> None:
    """XOR applied twice would revert; here patches know what they were made for."""
    world = World(tmp_path, allowed=("xor",))
    engine, receiver = world.joined()
    new = world.publish()
    staged = receiver.prepare()
    assert staged is not None
    receiver.commit(staged)
    receiver.finish()
    with pytest.raises(SyncError, match="was staged on"):
        receiver.commit(staged)
    assert engine.holds(new)
    assert receiver.sync() is None


@pytest.mark.parametrize("touched", [True, False])
def test_fault_32_base_drifts_by_one_bit(tmp_path: Path, touched: bool) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined(verify_every=2)
    name = "embed.weight" if touched else "rope.inv_freq"
    engine.weights[name].view(np.uint8)[5] ^= 4
    still = world.model.master["rope.inv_freq"]
    resyncs = []
    for version in (1, 2):
        new = world.model.train(1e-3)
        if not touched:
            world.model.master["rope.inv_freq"] = new["rope.inv_freq"] = still
        world.publisher.publish(new, version=version)
        report = receiver.sync()
        assert report is not None
        resyncs.append(report.resynced)
    assert resyncs == ([True, False] if touched else [False, True]), "at once, or at the next hash of everything"
    assert engine.holds(new)
    assert receiver.faults == 1


def test_fault_32_audit_on_demand(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    receiver.audit()
    engine.weights["rope.inv_freq"].view(np.uint8)[5] ^= 4
    with pytest.raises(SyncError, match=r"rope\.inv_freq.*is not that of version 0 any more"):
        receiver.audit()
    assert receiver.state is State.FENCED
    assert receiver.sync() is not None, "the head did not move, but a keyframe puts it right"
    assert engine.holds(world.model.served())
    receiver.audit()


def test_fault_33_late_join_with_a_pruned_chain(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=10)
    early, early_receiver = world.joined()
    new = world.publish(24)
    gone = world.compactor().collect(keep_versions=3, grace_s=0, skew_s=-1)
    assert gone.objects > 20
    late, receiver = world.receiver()
    report = receiver.sync()
    assert report is not None
    assert late.holds(new)
    head = read_head(world.store)
    assert head is not None
    left = read_catalog(world.store, head).edges
    assert [e.version for e in left if e.source is None] == [20]
    assert report.body_bytes == sum(e.bytes for e in left if e.source is None or e.version > 20)
    resync = early_receiver.sync()
    assert resync is not None
    assert resync.resynced, "the chain from version 0 is gone"
    assert early.holds(new)


def test_fault_34_join_during_the_rollout_of_the_next(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=2)
    engine, receiver = world.receiver(leases=Leases(world.store, replica="r0"))
    at_join = world.publish()
    head = read_head(world.store)
    dies = True

    def collector_runs(key: str, start: int) -> None:
        nonlocal dies
        if dies and key.endswith(".pack"):
            dies = False
            world.publish(3)
            world.compactor().collect(keep_versions=1, grace_s=0, skew_s=0)

    world.faulty.on_read = collector_runs
    receiver.sync(head)
    assert engine.holds(at_join), "the lease kept what it was reading"
    assert not dies
    receiver.sync()
    assert engine.holds(world.model.served())


def test_fault_35_no_traffic_before_proof(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.receiver()
    seen: list[tuple[str, bool]] = []
    engine.on_changed = lambda names: seen.append((receiver.state, receiver.serving))
    world.faulty.on_read = lambda key, start: seen.append((receiver.state, receiver.serving))
    with pytest.raises(SyncError, match="receiver is empty"):
        receiver.require()
    staged = receiver.prepare()
    assert staged is not None
    assert not receiver.serving
    receiver.commit(staged)
    assert not receiver.serving
    receiver.finish()
    assert receiver.serving
    assert not any(serving for _, serving in seen)
    assert {state for state, _ in seen} == {"empty", "base", "fetching", "activating"}
    seen.clear()
    world.publish()
    receiver.sync()
    assert {state for state, serving in seen if serving} == {"serving", "fetching"}, "the old version is served on"
    assert {state for state, serving in seen if not serving} == {"activating"}


def test_fault_35_requests_name_versions(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, receiver = world.joined()
    receiver.require(min_version=0)
    with pytest.raises(SyncError, match="version 0 is served, the request wants at least 1; try again later"):
        receiver.require(min_version=1)
    with pytest.raises(SyncError, match="wants exactly 1"):
        receiver.require(exact_version=1)


def test_fault_39_a_pause_that_never_comes(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    receiver._pause_limit_s = 0.05
    old, new = world.model.served(), world.publish()
    gate = threading.Event()
    engine.on_pause = lambda: (gate.wait(30), None)[1]
    engine.log.clear()
    with pytest.raises(SyncError, match=r"did not pause within 0\.05 s"):
        receiver.sync()
    assert receiver.state is State.SERVING
    assert engine.holds(old)
    receiver.require(exact_version=0)
    gate.set()
    waiting = [thread for thread in threading.enumerate() if thread.name == "sync-pause"]
    for thread in waiting:
        thread.join(10)
    assert engine.log == ["pause", "resume"], "a pause that came too late is undone"
    engine.on_pause = lambda: None
    receiver.sync()
    assert engine.holds(new)


def test_fault_39_a_pause_that_fails(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined(pause_limit_s=5.0)
    world.publish()

    def fails() -> None:
        raise RuntimeError("deadlock")

    engine.on_pause = fails
    with pytest.raises(SyncError, match="pausing the engine: RuntimeError: deadlock"):
        receiver.sync()
    receiver.require(exact_version=0)


def test_fault_40_sleep_and_wake_between_updates(tmp_path: Path) -> None:
    """An engine that throws its weights away in its sleep wakes up with something that is no version."""
    world = World(tmp_path)
    engine, receiver = world.joined()
    for array in engine.weights.values():
        array.view(np.uint8)[:] = 0
    new = world.publish()
    report = receiver.sync()
    assert report is not None
    assert report.resynced
    assert engine.holds(new)
    for array in engine.weights.values():  # slept, and nothing was published meanwhile
        array.view(np.uint8)[:] = 0
    with pytest.raises(SyncError, match="any more"):
        receiver.audit()
    receiver.sync()
    assert engine.holds(new)


@pytest.mark.parametrize(
    "name", ["mtp.0.proj.weight", "rope.inv_freq", "layers.1.lora_A.weight", "layers.1.experts.fp8", "scale"]
)
def test_fault_41_every_kind_of_tensor_is_included(tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    engine, _ = world.joined()
    assert engine.weights[name].tobytes() == world.model.served()[name].tobytes()
    lacking, receiver = world.receiver()
    del lacking.weights[name]
    with pytest.raises(SyncError, match=f"the engine does not hold: {name}"):
        receiver.sync()


@pytest.mark.parametrize("kept", ["embed.weight", "lm_head.weight"])
def test_fault_41_tied_head_travels_once(tmp_path: Path, kept: str) -> None:
    """Engines may hold a tied tensor under both names, twice, or under either name alone."""
    world = World(tmp_path)
    base = world.base()
    assert dict(base.aliases) == {"lm_head.weight": "embed.weight"}
    assert "lm_head.weight" not in {c.tensor for c in base.chunks}
    twice, twice_receiver = world.joined()
    assert twice.weights["embed.weight"] is not twice.weights["lm_head.weight"]
    shared, shared_receiver = world.receiver()
    shared.weights["lm_head.weight"] = shared.weights["embed.weight"]
    one, one_receiver = world.receiver()
    del one.weights[{"embed.weight": "lm_head.weight", "lm_head.weight": "embed.weight"}[kept]]
    new = world.publish(2)
    for engine, receiver in ((twice, twice_receiver), (shared, shared_receiver), (one, one_receiver)):
        receiver.sync()
        assert engine.holds(new)


def test_fault_42_derived_layouts_are_rebuilt(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    for _ in range(3):
        new = world.publish(size=1e-2)
        receiver.sync()
        assert engine.derived is not None
        assert np.array_equal(engine.derived, new["layers.1.experts.fp8"].reshape(-1).astype(np.float32) * 2)
    before = engine.derived.copy()
    receiver.rollback()
    assert not np.array_equal(engine.derived, before), "and after going back too"
    assert np.array_equal(engine.derived, engine.weights["layers.1.experts.fp8"].view(FP8).astype(np.float32) * 2)


def bits(arrays: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def test_fault_43_a_hundred_updates_equal_one_full_load(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=1000, with_limit=False)
    engine, receiver = world.joined()
    for _ in range(100):
        world.publish()
        report = receiver.sync()
        assert report is not None
        assert not report.resynced
    again = Model()
    for _ in range(100):
        full = again.train()
    assert engine.bits() == bits(full)
    fresh = World(tmp_path / "fresh")
    fresh.new_publisher().start(full, version=100)
    other, joined = fresh.joined()
    assert other.bits() == engine.bits()
    assert joined.digest == receiver.digest, "the same name, whatever the way"
    late, late_receiver = world.joined()
    assert late.bits() == engine.bits()
    assert late_receiver.digest == receiver.digest


def test_fault_44_squash_equals_the_chain(tmp_path: Path) -> None:
    world = World(tmp_path)
    chained, receiver = world.joined()
    start = receiver.digest
    states = []
    for _ in range(8):
        world.publish()
        receiver.sync()
        states.append(receiver.digest)
    merged = world.compactor().squash_due()
    assert sorted(edge.span for edge in merged) == [2, 2, 2, 2, 4, 4, 8]
    whole = next(edge for edge in merged if edge.span == 8)
    assert (whole.source, whole.target) == (start, states[-1])
    head = read_head(world.store)
    assert head is not None
    edges = read_catalog(world.store, head).edges
    found = cheapest_path(edges, {start: 0}, head.digest)
    assert found is not None
    assert [edge.span for edge in found[1]] == [8], "the merged one is the cheapest way"
    assert whole.bytes < sum(edge.bytes for edge in edges if edge.span == 1)
    squashed, late = world.joined()
    assert squashed.bits() == chained.bits()
    assert late.digest == receiver.digest
    assert world.compactor().squash_due() == [], "nothing is due twice"


def test_fault_44_every_way_leads_to_the_same_bits(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=4)
    world.publish(8)
    world.compactor().squash_due()
    head = read_head(world.store)
    assert head is not None
    edges: list[Edge] = list(read_catalog(world.store, head).edges)
    seen, bad = set(), set()
    while (found := cheapest_path(edges, {None: 0}, head.digest, bad)) is not None:
        path = found[1]
        engine, receiver = world.receiver()
        world.faulty.on_read = lambda key, start: None
        for edge in edges:
            if edge not in path:
                bad.add(edge.manifest)

        def only(key: str, start: int, bad: set[str] = bad) -> None:
            if key in bad:
                raise FileNotFoundError(key)

        world.faulty.on_read = only
        receiver.sync()
        assert engine.holds(world.model.served())
        seen.add((tuple(edge.span for edge in path), receiver.digest))
        edges = [edge for edge in edges if edge != path[-1]]
        bad = set()
    assert len(seen) >= 3
    assert len({digest for _, digest in seen}) == 1


def test_fault_45_rollback_equals_the_earlier_state(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    with pytest.raises(SyncError, match="no version to go back to"):
        receiver.rollback()
    for size in (1e-4, 1e-2, 1.0):  # sparse, mixed, dense
        before, digest, version = engine.bits(), receiver.digest, receiver.version
        new = world.publish(size=size)
        receiver.sync()
        assert engine.bits() != before
        receiver.rollback()
        assert engine.bits() == before
        assert (receiver.digest, receiver.version, receiver.state) == (digest, version, State.SERVING)
        receiver.audit()
        with pytest.raises(SyncError, match="one step is remembered"):
            receiver.rollback()
        receiver.sync()
        assert engine.holds(new)
