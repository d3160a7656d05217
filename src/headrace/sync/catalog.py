"""The head of a run, what it leads to, and the cheapest way there."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

from pydantic import Field

from headrace.errors import SyncError
from headrace.sync.store import Store
from headrace.sync.version import MAX_DOCUMENT_BYTES, Count, Digest, Document, Key, Name, parse

HEAD_KEY = "head.json"
_MAX_HEAD_BYTES = 64 * 1024


class Edge(Document):
    """One manifest as a way from one version to another."""

    source: Digest | None
    """None: a keyframe, which starts from nothing."""
    target: Digest
    version: Count
    """Label of the target."""
    span: Annotated[int, Field(ge=0)]
    """Published versions that it covers: 1 for a plain delta, more for a merged one, 0 for a keyframe."""
    bytes: Annotated[int, Field(ge=0)]
    """Of the chunks' bodies."""
    manifest: Key
    packs: tuple[Key, ...]


class Catalog(Document):
    """All ways that the store still has. Immutable; the head names the valid one."""

    run_id: Name
    edges: tuple[Edge, ...]

    def reaches(self, target: str) -> bool:
        """Somebody who has nothing gets there."""
        return cheapest_path(self.edges, {None: 0}, target) is not None


class Head(Document):
    """The only object that changes. Whoever reads it knows the newest version and how to get it."""

    run_id: Name
    epoch: Annotated[int, Field(ge=1)]
    """+1 with each start of the run's publisher: the newer one fences off the older."""
    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Random name of the publisher that owns the epoch."""
    version: Count
    digest: Digest
    manifest: Key
    """Of the newest version."""
    catalog: Key
    created_at_s: float
    """By the publisher's clock; for people only."""


def read_head(store: Store) -> Head | None:
    """The head, or None where nothing was published."""
    data = store.find(HEAD_KEY, max_bytes=_MAX_HEAD_BYTES)
    return None if data is None else parse(Head, data, f"{store.url}/{HEAD_KEY}")


def read_catalog(store: Store, head: Head) -> Catalog:
    """What the head leads to."""
    data = store.get_object(head.catalog, max_bytes=MAX_DOCUMENT_BYTES)
    catalog = parse(Catalog, data, head.catalog)
    if catalog.run_id != head.run_id:
        raise SyncError(f"{head.catalog} belongs to run {catalog.run_id!r}, the head to {head.run_id!r}")
    return catalog


def swap_head(store: Store, old: Head | None, new: Head) -> bool:
    """Put `new` in the place of `old`; False where something else is there."""
    return store.swap(HEAD_KEY, None if old is None else old.to_bytes(), new.to_bytes())


def cheapest_path(
    edges: Iterable[Edge], sources: Mapping[str | None, int], target: str, without: Collection[str] = ()
) -> tuple[str | None, list[Edge]] | None:
    """Dijkstra by (bytes, passes) from the cheapest of `sources` (digest, or None for nothing: bytes to be there).

    `without` names manifests that turned out to be unusable. Returns the source and the edges, or None.
    """
    out: dict[str | None, list[Edge]] = {}
    for edge in edges:
        if edge.manifest not in without:
            out.setdefault(edge.source, []).append(edge)
    order = itertools.count()
    queue: list[tuple[int, int, int, str | None, str | None, list[Edge]]] = [
        (cost, 0, next(order), source, source, []) for source, cost in sources.items()
    ]
    heapq.heapify(queue)
    seen: set[str | None] = set()
    while queue:
        cost, passes, _, source, at, path = heapq.heappop(queue)
        if at == target:
            return source, path
        if at in seen:
            continue
        seen.add(at)
        for edge in out.get(at, ()):
            step = (cost + edge.bytes, passes + 1, next(order), source, edge.target, [*path, edge])
            heapq.heappush(queue, step)
    return None
