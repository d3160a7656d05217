"""Records with sensible numbers; tests change what they are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.telemetry.records import BUCKETS, EvalRecord, RunSummary, StepRecord


def make_step(version: int = 1, **changes: Any) -> StepRecord:
    numbers: dict[str, Any] = {
        "time_s": 3.0 * version,
        "version": version,
        "steps": 50,
        "reward_mean": 0.30 + 0.01 * version,
        "pass_frac": 0.31,
        "response_tok_mean": 24.5,
        "response_tok_max": 48,
        "lag_mean": 0.8,
        "lag_max": 2,
        "masked_stale_tok": 0,
        "trained_tok": 1500,
        "generated_tok": 1800,
        "zero_signal_frac": 0.2,
        "wait_data_s": 0.3,
        "wait_bound_s": 0.15,
        "train_s": 2.4,
        "publish_s": 0.06,
        "land_s": 0.1,
        "pause_s": 0.02,
        "queue_groups": 3,
        "running_rollouts": 61,
        "production_per_s": 21.4,
        "consumption_per_s": 26.7,
        "verdict": "generation_bound",
        "eta_s": 3.0 * (50 - version),
        "loss": -0.012,
        "grad_norm": 0.7,
        "lr": 1e-5,
        "metrics": {"kl_infer_train/k3": 0.0004, "ess/token": 0.98},
    }
    return StepRecord(**(numbers | changes))


def make_eval(version: int = 0, accuracy: float = 0.31, **changes: Any) -> EvalRecord:
    numbers: dict[str, Any] = {
        "time_s": 10.0 + version,
        "version": version,
        "prompts": 200,
        "accuracy": accuracy,
        "reward_mean": accuracy,
        "outcomes": {"ok": 199, "timeout": 1},
        "eval_s": 9.5,
        "response_tok_mean": 22.0,
    }
    return EvalRecord(**(numbers | changes))


def make_summary(**changes: Any) -> RunSummary:
    numbers: dict[str, Any] = {
        "run_dir": "/home/somebody/projects/headrace/runs/quickstart-20260101-120000",
        "reason": "steps done",
        "steps": 50,
        "version": 50,
        "train_s": 151.2,
        "total_s": 183.9,
        "accuracy_before": 0.310,
        "accuracy_after": 0.445,
        "eval_prompts": 200,
        "reward_first": 0.31,
        "reward_last": 0.52,
        "generated_tok": 92_000,
        "trained_tok": 75_000,
        "masked_tok": 0,
        "wasted_tok": {"filtered_zero_signal": 15_000, "unfinished": 2_000, "retried": 0},
        "groups": dict.fromkeys(BUCKETS, 0) | {"trained": 400, "filtered_zero_signal": 88, "unfinished": 12},
        "admitted": 500,
        "balanced": True,
        "lag_hist": {0: 20_000, 1: 40_000, 2: 15_000},
        "accept_by_length": (0.8, 0.82, 0.79, 0.84, 0.8, 0.81, 0.78, 0.83, 0.8, 0.77),
        "trainer_shares": {"busy": 0.82, "wait_data": 0.1, "wait_bound": 0.05, "hand_off": 0.02, "idle": 0.01},
        "generator_shares": {"decode": 0.86, "prefill": 0.06, "blocked": 0.05, "paused": 0.01, "idle": 0.02},
        "model_dir": "/home/somebody/projects/headrace/runs/quickstart-20260101-120000/model",
    }
    return RunSummary(**(numbers | changes))


@pytest.fixture
def step() -> Callable[..., StepRecord]:
    return make_step


@pytest.fixture
def evaluation() -> Callable[..., EvalRecord]:
    return make_eval


@pytest.fixture
def summary() -> Callable[..., RunSummary]:
    return make_summary
