"""Faults 1 to 15 of the list: what happens on the way. The old version stays, whole, or another way is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from delivery import RUN, Faulty, World, object_with

from headrace.clock import VirtualClock
from headrace.errors import SyncError
from headrace.sync.backends import FileBackend
from headrace.sync.catalog import read_catalog, read_head
from headrace.sync.gaps import write_gaps
from headrace.sync.lease import Leases
from headrace.sync.packs import read_manifest
from headrace.sync.staging import next_table
from headrace.sync.store import Store
from headrace.sync.streams import frame, varint
from headrace.sync.target import State
from headrace.sync.version import DeltaManifest, parse


def refused_then_healed(world: World, hurt: Callable[[], None], heal: Callable[[], None], match: str) -> None:
    """A damaged delta is refused with the old version served; undamaged it lands."""
    engine, receiver = world.joined()
    old, before = world.model.served(), receiver.version
    new = world.publish()
    hurt()
    with pytest.raises(SyncError, match=match):
        receiver.sync()
    assert engine.holds(old)
    assert receiver.state is State.SERVING
    assert receiver.version == before
    assert not engine.paused
    receiver.require(exact_version=before)
    heal()
    assert receiver.sync() is not None
    assert engine.holds(new)


def damage(world: World, change: Callable[[bytes], bytes]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Hurt and heal the newest pack."""
    whole: list[bytes] = []

    def hurt() -> None:
        whole.append(world.pack_path().read_bytes())
        world.pack_path().write_bytes(change(whole[0]))

    return hurt, lambda: (world.pack_path().write_bytes(whole[0]), None)[1]


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_fault_01_truncated_pack(tmp_path: Path) -> None:
    world = World(tmp_path)
    refused_then_healed(world, *damage(world, lambda data: data[:-3]), "content")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_fault_02_bit_flip_in_body(tmp_path: Path, share: float) -> None:
    world = World(tmp_path)
    refused_then_healed(world, *damage(world, lambda data: flip(data, int(share * len(data)))), "not what its name")


def test_fault_02_bit_flip_heals_by_a_keyframe(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=1)
    engine, receiver = world.joined()
    new = world.publish()
    hurt, _ = damage(world, lambda data: flip(data, 5))
    hurt()
    report = receiver.sync()
    assert report is not None
    assert report.resynced
    assert engine.holds(new)
    assert receiver.faults == 1


def test_fault_02_body_is_proven_also_when_read_by_ranges(tmp_path: Path) -> None:
    """A rank reads few bytes of a pack, so the pack's own name proves nothing; the chunk's hash does."""
    world = World(tmp_path)
    engine, receiver = world.receiver(partial=True)
    for name in [n for n in engine.weights if n != "layers.0.norm.weight"]:
        del engine.weights[name]
    receiver.sync()
    old = engine.bits()
    world.publish(size=1e-2)
    entry = next(c for c in world.newest()[1]["chunks"] if c["tensor"] == "layers.0.norm.weight")
    path = world.pack_path()
    path.write_bytes(flip(path.read_bytes(), entry["offset"]))
    with pytest.raises(SyncError, match=r"norm\.weight.*damaged"):
        receiver.sync()
    assert engine.bits() == old


