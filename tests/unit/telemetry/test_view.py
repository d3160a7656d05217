from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from headrace.clock import VirtualClock
from headrace.config.schema import RunConfig
from headrace.telemetry.panels import SHARE_STYLES, RunScreen, share_bar
from headrace.telemetry.records import EvalRecord, RunSummary, StepRecord
from headrace.telemetry.silent import SilentView
from headrace.telemetry.state import RunState
from headrace.telemetry.summary import print_summary
from headrace.telemetry.view import LiveView, PlainView, View, make_view

Step = Callable[..., StepRecord]
Eval = Callable[..., EvalRecord]
Summary = Callable[..., RunSummary]
CONFIG = RunConfig(name="demo")


def render(thing: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(thing)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue().splitlines()


def full_state(step: Step, evaluation: Eval) -> RunState:
    state = RunState(CONFIG, VirtualClock())
    state.add(evaluation(0))
    for version in range(1, 40):
        state.add(step(version))
    state.add(evaluation(30, 0.42))
    state.messages.append((3.0, "a message that is much too long for the screen, " * 4))
    state.set_progress("held-out v39", 62, 200)
    return state


@pytest.mark.parametrize("width", [72, 80, 120])
def test_the_screen_is_a_box_of_exactly_the_width(width: int, step: Step, evaluation: Eval) -> None:
    lines = render(RunScreen(full_state(step, evaluation)), width)
    assert {len(line) for line in lines} == {width}
    assert len(lines) <= 22
    text = "\n".join(lines)
    for word in (
        "39/50",
        "42.0 % at v30",
        "+11.0 points",
        "max 2/2",
        "generation bound",
        "held-out v39",
        "hand-off 2 %",
    ):
        assert word in text, word
    assert "…" not in "\n".join(line for line in lines if "message" not in line)


def test_start_up_says_who_waits_for_whom_since_when() -> None:
    clock = VirtualClock()
    view = LiveView(Console(file=io.StringIO()), CONFIG, clock=clock)
    view.role("generator", "loading weights", "trainer")
    view.role("trainer", "ready")
    clock.advance_to(4.0)
    view.role("generator", "loading weights", "trainer")
    text = "\n".join(render(RunScreen(view.state), 80))
    assert "generator  loading weights  waits for trainer  for 4.0 s" in text
    assert "trainer    ready " in text


def test_shares_account_for_the_wall_time_of_the_window(step: Step) -> None:
    state = RunState(CONFIG, VirtualClock())
    for version in range(1, 12):
        state.add(step(version, train_s=1.5, wait_data_s=0.75, wait_bound_s=0.0, publish_s=0.3, time_s=3.0 * version))
    shares = state.trainer_shares()
    assert shares == pytest.approx({"busy": 0.5, "data": 0.25, "bound": 0.0, "hand-off": 0.1, "idle": 0.15})
    assert state.tok_per_s() == pytest.approx((1800 / 3, 1500 / 3))


def test_a_resume_that_restarts_the_time_does_not_break_shares(step: Step) -> None:
    state = RunState(CONFIG, VirtualClock())
    for version, time_s in ((1, 100.0), (2, 103.0), (3, 2.0)):
        state.add(step(version, time_s=time_s))
    assert sum(state.trainer_shares().values()) == pytest.approx(1.0)
    assert state.tok_per_s()[0] > 0


def test_a_step_seen_again_replaces_what_came_after_it(step: Step) -> None:
    state = RunState(CONFIG, VirtualClock())
    for version in (1, 2, 3, 2):
        state.add(step(version))
    assert [s.version for s in state.steps] == [1, 2]


@pytest.mark.parametrize("width", [10, 37, 100])
def test_the_share_bar_fills_its_width_exactly(width: int) -> None:
    shares = {"busy": 1 / 3, "data": 1 / 3, "bound": 1 / 6, "hand-off": 1 / 12, "idle": 1 / 12}
    bar = share_bar(shares, width).plain
    assert len(bar) == width
    assert set(bar) <= {block for _, block in SHARE_STYLES.values()}
    assert share_bar({}, width).plain == " " * width


def test_plain_view_prints_one_line_per_event(step: Step, evaluation: Eval) -> None:
    out = io.StringIO()
    view = make_view(CONFIG, console=Console(file=out, width=60), clock=VirtualClock())
    assert isinstance(view, PlainView)
    with view:
        view.status("starting generator and trainer")
        view.role("generator", "loading", "trainer")
        view.role("generator", "loading", "trainer")
        view.update(evaluation(0))
        view.update(step(1))
        view.message("[not markup]")
    lines = [line[10:] for line in out.getvalue().splitlines()]
    assert lines[0] == "starting generator and trainer"
    assert lines[1] == "generator: loading, waits for trainer"
    assert lines[2] == "held-out at v0: 31.0 % of 200 in 9.5 s (not answered: 1 timeout)"
    assert lines[3].startswith("step 1/50 | reward 0.310 | pass 31 % | lag 0.80 max 2/2 |")
    assert lines[4:] == ["[not markup]"]


def test_plain_progress_is_not_chatty() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=200), CONFIG, clock=VirtualClock())
    for done in range(201):
        view.progress("held-out", done, 200)
    for done in range(50):
        view.progress("download of unknown size", done, 0)
    assert [line[10:] for line in out.getvalue().splitlines()] == [
        "held-out: 50/200",
        "held-out: 100/200",
        "held-out: 150/200",
        "held-out: 200/200",
        "download of unknown size",
    ]


