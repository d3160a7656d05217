"""What the live views know: fed with records, asked for windowed numbers. No drawing here."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.clock import Clock, WallClock
from headrace.config.schema import RunConfig
from headrace.telemetry.records import EvalRecord, Record, StepRecord

WINDOW_STEPS = 8
MESSAGES = 3


@dataclass(slots=True, kw_only=True)
class RoleState:
    """One line of the start-up table."""

    name: str
    state: str
    waits_for: str
    since_s: float


@dataclass(slots=True, kw_only=True)
class Progress:
    """Something countable that is under way."""

    what: str
    done: float
    total: float
    """0 = not known."""
    began_s: float


@dataclass(slots=True)
class RunState:
    """Everything shown, as data. Times are seconds of the clock since the state was made."""

    config: RunConfig | None = None
    clock: Clock = field(default_factory=WallClock)
    phase: str = "starting"
    steps: list[StepRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    roles: dict[str, RoleState] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    messages: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MESSAGES))
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.clock.now()

    @property
    def name(self) -> str:
        return self.config.name if self.config is not None else ""

    @property
    def lag_bound(self) -> int | None:
        return self.config.flow.lag_bound if self.config is not None else None

    @property
    def steps_planned(self) -> int:
        """0 = not known yet."""
        if self.steps:
            return self.steps[-1].steps
        return self.config.steps if self.config is not None else 0

    @property
    def elapsed_s(self) -> float:
        return self.clock.now() - self.began_s

    @property
    def last(self) -> StepRecord | None:
        return self.steps[-1] if self.steps else None

    @property
    def window(self) -> list[StepRecord]:
        """The last steps, over which shares and throughput are taken."""
        return self.steps[-WINDOW_STEPS:]

    def add(self, record: Record) -> None:
        """Take a step or eval record; a step of an already seen version voids what came after it."""
        if isinstance(record, StepRecord):
            self.steps = [s for s in self.steps if s.version < record.version]
            self.steps.append(record)
            self.phase = "training"
        elif isinstance(record, EvalRecord):
            self.evals.append(record)

    def set_phase(self, text: str) -> None:
        """Note what goes on now; it stays among the messages when the next thing begins."""
        if text != self.phase:
            self.phase = text
            self.messages.append((self.elapsed_s, text))

    def set_role(self, name: str, state: str, waits_for: str) -> None:
        """Note what a role does; `since` restarts only when that changes."""
        known = self.roles.get(name)
        if known is None or (known.state, known.waits_for) != (state, waits_for):
            self.roles[name] = RoleState(name=name, state=state, waits_for=waits_for, since_s=self.elapsed_s)

    def set_progress(self, what: str, done: float, total: float) -> None:
        """Note progress; it goes away when done reaches a known total."""
        if total > 0 and done >= total:
            self.progress.pop(what, None)
            return
        known = self.progress.get(what)
        began_s = known.began_s if known is not None and known.done <= done else self.elapsed_s
        self.progress[what] = Progress(what=what, done=done, total=total, began_s=began_s)

    def window_wall_s(self) -> float:
        """Wall time that the window covers, less evaluations: from the end of the step before it.

        A resume restarts the count.
        """
        window = self.window
        if not window:
            return 0.0
        at = len(self.steps) - len(window)
        before_s = self.steps[at - 1].time_s if at > 0 else window[0].time_s - accounted_s(window[0])
        first = window[0].version - (at > 0)
        evals_s = sum(e.eval_s for e in self.evals if first <= e.version < window[-1].version)
        wall_s = window[-1].time_s - before_s - evals_s
        return wall_s if wall_s > 0 else sum(accounted_s(s) for s in window)

    def trainer_shares(self) -> Mapping[str, float]:
        """busy, data, bound, hand-off and idle shares of the window; they sum to 1 (all 0 before the first step)."""
        names = ("busy", "data", "bound", "hand-off", "idle")
        window = self.window
        parts = {
            "busy": sum(s.train_s for s in window),
            "data": sum(s.wait_data_s for s in window),
            "bound": sum(s.wait_bound_s for s in window),
            "hand-off": sum(s.publish_s for s in window),
        }
        used_s = sum(parts.values())
        whole_s = max(self.window_wall_s(), used_s)
        if whole_s <= 0:
            return dict.fromkeys(names, 0.0)
        return {n: v / whole_s for n, v in parts.items()} | {"idle": (whole_s - used_s) / whole_s}

    def tok_per_s(self) -> tuple[float, float]:
        """Generated and trained tokens per second of wall time over the window."""
        wall_s = self.window_wall_s()
        if wall_s <= 0:
            return 0.0, 0.0
        generated = sum(s.generated_tok for s in self.window)
        trained = sum(s.trained_tok for s in self.window)
        return generated / wall_s, trained / wall_s


def accounted_s(step: StepRecord) -> float:
    """Seconds of a step that its record explains."""
    return step.wait_data_s + step.wait_bound_s + step.train_s + step.publish_s
