"""The log of everything that went into a controller and came out: JSON lines that replay.

The first line is the set-up, every other one an event with the decisions it led to. A log pasted from a bug report is
a unit test:

    setup, stimuli = read_log(text.splitlines())
    assert replay(setup, [s.event for s in stimuli]) == [d for s in stimuli for d in s.decisions]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.errors import FlowError, did_you_mean
from headrace.flow.controller import Controller
from headrace.flow.events import (
    BatchWanted,
    Decision,
    Event,
    Landed,
    MemberEnded,
    RunEnding,
    RunStarted,
    StepEnded,
)
from headrace.flow.group import Row
from headrace.flow.restore import Restored
from headrace.records import Outcome

_EVENTS: tuple[type[Event], ...] = (RunStarted, MemberEnded, BatchWanted, StepEnded, Landed, RunEnding)
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in (*_EVENTS, *get_args(Decision), Row)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a controller is made from: enough to make it again."""

    flow: FlowConfig
    curriculum: CurriculumConfig
    prompts: int
    seed: int
    rows: tuple[Row, ...] = ()
    """The journal, if the run was resumed."""
    version: int = 0
    """Of the checkpoint, if the run was resumed."""
    steps: int = 0
    """Of the whole run; 0 = open end."""

    def controller(self) -> Controller:
        """A fresh controller in this state."""
        return self.restore()[0]

    def restore(self) -> tuple[Controller, Restored]:
        """The controller, and what it took over from `rows`."""
        return Controller.restore(
            self.flow,
            self.curriculum,
            prompts=self.prompts,
            seed=self.seed,
            rows=self.rows,
            version=self.version,
            steps=self.steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stimulus:
    """One event and what the controller decided."""

    event: Event
    decisions: tuple[Decision, ...]


def encode(item: Event | Decision | Row) -> dict[str, Any]:
    """A record as plain JSON data, its type under "is"."""
    return {"is": type(item).__name__} | {f.name: getattr(item, f.name) for f in fields(item)}


def decode(data: dict[str, Any]) -> Any:
    """The record behind `encode`'s data. FlowError names an unknown type or field."""
    name = str(data.get("is"))
    cls = _TYPES.get(name)
    if cls is None:
        raise FlowError(f"a flow log knows no {name!r}; {did_you_mean(name, _TYPES)}")
    known = {f.name for f in fields(cls)}
    values = {key: _frozen(value) for key, value in data.items() if key != "is"}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise FlowError(f"{name} has no field {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    if "outcome" in values:
        values["outcome"] = Outcome(values["outcome"])
    return cls(**values)


def _frozen(value: Any) -> Any:
    """JSON has lists where the records have tuples."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def write_setup(setup: Setup) -> str:
    """First line of a log, without its end."""
    data = {
        "flow": setup.flow.model_dump(mode="json"),
        "curriculum": setup.curriculum.model_dump(mode="json"),
        "prompts": setup.prompts,
        "seed": setup.seed,
        "rows": [encode(row) for row in setup.rows],
        "version": setup.version,
        "steps": setup.steps,
    }
    return json.dumps({"setup": data})


def write_stimulus(event: Event, decisions: Sequence[Decision]) -> str:
    """One more line of a log, without its end."""
    return json.dumps({"event": encode(event), "decisions": [encode(d) for d in decisions]})


def read_log(lines: Iterable[str]) -> tuple[Setup, list[Stimulus]]:
    """Parse a log. FlowError names the line that cannot be read; a torn last line (crash) is left out."""
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise FlowError("the flow log is empty")
    setup: Setup | None = None
    stimuli: list[Stimulus] = []
    for number, line in numbered:
        try:
            data = json.loads(line)
        except json.JSONDecodeError as exc:
            if number == numbered[-1][0] and setup is not None:
                break
            raise FlowError(f"flow log, line {number}: no JSON ({exc})") from exc
        if setup is None:
            if "setup" not in data:
                raise FlowError(f"flow log, line {number}: the first line must hold the set-up")
            setup = _setup(data["setup"])
        else:
            decisions = tuple(decode(d) for d in data["decisions"])
            stimuli.append(Stimulus(event=decode(data["event"]), decisions=decisions))
    assert setup is not None
    return setup, stimuli


def _setup(data: dict[str, Any]) -> Setup:
    return Setup(
        flow=FlowConfig.model_validate(data["flow"]),
        curriculum=CurriculumConfig.model_validate(data["curriculum"]),
        prompts=data["prompts"],
        seed=data["seed"],
        rows=tuple(decode(row) for row in data["rows"]),
        version=data["version"],
        steps=data["steps"],
    )


def replay(setup: Setup, events: Iterable[Event]) -> list[Decision]:
    """All decisions of a fresh controller on these events, in order."""
    controller = setup.controller()
    return [decision for event in events for decision in controller.handle(event)]
