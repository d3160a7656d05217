from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.telemetry.plot import plot
from headrace.telemetry.timeline import (
    Landing,
    RolloutSpan,
    Timeline,
    TrainerSpan,
    aligned,
    assign_rows,
    read_timeline,
    segments,
    telling_window,
)

ROLLOUT = RolloutSpan(start_s=1.0, end_s=4.0, versions=((0, 1.0), (1, 2.5)), label="g0/1")
INTERVALS = [
    ROLLOUT,
    TrainerSpan(kind="wait_data", start_s=0.0, end_s=1.5, version=1),
    TrainerSpan(kind="busy", start_s=1.5, end_s=2.4, version=1),
    Landing(time_s=2.5, version=1),
]


def test_intervals_survive_the_file_and_a_torn_line(tmp_path: Path) -> None:
    with Timeline(tmp_path) as timeline:
        for interval in INTERVALS:
            timeline.add(interval)
    with (tmp_path / "trace.jsonl").open("ab") as file:
        file.write(b'{"lane":"rol')
    assert read_timeline(tmp_path).intervals == INTERVALS


def test_segments_split_where_weights_changed() -> None:
    assert segments(ROLLOUT) == [(0, 1.0, 2.5), (1, 2.5, 4.0)]


def test_window_keeps_what_touches_it() -> None:
    shown = Timeline(intervals=INTERVALS).window(2.45, 9.0)
    assert shown.intervals == [INTERVALS[0], INTERVALS[3]]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 20)).map(
            lambda t: RolloutSpan(start_s=t[0], end_s=t[0] + t[1], versions=((0, t[0]),))
        ),
        max_size=30,
    )
)
def test_assigned_rows_never_overlap_and_are_as_few_as_possible(rollouts: list[RolloutSpan]) -> None:
    placed = assign_rows(rollouts)
    assert len(placed) == len(rollouts)
    for row in {r.row for r in placed}:
        ends = [(r.start_s, r.end_s) for r in placed if r.row == row]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    deepest = max((sum(r.start_s <= t < r.end_s for r in rollouts) for t in range(70)), default=0)
    assert len({r.row for r in placed}) == deepest


def test_given_rows_are_kept() -> None:
    fixed = RolloutSpan(start_s=0, end_s=9, row=4, versions=((0, 0),))
    free = RolloutSpan(start_s=0, end_s=9, versions=((0, 0),))
    assert {r.row for r in assign_rows([fixed, free])} == {4, 5}


def test_chrome_trace_has_every_piece_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Timeline(intervals=INTERVALS).to_chrome(path)
    events = json.loads(path.read_text())["traceEvents"]
    pieces = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert pieces == [
        ("v0", 1_000_000, 1_500_000),
        ("v1", 2_500_000, 1_500_000),
        ("wait_data v1", 0, 1_500_000),
        ("busy v1", 1_500_000, 900_000),
    ]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["v1 landed"]


def test_unknown_lane_and_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="recorded no timeline"):
        read_timeline(tmp_path)
    (tmp_path / "trace.jsonl").write_text('{"lane":"trainr"}\n')
    with pytest.raises(DataError, match="line 1: lane = 'trainr'; did you mean 'trainer'"):
        read_timeline(tmp_path)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{suffix}"
    plot(Timeline(intervals=INTERVALS), path, window=(1.0, 4.0), title="test")
    assert path.stat().st_size > 1000


def test_an_empty_window_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(DataError, match="nothing happened between 50"):
        plot(Timeline(intervals=INTERVALS), tmp_path / "x.png", window=(50.0, 60.0))


def test_colour_changes_move_to_the_measured_landing() -> None:
    estimated = RolloutSpan(start_s=1.0, end_s=5.0, versions=((3, 1.0), (4, 2.0)))
    early = RolloutSpan(start_s=3.0, end_s=5.0, versions=((3, 3.0), (4, 4.0)))
    unknown = RolloutSpan(start_s=1.0, end_s=5.0, versions=((1, 1.0), (2, 2.0)))
    timeline = Timeline(intervals=[estimated, early, unknown, Landing(time_s=2.5, version=4)])
    assert [r.versions for r in aligned(timeline).rollouts] == [
        ((3, 1.0), (4, 2.5)),
        ((3, 3.0), (4, 3.0)),  # never before the rollout began
        ((1, 1.0), (2, 2.0)),
    ]


def test_telling_window_prefers_changes_of_weights_and_a_busy_trainer() -> None:
    def step(version: int, start_s: float, end_s: float) -> TrainerSpan:
        return TrainerSpan(kind="busy", start_s=start_s, end_s=end_s, version=version)

    def change(at_s: float) -> RolloutSpan:
        return RolloutSpan(start_s=at_s - 0.5, end_s=at_s + 0.5, versions=((0, at_s - 0.5), (1, at_s)))

    steps = [step(1, 0.0, 1.0), step(2, 1.0, 2.0), step(3, 2.0, 3.0), step(4, 9.0, 10.0)]
    assert telling_window(Timeline(intervals=[*steps, change(2.5), change(2.6)]), steps=2) == (1.0, 3.0)
    assert telling_window(Timeline(intervals=steps), steps=9) == (0.0, 10.0)
    assert telling_window(Timeline()) is None


def test_a_resumed_run_goes_on_where_the_times_end(tmp_path: Path) -> None:
    for _ in range(2):
        with Timeline(tmp_path) as timeline:
            for interval in INTERVALS:
                timeline.add(interval)
    again = read_timeline(tmp_path)
    assert again.intervals[: len(INTERVALS)] == INTERVALS
    assert again.rollouts[1].versions == ((0, 5.0), (1, 6.5))  # 4 s later: the first process ended at 4 s
    assert [x.time_s for x in again.landings] == [2.5, 6.5]
