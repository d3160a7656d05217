"""vLLM's decode rate on the CPU. Runs in a virtual environment of its own (README.md beside this file).

    python vllm_decode.py arguments.json

The arguments file is one JSON object:

    model_dir     folder in Hugging Face layout
    prompts       list of rendered chat texts, or of token id lists; reused in turn when there are fewer than requests
    requests      how many requests at once, in turn       (default [1, 16, 64, 128])
    new_tok       tokens per request, end token ignored    (default 48)
    repeats       timed runs per size; the median counts   (default 3)
    threads       CPU threads                              (default 2)
    max_model_len tokens of prompt plus completion         (default 512)
    kv_gb         memory for the KV cache, GB              (default 2)
    logprobs      return the log-prob of each token, as RL needs it (default true)
    seed                                                   (default 0)

The last line of the output is one JSON object; its `decode` maps requests to tokens generated per second of wall time,
prefill included, and the prefix cache is off, so every run does the same work.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "requests": [1, 16, 64, 128],
    "new_tok": 48,
    "repeats": 3,
    "threads": 2,
    "max_model_len": 512,
    "kv_gb": 2,
    "logprobs": True,
    "seed": 0,
}
REQUIRED = ("model_dir", "prompts")


def read_arguments(path: Path) -> dict[str, Any]:
    """The arguments with defaults filled in; exits with a sentence on a wrong key."""
    given = json.loads(path.read_text())
    unknown = sorted(set(given) - set(DEFAULTS) - set(REQUIRED))
    missing = [key for key in REQUIRED if key not in given]
    if unknown or missing:
        sys.exit(f"{path}: unknown keys {unknown}, missing keys {missing}")
    return DEFAULTS | given


def set_environment(args: dict[str, Any]) -> None:
    """vLLM reads these at import time."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(args["kv_gb"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0-" + str(args["threads"] - 1) if args["threads"] > 1 else "0"
    os.environ["OMP_NUM_THREADS"] = str(args["threads"])
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"


def run(args: dict[str, Any]) -> dict[str, Any]:
    """Decode and time; returns what the last line of the output shows."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    import vllm  # noqa: PLC0415

    began = time.perf_counter()
    engine = vllm.LLM(
        model=args["model_dir"],
        dtype="bfloat16",
        max_model_len=args["max_model_len"],
        max_num_seqs=max(args["requests"]),
        enable_prefix_caching=False,
        seed=args["seed"],
    )
    start_s = time.perf_counter() - began
    sampling = vllm.SamplingParams(
        temperature=1.0,
        max_tokens=args["new_tok"],
        ignore_eos=True,
        logprobs=0 if args["logprobs"] else None,
        seed=None,
    )
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in args["prompts"]]
    engine.generate(prompts[:1], sampling, use_tqdm=False)
    rates: dict[str, float] = {}
    runs_s: dict[str, list[float]] = {}
    for count in args["requests"]:
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        times = []
        for _ in range(args["repeats"]):
            began = time.perf_counter()
            outputs = engine.generate(chosen, sampling, use_tqdm=False)
            times.append(time.perf_counter() - began)
            made = sum(len(o.outputs[0].token_ids) for o in outputs)
            if made != count * args["new_tok"]:
                sys.exit(f"{count} requests made {made} tokens, expected {count * args['new_tok']}")
        rates[str(count)] = round(count * args["new_tok"] / statistics.median(times), 1)
        runs_s[str(count)] = [round(t, 3) for t in times]
        sys.stderr.write(f"{count} requests: {rates[str(count)]} tok/s\n")
    return {
        "peer": "vllm",
        "decode": rates,
        "runs_s": runs_s,
        "start_s": round(start_s, 1),
        "settings": {key: args[key] for key in DEFAULTS},
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, vllm)},
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python vllm_decode.py arguments.json")
    args = read_arguments(Path(sys.argv[1]))
    set_environment(args)
    result = run(args)
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
