"""A store of objects for weight delivery: whole writes, resumed reads, deadlines, and one pointer that is swapped.

Objects are named by the blake3 of their content, so a wrong or damaged one cannot pass for the right one, writing one
twice is harmless, and a publisher that dies leaves at most objects that nothing points to.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from headrace.clock import Clock, WallClock
from headrace.errors import SyncError
from headrace.sync.backends import Backend, FileBackend, FsspecBackend, HttpBackend, Stored

OBJECT_KEY = r"objects/[0-9a-f]{64}\.(pack|json)"
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_HOPELESS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG}
"""Failures that no further try heals."""
_FIRST_WAIT_S = 0.1
_CLOCK_FOLDER = "clock"
_T = TypeVar("_T")


class _EndedEarly(OSError):
    """An object is shorter than what was asked of it."""


def object_key(data: bytes | memoryview, kind: str) -> str:
    """Name of an object by its content; `kind` is "pack" or "json"."""
    return f"objects/{blake3(data).hexdigest()}.{kind}"


class Store:
    """Objects under one URL: a path, file://, memory://, s3://, gs:// (fsspec), http:// and https:// (read-only).

    Every call ends after `deadline_s` at the latest, however slowly bytes trickle in; a broken read goes on where it
    broke, up to `tries` times without progress. Raises SyncError that says what was tried.
    """

    def __init__(
        self,
        url: str,
        *,
        durable: bool = True,
        deadline_s: float = 600.0,
        attempt_s: float = 30.0,
        tries: int = 5,
        clock: Clock | None = None,
        wait: Callable[[float], None] = time.sleep,
        backend: Backend | None = None,
    ) -> None:
        self.url = url
        self._deadline_s = deadline_s
        self._tries = tries
        self._clock = clock or WallClock()
        self._wait = wait
        self._backend = backend or _backend(url, durable=durable, attempt_s=attempt_s)

    def put(self, key: str, data: bytes) -> None:
        """Write an object: whole or not at all, on disk when this returns (file systems, `durable`)."""
        _check(key)
        self._retried(f"writing {key} ({len(data)} bytes)", lambda: self._backend.write(key, data))

    def put_object(self, data: bytes, kind: str) -> str:
        """Write an object under the name of its content and return that name.

        It is written also when it is there: its time becomes new, so that no collector takes it meanwhile.
        """
        key = object_key(data, kind)
        self.put(key, data)
        return key

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """A whole object. One that is not there yet is tried again: its name may have travelled faster than it."""
        return self._read(key, 0, None, max_bytes)

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Exactly `size` bytes from `start`."""
        return self._read(key, start, start + size, None)

    def get_object(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """A whole object whose content was proven by its name. Damage is read once more, then refused."""
        data = self.get(key, max_bytes=max_bytes)
        if not _proven(key, data):
            data = self.get(key, max_bytes=max_bytes)
        if not _proven(key, data):
            raise SyncError(f"{self.url}/{key}: its content ({len(data)} bytes) is not what its name says")
        return data

    def fetch(self, key: str, path: Path, size: int) -> bytes:
        """`get_object` by way of a file: a read that was broken off, even by the end of the process, goes on."""
        if path.exists() and path.stat().st_size == size:
            data = path.read_bytes()
            if _proven(key, data):
                return data
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        for fresh in (False, True):
            if fresh:
                partial.unlink(missing_ok=True)
            have = partial.stat().st_size if partial.exists() else 0
            with partial.open("r+b" if have else "wb") as file:
                have = min(have, size)
                file.truncate(have)
                file.seek(have)
                for block in self._blocks(key, have, size):
                    file.write(block)
            data = partial.read_bytes()
            if _proven(key, data):
                partial.replace(path)
                return data
        partial.unlink()
        raise SyncError(f"{self.url}/{key}: its content ({len(data)} bytes) is not what its name says")

    def find(self, key: str, *, max_bytes: int | None = None) -> bytes | None:
        """A whole object, or None at once where there is none."""
        try:
            return self._read(key, 0, None, max_bytes, absent_ok=True)
        except FileNotFoundError:
            return None

    def exists(self, key: str) -> bool:
        """Whether an object is there now."""
        _check(key)

        def once() -> bool:
            try:
                for _ in self._backend.read(key, 0, 1):
                    break
            except FileNotFoundError:
                return False
            return True

        return self._retried(f"looking for {key}", once)

    def list(self, prefix: str) -> list[Stored]:
        """Objects below a folder, perhaps not the newest ones."""
        return self._retried(f"listing {prefix}", lambda: self._backend.list(prefix))

    def delete(self, key: str) -> None:
        """Delete an object; an absent one is no error."""
        _check(key)
        self._retried(f"deleting {key}", lambda: self._backend.delete(key))

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bool:
        """Replace `expected` (None: absence) by `new`; False, and nothing changed, where something else is there.

        Folders and memory: atomic. Object stores through fsspec offer no conditional write in common: compare, write,
        read again. Two writers within that moment can both see True; the epochs in the head then stop the older one
        at its next write, because it finds an epoch that is not its own.
        """
        with self._backend.lock() as exclusive:
            if self.find(key) != expected:
                return False
            self.put(key, new)
        return exclusive or self.find(key) == new

    def now_s(self) -> float:
        """The time by the store's clock, which is the only one that lease and age are measured with."""
        key = f"{_CLOCK_FOLDER}/now"
        self.put(key, b"")
        for stored in self.list(_CLOCK_FOLDER):
            if stored.key == key:
                return stored.modified_s
        raise SyncError(f"{self.url}: an object just written is not listed; the store's time is unknown")

    def _read(self, key: str, start: int, stop: int | None, max_bytes: int | None, *, absent_ok: bool = False) -> bytes:
        data = bytearray()
        for block in self._blocks(key, start, stop, absent_ok=absent_ok):
            data += block
            if max_bytes is not None and len(data) > max_bytes:
                raise SyncError(f"{self.url}/{key} is larger than the {max_bytes} bytes that it may have")
        return bytes(data)

    def _blocks(self, key: str, start: int, stop: int | None, *, absent_ok: bool = False) -> Iterator[bytes]:
        """Bytes of an object in order, over as many connections as that takes."""
        _check(key)
        at, failures = start, 0
        until_s = self._clock.now() + self._deadline_s
        while stop is None or at < stop:
            before = at
            try:
                for block in self._backend.read(key, at, stop):
                    at += len(block)
                    yield block
                    if self._clock.now() > until_s:
                        raise SyncError(
                            f"reading {self.url}/{key}: {at - start} bytes came within {self._deadline_s} s, "
                            "which is all the time there is"
                        )
                if stop is None or at >= stop:
                    return
                reason: OSError = _EndedEarly(f"it ends at byte {at}, {stop} are needed")
            except OSError as exc:
                if absent_ok and isinstance(exc, FileNotFoundError):
                    raise
                reason = exc
            failures = 1 if at > before else failures + 1
            self._after_failure(f"reading {key} at byte {at}", reason, failures, until_s)

    def _retried(self, doing: str, once: Callable[[], _T]) -> _T:
        until_s = self._clock.now() + self._deadline_s
        failures = 0
        while True:
            try:
                return once()
            except OSError as exc:
                failures += 1
                self._after_failure(doing, exc, failures, until_s)

    def _after_failure(self, doing: str, exc: OSError, failures: int, until_s: float) -> None:
        """Wait before the next try, or give up."""
        wait_s = _FIRST_WAIT_S * 2 ** (failures - 1)
        hopeless = exc.errno in _HOPELESS
        if hopeless or failures >= self._tries or self._clock.now() + wait_s > until_s:
            raise SyncError(
                f"{doing} in {self.url}: {type(exc).__name__}: {exc} (try {failures} of {self._tries})"
            ) from exc
        self._wait(wait_s)


def _backend(url: str, *, durable: bool, attempt_s: float) -> Backend:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        return FileBackend(Path(rest if separator else url), durable=durable)
    if scheme in ("http", "https"):
        return HttpBackend(url, attempt_s=attempt_s)
    return FsspecBackend(url)


def _check(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise SyncError(f"{key!r} is no name of an object: letters, digits, _ - . and single / between them only")


def _proven(key: str, data: bytes) -> bool:
    return object_key(data, key.rpartition(".")[2]) == key
