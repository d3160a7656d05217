"""Versions that an engine core takes from a store: staged beside the served one, put in place between two steps.

stage (any thread; the target is only read)     find the way, fetch, prove, decode
land  (the core's thread, between two steps)    scatter, prove; or everything back as it was
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.errors import SyncError
from headrace.sync.catalog import read_head
from headrace.sync.manifest import StoreManifest
from headrace.sync.receiver import Receiver, Staged
from headrace.sync.report import SyncReport
from headrace.sync.staging import Patch
from headrace.sync.store import Store
from headrace.sync.target import State, Target
from headrace.sync.version import TensorSpec


class ServedTarget(Target, Protocol):
    """A target that is told beforehand which elements will change."""

    def expect(self, patches: Sequence[Patch]) -> None: ...


class Deliveries:
    """One core's receiver and what it has staged. `stage` and `land` must not run at the same time."""

    def __init__(
        self, *, run_id: str, target: Callable[[Store], ServedTarget], verify_every: int, threads: int
    ) -> None:
        """`target` makes what the versions are put into, once the store is known."""
        self._run_id = run_id
        self._make_target = target
        self._verify_every = verify_every
        self._threads = threads
        self._store: Store | None = None
        self._target: ServedTarget | None = None
        self._receiver: Receiver | None = None
        self._staged: dict[int, tuple[StoreManifest, Staged | None]] = {}

    @property
    def landed(self) -> bool:
        """A version came this way already."""
        return self._receiver is not None and self._receiver.digest is not None

    @property
    def fenced(self) -> bool:
        """What is served is no version: neither the new one nor the old one could be put in place whole."""
        return self._receiver is not None and self._receiver.state is State.FENCED

    def stage(self, manifest: StoreManifest) -> tuple[TensorSpec, ...]:
        """Fetch, prove and decode; returns the version's tensors, or none when nothing differs. Raises SyncError."""
        staged = self._prepare(manifest)
        self._staged[manifest.version] = (manifest, staged)
        return () if staged is None else tuple(staged.table.specs.values())

    def changes(self, version: int) -> int:
        """Elements in which a staged version differs from what is held."""
        staged = self._staged[version][1]
        return 0 if staged is None else sum(patch.changed for patch in staged.patches)

    def forget(self, version: int) -> None:
        """Drop what was staged for it."""
        self._staged.pop(version, None)

    def land(self, version: int) -> SyncReport:
        """Put a staged version in place. On SyncError the old one is served as before, or `fenced` is True."""
        manifest, staged = self._staged.pop(version)
        assert self._receiver is not None
        assert self._target is not None
        if staged is not None and staged.basis != self._receiver.digest:
            staged = self._prepare(manifest)  # another version landed since
        self._staged = {v: ready for v, ready in self._staged.items() if v > version}
        if staged is None:
            return SyncReport(version=version, digest=manifest.digest)
        self._target.expect(staged.patches)
        report = self._receiver.commit(staged)
        self._receiver.finish()
        return report

    def _prepare(self, manifest: StoreManifest) -> Staged | None:
        if manifest.run_id != self._run_id:
            raise SyncError(f"version {manifest.version} belongs to run {manifest.run_id!r}, this is {self._run_id!r}")
        if self._store is None or self._store.url != manifest.store:
            self._store = Store(manifest.store, durable=False)
            self._target = self._make_target(self._store)
            self._receiver = Receiver(
                self._store,
                self._target,
                run_id=self._run_id,
                verify_every=self._verify_every,
                threads=self._threads,
            )
            self._staged.clear()
        head = read_head(self._store)
        if head is None:
            raise SyncError(f"{manifest.store} holds no run; version {manifest.version} was to come from there")
        # The head may be further on already; its catalog leads to the versions before it, too.
        head = head.model_copy(update={"version": manifest.version, "digest": manifest.digest})
        assert self._receiver is not None
        return self._receiver.prepare(head)
