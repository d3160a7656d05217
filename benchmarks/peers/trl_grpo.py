"""TRL's GRPOTrainer on the CPU, timed. Runs in a virtual environment of its own (README.md beside this file).

    python trl_grpo.py arguments.json

The arguments file is one JSON object:

    model_dir      folder in Hugging Face layout
    prompts        list; each a rendered chat text, or a list of {"role", "content"} messages
    answers        list of gold answers, as text, in the order of the prompts
    group_size     rollouts per prompt                       (default 8)
    batch_groups   prompts per optimizer step                (default 8)
    max_new_tok    tokens per completion at most             (default 48)
    steps          optimizer steps, the first is warm-up     (default 3)
    lr             learning rate, constant                   (default 1e-5)
    bf16           weights and autocast in bfloat16          (default true)
    micro_batch    samples per forward and backward pass     (default 16)
    gradient_checkpointing                                   (default false; TRL's own default is true, and slower)
    threads        CPU threads                               (default 2)
    seed                                                     (default 0)

The last line of the output is one JSON object: samples_per_s (without the warm-up step), step_s, losses, rewards,
response_tok_mean, peak_rss_bytes and the versions used. The same settings as a Headrace run: temperature 1, no top-p
or top-k, no KL term, Dr. GRPO loss without scaling by the deviation, gradients clipped to norm 1, AdamW (0.9, 0.95)
without decay.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "group_size": 8,
    "batch_groups": 8,
    "max_new_tok": 48,
    "steps": 3,
    "lr": 1e-5,
    "bf16": True,
    "micro_batch": 16,
    "gradient_checkpointing": False,
    "threads": 2,
    "seed": 0,
}
REQUIRED = ("model_dir", "prompts", "answers")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read_arguments(path: Path) -> dict[str, Any]:
    """The arguments with defaults filled in; exits with a sentence on a wrong key or size."""
    given = json.loads(path.read_text())
    unknown = sorted(set(given) - set(DEFAULTS) - set(REQUIRED))
    missing = [key for key in REQUIRED if key not in given]
    if unknown or missing:
        sys.exit(f"{path}: unknown keys {unknown}, missing keys {missing}")
    args = DEFAULTS | given
    batch = args["group_size"] * args["batch_groups"]
    if batch % args["micro_batch"]:
        sys.exit(f"micro_batch = {args['micro_batch']} must divide group_size x batch_groups = {batch}")
    if len(args["prompts"]) != len(args["answers"]):
        sys.exit(f"{len(args['prompts'])} prompts, {len(args['answers'])} answers: must be as many")
    return args


def numeric_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1.0 where the last number in the completion equals the answer, else 0.0."""
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = NUMBER.findall(text)
        wanted = NUMBER.findall(gold)
        right = bool(found and wanted) and _value(found[-1]) == _value(wanted[-1])
        scores.append(1.0 if right else 0.0)
    return scores


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def run(args: dict[str, Any]) -> dict[str, Any]:
    """Train and time; returns what the last line of the output shows."""
    import datasets  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    import trl  # noqa: PLC0415

    torch.set_num_threads(args["threads"])
    samples_per_step = args["group_size"] * args["batch_groups"]
    step_s: list[float] = []

    class Stopwatch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Times optimizer steps: generation, reward, forward, backward and update."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s.append(time.perf_counter() - self.begin)

    with tempfile.TemporaryDirectory() as out:
        config = trl.GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=args["bf16"],
            model_init_kwargs={"dtype": "bfloat16" if args["bf16"] else "float32"},
            per_device_train_batch_size=args["micro_batch"],
            gradient_accumulation_steps=samples_per_step // args["micro_batch"],
            num_generations=args["group_size"],
            max_completion_length=args["max_new_tok"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            max_grad_norm=1.0,
            learning_rate=args["lr"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_steps=args["steps"],
            gradient_checkpointing=args["gradient_checkpointing"],
            use_vllm=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args["seed"],
        )
        rows = datasets.Dataset.from_dict({"prompt": args["prompts"], "answer": args["answers"]})
        trainer = trl.GRPOTrainer(
            model=args["model_dir"],
            reward_funcs=numeric_reward,
            args=config,
            train_dataset=rows,
            callbacks=[Stopwatch()],
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    measured_s = sum(step_s[1:])
    return {
        "peer": "trl",
        "samples_per_s": samples_per_step * (len(step_s) - 1) / measured_s if measured_s else None,
        "step_s": [round(s, 3) for s in step_s],
        "losses": [entry.get("loss") for entry in logged],
        "rewards": [entry["reward"] for entry in logged],
        "response_tok_mean": [entry.get("completions/mean_length") for entry in logged],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "settings": {key: args[key] for key in DEFAULTS},
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl)},
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python trl_grpo.py arguments.json")
    args = read_arguments(Path(sys.argv[1]))
    os.environ.setdefault("OMP_NUM_THREADS", str(args["threads"]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result = run(args)
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
