"""What a run tells: turns what the loop sees into telemetry records, the stimulus log and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headrace.clock import Clock
from headrace.config.schema import RunConfig
from headrace.errors import DataError, boundary
from headrace.flow.controller import Controller
from headrace.flow.events import Decision, Event, Landed
from headrace.flow.health import TrainerState
from headrace.flow.restore import Restored
from headrace.flow.stimulus import Setup, write_setup, write_stimulus
from headrace.loop.evaluate import SOLVED
from headrace.loop.handoff import Handoff
from headrace.loop.setup import threads
from headrace.records import Batch, Completion, Outcome, Rollout
from headrace.rollout.engine import EngineStats
from headrace.telemetry.log import RunLog
from headrace.telemetry.records import EvalRecord, ProfileRecord, RunSummary, StepRecord
from headrace.telemetry.report import write_report
from headrace.telemetry.timeline import Landing, RolloutSpan, Timeline, TrainerSpan
from headrace.telemetry.view import View
from headrace.trainer.learner import ForwardBackwardReport, OptimReport

_WRITING = boundary(DataError, "writing the logs of the run")


class Recorder:
    """Owns the run folder's logs. Every method is cheap: it runs on the loop."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        controller: Controller,
        setup: Setup,
        clock: Clock,
        view: View,
    ) -> None:
        self._config = config
        self._folder = folder
        self._controller = controller
        self._clock = clock
        self._view = view
        self._log = RunLog(folder)
        self._timeline = Timeline(folder)
        self._stimulus = (folder / f"stimulus-v{setup.version:06d}.jsonl").open("w")
        self._stimulus.write(write_setup(setup) + "\n")
        self._opened_s = clock.now()
        self._step_began_s = self._opened_s
        self._training_s = self._opened_s
        self._span_began_s = 0.0
        self._trainer_state: TrainerState = "idle"
        self._steps_s: list[float] = []
        self._generated_tok = controller.ledger.generated_tok
        self._resumed_tok = controller.ledger.trained_tok
        self._resumed_groups = controller.ledger.buckets["trained"]
        self._batch: Batch | None = None
        self._trained: tuple[Sequence[ForwardBackwardReport], Sequence[OptimReport]] = ((), ())
        self._rewards: list[float] = []

    # --- told by the pipeline ----------------------------------------------------------------------------------

    @_WRITING
    def on_event(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Every event with its decisions: the file replays (flow/stimulus.py)."""
        self._stimulus.write(write_stimulus(event, decisions) + "\n")
        if isinstance(event, Landed):
            self._timeline.add(Landing(time_s=event.time_s, version=event.version))
        state = self._controller.health.state
        if state != self._trainer_state:
            self._end_trainer_span(event.time_s)
            self._trainer_state = state

    @_WRITING
    def on_rollout(self, rollout: Rollout) -> None:
        """A training rollout ended."""
        self._controller.health.observe_rollout(rollout.gen_s, rollout.env_s, rollout.grade_s)
        end_s = self._clock.now() - self._training_s - rollout.grade_s
        for turn in reversed(rollout.turns):
            span = _rollout_span(turn.completion, end_s, wasted=rollout.outcome is Outcome.CANCELLED)
            self._timeline.add(span)
            end_s = span.start_s - turn.completion.queue_s

    def training_begins(self) -> None:
        """From here on time counts as training."""
        self._training_s = self._step_began_s = self._clock.now()

    def batch_taken(self, batch: Batch) -> None:
        self._batch = batch

    def _end_trainer_span(self, now_s: float) -> None:
        """What the trainer did until now goes to the timeline."""
        if self._trainer_state != "idle" and now_s > self._span_began_s:
            version = self._controller.version + (self._trainer_state in ("wait_data", "wait_bound"))
            self._timeline.add(
                TrainerSpan(kind=self._trainer_state, start_s=self._span_began_s, end_s=now_s, version=version)
            )
        self._span_began_s = now_s

    # --- told by the run ---------------------------------------------------------------------------------------

    def trained(self, reports: Sequence[ForwardBackwardReport], steps: Sequence[OptimReport]) -> None:
        self._trained = (reports, steps)

    @_WRITING
    def step_ended(self, handoff: Handoff) -> StepRecord:
        """One optimizer step is published: write and show its record."""
        batch, (reports, optims) = self._batch, self._trained
        assert batch is not None
        now_s = self._clock.now()
        self._steps_s.append(now_s - self._step_began_s)
        self._step_began_s = now_s
        health, ledger = self._controller.health, self._controller.ledger
        counts, last = self._controller.counts(), health.last_step
        generated_tok, self._generated_tok = ledger.generated_tok - self._generated_tok, ledger.generated_tok
        rewards = [s.reward for s in batch.samples]
        lengths = [int(s.loss_mask_T.sum()) for s in batch.samples]
        lag_mean, lag_max = _lag(batch)
        self._rewards.append(sum(rewards) / len(rewards))
        recent = self._steps_s[-8:]
        left = self._config.steps - self._controller.version
        record = StepRecord(
            time_s=now_s - self._opened_s,
            version=self._controller.version,
            steps=self._config.steps,
            reward_mean=self._rewards[-1],
            pass_frac=sum(r >= SOLVED for r in rewards) / len(rewards),
            response_tok_mean=sum(lengths) / len(lengths),
            response_tok_max=max(lengths),
            lag_mean=lag_mean,
            lag_max=lag_max,
            masked_stale_tok=batch.masked_stale_tok,
            trained_tok=batch.trained_tok,
            batch_tok=_computed_tok(batch, share_prompts=self._config.trainer.share_prompts),
            batch_tok2=sum(len(s.ids_T) ** 2 for s in batch.samples),
            prompt_tok_mean=sum(s.prompt_tok for s in batch.samples) / len(batch.samples),
            generated_tok=generated_tok,
            zero_signal_frac=last.zero_signal_groups / max(1, last.scored_groups),
            wait_data_s=last.seconds["wait_data"],
            wait_bound_s=last.seconds["wait_bound"],
            train_s=sum(r.busy_s for r in reports) + sum(o.busy_s for o in optims),
            optim_s=sum(o.busy_s for o in optims),
            publish_s=handoff.publish_s,
            land_s=handoff.land_s,
            pause_s=handoff.report.pause_s if handoff.report else 0.0,
            queue_groups=counts["completed_groups"],
            running_rollouts=counts["running_rollouts"],
            production_per_s=health.production_per_s(),
            consumption_per_s=health.consumption_per_s(),
            verdict=health.verdict,
            eta_s=left * sum(recent) / len(recent),
            loss=sum(r.loss for r in reports) / max(1, len(reports)),
            grad_norm=optims[-1].grad_norm if optims else 0.0,
            lr=optims[-1].lr if optims else 0.0,
            metrics={**(reports[-1].metrics if reports else {}), **handoff.metrics()},
        )
        self._stimulus.flush()
        self._log.append(record)
        self._view.update(record)
        return record

    @_WRITING
    def evaluated(self, record: EvalRecord) -> None:
        self._log.append(record)
        self._view.update(record)
        self._step_began_s = self._clock.now()

    @_WRITING
    def resumed(self, version: int, restored: Restored) -> None:
        """A resumed run says what it found."""
        self._log.resumed(version)
        self._view.message(
            f"resumed at step {version}: {restored.kept} prompt attempts kept, {restored.salvaged} complete groups "
            f"taken over, {restored.restarted} started again"
        )

    @_WRITING
    def finished(
        self,
        *,
        reason: str,
        train_s: float,
        model_dir: str | None,
        stats: EngineStats,
        evals: Sequence[EvalRecord],
        handoff: Handoff,
    ) -> RunSummary:
        """Check the ledger once more and write the end of the run."""
        ledger, health = self._controller.ledger, self._controller.health
        ledger.check()
        before = [e for e in evals if e.version == 0]
        after = [e for e in evals if e.version == self._controller.version and e.version > 0]
        summary = RunSummary(
            run_dir=str(self._folder),
            reason=reason,
            steps=self._controller.version,
            version=self._controller.version,
            train_s=train_s,
            total_s=self._clock.now() - self._opened_s,
            accuracy_before=before[0].accuracy if before else None,
            accuracy_after=after[-1].accuracy if after else None,
            eval_prompts=evals[-1].prompts if evals else 0,
            reward_first=self._rewards[0] if self._rewards else None,
            reward_last=self._rewards[-1] if self._rewards else None,
            generated_tok=ledger.generated_tok,
            trained_tok=ledger.trained_tok,
            masked_tok=ledger.masked_tok,
            wasted_tok=dict(ledger.wasted_tok),
            groups={str(k): v for k, v in ledger.buckets.items()},
            admitted=ledger.admitted,
            balanced=ledger.balanced,
            lag_hist=dict(sorted(ledger.lag_hist.items())),
            accept_by_length=ledger.accept_by_length(),
            trainer_shares={str(k): v for k, v in health.trainer_shares(whole_run=True).items()},
            generator_shares=_generator_shares(stats, health.blocked_frac(whole_run=True)),
            model_dir=model_dir,
            sync=handoff.totals.summary(),
            sync_mode=self._config.sync.mode,
            resumed_tok=self._resumed_tok,
            resumed_groups=self._resumed_groups,
        )
        self._stimulus.flush()
        self._log.append(_profile(self._config, stats))
        self._log.append(summary)
        write_report(self._folder)
        return summary

    def close(self) -> None:
        """Close the logs. What counts was flushed at its step; on a full disk the rest is lost with the failing run."""
        for log in (self._timeline, self._stimulus, self._log):
            with suppress(OSError):
                log.close()


def _computed_tok(batch: Batch, *, share_prompts: bool) -> int:
    """Tokens of a batch that the trainer computes: a group's common prompt once where it is shared."""
    once = sum(max(0, len(g.samples) - 1) * g.samples[0].prompt_tok for g in batch.groups if g.samples)
    return sum(len(s.ids_T) for s in batch.samples) - (once if share_prompts else 0)


def _profile(config: RunConfig, stats: EngineStats) -> ProfileRecord:
    used = threads(config)
    return ProfileRecord(
        version=stats.version,
        generator_threads=used.generator,
        trainer_threads=used.trainer,
        decode=tuple((p.running, p.steps, p.context_tok, p.step_s) for p in stats.decode_points),
        prefill=stats.prefills,
    )


def _rollout_span(completion: Completion, end_s: float, *, wasted: bool) -> RolloutSpan:
    """Where in time a completion was sampled; tokens of one completion take equally long."""
    start_s = end_s - completion.gen_s
    per_tok_s = completion.gen_s / max(1, len(completion.ids_N))
    versions: dict[int, float] = {}
    for span in completion.spans:
        versions.setdefault(span.policy_version, start_s + span.start * per_tok_s)
    return RolloutSpan(
        start_s=start_s, end_s=end_s, versions=tuple(versions.items()), label=completion.request_id, wasted=wasted
    )


def _lag(batch: Batch) -> tuple[float, int]:
    """Token-weighted mean and maximum of the lag of the trained tokens."""
    total, count, worst = 0, 0, 0
    for sample in batch.samples:
        versions = sample.policy_version_T[sample.loss_mask_T]
        if versions.size:
            total += int((batch.version - versions).sum())
            count += versions.size
            worst = max(worst, int(batch.version - versions.min()))
    return total / max(1, count), worst


def _generator_shares(stats: EngineStats, blocked_frac: float) -> dict[str, float]:
    """Shares of the worker's life; what it idled because nothing was admitted is `blocked`, the rest `idle`."""
    whole_s = stats.decode_s + stats.prefill_s + stats.idle_s + stats.paused_s
    if whole_s <= 0.0:
        return {}
    idle_frac = stats.idle_s / whole_s
    blocked = min(idle_frac, blocked_frac)
    return {
        "decode": stats.decode_s / whole_s,
        "prefill": stats.prefill_s / whole_s,
        "blocked": blocked,
        "paused": stats.paused_s / whole_s,
        "idle": idle_frac - blocked,
    }
