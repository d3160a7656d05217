"""A run with real processes and its simulation decide alike: what starts, what trains, in the same order.

The run's flow log holds every length and reward; the simulator gets them as its draws, with the scripted engine's and
trainer's laws as costs. Their constants are read off the log (sleeping takes a little longer than asked for). The
lengths are chosen so that no two ends that matter lie within a few decode steps of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from run_tools import SERVANTS, summary_of, train

from headrace.config.schema import RunConfig
from headrace.flow.events import Decision, Landed, MemberEnded, StartGroup, StepEnded, SwapWeights, TakeBatch
from headrace.flow.stimulus import Stimulus, read_log
from headrace.planner.cost import DecodeTable, EngineCost, HandOffCost, TrainerCost
from headrace.planner.simulate import Parts, Trace, simulate

STEPS, MAX_BATCH = 6, 64
BASE_S, STEP_S = 0.004, 0.03


def recipe(out: Path, **flow: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "parity",
            "out": str(out),
            "steps": STEPS,
            "seed": flow.pop("seed"),
            "recipe_dir": str(SERVANTS),
            "env": {"kind": "coin_task:build", "eval_prompts": 4},
            "eval": {"before": True, "after": False},  # graders start before the run's time does
            "flow": {"batch_groups": 2, "group_size": 3} | flow,
            "sampling": {"max_new_tok": 200},
            "engine": {
                "kind": "scripted",
                "max_batch": MAX_BATCH,
                "options": {
                    "length": "lognormal",
                    "length_tok": 50,
                    "length_sigma": 0.7,
                    "base_s": BASE_S,
                    "right_p": 0.5,
                    "verify_weights": False,  # what landing loads for the first time would take as long as a batch
                },
            },
            "trainer": {"kind": "scripted", "options": {"step_s": STEP_S}},
            "launch": {"start_deadline_s": 60, "call_deadline_s": 60, "step_deadline_s": 60},
        }
    )


class LoggedDraws:
    """Lengths and rewards of a run, by ordinal and member."""

    def __init__(self, stimuli: Sequence[Stimulus]) -> None:
        ordinals = {d.group_id: d.ordinal for s in stimuli for d in s.decisions if isinstance(d, StartGroup)}
        ended = [s.event for s in stimuli if isinstance(s.event, MemberEnded)]
        self._ends = {(ordinals[e.group_id], e.member): e for e in ended}
        self._members = 1 + max(e.member for e in ended)

    def lengths(self, ordinal: int, attempt: int = 0) -> Sequence[int]:
        return [self._ends[ordinal, member].generated_tok for member in range(self._members)]

    def prompt_tok(self, ordinal: int) -> int:
        return 16

    def rewards(self, ordinal: int, attempt: int = 0) -> Sequence[float]:
        return [float(self._ends[ordinal, member].reward or 0.0) for member in range(self._members)]

    def episode(self, ordinal: int, member: int, attempt: int = 0) -> None:
        return None


def parts_of(config: RunConfig, stimuli: Sequence[Stimulus]) -> Parts:
    """The scripted laws, with the constants that the log shows."""
    begun_s: dict[str, float] = {}
    step_s, train_s, land_s = [], [], []
    taken_s = swapping_s = 0.0
    for stimulus in stimuli:
        event = stimulus.event
        if isinstance(event, MemberEnded):
            step_s.append((event.time_s - begun_s[event.group_id]) / event.generated_tok)
        elif isinstance(event, StepEnded):
            train_s.append(event.time_s - taken_s)
        elif isinstance(event, Landed):
            land_s.append(event.time_s - swapping_s)
        for decision in stimulus.decisions:
            if isinstance(decision, StartGroup):
                begun_s[decision.group_id] = event.time_s
            elif isinstance(decision, TakeBatch):
                taken_s = event.time_s
            elif isinstance(decision, SwapWeights):
                swapping_s = event.time_s
    zeros = (0.0,) * (MAX_BATCH + 1)
    table = DecodeTable(
        mem_s=(median(step_s),) * (MAX_BATCH + 1), mem_s_per_tok=0.0, flop_s=zeros, flop_s_per_tok=0.0, other_s=zeros
    )
    engine = EngineCost(
        decode=table,
        prefill_s_per_tok=0.0,
        prefill_s_per_tok2=0.0,
        prefill_s_min=0.0,
        kv_capacity_tok=10**6,
        max_running=MAX_BATCH,
    )
    return Parts(
        flow=config.flow,
        engines=(engine,),
        trainer=TrainerCost(s_per_tok=0.0, s_per_tok2=0.0, fixed_s=median(train_s), mfu=1.0),
        hand_off=HandOffCost(publish_s=0.0, transfer_s=median(land_s), pause_s=0.0, bytes=0.0),
    )


def order(decisions: Sequence[Decision]) -> tuple[list[tuple[int, int]], list[tuple[int, tuple[str, ...]]]]:
    """Who starts (ordinal, prompt) and who trains (version, groups)."""
    return (
        [(d.ordinal, d.prompt_index) for d in decisions if isinstance(d, StartGroup)],
        [(d.version, d.group_ids) for d in decisions if isinstance(d, TakeBatch)],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "seed", "more"),
    [
        ("sync", 7, {}),
        ("one_step_off", 9, {}),
        ("pipeline", 8, {"max_lag_steps": 2}),
        ("pipeline", 3, {"max_lag_steps": 2}),
        ("pipeline", 2, {"max_lag_steps": 1, "on_bound": "drop"}),
        ("pipeline", 7, {"max_lag_steps": 2, "max_running": 9}),
    ],
)
def test_a_run_and_its_simulation_decide_alike(tmp_path: Path, mode: str, seed: int, more: dict[str, Any]) -> None:
    config = recipe(tmp_path, mode=mode, seed=seed, **more)
    run = train(config)
    lines = (Path(summary_of(run).run_dir) / "stimulus-v000000.jsonl").read_text().splitlines()
    setup, stimuli = read_log(lines)
    trace = Trace()
    simulate(
        parts_of(config, stimuli),
        LoggedDraws(stimuli),
        steps=setup.steps,
        seed=setup.seed,
        prompts=setup.prompts,
        trace=trace,
        whole_run=True,
    )
    started, taken = order([d for s in stimuli for d in s.decisions])
    assert len(taken) == STEPS
    assert order([d for _, _, ds in trace.decisions for d in ds]) == (started, taken)
