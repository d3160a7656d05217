"""Kills processes before every step that they take on disk, and looks at what is left. Run as a script: JOB FOLDER.

Each attempt is a forked child in which an audit hook counts the steps (files opened for writing, renames, deletions)
below the folder and sends SIGKILL before the n-th; n grows until a child ends by itself. After each death a new
publisher, a new receiver, or the same replica opened again must find one version, whole. Prints the number of deaths.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from headrace.sync.catalog import read_head
from headrace.sync.compactor import Compactor
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.receiver import Receiver
from headrace.sync.replica import MappedReplica, MemoryReplica, newest_layout, pull
from headrace.sync.staging import Patch
from headrace.sync.store import Store

RUN = "run-1"
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


def weights(version: int) -> Arrays:
    """Version 0 to 3 of a tiny model; a fifth of the elements differs from one to the next."""
    out = {name: np.random.default_rng(7).integers(0, 60_000, 500, dtype=np.uint16) for name in ("a", "b", "c")}
    for at in range(version):
        for name, array in out.items():
            array[np.random.default_rng([at, ord(name)]).random(500) < 0.2] += 1
    return out


def store_at(folder: Path) -> Store:
    return Store(str(folder), durable=False, wait=lambda s: None)


def prepared(folder: Path, version: int) -> None:
    """A store whose head is `version`, a delta away from `version - 1`."""
    publisher = DeltaPublisher(store_at(folder), run_id=RUN)
    publisher.start(weights(0), version=0)
    for v in range(1, version + 1):
        publisher.publish(weights(v), version=v)


def kill_before(step: int, folder: Path) -> None:
    """From now on, die before the n-th step on disk below the folder."""
    taken = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal taken
        writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writing or event in ("os.rename", "os.remove", "os.truncate")) and str(folder) in str(args[0]):
            if taken == step:
                os.kill(os.getpid(), signal.SIGKILL)
            taken += 1

    sys.addaudithook(hook)


def deaths(job: Callable[[], None], armed: Callable[[int], None], check: Callable[[bool], None], reset: Any) -> int:
    """Run the job, killed at step 0, 1, 2, ...; `check(finished)` after each."""
    step = 0
    while True:
        reset()
        child = os.fork()
        if child == 0:
            armed(step)
            job()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or status == 0, f"step {step}: the child ended with {status}"
        check(not killed)
        if not killed:
            return step
        step += 1


def version_of(arrays: Any) -> int:
    """Which version this is, bit for bit; fails for a mixture."""
    for version in range(5):
        if all(np.array_equal(arrays[name].view(np.uint16), a) for name, a in weights(version).items()):
            return version
    raise AssertionError("neither the old version nor the new one")


def joined(folder: Path) -> int:
    """The version that a new receiver gets, and the head agrees."""
    store = store_at(folder)
    target = MemoryReplica({name: np.zeros(500, np.uint16) for name in ("a", "b", "c")})
    receiver = Receiver(store, target, run_id=RUN)
    assert receiver.sync() is not None
    assert version_of(target.arrays()) == receiver.version
    return int(receiver.version or 0)


def fresh(folder: Path, made: Path) -> Callable[[], None]:
    def reset() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)

    return reset


def publish(root: Path) -> int:
    made, folder = root / "made", root / "store"
    prepared(made, 1)

    def job() -> None:
        publisher = DeltaPublisher(store_at(folder), run_id=RUN, keyframe_every=2)
        publisher.start(weights(1), version=1)
        publisher.publish(weights(2), version=2)
        publisher.publish(weights(3), version=3)  # and a keyframe

    def check(finished: bool) -> None:
        version = joined(folder)
        assert version == 3 if finished else version in (1, 2, 3)
        publisher = DeltaPublisher(store_at(folder), run_id=RUN)
        publisher.start(weights(version), version=version)
        publisher.publish(weights(version + 1), version=version + 1)
        assert joined(folder) == version + 1
        Compactor(store_at(folder), run_id=RUN).collect(grace_s=0, skew_s=-1)
        assert joined(folder) == version + 1

    return deaths(job, lambda step: kill_before(step, folder), check, fresh(folder, made))


class Torn(Patch):
    """A patch during which the process dies: half of the values are written."""

    __slots__ = ()

    def apply(self, tensor: Any) -> None:
        part = tensor[self.start : self.start + self.elems]
        where = np.arange(self.elems) if self.where is None else self.where
        part[where[: where.size // 2]] = self.new[: where.size // 2]
        os.kill(os.getpid(), signal.SIGKILL)


def apply(root: Path) -> int:
    """A replica in a file that is changed in place: at every step on disk, and in the middle of every scatter."""
    store, made, folder = root / "store", root / "made", root / "replica"
    prepared(store, 1)
    layout = newest_layout(store_at(store))
    assert layout is not None
    first = MappedReplica.create(made, layout)
    Receiver(store_at(store), first, run_id=RUN, journal=first.journal).sync()
    first.journal.clear()
    publisher = DeltaPublisher(store_at(store), run_id=RUN)
    publisher.start(weights(1), version=1)
    publisher.publish(weights(2), version=2)
    torn_at: list[int] = []

    def job() -> None:
        replica = MappedReplica(folder)
        receiver = Receiver(store_at(store), replica, run_id=RUN, journal=replica.journal)
        staged = receiver.prepare()
        assert staged is not None
        patches = list(staged.patches)
        for at in torn_at:
            patches[at] = Torn(**{f.name: getattr(patches[at], f.name) for f in fields(Patch)})
        object.__setattr__(staged, "patches", tuple(patches))
        receiver.commit(staged)
        receiver.finish()

    def check(finished: bool) -> None:
        replica = MappedReplica(folder)
        version = version_of(replica.arrays())
        assert version == 2 if finished else version in (1, 2)
        assert not torn_at or (replica.recovered and version == 1)
        receiver = Receiver(store_at(store), replica, run_id=RUN, journal=replica.journal)
        receiver.sync()
        assert version_of(MappedReplica(folder).arrays()) == 2

    count = deaths(job, lambda step: kill_before(step, folder), check, fresh(folder, made))
    for at in range(3):
        torn_at[:] = [at]
        fresh(folder, made)()
        child = os.fork()
        if child == 0:
            job()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        check(False)
        count += 1
    return count


def follow(root: Path) -> int:
    store, made, folder = root / "store", root / "made", root / "follow"
    prepared(store, 1)
    pull(store_at(store), made, run_id=RUN)
    publisher = DeltaPublisher(store_at(store), run_id=RUN)
    publisher.start(weights(1), version=1)
    publisher.publish(weights(2), version=2)

    def check(finished: bool) -> None:
        version = version_of(MappedReplica(folder).arrays())
        assert version == 2 if finished else version in (1, 2)
        pull(store_at(store), folder, run_id=RUN)
        assert version_of(MappedReplica(folder).arrays()) == 2
        assert pull(store_at(store), folder, run_id=RUN) is None

    return deaths(
        lambda: (pull(store_at(store), folder, run_id=RUN), None)[1],
        lambda step: kill_before(step, folder),
        check,
        fresh(folder, made),
    )


def collect(root: Path) -> int:
    made, folder = root / "made", root / "store"
    prepared(made, 2)

    def job() -> None:
        compactor = Compactor(store_at(folder), run_id=RUN)
        compactor.squash_due()
        publisher = DeltaPublisher(store_at(folder), run_id=RUN, keyframe_every=1)
        publisher.start(weights(2), version=2)
        publisher.publish(weights(3), version=3)
        compactor.collect(keep_versions=0, grace_s=0, skew_s=-1)

    def check(finished: bool) -> None:
        assert joined(folder) == 3 if finished else joined(folder) in (2, 3)
        Compactor(store_at(folder), run_id=RUN).collect(keep_versions=0, grace_s=0, skew_s=-1)
        head = read_head(store_at(folder))
        assert head is not None
        assert joined(folder) == head.version

    return deaths(job, lambda step: kill_before(step, folder), check, fresh(folder, made))


if __name__ == "__main__":
    sys.stdout.write(f"{globals()[sys.argv[1]](Path(sys.argv[2]))}\n")
