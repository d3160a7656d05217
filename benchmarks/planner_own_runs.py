"""Predicted against measured on this machine: calibrate on two short runs of the quickstart, predict other settings.

    python benchmarks/planner_own_runs.py [--steps 8] [--keep DIR] [--out own_runs.json] [--page docs/...]

Calibration: pipeline (one thread for each role) and sync (both take turns on all cores), each with two batch sizes (one
alone does not tell a batch's fixed cost from its cost per token). Then every other setting is predicted from those runs
(lengths too: what a calibration run sampled, cut at the setting's cap) and measured: `headrace train` on the real model
with the native engine. No prediction sees its own run. The learning rate is tiny, so that the policy, and with it the
lengths, stay what they were; groups without signal are kept. --keep DIR keeps the run folders and uses those that are
there already.

Last line: one JSON object with mape_own_runs (mean absolute error of the mean step time, in percent). `--out` is what
`benchmarks/planner_accuracy.py --own` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from headrace.config.load import load_recipe
from headrace.planner.calibrate import calibrate_runs
from headrace.planner.constants import Constants, builtin, save
from headrace.planner.evaluate import evaluate_setting
from headrace.planner.measure import RunMeasurement, measure_run
from headrace.planner.measured import metrics_of_run
from headrace.planner.outcome import Metrics
from headrace.planner.recipe import setting_of_recipe, spec_of_recipe
from headrace.planner.spec import ClusterConfig, PlanSpec, ResponseConfig
from headrace.telemetry.log import read_log
from headrace.telemetry.records import StepRecord

RECIPE = Path("recipes/quickstart.toml")
COMMON = [
    "optim.lr=1e-7",
    "optim.warmup_steps=0",
    "flow.zero_signal=keep",
    "eval.before=false",
    "eval.after=false",
    "checkpoint.every_steps=0",
    "engine.max_context_tok=192",
]
CAP_TOK = 48
PIPELINE = ["flow.mode=pipeline", "flow.max_lag_steps=2", f"sampling.max_new_tok={CAP_TOK}"]
SYNC = ["flow.mode=sync", "flow.max_lag_steps=0", f"sampling.max_new_tok={CAP_TOK}"]
CALIBRATION: dict[str, list[str]] = {
    "pipeline 8 x 8": PIPELINE,
    "pipeline 4 x 8": [*PIPELINE, "flow.batch_groups=4"],
    "sync 8 x 8": SYNC,
    "sync 4 x 8": [*SYNC, "flow.batch_groups=4"],
}
SETTINGS: dict[str, list[str]] = {
    "pipeline, batch 16 x 8, lag 1": [*PIPELINE, "flow.batch_groups=16", "flow.max_lag_steps=1"],
    "pipeline, 8 x 16, cap 24": [*PIPELINE, "flow.group_size=16", "sampling.max_new_tok=24"],
    "pipeline, 32 at once": [*PIPELINE, "flow.max_running=32"],
    "one_step_off, 8 x 8": [*PIPELINE, "flow.mode=one_step_off", "flow.max_lag_steps=1"],
    "sync, 16 x 8": [*SYNC, "flow.batch_groups=16"],
    "sync, 8 x 8, cap 16": [*SYNC, "sampling.max_new_tok=16"],
}
WARM_UP = 3
"""Steps of a measured run that are left out: pipeline fill and compilation."""


@dataclass(frozen=True)
class Compared:
    """One setting, predicted first, then measured."""

    name: str
    predicted: Metrics
    measured: Metrics
    measured_lag: float
    """Token-weighted mean of the steps after the warm-up."""
    run: dict[str, Any]

    @property
    def error_frac(self) -> float:
        return self.predicted.step_s_mean / self.measured.step_s_mean - 1.0


def train(name: str, changes: list[str], folder: Path, *, steps: int) -> Path:
    """One run of the quickstart with changes, in a folder of its own unless it is there; its run folder."""
    out = folder / re.sub(r"[^a-z0-9]+", "-", name)
    if found := sorted(out.glob("*/run.json")):
        return found[0].parent
    sets = [part for change in [*COMMON, *changes, f"steps={steps}"] for part in ("--set", change)]
    command = [sys.executable, "-m", "headrace", "train", str(RECIPE), "--out", str(out), "--no-live", *sets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    (run,) = out.glob("*")
    return run


def lag_of(folder: Path) -> float:
    """Token-weighted mean lag of a run's steps after the warm-up."""
    steps = [r for r in read_log(folder) if isinstance(r, StepRecord)][WARM_UP:]
    return sum(s.lag_mean * s.trained_tok for s in steps) / sum(s.trained_tok for s in steps)


