from __future__ import annotations

import dataclasses
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.errors import DataError, PlanError
from headrace.flow.events import MemberEnded
from headrace.flow.stimulus import Setup, write_setup, write_stimulus
from headrace.planner.calibrate import calibrate_runs
from headrace.planner.constants import Constants, builtin
from headrace.planner.measure import RunMeasurement, fit_batches, fit_decode, fit_line, group_lengths, measure_run
from headrace.planner.measured import metrics_of_run
from headrace.records import Outcome
from headrace.telemetry.log import RunLog
from headrace.telemetry.records import BUCKETS, ProfileRecord, RunSummary, StepRecord

BASE_S, REQUEST_S, TOKEN_S = 0.010, 0.0004, 2e-6
FIXED_S, TRAIN_TOK_S = 0.5, 2e-4


def step(version: int, *, time_s: float, batch_tok: int, compiled_s: float = 0.0) -> StepRecord:
    return StepRecord(
        time_s=time_s, version=version, steps=12, reward_mean=0.5, pass_frac=0.5, response_tok_mean=20.0,
        response_tok_max=32, lag_mean=1.0, lag_max=2, masked_stale_tok=0, trained_tok=320, generated_tok=330,
        batch_tok=batch_tok, batch_tok2=batch_tok**2 // 16, prompt_tok_mean=30.0,
        zero_signal_frac=0.0, wait_data_s=0.3, wait_bound_s=0.1,
        train_s=FIXED_S + TRAIN_TOK_S * batch_tok + compiled_s, publish_s=0.1, land_s=0.25, pause_s=0.05,
        queue_groups=0, running_rollouts=8, production_per_s=1.0, consumption_per_s=1.0, verdict="balanced",
        eta_s=0.0, loss=0.0, grad_norm=1.0, lr=1e-5,
    )  # fmt: skip


def profile(generator_threads: int = 1) -> ProfileRecord:
    decode = tuple((b, 40, 50.0 * b, BASE_S + REQUEST_S * b + TOKEN_S * 50.0 * b * (1 + 0.1 * b)) for b in range(1, 17))
    decode = tuple((b, n, s * (1 + 0.1 * b), t) for b, n, s, t in decode)
    return ProfileRecord(
        version=12, generator_threads=generator_threads, trainer_threads=1, decode=decode, prefill=((100, 0.1),) * 4
    )


def summary() -> RunSummary:
    groups = dict.fromkeys(BUCKETS, 0) | {"trained": 48, "filtered_zero_signal": 16}
    return RunSummary(
        run_dir="x", reason="steps done", steps=12, version=12, train_s=20.0, total_s=25.0, accuracy_before=None,
        accuracy_after=None, eval_prompts=0, reward_first=0.1, reward_last=0.5, generated_tok=5000, trained_tok=3840,
        masked_tok=0, wasted_tok={"filtered_zero_signal": 1160}, groups=groups, admitted=64, balanced=True,
        lag_hist={0: 1000, 1: 2000, 2: 840}, accept_by_length=(), trainer_shares={},
        generator_shares={"decode": 0.7, "prefill": 0.1, "blocked": 0.1, "paused": 0.05, "idle": 0.05}, model_dir=None,
    )  # fmt: skip


