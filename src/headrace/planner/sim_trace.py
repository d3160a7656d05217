"""What a simulation did, for eyes and tests: decisions in order, and a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.flow.events import Decision, Event

TRAINER, ENGINES, GROUPS = 1, 2, 3
"""Process numbers of the trace's lanes."""


class Trace:
    """Give one to `simulate`; without it nothing is collected."""

    def __init__(self) -> None:
        self.decisions: list[tuple[float, Event, tuple[Decision, ...]]] = []
        """(seconds, event, decisions): everything that went into the controller and came out, in order."""
        self._events: list[dict[str, Any]] = []
        for pid, name in ((TRAINER, "trainer"), (ENGINES, "engines"), (GROUPS, "groups")):
            self._events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}})

    def handled(self, event: Event, decisions: Sequence[Decision]) -> None:
        """The controller took an event in."""
        self.decisions.append((event.time_s, event, tuple(decisions)))

    def span(self, pid: int, tid: int, name: str, from_s: float, until_s: float, **args: object) -> None:
        """A lane is occupied."""
        if until_s > from_s:
            self._add("X", pid, tid, name, from_s, dur=_us(until_s - from_s), args=args)

    def counter(self, pid: int, name: str, time_s: float, **values: float) -> None:
        """A number, or several, from now on."""
        self._add("C", pid, 0, name, time_s, args=values)

    def group_started(self, group_id: str, time_s: float) -> None:
        self._add("b", GROUPS, 0, "group", time_s, id=group_id, cat="group", args={"id": group_id})

    def group_ended(self, group_id: str, time_s: float, how: str) -> None:
        self._add("e", GROUPS, 0, "group", time_s, id=group_id, cat="group", args={"ended": how})

    def _add(self, ph: str, pid: int, tid: int, name: str, time_s: float, **rest: object) -> None:
        self._events.append({"ph": ph, "pid": pid, "tid": tid, "name": name, "ts": _us(time_s), **rest})

    def chrome_json(self) -> str:
        """The Chrome trace event format (object form), times in microseconds."""
        return json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}, allow_nan=False)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