def predicted(
    changes: list[str], lengths: RunMeasurement, constants: Constants, cores: int, steps: int
) -> tuple[Metrics, dict[str, Any]]:
    """What the planner says of the quickstart with these changes, from calibration runs alone."""
    recipe = load_recipe(RECIPE, [*COMMON, *changes])
    setting = setting_of_recipe(recipe, cores)
    cap_tok = recipe.sampling.max_new_tok
    spec: PlanSpec = spec_of_recipe(
        recipe,
        cluster=ClusterConfig(gpu="cpu", num_gpus=cores, max_seqs=recipe.engine.max_batch),
        prompt_tok=max(1, round(lengths.prompt_tok)),
    )
    spec = spec.model_copy(update={"response": ResponseConfig(law="file", path=lengths.run, cap_tok=cap_tok)})
    found = evaluate_setting(spec, setting, constants, steps=max(12, steps))
    return found.metrics, {"spec": spec.model_dump(mode="json"), "setting": asdict(setting)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    parser.add_argument("--keep", type=Path, help="folder of run folders to keep and to use again")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), help="names of settings")
    parser.add_argument("--out", type=Path, help="JSON for planner_accuracy.py --own")
    parser.add_argument("--page", type=Path, help="write the table as Markdown")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="headrace-own-") as temp:
        folder = args.keep or Path(temp)
        runs = [measure_run(train(name, changes, folder, steps=args.steps)) for name, changes in CALIBRATION.items()]
        constants = calibrate_runs(
            runs, model="smollm2-135m-instruct", chip="cpu", name="own", base=builtin(), today=date.today()
        )
        compared = []
        for name in args.only:
            metrics, run = predicted(SETTINGS[name], runs[0], constants, cores, args.steps)
            ran = train(name, SETTINGS[name], folder, steps=args.steps)
            compared.append(Compared(name, metrics, metrics_of_run(ran, warm_up=WARM_UP), lag_of(ran), run))
            print(row(compared[-1]), flush=True)  # noqa: T201
        errors = [abs(c.error_frac) for c in compared]
        mape = 100.0 * sum(errors) / len(errors)
        if args.out:
            path = save(constants, args.out.parent)
            entries = [
                {"name": c.name, **c.run, "calibration": str(path), "step_s": c.measured.step_s_mean} for c in compared
            ]
            args.out.write_text(json.dumps({"runs": entries}, indent=1) + "\n")
    if args.page:
        args.page.write_text(page(compared, mape, args.steps))
    print(  # noqa: T201
        json.dumps(
            {
                "mape_own_runs": round(mape, 1),
                "settings": len(compared),
                "rows": {c.name: round(100 * c.error_frac, 1) for c in compared},
                "lag_mean": {c.name: [round(c.predicted.lag_mean, 2), round(c.measured_lag, 2)] for c in compared},
                "machine": platform.machine(),
                "cores": cores,
            }
        )
    )


def row(c: Compared) -> str:
    """Predicted and measured of one setting, as a Markdown row."""
    p, m = c.predicted, c.measured
    return (
        f"| {c.name} | {p.step_s_mean:.2f} | {m.step_s_mean:.2f} | {c.error_frac:+.1%} "
        f"| {p.trainer_idle_frac:.0%} | {m.trainer_idle_frac:.0%} | {p.lag_mean:.2f} | {c.measured_lag:.2f} |"
    )


def page(compared: list[Compared], mape: float, steps: int) -> str:
    """The table for the documents."""
    head = (
        "# Predicted against measured, on our own runs\n\n"
        f"Written by `python benchmarks/planner_own_runs.py --page ...` on {date.today().isoformat()}: "
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPU cores, SmolLM2-135M, native engine, {steps} steps a "
        "run. Calibrated on four short runs of the quickstart (pipeline and sync, batches of 8 x 8 and 4 x 8, cap 48); "
        "no prediction below has seen its own run.\n\n"
        "| setting | step s, predicted | measured | error | trainer waits, predicted | measured | mean lag, predicted "
        "| measured |\n|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(row(c) for c in compared) + f"\n\nMean absolute error of the step time: {mape:.1f} %.\n"


if __name__ == "__main__":
    main()
