"""Adds up what a simulation sees, and turns it into `outcome.Metrics`. Whoever reads the code can skip this file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from headrace.errors import PlanError
from headrace.flow.events import TakeBatch
from headrace.flow.health import Health
from headrace.flow.ledger import Ledger
from headrace.planner.outcome import Metrics
from headrace.planner.sim_engine import Engine
from headrace.planner.sim_rollout import SimGroup

TRAINER_STATES = ("busy", "wait_data", "wait_bound", "hand_off", "idle")


@dataclass(slots=True, kw_only=True)
class EngineTotals:
    """Sums over engines, in engine seconds."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    paused_s: float = 0.0
    idle_s: float = 0.0
    running_s: float = 0.0
    queued_s: float = 0.0
    kv_used_s: float = 0.0
    """Integral of the used share."""

    @classmethod
    def of(cls, engines: Iterable[Engine], now_s: float) -> EngineTotals:
        """At `now_s`; advance the engines first. What they are ahead of the clock is taken off again."""
        total = cls()
        for engine in engines:
            ahead_s = 0.0 if engine.off else max(0.0, engine.time_s - now_s)
            decoding = engine.b > 0
            total.decode_s += engine.decode_s - (ahead_s if decoding else 0.0)
            total.paused_s += engine.paused_s - (0.0 if decoding else ahead_s)
            total.prefill_s += engine.prefill_s
            total.idle_s += engine.idle_s
            total.running_s += engine.running_s - ahead_s * engine.b
            total.queued_s += engine.queued_s + len(engine.queue) * now_s
            total.kv_used_s += (engine.kv_tok_s - ahead_s * engine.kv_tok) / engine.capacity_tok
        return total

    def __sub__(self, other: EngineTotals) -> EngineTotals:
        return EngineTotals(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    @property
    def whole_s(self) -> float:
        return self.decode_s + self.prefill_s + self.paused_s + self.idle_s


@dataclass(slots=True)
class Tally:
    """Everything that Metrics needs and neither ledger nor engines know. Lists and sums begin with `begin`."""

    measuring: bool = False
    """The warm-up is over."""
    begun_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    trainer_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TRAINER_STATES, 0.0))
    samples: int = 0
    trained_tok: int = 0
    rollout_s: list[float] = field(default_factory=list)
    """From admission to graded, of each rollout that ended by itself."""
    queue_s: list[float] = field(default_factory=list)
    sample_lag_hist: dict[int, int] = field(default_factory=dict)
    waiting: int = 0
    """Rollouts that wait for a sandbox now."""
    waiting_s: float = 0.0
    """Integral of it, with what `waiting` has begun taken off: add waiting x now."""
    outside: int = 0
    """Rollouts in tools, in a starting sandbox or in grading now."""
    outside_s: float = 0.0
    _engines: EngineTotals = field(default_factory=EngineTotals)
    _lag_hist: dict[int, int] = field(default_factory=dict)
    _trained_tok: int = 0
    _waiting_s: float = 0.0
    _outside_s: float = 0.0
    _span_s: float = 0.0

    def begin(self, ledger: Ledger, engines: Sequence[Engine], now_s: float) -> None:
        """The warm-up ends here."""
        self.measuring, self.begun_s = True, now_s
        self._engines = EngineTotals.of(engines, now_s)
        self._lag_hist = dict(ledger.lag_hist)
        self._trained_tok = ledger.trained_tok
        self._waiting_s = self.waiting_s + self.waiting * now_s
        self._outside_s = self.outside_s + self.outside * now_s

    def end(self, engines: Sequence[Engine], now_s: float) -> None:
        """The last step ends here."""
        self._span_s = now_s - self.begun_s
        self._engines = EngineTotals.of(engines, now_s) - self._engines
        self._waiting_s = self.waiting_s + self.waiting * now_s - self._waiting_s
        self._outside_s = self.outside_s + self.outside * now_s - self._outside_s
        self.measuring = False

    def step_ended(self, health: Health, since_s: float, now_s: float, hand_off_s: float) -> None:
        """An optimizer batch is trained and published; `hand_off_s` of its busy time was publishing or switching."""
        self.step_s.append(now_s - since_s)
        for state, seconds in health.last_step.seconds.items():
            self.trainer_s[state] += seconds
        self.trainer_s["busy"] -= hand_off_s
        self.trainer_s["hand_off"] += hand_off_s

    def taken(self, decision: TakeBatch, groups: Sequence[SimGroup], now_s: float) -> None:
        """A batch begins to train."""
        mask_below = decision.mask_below_version
        hist = self.sample_lag_hist
        for group in groups:
            self.queue_s.append(now_s - group.ended_s)
            for oldest, newest in group.versions:
                if newest >= mask_below:
                    lag = decision.version - max(oldest, mask_below)
                    hist[lag] = hist.get(lag, 0) + 1

    def metrics(self, *, steps: int, ledger: Ledger, engines: Sequence[Engine], wall_s: float) -> Metrics:
        """After `end`. `wall_s`: of the whole run, its last landing included."""
        span_s = self._span_s
        if span_s <= 0.0:
            raise PlanError("the simulated steps take no time: every cost is 0")
        totals = self._engines
        lag_hist = {
            lag: tok - self._lag_hist.get(lag, 0)
            for lag, tok in sorted(ledger.lag_hist.items())
            if tok > self._lag_hist.get(lag, 0)
        }
        trainer_s = sum(self.trainer_s.values())
        whole_s = totals.whole_s
        rollout_s = np.sort(np.asarray(self.rollout_s or [0.0]))
        return Metrics(
            steps=steps,
            wall_s=wall_s,
            samples_per_s=self.samples / span_s,
            trained_tok_per_s=(ledger.trained_tok - self._trained_tok) / span_s,
            step_s_mean=float(np.mean(self.step_s)),
            step_s_p50=float(np.quantile(self.step_s, 0.5)),
            step_s_p99=float(np.quantile(self.step_s, 0.99)),
            step_s=tuple(self.step_s),
            trainer_shares={state: seconds / trainer_s for state, seconds in self.trainer_s.items()},
            generator_shares={
                "decode": totals.decode_s / whole_s,
                "prefill": totals.prefill_s / whole_s,
                "paused": totals.paused_s / whole_s,
                "idle": totals.idle_s / whole_s,
            },
            lag_hist=lag_hist,
            sample_lag_hist=dict(sorted(self.sample_lag_hist.items())),
            generated_tok=ledger.generated_tok,
            trained_tok=ledger.trained_tok,
            masked_tok=ledger.masked_tok,
            wasted_tok=dict(sorted(ledger.wasted_tok.items())),
            groups={str(bucket): count for bucket, count in ledger.buckets.items()},
            kv_used_frac=totals.kv_used_s / whole_s,
            kv_peak_frac=max(e.kv_peak_tok / e.capacity_tok for e in engines),
            running_mean=totals.running_s / span_s,
            queued_mean=(totals.queued_s + self._waiting_s) / span_s,
            tool_mean=self._outside_s / span_s,
            preemptions=sum(e.preemptions for e in engines),
            rollout_s_mean=float(rollout_s.mean()),
            rollout_s_p50=float(np.quantile(rollout_s, 0.5)),
            rollout_s_p99=float(np.quantile(rollout_s, 0.99)),
            rollout_s_max=float(rollout_s[-1]),
            queue_s_mean=float(np.mean(self.queue_s)) if self.queue_s else 0.0,
        )
