"""Draws the timelines of docs/async.md and fills its table: python docs/make_timelines.py

The decisions are those of the real flow controller (src/headrace/flow/controller.py). Around it stands a small
discrete-event simulation of one generator with continuous batching and one trainer on a device of their own each:

    decode step     DECODE_S + rows x DECODE_ROW_S; every running rollout gets one token
    rollout length  log-normal, cut at LENGTH_MAX tokens; the same lengths in every scenario
    optimizer step  TRAIN_S; publication PUBLISH_S; landing LAND_S after the decision to swap

Deterministic: the same code gives the same pictures and numbers.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
import sys
from pathlib import Path
from typing import Any

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.flow.controller import Controller
from headrace.flow.events import (
    BatchWanted,
    CancelGroup,
    Event,
    Landed,
    MemberEnded,
    RetryMember,
    RunStarted,
    StartGroup,
    StepEnded,
    Stop,
    SwapWeights,
    TakeBatch,
)
from headrace.records import Outcome
from headrace.telemetry.plot import plot
from headrace.telemetry.timeline import Landing, RolloutSpan, Timeline, TrainerSpan

HERE = Path(__file__).parent
DECODE_S, DECODE_ROW_S = 0.016, 0.0005
TRAIN_S, PUBLISH_S, LAND_S = 1.0, 0.06, 0.06
LENGTH_MEDIAN, LENGTH_SIGMA, LENGTH_MAX = 36, 0.6, 160
STEPS_DRAWN_S = 9.0
STEPS_MEASURED = 200


@dataclasses.dataclass
class Running:
    """One rollout in the engine."""

    group_id: str
    member: int
    length_tok: int
    reward: float
    start_s: float
    tok_by_version: dict[int, int] = dataclasses.field(default_factory=dict)
    since: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class Simulation:
    """One run of the controller on virtual time."""

    def __init__(self, flow: FlowConfig, *, steps: int) -> None:
        self.controller = Controller(flow, CurriculumConfig(), prompts=512, seed=0)
        self.flow = flow
        self.steps = steps
        self.timeline = Timeline()
        self.now_s = 0.0
        self.served = 0
        self.running: dict[tuple[str, int], Running] = {}
        self.decoding = False
        self._queue: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self._publishing = False
        self._state, self._since_s, self._makes = "idle", 0.0, 1

    def run(self) -> None:
        self.feed(RunStarted(time_s=0.0, version=0))
        self.feed(BatchWanted(time_s=0.0))
        while self._queue and self.controller.version < self.steps:
            self.now_s, _, what, value = heapq.heappop(self._queue)
            getattr(self, f"on_{what}")(value)

    def feed(self, event: Event) -> None:
        for decision in self.controller.handle(event):
            if isinstance(decision, StartGroup):
                for member in range(self.flow.group_size):
                    self._start(decision.group_id, decision.ordinal, member)
            elif isinstance(decision, TakeBatch):
                self._at(TRAIN_S, "trained", decision.version + 1)
            elif isinstance(decision, SwapWeights):
                self._at(LAND_S, "landed", decision.version)
            elif isinstance(decision, CancelGroup):
                for rollout in [r for r in self.running.values() if r.group_id == decision.group_id]:
                    self._end(rollout, wasted=True)
            elif isinstance(decision, RetryMember | Stop):
                raise RuntimeError(f"nothing fails here, yet: {decision}")
        self._draw_trainer()
        if self.running and not self.decoding:
            self.decoding = True
            self._at(DECODE_S + DECODE_ROW_S * len(self.running), "decoded", None)

    def on_decoded(self, _: None) -> None:
        self.decoding = False
        for rollout in list(self.running.values()):
            if (rollout.group_id, rollout.member) not in self.running:
                continue  # cancelled by what ended before it in this very step
            if self.served not in rollout.tok_by_version:
                rollout.since.append((self.served, rollout.start_s if not rollout.since else self.now_s))
            rollout.tok_by_version[self.served] = rollout.tok_by_version.get(self.served, 0) + 1
            if sum(rollout.tok_by_version.values()) >= rollout.length_tok:
                self._end(rollout, wasted=False)
        if self.running and not self.decoding:
            self.decoding = True
            self._at(DECODE_S + DECODE_ROW_S * len(self.running), "decoded", None)

    def on_trained(self, version: int) -> None:
        self._switch("hand_off", version)
        self._publishing = True
        self._at(PUBLISH_S, "published", version)

    def on_published(self, version: int) -> None:
        self._publishing = False
        self.feed(StepEnded(time_s=self.now_s, version=version))
        self.feed(BatchWanted(time_s=self.now_s))

    def on_landed(self, version: int) -> None:
        self.served = version
        self.timeline.add(Landing(time_s=self.now_s, version=version))
        self.feed(Landed(time_s=self.now_s, version=version))

    def _start(self, group_id: str, ordinal: int, member: int) -> None:
        draw = random.Random(f"{ordinal}/{member}")
        length = min(LENGTH_MAX, max(4, round(LENGTH_MEDIAN * draw.lognormvariate(0.0, LENGTH_SIGMA))))
        self.running[group_id, member] = Running(group_id, member, length, float(member % 2), self.now_s)

    def _end(self, rollout: Running, *, wasted: bool) -> None:
        del self.running[rollout.group_id, rollout.member]
        pairs = tuple(sorted(rollout.tok_by_version.items()))
        if pairs:
            span = RolloutSpan(
                start_s=rollout.start_s,
                end_s=self.now_s,
                versions=tuple(rollout.since),
                label=f"{rollout.group_id}/{rollout.member}",
                wasted=wasted,
            )
            self.timeline.add(span)
        self.feed(
            MemberEnded(
                time_s=self.now_s,
                group_id=rollout.group_id,
                member=rollout.member,
                attempt=0,
                outcome=Outcome.CANCELLED if wasted else Outcome.OK,
                reward=None if wasted else rollout.reward,
                generated_tok=sum(tok for _, tok in pairs),
                oldest_version=pairs[0][0] if pairs else None,
                newest_version=pairs[-1][0] if pairs else None,
                stale_tok_by_version=pairs,
            )
        )

    def _at(self, delay_s: float, what: str, value: Any) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), what, value))

    def _draw_trainer(self) -> None:
        if not self._publishing:  # to the controller that is still busy; on_trained draws it
            self._switch(self.controller.health.state, self.controller.version + 1)

    def _switch(self, state: str, version: int) -> None:
        """The trainer changes its state; `version` is what the step makes."""
        if state == self._state:
            return
        if self._state != "idle" and self.now_s > self._since_s:
            span: dict[str, Any] = {"kind": self._state, "start_s": self._since_s, "end_s": self.now_s}
            self.timeline.add(TrainerSpan(**span, version=self._makes))
        self._state, self._since_s, self._makes = state, self.now_s, version

    def numbers(self) -> dict[str, str]:
        """Measured over the whole run."""
        ledger, shares = self.controller.ledger, self.controller.health.trainer_shares(whole_run=True)
        lag = ledger.lag_hist
        trained = max(1, sum(lag.values()))
        made = max(1, ledger.generated_tok)
        wasted = sum(tok for reason, tok in ledger.wasted_tok.items() if reason != "unfinished")
        return {
            "steps/min": f"{60 * self.controller.version / self.now_s:.1f}",
            "trainer busy": f"{100 * TRAIN_S * self.controller.version / self.now_s:.0f} %",
            "waits for data": f"{100 * shares['wait_data']:.0f} %",
            "held by the bound": f"{100 * shares['wait_bound']:.0f} %",
            "mean lag": f"{sum(k * v for k, v in lag.items()) / trained:.2f}",
            "largest lag": str(max(lag, default=0)),
            "wasted tokens": f"{100 * wasted / made:.1f} %",
            "masked tokens": f"{100 * ledger.masked_tok / made:.1f} %",
        }


def scenarios() -> dict[str, tuple[str, FlowConfig]]:
    """Name of the picture -> title, settings."""
    common: dict[str, Any] = {"batch_groups": 4, "group_size": 4, "zero_signal": "keep"}
    pipeline = common | {"mode": "pipeline"}
    return {
        "sync": ("mode = sync", FlowConfig(**common, mode="sync")),
        "sync-oversample": ("mode = sync, oversample = 0.5", FlowConfig(**common, mode="sync", oversample=0.5)),
        "one-step-off": ("mode = one_step_off", FlowConfig(**common, mode="one_step_off")),
        "pipeline-1": ("mode = pipeline, max_lag_steps = 1", FlowConfig(**pipeline, max_lag_steps=1)),
        "pipeline-2": ("mode = pipeline, max_lag_steps = 2", FlowConfig(**pipeline, max_lag_steps=2)),
        "pipeline-1-drop": (
            "mode = pipeline, max_lag_steps = 1, on_bound = drop",
            FlowConfig(**pipeline, max_lag_steps=1, on_bound="drop"),
        ),
        "pipeline-1-carry": (
            "mode = pipeline, max_lag_steps = 1, on_bound = carry",
            FlowConfig(**pipeline, max_lag_steps=1, on_bound="carry"),
        ),
        "pipeline-2-narrow": (
            "mode = pipeline, max_lag_steps = 2, max_running = 8",
            FlowConfig(**pipeline, max_lag_steps=2, max_running=8),
        ),
    }


def table(rows: dict[str, dict[str, str]]) -> str:
    """A Markdown table."""
    names = list(next(iter(rows.values())))
    lines = ["| settings | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {title} | " + " | ".join(numbers.values()) + " |" for title, numbers in rows.items()]
    return "\n".join(lines)


def main() -> None:
    rows = {}
    for name, (title, flow) in scenarios().items():
        simulation = Simulation(flow, steps=STEPS_MEASURED)
        simulation.run()
        rows[title] = simulation.numbers()
        begin_s = 6.0
        target = HERE / "img" / f"async-{name}.png"
        plot(simulation.timeline, target, window=(begin_s, begin_s + STEPS_DRAWN_S), title=title, width_in=9.5)
    page = HERE / "async.md"
    head, _, rest = page.read_text().partition("<!-- table -->")
    _, _, tail = rest.partition("<!-- end of table -->")
    page.write_text(f"{head}<!-- table -->\n{table(rows)}\n<!-- end of table -->{tail}")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
