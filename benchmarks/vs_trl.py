"""The same RL work through Headrace and through TRL's GRPOTrainer, in turn.

    python benchmarks/vs_trl.py --trl-python /tmp/venv-trl/bin/python [--rounds 2] [--steps 5] [--reward-steps 0]

Same model, prompts, answers, reward (last number in the text), group size, batch, completion limit, learning rate,
optimizer, clipping and cores (benchmarks/peers/README.md says how TRL is set up, and what favours it). Samples per
second over the steps after the warm-up; zero-signal groups are kept on both sides so that both train on every sample.
--reward-steps N also runs both for N steps once and reports the seconds until the mean training reward of three
steps (fresh prompts, temperature 1) reaches --reward.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.api import train
from headrace.config.load import load_recipe
from headrace.config.schema import RunConfig
from headrace.envs.registry import build_task
from headrace.hub.fetch import ensure_model
from headrace.telemetry.log import read_log
from headrace.telemetry.records import StepRecord

ROOT = Path(__file__).parents[1]
WARMUP_STEPS = 2
GROUPS, GROUP_SIZE, MAX_NEW_TOK, LR = 8, 8, 48, 1e-5


def write_prompts(folder: Path) -> tuple[list[list[dict[str, str]]], list[str]]:
    """The quickstart's prompts as JSON Lines for ours, and as lists for TRL."""
    config = load_recipe(ROOT / "recipes" / "quickstart.toml")
    task = build_task(config.env, seed=0, recipe_dir=config.recipe_dir)
    prompts = [task.train[i] for i in range(min(1000, len(task.train)))]
    with (folder / "train.jsonl").open("w") as file:
        for p in prompts:
            messages = [{"role": m.role, "content": m.content} for m in p.messages]
            file.write(json.dumps({"messages": messages, "answer": p.answer}) + "\n")
    return [[{"role": m.role, "content": m.content} for m in p.messages] for p in prompts], [p.answer for p in prompts]


def our_config(folder: Path, steps: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "vs-trl",
            "out": str(folder / "runs"),
            "steps": steps,
            "recipe_dir": str(folder),
            "env": {
                "kind": "jsonl",
                "options": {"file": "train.jsonl"},
                "reward": "numeric",
                "eval_prompts": 20,
            },
            "sampling": {"max_new_tok": MAX_NEW_TOK},
            "flow": {
                "mode": "pipeline",
                "batch_groups": GROUPS,
                "group_size": GROUP_SIZE,
                "max_lag_steps": 1,
                "zero_signal": "keep",
            },
            "engine": {"max_context_tok": 256},
            "optim": {"lr": LR},
            "eval": {"before": False, "after": False},
            "checkpoint": {"every_steps": 0},
        }
    )


def ours(folder: Path, steps: int) -> dict[str, Any]:
    summary = train(our_config(folder, steps))
    records = [r for r in read_log(Path(summary.run_dir)) if isinstance(r, StepRecord)]
    times_s = [r.time_s for r in records]
    counted = times_s[WARMUP_STEPS - 1 :]
    first = records[0]
    first_s = (
        first.wait_data_s + first.wait_bound_s + first.train_s + first.publish_s
    )  # the warm-up counts, as TRL's does
    return {
        "samples_per_s": GROUPS * GROUP_SIZE * (len(counted) - 1) / (counted[-1] - counted[0]),
        "step_s": [round(b - a, 2) for a, b in pairwise(times_s)],
        "rewards": [round(r.reward_mean, 3) for r in records],
        "response_tok_mean": [round(r.response_tok_mean, 1) for r in records],
        "ends_s": [t - times_s[0] + first_s for t in times_s],
    }


def trl(python: str, folder: Path, steps: int, prompts: list[Any], answers: list[str]) -> dict[str, Any]:
    arguments = folder / "trl.json"
    arguments.write_text(
        json.dumps(
            {
                "model_dir": str(ensure_model(RunConfig().model.name)),
                "prompts": prompts,
                "answers": answers,
                "group_size": GROUP_SIZE,
                "batch_groups": GROUPS,
                "max_new_tok": MAX_NEW_TOK,
                "steps": steps,
                "lr": LR,
            }
        )
    )
    script = str(ROOT / "benchmarks" / "peers" / "trl_grpo.py")
    done = subprocess.run([python, script, str(arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    found["ends_s"] = [sum(found["step_s"][: i + 1]) for i in range(len(found["step_s"]))]
    return found


def seconds_to(rewards: list[float], ends_s: list[float], wanted: float) -> float | None:
    """End of the first step at which the mean reward of three steps reaches `wanted`."""
    for i in range(2, len(rewards)):
        if sum(rewards[i - 2 : i + 1]) / 3 >= wanted:
            return round(ends_s[i], 1)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--reward-steps", type=int, default=0)
    parser.add_argument("--reward", type=float, default=0.5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts, answers = write_prompts(folder)
        mine: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        for number in range(args.rounds):
            mine.append(ours(folder, args.steps + WARMUP_STEPS))
            sys.stderr.write(f"round {number + 1} headrace {mine[-1]}\n")
            theirs.append(trl(args.trl_python, folder, args.steps, prompts, answers))
            sys.stderr.write(f"round {number + 1} trl {theirs[-1]}\n")
        rate = statistics.median(r["samples_per_s"] for r in mine)
        trl_rate = statistics.median(r["samples_per_s"] for r in theirs)
        result: dict[str, Any] = {
            "samples_per_s": round(rate, 2),
            "trl_samples_per_s": round(trl_rate, 2),
            "ratio": round(rate / trl_rate, 2),
            "response_tok_mean": mine[-1]["response_tok_mean"][-1],
            "trl_response_tok_mean": theirs[-1]["response_tok_mean"][-1],
            "trl_versions": theirs[-1]["versions"],
        }
        if args.reward_steps:
            a = ours(folder, args.reward_steps)
            b = trl(args.trl_python, folder, args.reward_steps, prompts, answers)
            ours_s = seconds_to(a["rewards"], a["ends_s"], args.reward)
            trl_s = seconds_to(b["rewards"], b["ends_s"], args.reward)
            result |= {
                "reward": args.reward,
                "time_to_reward_s": ours_s,
                "trl_time_to_reward_s": trl_s,
                "time_ratio": round(trl_s / ours_s, 2) if ours_s and trl_s else None,
                "rewards_last": [round(statistics.mean(r["rewards"][-3:]), 3) for r in (a, b)],
            }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
