"""Bodies of chunks on their way: packed for the store, fetched whole or by ranges."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.errors import SyncError
from headrace.sync.codec import Chunk
from headrace.sync.store import Store
from headrace.sync.version import MAX_DOCUMENT_BYTES, BaseManifest, ChunkEntry, DeltaManifest, PackRef, parse

Manifest = DeltaManifest | BaseManifest
_CONNECTIONS = 4
_WHOLE_SHARE = 0.8
"""From this share of a pack on it is read whole: one request, and its name proves it."""


class UnusableError(SyncError):
    """A manifest or its packs cannot be had or are damaged; another way may exist."""

    def __init__(self, manifest: str, why: str) -> None:
        super().__init__(f"{manifest[:20]}...: {why}")
        self.manifest = manifest


_M = TypeVar("_M", DeltaManifest, BaseManifest)


def read_manifest(store: Store, key: str, kind: type[_M]) -> _M:
    """Fetch and parse one manifest."""
    return parse(kind, store.get_object(key, max_bytes=MAX_DOCUMENT_BYTES), key)


def write_packs(
    store: Store, chunks: Iterable[Chunk], pack_bytes: int
) -> tuple[tuple[PackRef, ...], tuple[ChunkEntry, ...]]:
    """Put the chunks' bodies into packs of about `pack_bytes`, in order of (tensor, start), and into the store."""
    packs: list[PackRef] = []
    entries: list[ChunkEntry] = []
    body = bytearray()

    def close() -> None:
        data = bytes(body)
        packs.append(PackRef(key=store.put_object(data, "pack"), size=len(data)))
        body.clear()

    for chunk in sorted(chunks, key=lambda c: (c.tensor, c.start)):
        if body and len(body) + len(chunk.body) > pack_bytes:
            close()
        entry = entry_of(chunk, pack=len(packs), offset=len(body))
        body += chunk.body
        entries.append(entry)
    if body:
        close()
    return tuple(packs), tuple(entries)


def entry_of(chunk: Chunk, *, pack: int, offset: int) -> ChunkEntry:
    """A chunk as a line of a manifest, with where its body lies."""
    return ChunkEntry(
        tensor=chunk.tensor,
        start=chunk.start,
        elems=chunk.elems,
        changed=chunk.changed,
        mode=chunk.mode,
        pack=pack,
        offset=offset,
        size=len(chunk.body),
        body=chunk.body_digest,
        old=chunk.old_digest or None,
        new=chunk.new_digest,
    )


class PackReader:
    """Fetches bodies. With a folder, packs pass through files there: broken downloads go on, and receivers on one
    host fetch each pack once."""

    def __init__(self, store: Store, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder

    def bodies(self, manifest: Manifest, tensors: Collection[str]) -> dict[tuple[str, int], bytes]:
        """All bodies for these tensors, by (tensor, start). Hashes of bodies are checked when they are decoded."""
        wanted = [chunk for chunk in manifest.chunks if chunk.tensor in tensors]
        need = [0] * len(manifest.packs)
        for chunk in wanted:
            need[chunk.pack] += chunk.size
        often = [index for index, pack in enumerate(manifest.packs) if need[index] > _WHOLE_SHARE * pack.size]
        with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="delta-get") as pool:
            whole = dict(zip(often, pool.map(lambda index: self._whole(manifest.packs[index]), often), strict=True))
            bodies = pool.map(lambda chunk: self._body(manifest, chunk, whole), wanted)
            return {(chunk.tensor, chunk.start): body for chunk, body in zip(wanted, bodies, strict=True)}

    def keep_only(self, manifests: Iterable[Manifest]) -> None:
        """Drop other packs from the folder."""
        if self._folder is None or not self._folder.is_dir():
            return
        keep = {Path(pack.key).name for manifest in manifests for pack in manifest.packs}
        for path in self._folder.glob("*.pack*"):
            if path.name.partition(".pack")[0] + ".pack" not in keep:
                path.unlink(missing_ok=True)

    def _body(self, manifest: Manifest, chunk: ChunkEntry, whole: Mapping[int, bytes]) -> bytes:
        if chunk.pack in whole:
            return whole[chunk.pack][chunk.offset : chunk.offset + chunk.size]
        if chunk.size == 0:
            return b""
        return self._store.get_range(manifest.packs[chunk.pack].key, chunk.offset, chunk.size)

    def _whole(self, pack: PackRef) -> bytes:
        if self._folder is None:
            data = self._store.get_object(pack.key, max_bytes=pack.size)
        else:
            name = Path(pack.key).name
            with _locked(self._folder, name):
                data = self._store.fetch(pack.key, self._folder / name, pack.size)
        if len(data) != pack.size:
            raise SyncError(f"{pack.key} has {len(data)} bytes, its manifest says {pack.size}")
        return data


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """One process at a time fetches a pack. The lock ends with its holder; the download has its own deadline."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
