"""Seconds until a replica serves the right version again, for each class of fault. Run by weights_e2e.py.

The clock starts with the first thing that the replica (or, where it died, the publisher) does after the fault, and
stops when the receiver is SERVING the digest of the head; the weights are then compared bit for bit. Failed attempts
are repeated at once: what a real loop waits between two looks at the head is left out.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import SyncError
from headrace.sync.catalog import HEAD_KEY, read_catalog, read_head
from headrace.sync.compactor import Compactor
from headrace.sync.receiver import Receiver
from headrace.sync.replica import MappedReplica
from headrace.sync.target import State
from weights_world import RUN, Arrays, Replica, World, nudged

_ATTEMPTS = 6


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Scene:
    """A world just after a fault."""

    world: World
    receiver: Receiver
    want: Arrays
    """What should be served in the end."""
    holds: Callable[[Arrays], bool]
    before: Callable[[], None] = lambda: None
    """Done first, on the clock: a restart."""
    attempts: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recovery:
    """One line of the table."""

    fault: str
    seconds: float
    attempts: int
    way: str
    link_bytes: int


def updated(folder: Path, first: Arrays, *, count: int = 1, **options: Any) -> Scene:
    """A replica at version 0, and `count` versions published after it."""
    world = World(folder, first, **options)
    replica, receiver = world.joined(first)
    return published(Scene(world, receiver, first, replica.holds), count)


def published(scene: Scene, count: int = 1) -> Scene:
    head = read_head(scene.world.near)
    assert head is not None
    for version in range(head.version + 1, head.version + 1 + count):
        scene.want = nudged(scene.want, version)
        scene.world.publisher.publish(scene.want, version=version)
    return scene


def _pack(world: World) -> Path:
    """The largest pack of the newest delta."""
    head = read_head(world.near)
    assert head is not None
    edges = [edge for edge in read_catalog(world.near, head).edges if edge.source is not None]
    return max((world.folder / key for key in edges[-1].packs), key=lambda path: path.stat().st_size)


def _once(change: Callable[[bytes], bytes | None]) -> Callable[[str, Iterator[bytes]], Iterator[bytes]]:
    """The first block of a pack that is read is changed; None breaks the connection in its middle."""
    fresh = [True]

    def blocks(key: str, inner: Iterator[bytes]) -> Iterator[bytes]:
        for block in inner:
            if fresh and key.endswith(".pack"):
                fresh.clear()
                changed = change(block)
                if changed is None:
                    yield block[: len(block) // 2]
                    raise ConnectionResetError("reset by peer")
                block = changed
            yield block

    return blocks


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def nothing(folder: Path, first: Arrays) -> Scene:
    return updated(folder, first)


def connection_reset(folder: Path, first: Arrays) -> Scene:
    scene = updated(folder, first)
    scene.world.backend.blocks = _once(lambda block: None)
    return scene


def flip_on_the_way(folder: Path, first: Arrays) -> Scene:
    scene = updated(folder, first)
    scene.world.backend.blocks = _once(_flipped)
    return scene


def truncated_pack(folder: Path, first: Arrays) -> Scene:
    scene = updated(folder, first, keyframe_every=1)
    path = _pack(scene.world)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return scene


def flip_in_the_store(folder: Path, first: Arrays) -> Scene:
    scene = updated(folder, first, keyframe_every=1)
    path = _pack(scene.world)
    path.write_bytes(_flipped(path.read_bytes()))
    return scene


def _without_newest(scene: Scene) -> None:
    head = read_head(scene.world.near)
    assert head is not None
    plain = [e for e in read_catalog(scene.world.near, head).edges if e.source is not None and e.span == 1]
    scene.world.near.delete(plain[-1].manifest)


def missing_version_with_skip(folder: Path, first: Arrays) -> Scene:
    scene = updated(folder, first, count=2)
    Compactor(scene.world.near, run_id=RUN).squash_due((2,))
    _without_newest(scene)
    return scene


def missing_version(folder: Path, first: Arrays) -> Scene:
    scene = updated(folder, first, count=2, keyframe_every=2)
    _without_newest(scene)
    return scene


def pruned_chain(folder: Path, first: Arrays) -> Scene:
    scene = updated(folder, first, count=4, keyframe_every=4)
    Compactor(scene.world.near, run_id=RUN).collect(keep_versions=1, grace_s=0, skew_s=-1)
    return scene


def drifted_base(folder: Path, first: Arrays) -> Scene:
    world = World(folder, first)
    replica, receiver = world.joined(first)
    scene = published(Scene(world, receiver, first, replica.holds))
    next(iter(replica.arrays().values())).reshape(-1).view(np.uint16)[7] ^= 1
    return scene


def _failing(scene: Scene, replica: Replica, times: int) -> None:
    left = [None] * times

    def fails() -> None:
        if left:
            left.pop()
            raise RuntimeError("the device is gone")

    replica.on_changed = fails


def crashed_apply(folder: Path, first: Arrays) -> Scene:
    world = World(folder, first)
    replica, receiver = world.joined(first)
    scene = published(Scene(world, receiver, first, replica.holds))
    _failing(scene, replica, 1)
    return scene


def crashed_apply_and_rollback(folder: Path, first: Arrays) -> Scene:
    world = World(folder, first)
    replica, receiver = world.joined(first)
    scene = published(Scene(world, receiver, first, replica.holds))
    _failing(scene, replica, 2)
    return scene


def killed_in_apply(folder: Path, first: Arrays) -> Scene:
    """The weights are a mapped file with a journal; the new process maps it, goes back and goes on."""
    world = World(folder / "store", first)
    _, known = world.joined(first)
    assert known.table is not None
    target = MappedReplica.create(folder / "replica", known.table)
    receiver = Receiver(world.far, target, run_id=RUN, journal=target.journal)
    receiver.sync()
    scene = published(Scene(world, receiver, first, lambda want: True))

    def dies(names: frozenset[str]) -> None:
        raise Killed

    target.changed = dies  # type: ignore[method-assign]
    with contextlib.suppress(Killed):
        receiver.sync()

    def restart() -> None:
        fresh = MappedReplica(folder / "replica")
        scene.notes.append("undo journal" if fresh.recovered else "no journal")
        scene.receiver = Receiver(world.far, fresh, run_id=RUN, journal=fresh.journal)
        scene.holds = Replica(fresh.arrays()).holds

    scene.before = restart
    return scene


def pause_never_returns(folder: Path, first: Arrays) -> Scene:
    world = World(folder, first)
    replica, receiver = world.joined(first, pause_limit_s=0.5)
    scene = published(Scene(world, receiver, first, replica.holds))
    stuck = [True]

    def pauses() -> None:
        if stuck:
            stuck.clear()
            time.sleep(1.0)

    replica.on_pause = pauses
    return scene


def publisher_killed(folder: Path, first: Arrays) -> Scene:
    """Before the head was written. The trainer comes back with the same weights and starts its publisher."""
    scene = updated(folder, first, count=0)
    scene.want = nudged(first, 1)

    def dies(key: str) -> None:
        if key == HEAD_KEY:
            raise Killed

    scene.world.near_backend.on_write = dies
    with contextlib.suppress(Killed):
        scene.world.publisher.publish(scene.want, version=1)
    scene.world.near_backend.on_write = lambda key: None

    def restart() -> None:
        scene.world.publisher = scene.world.new_publisher()
        scene.world.publisher.start(scene.want, version=1)

    scene.before = restart
    return scene


def fork(folder: Path, first: Arrays) -> Scene:
    """The trainer went back to an older checkpoint and made other versions from there."""
    scene = updated(folder, first, count=0)
    for _ in range(3):
        published(scene).receiver.sync()
    scene.world.publisher = scene.world.new_publisher()
    scene.want = nudged(first, 77)
    scene.world.publisher.start(first, version=0)
    scene.world.publisher.publish(scene.want, version=1)
    return scene


FAULTS: dict[str, Callable[[Path, Arrays], Scene]] = {
    "none (an update)": nothing,
    "connection reset in a pack": connection_reset,
    "bit flip on the way": flip_on_the_way,
    "bit flip in the store": flip_in_the_store,
    "truncated pack": truncated_pack,
    "missing version, skip delta": missing_version_with_skip,
    "missing version, keyframe": missing_version,
    "pruned chain": pruned_chain,
    "drifted base": drifted_base,
    "crash in apply": crashed_apply,
    "crash in apply and undo": crashed_apply_and_rollback,
    "killed in apply (journal)": killed_in_apply,
    "pause takes too long": pause_never_returns,
    "publisher killed": publisher_killed,
    "fork": fork,
}


def recovery(name: str, first: Arrays, gbit_s: float | None) -> Recovery:
    """Make the fault, then time the way back over a link of that speed."""
    with tempfile.TemporaryDirectory() as folder:
        scene = FAULTS[name](Path(folder), first)
        link = scene.world.link
        link.gbit_s, link.bytes = gbit_s, 0
        begun_s = time.perf_counter()
        scene.before()
        way = _serve(scene)
        taken_s = time.perf_counter() - begun_s
        if not scene.holds(scene.want):
            raise SystemExit(f"{name}: the replica serves something else than what was published")
        return Recovery(name, taken_s, scene.attempts, way, link.bytes)


def _serve(scene: Scene) -> str:
    """Sync until the head is served; returns the ways that were taken."""
    ways = scene.notes
    head = read_head(scene.world.near)
    assert head is not None
    for _ in range(_ATTEMPTS):
        scene.attempts += 1
        rollbacks = scene.receiver.rollbacks
        try:
            report = scene.receiver.sync()
        except SyncError:
            fenced = scene.receiver.state is State.FENCED
            ways.append("fenced" if fenced else "rollback" if scene.receiver.rollbacks > rollbacks else "refused")
            continue
        if report is not None:
            ways.append("keyframe" if "dense" in report.bytes_by_mode else "delta")
        if scene.receiver.serving and scene.receiver.digest == head.digest:
            return ", ".join(ways)
    raise SystemExit(f"version {head.version} is not served after {_ATTEMPTS} attempts: {ways}")


def table(rows: list[Recovery]) -> str:
    lines = [f"{'fault':<30}{'seconds':>9}{'attempts':>10}{'MB':>8}  way"]
    lines += [f"{r.fault:<30}{r.seconds:>9.2f}{r.attempts:>10}{r.link_bytes / 1e6:>8.1f}  {r.way}" for r in rows]
    return "\n".join(lines)
