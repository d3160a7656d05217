"""A learner without a model: takes time, counts steps, changes one small tensor. For tests and benchmarks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from headrace.config.schema import RunConfig, Section
from headrace.errors import ConfigError, DataError, LearnerError, boundary
from headrace.records import Batch
from headrace.trainer.batching import check_sample, split
from headrace.trainer.learner import ForwardBackwardReport, OptimReport
from headrace.trainer.schedule import learning_rate


class ScriptedOptions(Section):
    """`trainer.options` of `trainer.kind = "scripted"`."""

    step_s: float = 0.0
    """Seconds per optimizer step."""
    sample_s: float = 0.0
    """Seconds per sample."""
    token_s: float = 0.0
    """Seconds per trained token."""
    tensor_size: int = 4
    """Elements of the one tensor."""
    fail_at_step: int = -1
    """Raise LearnerError in this step (from 0); -1 = never."""


def build(*, config: dict[str, Any], model_dir: str = "") -> ScriptedLearner:
    """Factory for `trainer.kind = "scripted"`; `model_dir` is not looked at."""
    return ScriptedLearner(RunConfig.model_validate(config))


class ScriptedLearner:
    """Implements `Learner`. The tensor "step" holds the number of completed optimizer steps."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        try:
            self.options = ScriptedOptions.model_validate(config.trainer.options)
        except ValidationError as exc:
            raise ConfigError(f"trainer.options of the scripted learner: {exc}") from exc
        self.step = 0
        self._pending = 0

    def train(self, batch: Batch) -> tuple[list[ForwardBackwardReport], list[OptimReport]]:
        """trainer.updates_per_batch steps on whole groups."""
        forward, optim = [], []
        for part in split(batch, self.config.trainer.updates_per_batch):
            forward.append(self.forward_backward(part))
            optim.append(self.optim_step())
        return forward, optim

    def forward_backward(self, batch: Batch) -> ForwardBackwardReport:
        """Checks the samples' shapes, takes the time that the options say."""
        began = time.perf_counter()
        if self.step == self.options.fail_at_step:
            raise LearnerError(f"scripted failure at step {self.step} (trainer.options.fail_at_step)")
        for sample in batch.samples:
            check_sample(sample)
        _pass(len(batch.samples) * self.options.sample_s + batch.trained_tok * self.options.token_s)
        self._pending += 1
        return ForwardBackwardReport(
            loss=0.0,
            trained_tok=batch.trained_tok,
            forward_tok=sum(len(s.ids_T) for s in batch.samples),
            micro_batches=1,
            busy_s=time.perf_counter() - began,
            metrics={},
        )

    def optim_step(self) -> OptimReport:
        """Counts."""
        began = time.perf_counter()
        if not self._pending:
            raise LearnerError("optim_step without gradients: call forward_backward first")
        _pass(self.options.step_s)
        lr = learning_rate(self.config.optim, self.step, self.config.steps * self.config.trainer.updates_per_batch)
        self.step += 1
        self._pending = 0
        return OptimReport(step=self.step, lr=lr, grad_norm=0.0, busy_s=time.perf_counter() - began)

    def named_arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """One float32 tensor that changes with each step."""
        yield "step", np.full(self.options.tensor_size, self.step, dtype=np.float32)

    def save(self, folder: Path) -> None:
        """Write the step counter."""
        with boundary(DataError, f"writing a scripted checkpoint to {folder}"):
            (folder / "learner.json").write_text(json.dumps({"learner": "scripted", "step": self.step}))

    def load(self, folder: Path) -> None:
        """Restore the step counter; DataError for anything else."""
        with boundary(DataError, f"reading the scripted checkpoint in {folder}"):
            stored = json.loads((folder / "learner.json").read_text())
        if stored.get("learner") != "scripted":
            raise DataError(f"checkpoint {folder} does not fit: it has no scripted learner (learner.json: {stored})")
        self.step, self._pending = int(stored["step"]), 0

    def export(self, folder: Path) -> None:
        """There is no model; writes the counter."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder)

    def describe(self) -> dict[str, Any]:
        """What this learner is, for logs."""
        return {"kind": "scripted", "parameters": self.options.tensor_size, "step": self.step}


def _pass(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)
