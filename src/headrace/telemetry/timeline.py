"""Who did what when: rollouts by policy version, the trainer's work and waits, landings of new weights.

Intervals go to memory and, one line each, to trace.jsonl. They can be written as a Chrome trace (open it in Perfetto)
or drawn: `plot` makes the picture of the README. Times are seconds of the run's clock.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from headrace.errors import DataError, did_you_mean
from headrace.telemetry.log import complete_lines, cut_torn_line, encode_line

FILE_NAME = "trace.jsonl"
TrainerKind = Literal["busy", "wait_data", "wait_bound", "hand_off"]
TRAINER_KINDS: tuple[TrainerKind, ...] = ("busy", "wait_data", "wait_bound", "hand_off")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpan:
    """One request in the engine, from its first decode step to its end."""

    start_s: float
    end_s: float
    row: int = -1
    """Line it is drawn on; -1 = the lowest that is free."""
    versions: tuple[tuple[int, float], ...]
    """(policy_version, from_s), ascending: which weights sampled its tokens, and since when."""
    label: str = ""
    """Request or group id."""
    wasted: bool = False
    """Cancelled: none of its tokens trains. Drawn pale."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpan:
    """One interval of the trainer."""

    kind: TrainerKind
    start_s: float
    end_s: float
    version: int
    """Version that the step makes (or made, for hand_off)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Every replica serves `version` from now on."""

    time_s: float
    version: int


Interval = RolloutSpan | TrainerSpan | Landing
_KINDS: dict[str, type[RolloutSpan] | type[TrainerSpan] | type[Landing]] = {
    "rollout": RolloutSpan,
    "trainer": TrainerSpan,
    "landing": Landing,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}


class Timeline:
    """Collects intervals, in any order."""

    def __init__(self, folder: Path | None = None, intervals: Iterable[Interval] = ()) -> None:
        """With a folder every added interval is also appended to its trace.jsonl, after what a resumed run left there.

        A resumed run's clock begins anew; in the file its times go on where the earlier ones end.
        """
        self.intervals: list[Interval] = list(intervals)
        self._file: BinaryIO | None = None
        self._shift_s = 0.0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            cut_torn_line(folder / FILE_NAME)
            if (folder / FILE_NAME).exists():
                self._shift_s = max(map(end_of, read_timeline(folder).intervals), default=0.0)
            self._file = (folder / FILE_NAME).open("ab")

    def add(self, interval: Interval) -> None:
        """Record one interval or landing."""
        self.intervals.append(interval)
        if self._file is not None:
            row = {"lane": _NAMES[type(interval)], **dataclasses.asdict(_shifted(interval, self._shift_s))}
            self._file.write(encode_line(row))
            self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def rollouts(self) -> list[RolloutSpan]:
        return [i for i in self.intervals if isinstance(i, RolloutSpan)]

    @property
    def trainer(self) -> list[TrainerSpan]:
        return [i for i in self.intervals if isinstance(i, TrainerSpan)]

    @property
    def landings(self) -> list[Landing]:
        return [i for i in self.intervals if isinstance(i, Landing)]

    def window(self, start_s: float, end_s: float) -> Timeline:
        """The intervals that touch [start_s, end_s]."""
        return Timeline(intervals=[i for i in self.intervals if end_of(i) >= start_s and begin_of(i) <= end_s])

    def to_chrome(self, path: Path) -> None:
        """Write a Chrome trace: one process for the generator with a thread per row, one for the trainer."""
        path.write_text(json.dumps({"traceEvents": _chrome_events(aligned(self)), "displayTimeUnit": "ms"}))


