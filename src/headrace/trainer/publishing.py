"""How the trainer's process publishes: deltas into a store, or full snapshots into a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.config.schema import KEEP_VERSIONS, SyncConfig
from headrace.sync.choice import Choice, Estimates, Situation
from headrace.sync.codec import Mode, warm_up
from headrace.sync.compactor import Compactor
from headrace.sync.manifest import Manifest, StoreManifest
from headrace.sync.publish import write_version
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.store import Store
from headrace.sync.version import dtype_name

_GRACE_S = 60.0
"""Objects that nothing names stay as long: a receiver may be reading them."""

_log = logging.getLogger(__name__)

Arrays = Iterable[tuple[str, NDArray[np.generic]]]


class Publishing:
    """One run's publishing side. What must survive a power cut is the checkpoint, so nothing here is flushed to disk.

    Deltas are measured against the version published before, whether or not a generator took it: a receiver names what
    it holds by its hash and finds its own way from there, at worst from a keyframe.
    """

    def __init__(self, config: SyncConfig, *, threads: int, estimates: Estimates | None = None) -> None:
        """`estimates` are what `sync.choose` goes by from the start; without them the first delta is the first lesson.

        Landings are reported to the controller, not to here: decoding and applying count with the built-in speeds and
        as many threads as encode, and the link is the one into the store.
        """
        self._config = config
        self._estimates = estimates or Estimates()
        self._chosen: tuple[Mode, int] | None = None
        self._threads = config.threads or threads
        self._publisher: DeltaPublisher | None = None
        self._store: Store | None = None
        self._count = 0

    def forget(self) -> None:
        """The weights were replaced from outside: the next version is measured against what the store holds."""
        self._publisher = None

    def publish(self, arrays: Arrays, *, folder: str, run_id: str, version: int) -> Manifest:
        """Publish one version; `folder` is where scratch data of the run may lie. Raises SyncError."""
        if not self._config.deltas:
            return write_version(Path(folder), run_id=run_id, version=version, arrays=arrays, durable=False)
        tensors = dict(arrays)
        if self._publisher is None or self._store is None:
            store = self._store = Store(self._url(folder, run_id), durable=False)
            for dtype in {dtype_name(name, array) for name, array in tensors.items()}:
                warm_up(dtype)
            every = self._config.keyframe_every
            publisher = DeltaPublisher(
                store, run_id=run_id, keyframe_every=every, threads=self._threads, with_limit=False
            )
            report = publisher.start(tensors, version=version)
            self._publisher, self._count = publisher, 0
        else:
            store = self._store
            self._count += 1
            limit_every = self._config.limit_every
            # The first delta is measured too, so that a short run can say how good its deltas were.
            with_limit = bool(limit_every) and (self._count - 1) % limit_every == 0
            item_bytes = max((array.itemsize for array in tensors.values()), default=1)
            choice = self._choose(sum(array.nbytes for array in tensors.values()), item_bytes)
            allowed, encoding_threads = (None, self._threads) if choice is None else (choice.allowed, choice.threads)
            report = self._publisher.publish(
                tensors,
                version=version,
                step=version,
                with_limit=with_limit,
                allowed=allowed,
                threads=encoding_threads,
            )
            self._estimates.published(report, threads=encoding_threads, item_bytes=item_bytes)
            if self._count % self._config.keyframe_every == 0:
                Compactor(store, run_id=run_id).collect(keep_versions=KEEP_VERSIONS, grace_s=_GRACE_S)
        return StoreManifest(run_id=run_id, version=version, digest=report.digest, store=store.url, report=report)

    def _choose(self, model_bytes: int, item_bytes: int) -> Choice | None:
        """How to encode the next delta; None where that is not asked for or nothing was measured yet."""
        density, bandwidth = self._estimates.density, self._estimates.bandwidth_bytes_per_s
        if not self._config.choose or not model_bytes or density is None or bandwidth is None:
            return None
        choice = self._estimates.choose(
            Situation(
                model_bytes=model_bytes,
                density=density,
                bandwidth_bytes_per_s=bandwidth,
                threads=self._threads,
                receiver_threads=self._threads,
                item_bytes=item_bytes,
            )
        )
        if self._chosen != (chosen := (choice.best.mode, choice.threads)):
            self._chosen = chosen
            # Nothing is wrong, but the log file of a role holds warnings and above only.
            _log.warning("deltas are published as %s from now on; %s", choice.best.mode, choice.why)
        return choice

    def _url(self, folder: str, run_id: str) -> str:
        """A store of the user's holds a folder for each run."""
        own = self._config.store
        return f"{own.rstrip('/')}/{run_id}" if own else str(Path(folder).resolve())
