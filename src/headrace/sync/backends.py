"""Where objects of weight delivery lie: a folder, anything that fsspec speaks, or a read-only web server."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import http.client
import itertools
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec

from headrace.errors import SyncError

BLOCK_BYTES = 4 * 1024 * 1024
_TEMP = "partial-"
_LOCK = ".lock"
_LOCK_POLL_S = 0.01
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
"""Where file systems of fsspec say when an object was written, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object as the store lists it."""

    key: str
    size: int
    modified_s: float
    """Seconds since 1970 by the *store's* clock."""


class Backend(Protocol):
    """Five calls. Keys are relative paths with forward slashes; failures are OSErrors, absence FileNotFoundError."""

    def read(self, key: str, start: int, stop: int | None) -> Iterator[bytes]:
        """Blocks of bytes `start` to `stop` (None: the end); fewer bytes come when the object is shorter."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Whole or not at all; an object of that name is replaced."""
        ...

    def list(self, prefix: str) -> list[Stored]:
        """Objects below a folder. May be out of date: nothing but deleting may rest on it."""
        ...

    def delete(self, key: str) -> None:
        """An absent object is no error."""
        ...

    def lock(self) -> AbstractContextManager[bool]:
        """Keep other writers out; yields False where the store offers no lock. Freed when its holder dies."""
        ...


class FileBackend:
    """A folder. Objects appear by rename; with `durable` they also survive a power cut."""

    def __init__(self, root: Path, *, durable: bool = True, lock_s: float = 30.0) -> None:
        self._root = root
        self._durable = durable
        self._lock_s = lock_s
        self._count = itertools.count()

    def read(self, key: str, start: int, stop: int | None) -> Iterator[bytes]:
        with (self._root / key).open("rb") as file:
            file.seek(start)
            left = None if stop is None else stop - start
            while left is None or left > 0:
                block = file.read(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES))
                if not block:
                    return
                left = None if left is None else left - len(block)
                yield block

    def write(self, key: str, data: bytes) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.parent / f"{_TEMP}{os.getpid()}-{threading.get_ident()}-{next(self._count)}"
        try:
            with temp.open("wb") as file:
                file.write(data)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
        if self._durable:
            sync_folder(path.parent)

    def list(self, prefix: str) -> list[Stored]:
        found = []
        for path in (self._root / prefix).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                about = path.stat()
                if path.is_file() and path.name != _LOCK:
                    key = path.relative_to(self._root).as_posix()
                    found.append(Stored(key=key, size=about.st_size, modified_s=about.st_mtime))
        return sorted(found, key=lambda stored: stored.key)

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        self._root.mkdir(parents=True, exist_ok=True)
        until_s = time.monotonic() + self._lock_s
        with (self._root / _LOCK).open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise SyncError(
                            f"{self._root / _LOCK} was held by another process for {self._lock_s} s"
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield True  # the lock ends with the file, also when the process is killed


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_MEMORY_LOCK = threading.Lock()


class FsspecBackend:
    """memory://, s3://, gs:// and whatever else fsspec speaks. Object stores write objects whole by themselves."""

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as exc:
            raise SyncError(f"the store {url!r} needs a package that is not installed: {exc}") from exc
        except ValueError as exc:
            raise SyncError(f"the store {url!r} cannot be opened: {exc}") from exc
        self._exclusive = url.startswith("memory:")

    def read(self, key: str, start: int, stop: int | None) -> Iterator[bytes]:
        path = self._path(key)
        size = int(self._fs.info(path)["size"])
        end = size if stop is None else min(stop, size)
        while start < end:
            block: bytes = self._fs.cat_file(path, start=start, end=min(end, start + BLOCK_BYTES))
            if not block:
                return
            start += len(block)
            yield block

    def write(self, key: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(key), data)

    def list(self, prefix: str) -> list[Stored]:
        self._fs.invalidate_cache()
        base = self._path(prefix).rstrip("/")
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(base, detail=True)
        except FileNotFoundError:
            return []
        skip = len(self._root.rstrip("/")) + 1
        listed = [
            Stored(key=path[skip:], size=int(about["size"]), modified_s=_modified_s(path, about))
            for path, about in found.items()
        ]
        return sorted(listed, key=lambda stored: stored.key)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        if not self._exclusive:
            yield False
            return
        with _MEMORY_LOCK:
            yield True

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"


def _modified_s(path: str, about: dict[str, Any]) -> float:
    """When an object was written, from whichever entry this file system fills."""
    for name in _MODIFIED:
        value = about.get(name)
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    raise SyncError(f"{path}: this store does not say when an object was written; it can be read, not collected")


class HttpBackend:
    """A web server with the objects as files; ranged GET only. Whatever writes must do so by another address."""

    def __init__(self, url: str, *, attempt_s: float) -> None:
        self._url = url.rstrip("/")
        self._attempt_s = attempt_s

    def read(self, key: str, start: int, stop: int | None) -> Iterator[bytes]:
        request = urllib.request.Request(f"{self._url}/{key}")
        if start or stop is not None:
            request.add_header("Range", f"bytes={start}-{'' if stop is None else stop - 1}")
        request.add_header("Accept-Encoding", "identity")
        if not key.startswith("objects/"):  # objects never change, so any cache on the way may answer
            request.add_header("Cache-Control", "no-cache")
        try:
            with urllib.request.urlopen(request, timeout=self._attempt_s) as response:
                yield from self._blocks(response, start, stop)
        except urllib.error.HTTPError as exc:
            exc.close()
            if exc.code in (404, 410):
                raise FileNotFoundError(f"{self._url}/{key}: HTTP {exc.code}") from exc
            if exc.code == 416:
                return
            raise
        except http.client.HTTPException as exc:
            raise ConnectionError(f"{self._url}/{key}: {type(exc).__name__}: {exc}") from exc

    def _blocks(self, response: Any, start: int, stop: int | None) -> Iterator[bytes]:
        """The body, cut to the range also where the server ignored it. An early end is a broken connection."""
        skip = 0 if response.status == 206 else start
        length = response.headers.get("Content-Length")
        seen, left = 0, None if stop is None else stop - start
        read1: Callable[[int], bytes] = response.read1
        while left is None or left > 0:
            block = read1(BLOCK_BYTES)
            if not block:
                if length is not None and seen < int(length):
                    raise ConnectionError(f"{response.url}: connection ended after {seen} of {length} bytes")
                return
            seen += len(block)
            cut = min(skip, len(block))
            skip -= cut
            block = block[cut:] if left is None else block[cut : cut + left]
            left = None if left is None else left - len(block)
            yield block

    def write(self, key: str, data: bytes) -> None:
        raise SyncError(f"{self._url} is read-only: {key} cannot be written; publish to the folder or bucket behind it")

    def list(self, prefix: str) -> list[Stored]:
        raise SyncError(f"{self._url} cannot be listed; collect garbage at the folder or bucket behind it")

    def delete(self, key: str) -> None:
        raise SyncError(f"{self._url} is read-only: {key} cannot be deleted")

    def lock(self) -> AbstractContextManager[bool]:
        raise SyncError(f"{self._url} is read-only; publish to the folder or bucket behind it")
