"""The same work in sync, one_step_off and pipeline: samples per second, waits, lag, waste.

    python benchmarks/modes.py [--rounds 3] [--steps 12] [--real-steps 4] [--no-real]

Scripted: exact long-tailed lengths (lognormal, sigma 1) and exact times, through the real loop with real processes; a
decode step takes base + per-request seconds, an optimizer step takes seconds per sample. Every mode has the same
generator, trainer and batch. Real: the default model with the quickstart's task; a mode gets the same two cores.
Modes run in turn (A B C A B C ...), medians count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.api import train
from headrace.config.load import load_recipe
from headrace.config.schema import RunConfig
from headrace.telemetry.log import read_log
from headrace.telemetry.records import RunSummary, StepRecord

ROOT = Path(__file__).parents[1]
MODES = ("sync", "one_step_off", "pipeline")


def scripted(mode: str, steps: int, out: str) -> RunConfig:
    """8 x 8 rollouts; median 40 tokens, the slowest of 64 takes about ten times as long; training 1 s a batch."""
    return RunConfig.model_validate(
        {
            "name": f"modes-{mode}",
            "out": out,
            "steps": steps,
            "recipe_dir": str(ROOT / "tests" / "servants"),
            "env": {"kind": "coin_task:build", "eval_prompts": 20, "options": {"size": 512}},
            "sampling": {"max_new_tok": 512},
            "flow": {"mode": mode, "batch_groups": 8, "group_size": 8, "zero_signal": "keep"},
            "engine": {
                "kind": "scripted",
                "options": {
                    "length": "lognormal",
                    "length_tok": 40,
                    "length_sigma": 1.0,
                    "base_s": 0.002,
                    "per_request_s": 0.00004,
                    "swap_s": 0.01,
                    "right_p": 0.5,
                },
            },
            "trainer": {"kind": "scripted", "options": {"sample_s": 1.0 / 64}},
            "eval": {"before": False, "after": False},
        }
    )


def real(mode: str, steps: int, out: str) -> RunConfig:
    """The quickstart in another mode."""
    changes = [
        f"name=modes-{mode}",
        f"out={json.dumps(out)}",
        f"steps={steps}",
        f"flow.mode={mode}",
        "eval.before=false",
        "eval.after=false",
        "checkpoint.every_steps=0",
        *([] if mode == "pipeline" else [f"flow.max_lag_steps={0 if mode == 'sync' else 1}"]),
    ]
    return load_recipe(ROOT / "recipes" / "quickstart.toml", changes)


def measure(config: RunConfig, warmup_steps: int) -> dict[str, Any]:
    """One run; rates over the steps after the warm-up."""
    summary: RunSummary = train(config)
    steps = [r for r in read_log(Path(summary.run_dir)) if isinstance(r, StepRecord)]
    wall_s = steps[-1].time_s - steps[warmup_steps - 1].time_s
    counted = steps[warmup_steps:]
    samples = len(counted) * config.flow.batch_groups * config.flow.group_size
    bound = config.flow.lag_bound
    return {
        "samples_per_s": samples / wall_s,
        "trainer_wait_frac": sum(s.wait_data_s + s.wait_bound_s for s in counted) / wall_s,
        "lag_hist": dict(summary.lag_hist),
        "lag_violations": sum(tok for lag, tok in summary.lag_hist.items() if not 0 <= lag <= bound),
        "wasted_frac": sum(summary.wasted_tok.values()) / max(1, summary.generated_tok),
        "balanced": summary.balanced,
    }


def compare(make: Any, steps: int, rounds: int, warmup_steps: int) -> dict[str, Any]:
    """All modes in turn, `rounds` times."""
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES:
            with tempfile.TemporaryDirectory() as out:
                found[mode].append(measure(make(mode, steps, out), warmup_steps))
            sys.stderr.write(f"round {number + 1}/{rounds} {mode}: {found[mode][-1]}\n")
    rate = {mode: statistics.median(r["samples_per_s"] for r in runs) for mode, runs in found.items()}
    return {
        "samples_per_s": {mode: round(value, 2) for mode, value in rate.items()},
        "ratio_pipeline_sync": round(rate["pipeline"] / rate["sync"], 3),
        "ratio_one_step_off_sync": round(rate["one_step_off"] / rate["sync"], 3),
        "trainer_wait_frac": {
            mode: round(statistics.median(r["trainer_wait_frac"] for r in runs), 3) for mode, runs in found.items()
        },
        "wasted_frac": {
            mode: round(statistics.median(r["wasted_frac"] for r in runs), 3) for mode, runs in found.items()
        },
        "lag_hist": {mode: runs[-1]["lag_hist"] for mode, runs in found.items()},
        "lag_violations": sum(r["lag_violations"] for runs in found.values() for r in runs),
        "balanced": all(r["balanced"] for runs in found.values() for r in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--real-steps", type=int, default=6)
    parser.add_argument("--no-real", action="store_true")
    args = parser.parse_args()
    result = {"scripted": compare(scripted, args.steps, args.rounds, warmup_steps=2)}
    if not args.no_real:
        result["real"] = compare(real, args.real_steps, args.rounds, warmup_steps=2)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