def test_live_view_draws_and_leaves_the_last_screen(step: Step, evaluation: Eval, summary: Summary) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, legacy_windows=False)
    view = make_view(CONFIG, console=console)
    assert isinstance(view, LiveView)
    with view:
        view.status("evaluating v0")
        view.update(evaluation(0))
        view.update(step(1))
    view.print_summary(summary())
    text = out.getvalue()
    assert "evaluating v0" in text
    assert "steps done" in text
    assert "\x1b[?25h" in text, "the cursor is shown again"


def test_dumb_and_refused_terminals_get_plain_lines() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, legacy_windows=False)
    assert isinstance(make_view(CONFIG, console=terminal, live=False), PlainView)


def test_every_view_takes_the_same_calls(step: Step, evaluation: Eval, summary: Summary) -> None:
    views: list[View] = [
        SilentView(),
        PlainView(Console(file=io.StringIO())),
        LiveView(Console(file=io.StringIO())),
    ]
    for view in views:
        with view:
            view.status("starting")
            view.role("trainer", "ready")
            view.progress("model", 1, 2)
            view.update(evaluation(0))
            view.update(step(1))
            view.message("checkpoint")
        view.print_summary(summary())


@pytest.mark.parametrize("width", [72, 80, 120])
def test_summary_fits_and_says_everything(width: int, summary: Summary) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    print_summary(console, summary())
    output = console.file
    assert isinstance(output, io.StringIO)
    lines = output.getvalue().splitlines()
    box = [line for line in lines if line[:1] in "╭│╰"]
    assert {len(line) for line in box} == {min(width, 100)}
    text = "\n".join(lines)
    for word in ("31.0 %  →  44.5 %", "+13.5 points", "81.5 %", "15.0k filtered zero signal", "balanced", "1: 53 %"):
        assert word in text, word
    assert summary().run_dir in text, "a path is never wrapped"


def test_an_unbalanced_ledger_and_a_failed_run_are_shown_as_such(summary: Summary) -> None:
    failed = summary(
        balanced=False, admitted=503, reason="failed: trainer died", accuracy_after=None, reward_first=None
    )
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_summary(console, failed)
    output = console.file
    assert isinstance(output, io.StringIO)
    text = output.getvalue()
    assert "NOT balanced: 3 groups and 0 tokens are unaccounted for" in text
    assert "31.0 %  →  ?" in text
    assert "no step was done" in text


def test_a_run_without_anything_still_has_a_summary(summary: Summary) -> None:
    empty = summary(
        steps=0, train_s=0.0, generated_tok=0, trained_tok=0, wasted_tok={}, groups={}, admitted=0, lag_hist={},
        accept_by_length=(), trainer_shares={}, generator_shares={}, accuracy_before=None, accuracy_after=None,
        model_dir=None,
    )  # fmt: skip
    print_summary(Console(file=io.StringIO(), width=80), empty)


def test_evaluations_are_not_idle_time(step: Step, evaluation: Eval) -> None:
    state = RunState(CONFIG, VirtualClock())
    explained = {"train_s": 3.0, "wait_data_s": 0.0, "wait_bound_s": 0.0, "publish_s": 0.0}
    state.add(step(1, time_s=13.0, **explained))
    state.add(evaluation(1, eval_s=50.0))
    state.add(step(2, time_s=66.0, **explained))
    state.add(evaluation(2, eval_s=40.0))  # after the window
    assert state.window_wall_s() == 6.0
    assert state.trainer_shares()["idle"] == 0.0
