"""What people see while a run goes on: a live screen on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from headrace.clock import Clock, WallClock
from headrace.config.schema import RunConfig
from headrace.telemetry.format import count, duration, percent
from headrace.telemetry.panels import RunScreen
from headrace.telemetry.records import EvalRecord, Record, RunSummary, StepRecord
from headrace.telemetry.state import RunState
from headrace.telemetry.summary import print_summary


class View(Protocol):
    """Where the loop and the start-up report to. Every method returns at once and never raises for its content."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def update(self, record: Record) -> None:
        """Show a step or an evaluation (a summary is shown by `print_summary`)."""
        ...

    def status(self, text: str) -> None:
        """The phase in a few words: "starting", "evaluating v0", "training", "saving"."""
        ...

    def message(self, text: str) -> None:
        """Something worth a line: a retry, a checkpoint, a warning."""
        ...

    def role(self, name: str, state: str, waits_for: str = "") -> None:
        """Start-up: what a role does and whom it waits for ("" = nobody)."""
        ...

    def progress(self, what: str, done: float, total: float) -> None:
        """Progress of a download, an evaluation, ...; total 0 = not known; done >= total ends it."""
        ...

    def print_summary(self, summary: RunSummary) -> None:
        """The final table."""
        ...


class LiveView:
    """A screen that redraws itself; use as a context manager."""

    def __init__(self, console: Console, config: RunConfig | None = None, *, clock: Clock | None = None) -> None:
        self.state = RunState(config, clock or WallClock())
        self._console = console
        self._live = Live(
            RunScreen(self.state), console=console, refresh_per_second=4, transient=True, redirect_stdout=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()
        if self.state.last is not None:
            self._console.print(RunScreen(self.state))

    def update(self, record: Record) -> None:
        self.state.add(record)

    def status(self, text: str) -> None:
        self.state.set_phase(text)

    def message(self, text: str) -> None:
        self.state.messages.append((self.state.elapsed_s, text))

    def role(self, name: str, state: str, waits_for: str = "") -> None:
        self.state.set_role(name, state, waits_for)

    def progress(self, what: str, done: float, total: float) -> None:
        self.state.set_progress(what, done, total)

    def print_summary(self, summary: RunSummary) -> None:
        self._live.stop()
        print_summary(self._console, summary)


class PlainView:
    """One line per event, for logs, pipes and CI."""

    PROGRESS_EVERY = 0.25
    """Share of a known total between two lines."""

    def __init__(self, console: Console, config: RunConfig | None = None, *, clock: Clock | None = None) -> None:
        self.state = RunState(config, clock or WallClock())
        self._console = console
        self._shown: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def update(self, record: Record) -> None:
        self.state.add(record)
        if isinstance(record, StepRecord):
            self._line(step_line(record, self.state))
        elif isinstance(record, EvalRecord):
            self._line(eval_line(record))

    def status(self, text: str) -> None:
        if text != self.state.phase:
            self.state.phase = text
            self._line(text)

    def message(self, text: str) -> None:
        self._line(text)

    def role(self, name: str, state: str, waits_for: str = "") -> None:
        known = self.state.roles.get(name)
        self.state.set_role(name, state, waits_for)
        if known is not self.state.roles[name]:
            self._line(f"{name}: {state}" + (f", waits for {waits_for}" if waits_for else ""))

    def progress(self, what: str, done: float, total: float) -> None:
        if total <= 0:
            if what not in self._shown:
                self._line(what)
            self._shown[what] = 0.0
            return
        share = min(1.0, done / total)
        shown = self._shown.get(what, 0.0)
        if share >= shown + self.PROGRESS_EVERY or share >= 1.0:
            self._line(f"{what}: {count(done)}/{count(total)}")
            self._shown[what] = share
        if share >= 1.0:
            self._shown.pop(what, None)

    def print_summary(self, summary: RunSummary) -> None:
        print_summary(self._console, summary)

    def _line(self, text: str) -> None:
        self._console.print(
            f"{duration(self.state.elapsed_s):>8}  {text}", soft_wrap=True, markup=False, highlight=False
        )


def make_view(
    config: RunConfig | None = None,
    *,
    console: Console | None = None,
    live: bool = True,
    clock: Clock | None = None,
) -> View:
    """A LiveView on a terminal (and `live`), a PlainView elsewhere. `config` names the run and its bounds."""
    console = console or Console()
    if live and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, config, clock=clock)
    return PlainView(console, config, clock=clock)


def step_line(step: StepRecord, state: RunState) -> str:
    """One step as one line of text."""
    generated, trained = state.tok_per_s()
    bound = "" if state.lag_bound is None else f"/{state.lag_bound}"
    waits = [f"data {duration(step.wait_data_s)}", f"bound {duration(step.wait_bound_s)}"]
    parts = [
        f"step {step.version}/{step.steps}",
        f"reward {step.reward_mean:.3f}",
        f"pass {percent(step.pass_frac)}",
        f"lag {step.lag_mean:.2f} max {step.lag_max}{bound}",
        f"train {duration(step.train_s)}",
        f"wait {', '.join(waits)}",
        f"hand-off {duration(step.publish_s + step.land_s)}",
        f"tok/s {count(generated)} made, {count(trained)} trained",
        f"queue {step.queue_groups}",
        step.verdict,
        f"ETA {duration(step.eta_s)}",
    ]
    return " | ".join(parts)


def eval_line(record: EvalRecord) -> str:
    """One evaluation as one line of text."""
    failed = {name: n for name, n in record.outcomes.items() if name not in ("ok", "policy_fail") and n}
    line = (
        f"held-out at v{record.version}: {percent(record.accuracy, 1)} of {record.prompts} in {duration(record.eval_s)}"
    )
    return line + (f" (not answered: {', '.join(f'{n} {name}' for name, n in failed.items())})" if failed else "")
