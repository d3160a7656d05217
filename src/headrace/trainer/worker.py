"""The trainer's process: a learner behind plain calls. Never imports torch itself; the learner's module does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace import plugins
from headrace.records import Batch
from headrace.sync.manifest import Manifest
from headrace.sync.publish import write_version
from headrace.trainer.learner import ForwardBackwardReport, OptimReport

METHODS = ("train", "forward_backward", "optim_step", "named_arrays", "save", "load", "export", "describe")
FACTORIES = {"torch": "headrace.trainer.torch_learner:build", "scripted": "headrace.trainer.scripted:build"}
"""Built-in values of trainer.kind."""


def build_servant(*, factory: str, kwargs: Mapping[str, Any]) -> LearnerServant:
    """Build the learner: `factory` is a name in FACTORIES or "module:function", called with `kwargs`."""
    make = plugins.resolve(FACTORIES.get(factory, factory), what="trainer.kind")
    return LearnerServant(make(**kwargs))


class LearnerServant:
    """What the controller can call (see roles.py). Arguments and results are plain data."""

    def __init__(self, learner: Any) -> None:
        plugins.require_methods(learner, METHODS, what="learner")
        self._learner = learner

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
        """Write the weights to serve as one version; SyncError. What must survive a power cut is the checkpoint."""
        arrays = self._learner.named_arrays()
        return write_version(Path(folder), run_id=run_id, version=version, arrays=arrays, durable=False)

    def save(self, folder: str) -> None:
        """Write a checkpoint into an existing empty folder."""
        self._learner.save(Path(folder))

    def load(self, folder: str) -> None:
        """Restore a checkpoint; DataError."""
        self._learner.load(Path(folder))

    def export(self, folder: str) -> None:
        """Write the model in Hugging Face layout."""
        self._learner.export(Path(folder))

    def describe(self) -> dict[str, Any]:
        """What the learner is, for logs."""
        return dict(self._learner.describe())