def run_folder(folder: Path, *, threads: int = 1, steps: int = 12) -> Path:
    """A finished run whose laws are known; its first steps took seconds longer."""
    with RunLog(folder) as log:
        time_s = 0.0
        for version in range(1, steps + 1):
            time_s += 9.0 if version == 1 else 1.6
            compiled_s = 5.0 if version == 1 else 0.0
            log.append(step(version, time_s=time_s, batch_tok=800 + 37 * version % 200, compiled_s=compiled_s))
        log.append(profile(threads))
        log.append(summary())
    setup = Setup(
        flow=FlowConfig(mode="sync", batch_groups=1, group_size=2),
        curriculum=CurriculumConfig(), prompts=4, seed=0, rows=(), version=0, steps=0,
    )  # fmt: skip
    lines = [write_setup(setup)]
    for group in range(200):
        for member in range(4):
            length = 10 * (1 + group % 4) + member
            event = MemberEnded(
                time_s=float(group), group_id=f"g{group}", member=member, attempt=0, outcome=Outcome.OK, reward=1.0,
                generated_tok=length, oldest_version=0, newest_version=0,
            )  # fmt: skip
            lines.append(write_stimulus(event, []))
    lost = dataclasses.replace(event, outcome=Outcome.INFRA_FAIL, reward=None, generated_tok=9999)
    lines.append(write_stimulus(lost, []))
    (folder / "stimulus-v000000.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_gives_back_the_laws_it_was_made_with(tmp_path: Path) -> None:
    measured = measure_run(run_folder(tmp_path / "run"))
    decode = fit_decode(measured.decode_points)
    assert decode.coefficients == pytest.approx((BASE_S, REQUEST_S, TOKEN_S), rel=1e-6)
    assert decode.error_frac < 1e-9
    assert fit_line(measured.batch_points).coefficients == pytest.approx((FIXED_S, TRAIN_TOK_S), rel=1e-6)
    assert (measured.publish_s, measured.transfer_s, measured.pause_s) == pytest.approx((0.1, 0.2, 0.05))
    assert measured.zero_signal_frac == pytest.approx(16 / 64)
    assert measured.prompt_tok == pytest.approx(30.0)


def test_lengths_are_those_of_scored_rollouts_by_group(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    lengths = group_lengths(folder)
    assert len(lengths) == 200
    assert lengths[1] == [20, 21, 22, 23]
    measured = measure_run(folder)
    assert measured.response_tok == pytest.approx(25 + 1.5)
    logs = np.log([n for group in lengths for n in group])
    assert measured.sigma == pytest.approx(logs.std())
    assert 0 < measured.sigma_within < measured.sigma / 3


def test_one_bad_batch_does_not_bend_the_line() -> None:
    points = [(tok, 1.0 + 0.01 * tok) for tok in range(100, 1100, 50)]
    spoiled = [*points[:-1], (points[-1][0], 50.0)]
    assert fit_line(spoiled).coefficients == pytest.approx((1.0, 0.01), rel=1e-6)


def test_batches_of_one_size_take_the_optimizers_time_as_fixed() -> None:
    points = [(1000 + tok, 0.7 + 0.002 * (1000 + tok)) for tok in range(0, 200, 20)]
    assert fit_batches(points, optim_s=0.7).coefficients == pytest.approx((0.7, 0.002), rel=1e-6)
    both = [*points, *((2 * tok, 0.7 + 0.002 * 2 * tok) for tok, _ in points)]
    assert fit_batches(both, optim_s=0.1).coefficients == pytest.approx((0.7, 0.002), rel=1e-6)


def test_laws_are_never_negative() -> None:
    falling = [(b, 10, 10.0 * b, 0.02 - 0.0005 * b) for b in range(1, 20)]
    assert min(fit_decode(falling).coefficients) >= 0.0


def test_metrics_of_a_run(tmp_path: Path) -> None:
    metrics = metrics_of_run(run_folder(tmp_path / "run"))
    assert metrics.step_s_mean == pytest.approx(1.6)
    assert metrics.samples_per_s == pytest.approx(16 / 1.6)
    assert sum(metrics.trainer_shares.values()) == pytest.approx(1.0)
    assert metrics.trainer_shares["wait_data"] == pytest.approx(0.3 / 1.6)
    assert metrics.lag_mean == pytest.approx((2000 + 2 * 840) / 3840)
    assert metrics.generator_idle_frac == pytest.approx(0.15)


@pytest.mark.parametrize("missing", ["profile", "summary", "steps", "flow log"])
def test_what_a_run_lacks_is_named(tmp_path: Path, missing: str) -> None:
    folder = run_folder(tmp_path / "run", steps=3 if missing == "steps" else 12)
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    if missing in ("profile", "summary"):
        log.write_text("".join(line for line in lines if f'"kind":"{missing}"' not in line))
    if missing == "flow log":
        (folder / "stimulus-v000000.jsonl").unlink()
    words = {
        "profile": "no engine profile",
        "summary": "no engine profile",
        "steps": "at least 3",
        "flow log": "flow log",
    }
    with pytest.raises(DataError, match=words[missing]):
        measure_run(folder)


def measurements(tmp_path: Path) -> list[RunMeasurement]:
    return [
        measure_run(run_folder(tmp_path / "one", threads=1)),
        measure_run(run_folder(tmp_path / "two", threads=2)),
    ]


def calibrated(runs: list[RunMeasurement], base: Constants | None = None) -> Constants:
    return calibrate_runs(
        runs, model="smollm2-135m-instruct", chip="cpu", name="here", base=base or builtin(), today=date(2026, 11, 29)
    )


def test_calibration_has_a_law_for_each_width(tmp_path: Path) -> None:
    constants = calibrated(measurements(tmp_path))
    assert [(law.gen_tp, law.train_gpus) for law in constants.laws] == [(1, 1), (2, 1)]
    law = constants.laws[0]
    assert law.base_s is not None
    assert law.base_s.value == pytest.approx(BASE_S)
    assert law.base_s.grade == "measured"
    assert law.base_s.date == "2026-11-29"
    assert constants.name == "here"


def test_calibrating_again_replaces_and_adds_nothing(tmp_path: Path) -> None:
    runs = measurements(tmp_path)
    once = calibrated(runs)
    assert calibrated(runs, base=once).laws == once.laws


def test_calibrating_nothing_is_an_error() -> None:
    with pytest.raises(PlanError, match="at least one run"):
        calibrated([])