def test_fault_03_bit_flip_in_header(tmp_path: Path) -> None:
    world = World(tmp_path)
    path = world.folder / "unset"
    whole = b""

    def hurt() -> None:
        nonlocal path, whole
        path = world.folder / world.newest()[0]
        whole = path.read_bytes()
        path.write_bytes(flip(whole, len(whole) // 3))

    refused_then_healed(world, hurt, lambda: (path.write_bytes(whole), None)[1], "not what its name")


def test_fault_03_a_damaged_head_is_no_head(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    old = world.model.served()
    world.publish()
    path = world.folder / "head.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(flip(whole, at))
        try:
            receiver.sync()
        except SyncError:
            assert engine.holds(old)
        else:  # a flipped label, time or writer: the weights are proven all the same
            assert engine.holds(world.model.served())
            receiver.rollback()


def test_fault_04_wrong_pack_under_the_right_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    other = world.pack_path().read_bytes()
    refused_then_healed(world, *damage(world, lambda data: other), "larger than")


def test_fault_05_duplicate_delivery(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    new = world.publish()
    head = read_head(world.store)
    assert receiver.sync(head) is not None
    pauses = engine.log.count("pause")
    assert receiver.sync(head) is None
    assert receiver.sync() is None
    assert engine.holds(new)
    assert engine.log.count("pause") == pauses


def test_fault_06_reordered_delivery(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    world.publish()
    first = read_head(world.store)
    new = world.publish()
    second = read_manifest(world.store, world.newest()[0], DeltaManifest)
    with pytest.raises(SyncError, match="version 2 applies to"):
        next_table(receiver.table, second, run_id=RUN)
    assert receiver.sync() is not None
    assert engine.holds(new)
    with pytest.raises(SyncError, match=r"version 1 refused: version 2"):
        receiver.sync(first)
    assert engine.holds(new)


def test_fault_07_missing_delta(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=3)
    engine, receiver = world.joined()
    old = world.model.served()
    world.publish()
    (world.folder / world.newest()[0]).unlink()
    world.publish()
    with pytest.raises(SyncError, match="FileNotFoundError"):
        receiver.sync()
    assert engine.holds(old)
    new = world.publish()
    report = receiver.sync()
    assert report is not None
    assert report.resynced
    assert engine.holds(new)


def test_fault_08_slow_loris(tmp_path: Path) -> None:
    clock = VirtualClock()
    backend = Faulty(FileBackend(tmp_path, durable=False))

    def drip(key: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            for byte in block:
                clock.advance_to(clock.now() + 1.0)
                yield bytes([byte])

    backend.blocks = drip
    store = Store("drip", backend=backend, clock=clock, deadline_s=30.0, wait=lambda s: None)
    key = store.put_object(bytes(1000), "pack")
    with pytest.raises(SyncError, match=r"31 bytes came within 30\.0 s"):
        store.get_object(key)
    assert clock.now() == 31.0


def test_fault_09_reset_in_mid_range_resumes(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    new = world.publish(size=1e-2)
    key = object_with(world.pack_path().read_bytes())

    def reset(read: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            yield block[:100]
            if read == key and len(block) > 100:
                raise ConnectionResetError("by peer")
            yield block[100:]

    world.faulty.blocks = reset
    assert receiver.sync() is not None
    assert engine.holds(new)
    starts = [start for read, start in world.faulty.reads if read == key]
    assert starts == list(range(0, 100 * len(starts), 100))
    assert len(starts) > 5, "each connection made progress, so none counted as the last try"


def test_fault_09_resumes_after_the_process_ended(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    cache = tmp_path / "cache"
    pack = world.pack_path()
    whole = pack.read_bytes()
    cache.mkdir()
    (cache / f"{pack.name}.partial").write_bytes(whole[:1234])
    engine, _ = world.joined(cache=cache)
    assert engine.holds(world.model.served())
    assert (object_with(whole), 1234) in world.faulty.reads
    assert (object_with(whole), 0) not in world.faulty.reads


def test_fault_09_a_damaged_partial_file_is_read_anew(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"{world.pack_path().name}.partial").write_bytes(b"\0" * 500)
    engine, _ = world.joined(cache=cache)
    assert engine.holds(world.model.served())


def test_fault_10_stale_listing(tmp_path: Path) -> None:
    """Nothing but deleting looks at a listing, and what it deletes it must see in one."""
    world = World(tmp_path)
    world.faulty.listed = lambda stored: [s for s in stored if s.key == "clock/now"]
    new = world.publish(3)
    engine, _ = world.joined()
    assert engine.holds(new)
    gone = world.compactor().collect(keep_versions=1, grace_s=0, skew_s=0)
    assert gone.objects == 0
    late, _ = world.joined()
    assert late.holds(new)


def test_fault_11_head_before_manifest(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine, receiver = world.joined()
    old, new = world.model.served(), world.publish()
    key, _ = world.newest()
    hidden = 3

    def not_yet(read: str, start: int) -> None:
        nonlocal hidden
        if read == key and hidden:
            hidden -= 1
            raise FileNotFoundError(read)

    world.faulty.on_read = not_yet
    hidden = 10_000
    with pytest.raises(SyncError, match="FileNotFoundError"):
        receiver.sync()
    assert engine.holds(old)
    hidden = 3
    assert receiver.sync() is not None
    assert engine.holds(new)
    assert world.waits, "it waited between tries"


def first_chunk(body: bytes, world: World, **about: Any) -> Callable[[dict[str, Any]], None]:
    """Give the first chunk of a manifest another body, with all names and hashes of bytes right."""

    def change(manifest: dict[str, Any]) -> None:
        key = world.store.put_object(body, "pack")
        manifest["packs"].append({"key": key, "size": len(body)})
        manifest["chunks"][0] |= {
            "pack": len(manifest["packs"]) - 1,
            "offset": 0,
            "size": len(body),
            "body": xxhash.xxh3_128_hexdigest(body),
            **about,
        }

    return change


def forged(world: World, change: Callable[[dict[str, Any]], None], match: str) -> None:
    engine, receiver = world.joined()
    old = world.model.served()
    world.publish(size=1e-3)
    world.forge(change)
    with pytest.raises(SyncError, match=match):
        receiver.sync()
    assert engine.holds(old)
    assert receiver.state is State.SERVING


def test_fault_12_zstd_bomb(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    assert len(bomb) < 4096
    world = World(tmp_path)
    forged(world, first_chunk(varint(len(bomb)) + bomb + frame(np.zeros(800, np.uint8)), world, mode="dense"), "embed")


@pytest.mark.parametrize(
    ("about", "match"),
    [
        ({"elems": 2**40}, "elems"),
        ({"size": 2**40}, "size"),
        ({"offset": 2**29}, "outside of its pack"),
        ({"changed": 10**6}, "number of changes"),
        ({"elems": 799}, "does not fit tensor"),
        ({"start": 4 * 1024 * 1024}, "does not fit tensor|not in order"),
    ],
)
def test_fault_12_huge_declared_size(tmp_path: Path, about: dict[str, int], match: str) -> None:
    world = World(tmp_path)
    forged(world, lambda manifest: manifest["chunks"][0].update(about), match)


def test_fault_12_body_larger_than_its_values(tmp_path: Path) -> None:
    world = World(tmp_path)
    forged(world, first_chunk(bytes(100_000), world, mode="raw"), "more than raw values have")


@pytest.mark.parametrize("gaps", [[5, 900, 1], [0, 799], [2**31, 2**31]], ids=["beyond", "one too far", "wraps"])
def test_fault_13_malformed_indices(tmp_path: Path, gaps: list[int]) -> None:
    """Decreasing positions cannot be written down: gaps are unsigned, and their sum is bounded."""
    world = World(tmp_path)
    body = write_gaps(np.array(gaps, np.uint32)) + frame(np.zeros(len(gaps), np.uint8)) * 2
    forged(world, first_chunk(body, world, mode="set", changed=len(gaps)), r"embed.*")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda manifest: manifest["chunks"].pop(), "the delta leads to"),
        (lambda manifest: manifest.update(to_digest="0" * 64), "leads to 000000000000, the catalog says"),
        (lambda manifest: manifest.update(from_digest="0" * 64), "applies to 000000000000"),
        (lambda manifest: manifest.update(run_id="run-2"), "belongs to run 'run-2'"),
        (lambda manifest: manifest["chunks"][0].update(new="0" * 32), "the delta leads to"),
        (lambda manifest: manifest["chunks"][0].update(old="0" * 32), "applies to another state"),
        (lambda manifest: manifest["chunks"][0].update(mode="dense"), "embed"),
    ],
    ids=["chunk missing", "to", "from", "run", "new", "old", "mode"],
)
def test_fault_04_right_bytes_that_say_something_else(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    forged(World(tmp_path), change, match)


def test_fault_13_wrong_values_at_right_indices(tmp_path: Path) -> None:
    world = World(tmp_path)
    body = write_gaps(np.array([3], np.uint32)) + frame(np.zeros(1, np.uint8)) * 2
    forged(world, first_chunk(body, world, mode="set", changed=1), "new digest differs")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../b", "a//b", "a\\b", "a\0b", ".", ""])
def test_fault_14_path_traversal_in_a_name(tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    with pytest.raises(SyncError):
        world.publisher.publish({**world.model.served(), name: np.zeros(3, np.float32)}, version=1)
    forged(world, lambda manifest: manifest["chunks"][0].update(tensor=name), "chunks.0.tensor|unknown|order")


@pytest.mark.parametrize(
    "key", ["../head.json", "objects/../../x.pack", "/etc/passwd", "objects/" + "0" * 63 + ".pack"]
)
def test_fault_14_path_traversal_in_a_key(tmp_path: Path, key: str) -> None:
    world = World(tmp_path)
    forged(world, lambda manifest: manifest["packs"][0].update(key=key), r"packs\.0\.key")


def test_fault_14_the_store_takes_no_paths(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for key in ("../x", "/x", "a/../../x", ".hidden", "a//b", ""):
        for call in (store.get, store.exists, store.delete, store.find, lambda k: store.put(k, b"")):
            with pytest.raises(SyncError, match="no name of an object"):
                call(key)


@pytest.mark.parametrize("text", [b'{"run_id":"r","run_id":NaN}', b'{"epoch":NaN}', b"[]", b"", b"\xff", b"[" * 10_000])
def test_fault_14_documents_are_parsed_strictly(text: bytes) -> None:
    with pytest.raises(SyncError, match="is no valid DeltaManifest"):
        parse(DeltaManifest, text, "here")


def test_fault_14_unknown_keys_and_nan_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish()
    _, manifest = world.newest()
    for odd in ({"extra": 1}, {"density": float("nan")}, {"created_at_s": float("inf")}, {"epoch": "1"}, {"codec": 2}):
        with pytest.raises(SyncError, match=next(iter(odd))):
            parse(DeltaManifest, json.dumps({**manifest, **odd}).encode(), "here")
    double = {**manifest, "chunks": [*manifest["chunks"], manifest["chunks"][-1]]}
    with pytest.raises(SyncError, match="twice"):
        parse(DeltaManifest, json.dumps(double).encode(), "here")


@pytest.mark.parametrize("skew_s", [-3e8, 3e8])
def test_fault_15_clock_skew(tmp_path: Path, skew_s: float) -> None:
    """Clocks of publishers and receivers decide nothing: order comes from epochs, ages from the store."""
    world = World(tmp_path, wall_s=lambda: 1e9 + skew_s)
    engine, receiver = world.joined(leases=Leases(world.store, replica="r0", lease_s=60))
    new = world.publish()
    world.options["wall_s"] = lambda: 1e9 - skew_s
    again = world.new_publisher()
    again.start(new, version=1)
    again.publish(world.model.train(), version=2)
    assert receiver.sync() is not None
    assert engine.holds(world.model.served())
    gone = world.compactor().collect(keep_versions=1, grace_s=600, skew_s=0)
    assert gone.objects == 0, "all objects are young by the store's clock"


def test_fault_15_leases_end_by_the_stores_clock(tmp_path: Path) -> None:
    world = World(tmp_path, keyframe_every=2)
    first = read_head(world.store)
    assert first is not None
    edge = read_catalog(world.store, first).edges[0]
    Leases(world.store, replica="r0", lease_s=100).hold([edge.manifest, *edge.packs])
    world.publish(4)
    late_s = 0.0
    world.faulty.listed = lambda stored: [
        type(s)(key=s.key, size=s.size, modified_s=s.modified_s + (late_s if s.key == "clock/now" else 0))
        for s in stored
    ]
    late_s = 120.0
    world.compactor().collect(keep_versions=1, grace_s=0, skew_s=30)
    assert world.store.exists(edge.manifest), "the lease ended 20 s ago, 30 s are tolerated"
    late_s = 140.0
    world.compactor().collect(keep_versions=1, grace_s=0, skew_s=30)
    assert not world.store.exists(edge.manifest)
