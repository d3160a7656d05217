"""The trainer's process: a learner behind plain calls. Never imports torch itself; the learner's module does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace import plugins
from headrace.config.schema import SyncConfig
from headrace.records import Batch
from headrace.sync.manifest import Manifest, StoreManifest
from headrace.trainer.learner import ForwardBackwardReport, OptimReport
from headrace.trainer.publishing import Publishing

METHODS = ("train", "forward_backward", "optim_step", "named_arrays", "save", "load", "export", "describe")
FACTORIES = {"torch": "headrace.trainer.torch_learner:build", "scripted": "headrace.trainer.scripted:build"}
"""Built-in values of trainer.kind."""


def build_servant(
    *,
    factory: str,
    kwargs: Mapping[str, Any],
    sync: Mapping[str, Any] | None = None,
    threads: int = 1,
    search: str | None = None,
) -> LearnerServant:
    """Build the learner: `factory` is a name in FACTORIES or "module:function", called with `kwargs`.

    `sync` is SyncConfig.model_dump(), `threads` what the role has, `search` a folder in which the module may lie.
    """
    make = plugins.resolve(
        FACTORIES.get(factory, factory), what="trainer.kind", search=Path(search) if search else None
    )
    return LearnerServant(make(**kwargs), Publishing(SyncConfig(**(sync or {})), threads=threads))


class LearnerServant:
    """What the controller can call (see roles.py). Arguments and results are plain data."""

    def __init__(self, learner: Any, publishing: Publishing) -> None:
        plugins.require_methods(learner, METHODS, what="learner")
        self._learner = learner
        self._publishing = publishing

    def train(self, batch: Batch) -> tuple[list[ForwardBackwardReport], list[OptimReport]]:
        """All updates on one batch (trainer.updates_per_batch of them)."""
        reports: tuple[list[ForwardBackwardReport], list[OptimReport]] = self._learner.train(batch)
        return reports

    def forward_backward(self, batch: Batch) -> ForwardBackwardReport:
        """Add gradients (for loops that step themselves)."""
        report: ForwardBackwardReport = self._learner.forward_backward(batch)
        return report

    def optim_step(self) -> OptimReport:
        """Take one optimizer step."""
        report: OptimReport = self._learner.optim_step()
        return report

    def publish(self, folder: str, run_id: str, version: int) -> Manifest:
        """Publish the weights to serve as one version; SyncError."""
        arrays = self._learner.named_arrays()
        manifest = self._publishing.publish(arrays, folder=folder, run_id=run_id, version=version)
        if isinstance(manifest, StoreManifest) and hasattr(self._learner, "follow"):
            self._learner.follow(manifest)
        return manifest

    def save(self, folder: str) -> None:
        """Write a checkpoint into an existing empty folder."""
        self._learner.save(Path(folder))

    def load(self, folder: str) -> None:
        """Restore a checkpoint; DataError."""
        self._learner.load(Path(folder))
        self._publishing.forget()

    def export(self, folder: str) -> None:
        """Write the model in Hugging Face layout."""
        self._learner.export(Path(folder))

    def describe(self) -> dict[str, Any]:
        """What the learner is, for logs."""
        return dict(self._learner.describe())
