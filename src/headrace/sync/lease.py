"""Leases: what a receiver is about to read must not be collected under its hands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from headrace.errors import SyncError
from headrace.sync.store import Store
from headrace.sync.version import Document, Key, parse

LEASE_FOLDER = "leases"
_REPLICA = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Lease(Document):
    """Objects that one replica needs, and for how long from when this was written *by the store's clock*."""

    replica: str
    lease_s: Annotated[float, Field(gt=0, le=86_400)]
    objects: tuple[Key, ...]


class Leases:
    """Writes one replica's lease; each new one replaces the last. The replica's own clock is never asked."""

    def __init__(self, store: Store, *, replica: str, lease_s: float = 600.0) -> None:
        if not _REPLICA.fullmatch(replica):
            raise SyncError(f"replica {replica!r}: letters, digits, _ and - only")
        self._store = store
        self._replica = replica
        self._lease_s = lease_s

    def hold(self, objects: Iterable[str]) -> None:
        """Keep these objects, and no others, for `lease_s` from now."""
        lease = Lease(replica=self._replica, lease_s=self._lease_s, objects=tuple(sorted(set(objects))))
        self._store.put(f"{LEASE_FOLDER}/{self._replica}.json", lease.to_bytes())

    def release(self) -> None:
        """Nothing is needed any more."""
        self._store.delete(f"{LEASE_FOLDER}/{self._replica}.json")


def leased(store: Store, *, now_s: float, skew_s: float) -> set[str]:
    """Objects under leases that are valid, or became invalid at most `skew_s` ago; dead leases are deleted.

    `now_s` is the store's time, like the times of the leases.
    """
    objects: set[str] = set()
    for stored in store.list(LEASE_FOLDER):
        data = store.find(stored.key)
        if data is None or not stored.key.endswith(".json"):
            continue
        lease = parse(Lease, data, stored.key)
        if now_s > stored.modified_s + lease.lease_s + skew_s:
            store.delete(stored.key)
        else:
            objects.update(lease.objects)
    return objects