def read_timeline(folder: Path) -> Timeline:
    """The timeline of a run folder; DataError when it has none or a line is no interval."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(f"{folder} has no {FILE_NAME}: the run recorded no timeline")
    intervals: list[Interval] = []
    for number, row in complete_lines(path):
        lane = str(row.pop("lane", ""))
        if lane not in _KINDS:
            raise DataError(f"{path}, line {number}: lane = {lane!r}; {did_you_mean(lane, _KINDS)}")
        if "versions" in row:
            row["versions"] = tuple((int(v), float(s)) for v, s in row["versions"])
        try:
            intervals.append(_KINDS[lane](**row))
        except TypeError as exc:
            raise DataError(f"{path}, line {number}: {exc}") from exc
    return Timeline(intervals=intervals)


def segments(span: RolloutSpan) -> list[tuple[int, float, float]]:
    """(version, start_s, end_s) pieces of a rollout; the first begins with the rollout."""
    marks = [span.start_s, *(from_s for _, from_s in span.versions[1:]), span.end_s]
    return [
        (version, begin, max(begin, end))
        for (version, _), begin, end in zip(span.versions, marks, marks[1:], strict=False)
    ]


def aligned(timeline: Timeline) -> Timeline:
    """The same with colour changes of rollouts moved to the landing of their version.

    Recorded changes are estimates (tokens of a rollout do not all take equally long); landings are measured.
    """
    landed = {x.version: x.time_s for x in timeline.landings}

    def moved(span: RolloutSpan) -> RolloutSpan:
        later = [(v, min(max(landed.get(v, at_s), span.start_s), span.end_s)) for v, at_s in span.versions[1:]]
        return dataclasses.replace(span, versions=(*span.versions[:1], *later))

    return Timeline(intervals=[moved(i) if isinstance(i, RolloutSpan) else i for i in timeline.intervals])


def telling_window(timeline: Timeline, steps: int = 4) -> tuple[float, float] | None:
    """(start_s, end_s) of `steps` consecutive optimizer steps: both sides at work, many rollouts changing weights.

    Of equals the one nearest the middle of the run; fewer steps when the run has fewer, None when it has none.
    """
    made = [(span.start_s, span.end_s) for span in timeline.trainer if span.kind == "busy"]
    if not made:
        return None
    changes = sorted(at_s for r in timeline.rollouts for _, at_s in r.versions[1:])
    steps = min(steps, len(made))
    last = len(made) - steps

    def merit(i: int) -> tuple[float, float]:
        begin_s, end_s = made[i][0], made[i + steps - 1][1]
        inside = bisect.bisect_right(changes, end_s) - bisect.bisect_left(changes, begin_s)
        busy_frac = sum(b - a for a, b in made[i : i + steps]) / max(end_s - begin_s, 1e-9)
        return inside * busy_frac**2, -abs(i - last / 2)

    best = max(range(last + 1), key=merit)
    return made[best][0], made[best + steps - 1][1]


def assign_rows(rollouts: Sequence[RolloutSpan]) -> list[RolloutSpan]:
    """Rollouts sorted by start, each without a row put on the lowest row that is free."""
    placed: list[RolloutSpan] = []
    taken = {r.row for r in rollouts if r.row >= 0}
    next_new = max(taken, default=-1) + 1
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for rollout in sorted(rollouts, key=lambda r: (r.start_s, r.end_s)):
        if rollout.row >= 0:
            placed.append(rollout)
            continue
        while busy and busy[0][0] <= rollout.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, next_new = next_new, next_new + 1
        heapq.heappush(busy, (rollout.end_s, row))
        placed.append(dataclasses.replace(rollout, row=row))
    return placed


def _shifted(interval: Interval, by_s: float) -> Interval:
    """The interval `by_s` later."""
    if isinstance(interval, Landing):
        return dataclasses.replace(interval, time_s=interval.time_s + by_s)
    moved = dataclasses.replace(interval, start_s=interval.start_s + by_s, end_s=interval.end_s + by_s)
    if isinstance(moved, RolloutSpan):
        return dataclasses.replace(moved, versions=tuple((v, at_s + by_s) for v, at_s in moved.versions))
    return moved


def begin_of(interval: Interval) -> float:
    """When it begins."""
    return interval.time_s if isinstance(interval, Landing) else interval.start_s


def end_of(interval: Interval) -> float:
    """When it ends."""
    return interval.time_s if isinstance(interval, Landing) else interval.end_s


def _chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    generator, trainer = 1, 2
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": generator, "args": {"name": "generator"}},
        {"ph": "M", "name": "process_name", "pid": trainer, "args": {"name": "trainer"}},
    ]

    def piece(name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        timing = {"ts": round(start_s * 1e6, 1), "dur": round((end_s - start_s) * 1e6, 1)}
        events.append({"ph": "X", "name": name, "pid": pid, "tid": tid, **timing, "args": args})

    for rollout in assign_rows(timeline.rollouts):
        for version, start_s, end_s in segments(rollout):
            piece(f"v{version}", generator, rollout.row, start_s, end_s, {"rollout": rollout.label, "version": version})
    for span in timeline.trainer:
        piece(f"{span.kind} v{span.version}", trainer, 0, span.start_s, span.end_s, {"version": span.version})
    for landing in timeline.landings:
        mark = {"ts": round(landing.time_s * 1e6, 1), "pid": generator, "tid": 0, "s": "g"}
        events.append({"ph": "i", "name": f"v{landing.version} landed", **mark})
    return events
