"""One run from open to summary: what `hr.open` returns and what `headrace train` drives.

start     folder, task, roles; the trainer's weights proven to be what the engine serves; evaluation before
batches   flow decides what and when; the body of the user's loop trains and publishes
finish    end rollouts, evaluation after, model in Hugging Face layout, summary
close     every role, file and task gone, on every path
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from headrace.clock import Clock, WallClock
from headrace.config.schema import RunConfig
from headrace.envs.env import Task
from headrace.errors import ConfigError, FlowError
from headrace.loop import resume
from headrace.loop.assembly import MakeLauncher, Parts, assemble
from headrace.loop.evaluate import evaluate
from headrace.loop.pipeline import Interrupted
from headrace.records import Batch
from headrace.telemetry.records import EvalRecord, RunSummary
from headrace.telemetry.view import View
from headrace.trainer.learner import ForwardBackwardReport, OptimReport

T = TypeVar("T")
Reports = tuple[list[ForwardBackwardReport], list[OptimReport]]


class Run:
    """An opened run. `async for batch in run.batches()` starts it; leaving the loop or the `async with` closes it."""

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        model_dir: Path | None,
        make_launcher: MakeLauncher,
        view: View,
        resume_from: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.task = task
        self._model_dir = model_dir
        self._make_launcher = make_launcher
        self._view = view
        self._resume_from = resume_from
        self._clock: Clock = clock or WallClock()
        self._opened_s = self._clock.now()
        self._parts: Parts | None = None
        self._batch: Batch | None = None
        self._reports: Reports = ([], [])
        self._version = 0
        self._train_begin_s: float | None = None
        self._eval_s = 0.0
        self._stop_reason: str | None = None
        self.interrupted = False
        self.summary: RunSummary | None = None
        self.evals: list[EvalRecord] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def version(self) -> int:
        """Completed and published optimizer steps."""
        return self._version

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._open().folder.path

    @property
    def train_s(self) -> float:
        """Seconds since training began, evaluations excluded."""
        if self._train_begin_s is None:
            return 0.0
        return self._clock.now() - self._train_begin_s - self._eval_s

    async def start(self) -> None:
        """Start roles, restore or begin, evaluate the untrained model. Idempotent."""
        if self._parts is not None:
            return
        self._parts = await assemble(
            self.config,
            task=self.task,
            model_dir=self._model_dir,
            resume_from=self._resume_from,
            make_launcher=self._make_launcher,
            view=self._view,
            clock=self._clock,
        )
        self._version = self._parts.version
        try:
            if self.config.eval.before and self._version == 0:
                await self.evaluate()
            self._eval_s = 0.0
            self._train_begin_s = self._clock.now()
            self._parts.pipeline.start(self._version)
        except BaseException:
            await self.close()
            raise

    # --- the loop ----------------------------------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches until the run is done. Train and publish each one in the body; closes the run at the end."""
        try:
            await self.start()
            while (reason := self._reason_to_end()) is None:
                try:
                    self._batch = await self._open().pipeline.next_batch()
                except Interrupted:
                    continue
                self._reports = ([], [])
                yield self._batch
                if self._version != self._batch.version + 1:
                    raise FlowError(
                        f"the batch of version {self._batch.version} was not published: call run.publish() once, "
                        "after optim_step, in the body of the loop"
                    )
                await self._after_step()
            await self.finish(reason)
        finally:
            await self.close()

    async def forward_backward(self, batch: Batch) -> ForwardBackwardReport:
        """Add the batch's gradients with the configured loss."""
        report = await self._trainer(self._open().learner.forward_backward(batch), "gradients")
        self._reports[0].append(report)
        return report

    async def optim_step(self) -> OptimReport:
        """One optimizer step on the gradients so far."""
        report = await self._trainer(self._open().learner.optim_step(), "the optimizer step")
        self._reports[1].append(report)
        return report

    async def train_on(self, batch: Batch) -> Reports:
        """forward_backward and optim_step, in trainer.updates_per_batch parts."""
        self._reports = await self._trainer(self._open().learner.train(batch), "training on the batch")
        return self._reports

    async def publish(self) -> None:
        """Make the new weights the next policy version; returns before they have landed on the generator."""
        if self._batch is None or self._version != self._batch.version:
            raise FlowError(f"publish() at version {self._version}: there is no trained batch to publish")
        parts = self._open()
        parts.recorder.trained(*self._reports)
        manifest = await self._trainer(parts.handoff.publish(self._version + 1), "publishing weights")
        self._version = manifest.version
        parts.pipeline.published(manifest)

    async def _after_step(self) -> None:
        config, parts = self.config, self._open()
        parts.recorder.step_ended(parts.handoff)
        last = self._version >= config.steps
        if (every := config.checkpoint.every_steps) and self._version % every == 0 and not last:
            await self.save_checkpoint()
        if (every := config.eval.every_steps) and self._version % every == 0 and not last:
            await parts.pipeline.landed(self._version)
            record = await self.evaluate()
            if config.target_accuracy and record.accuracy >= config.target_accuracy:
                self._stop_reason = f"target accuracy {config.target_accuracy:.3f} reached"

    def _reason_to_end(self) -> str | None:
        if self._stop_reason is not None:
            return self._stop_reason
        if self._version >= self.config.steps:
            return "steps done"
        limit_s = self.config.max_train_s
        if limit_s and self.train_s >= limit_s:
            return f"time limit of {limit_s:.0f} s of training"
        return None

    def interrupt(self) -> None:
        """End after the step under way (Ctrl-C); a wait for a batch ends now. Everything is saved for --resume."""
        self.interrupted = True
        self._stop_reason = "interrupted"
        if self._parts is not None:
            self._parts.pipeline.interrupt()

    # --- evaluation, checkpoints, end --------------------------------------------------------------------------

    async def evaluate(self) -> EvalRecord:
        """Held-out accuracy of the served version, which must not change meanwhile (nothing else publishes)."""
        parts, begin_s = self._open(), self._clock.now()
        playing = evaluate(
            player=parts.player,
            task=self.task,
            version=self._version,
            started_s=self._opened_s,
            clock=self._clock,
            progress=self._view.progress,
            at_once=2 * self.config.engine.max_batch,
        )
        record, _ = await parts.pipeline.until(
            playing,
            owner="evaluation",
            what="held-out rollouts",
            deadline_s=self.config.launch.step_deadline_s,
        )
        self.evals.append(record)
        parts.recorder.evaluated(record)
        self._eval_s += self._clock.now() - begin_s
        return record

    async def save_checkpoint(self) -> Path:
        """Everything that resume needs, complete or not at all."""
        parts, begin_s = self._open(), self._clock.now()
        path = await resume.save_checkpoint(
            parts.folder, self._version, parts.learner.save, keep=self.config.checkpoint.keep
        )
        self._view.message(f"checkpoint of step {self._version} saved in {self._clock.now() - begin_s:.1f} s")
        return path

    async def finish(self, reason: str) -> RunSummary:
        """End rollouts, save, evaluate, export, sum up."""
        parts, train_s = self._open(), self.train_s
        if self.interrupted:
            await parts.pipeline.abandon()
        else:
            await parts.pipeline.landed(self._version)
            await parts.pipeline.end()
        stats = await parts.replica.stats()
        if self._version:
            await self.save_checkpoint()
        model_dir: str | None = None
        if not self.interrupted:
            if self.config.eval.after:
                await self.evaluate()
            self._view.status("saving the model")
            await self._trainer(parts.learner.export(str(parts.folder.model)), "saving the model")
            model_dir = str(parts.folder.model)
        self.summary = parts.recorder.finished(
            reason=reason,
            train_s=train_s,
            model_dir=model_dir,
            stats=stats,
            evals=self.evals,
            handoff=parts.handoff,
        )
        return self.summary

    async def close(self) -> None:
        """End every task and role, release the folder. Idempotent; safe on every path."""
        parts, self._parts = self._parts, None
        if parts is not None:
            await parts.close()

    async def _trainer(self, call: Awaitable[T], what: str) -> T:
        deadline_s = self.config.launch.call_deadline_s
        return await self._open().pipeline.until(call, owner="trainer", what=what, deadline_s=deadline_s)

    def _open(self) -> Parts:
        if self._parts is None:
            raise ConfigError("the run is not open: use `async with hr.open(...)` or iterate over run.batches()")
        return self._parts
