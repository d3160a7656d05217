"""Decode rate of the native engine: against transformers' generate, vLLM (if it is there) and a measured limit.

    python benchmarks/engine.py [--threads 2] [--new-tok 64] [--repeats 3] [--vllm-python VENV/bin/python]

Every request has its own prompt, so no prefix is shared (but in tok_per_s_groups_64: groups of 8 with one prompt, as
in RL); rates are tokens per second of wall time, prefill included. Native and generate run in turn (A B A B), medians
count. The limit is the time in which the packed linears and the head read all weights once at that batch: no
attention, no norms, no sampling. On a busy machine use --threads 1 --cpu-time.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.config.schema import EngineConfig
from headrace.records import GenRequest, SamplingParams
from headrace.rollout.native.core import NativeCore, build
from headrace.rollout.native.decoder import Decoder
from headrace.rollout.native.head import logits_fp32

BATCHES = (1, 16, 64, 128)
COMPARED = 64
DEFAULT_MODEL = Path.home() / ".cache/headrace/models/smollm2-135m-instruct"


now = time.perf_counter
"""Replaced by the thread's CPU time under --cpu-time."""


def prompts_of(count: int, length: int) -> list[tuple[int, ...]]:
    """Random ids: what they mean does not change the work."""
    rng = np.random.default_rng(0)
    return [tuple(int(i) for i in rng.integers(1000, 40_000, length)) for _ in range(count)]


class _BenchmarkClock:
    """The engine's own times follow `now` too."""

    def now(self) -> float:
        return now()


def native_tok_per_s(
    core: NativeCore, prompts: list[tuple[int, ...]], new_tok: int, group: int = 1
) -> tuple[float, float]:
    """(tokens per second with prefill, tokens per second of decode steps alone); `group` requests share a prompt."""
    before, started_s = core.stats(), now()
    core.add(
        [
            GenRequest(
                id=str(i),
                prompt_ids=prompts[i // group],
                group_id=f"group-{i // group}",
                sampling=SamplingParams(max_new_tok=new_tok, seed=i),
            )
            for i in range(len(prompts))
        ]
    )
    while core.busy:
        core.step()
    wall_s, after = now() - started_s, core.stats()
    count = len(prompts) * new_tok
    if after.decode_tok - before.decode_tok != count:
        raise SystemExit(f"{after.decode_tok - before.decode_tok} tokens came out instead of {count}")
    return count / wall_s, count / (after.decode_s - before.decode_s)


@torch.inference_mode()
def generate_tok_per_s(model: Any, prompts: list[tuple[int, ...]], new_tok: int) -> float:
    """transformers' generate on the same prompts, sampling at temperature 1."""
    ids = torch.tensor(prompts)
    started_s = now()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        min_new_tokens=new_tok,
        max_new_tokens=new_tok,
        pad_token_id=0,
    )
    wall_s = now() - started_s
    if out.shape[1] - ids.shape[1] != new_tok:
        raise SystemExit(f"generate gave {out.shape[1] - ids.shape[1]} tokens instead of {new_tok}")
    return len(prompts) * new_tok / wall_s


@torch.inference_mode()
def limit_tok_per_s(core: NativeCore, batch: int, repeats: int = 15) -> float:
    """Tokens per second if a decode step did nothing but multiply by every weight once; median of the repeats."""
    backend = core._backend
    if not isinstance(backend, Decoder):
        raise SystemExit("the limit is defined for the fast decoder only")
    weights = backend._weights
    x = torch.randn(batch, weights.embed_VH.shape[1]).to(weights.embed_VH.dtype)
    inner = weights.layers[0].up(x)
    times_s = []
    for _ in range(repeats):
        started_s = now()
        for layer in weights.layers:
            layer.qkv(x)
            layer.out(x)
            layer.gate(x)
            layer.up(x)
            layer.down(inner)
        logits_fp32(x, weights.head_VH, exact_inputs=True)
        times_s.append(now() - started_s)
    return batch / statistics.median(times_s)


def vllm_tok_per_s(python: str, model: Path, prompts: list[tuple[int, ...]], args: argparse.Namespace) -> float | None:
    """vLLM's rate at COMPARED requests, from its own virtual environment; None if that is not there."""
    if not python or not Path(python).exists():
        return None
    script = Path(__file__).parent / "peers" / "vllm_decode.py"
    spec = {
        "model_dir": str(model),
        "prompts": prompts,
        "requests": [COMPARED],
        "new_tok": args.new_tok,
        "repeats": args.repeats,
        "threads": args.threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arguments.json"
        path.write_text(json.dumps(spec))
        done = subprocess.run([python, str(script), str(path)], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return None
    return float(json.loads(done.stdout.strip().splitlines()[-1])["decode"][str(COMPARED)])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt-tok", type=int, default=64)
    parser.add_argument("--new-tok", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure CPU time instead of wall time: for one thread, on a busy machine",
    )
    parser.add_argument("--vllm-python", default="")
    return parser.parse_args()


def with_huge_pages() -> None:
    """Start again with the allocator setting that the launcher gives its roles; generate then runs with it too."""
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        )


def main() -> None:
    with_huge_pages()
    global now
    args = parse()
    if args.cpu_time:
        if args.threads != 1:
            raise SystemExit(f"--cpu-time needs --threads 1, not {args.threads}: other threads would not be counted")
        now = time.thread_time
    torch.set_num_threads(args.threads)
    engine = EngineConfig(max_batch=max(args.batches), max_context_tok=args.prompt_tok + args.new_tok)
    core = build(
        model_dir=str(args.model),
        engine=engine.model_dump(),
        dtype="bfloat16",
        device="cpu",
        run_id="benchmark",
        ignore_end=True,
    )
    core._clock = _BenchmarkClock()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    prompts = prompts_of(max(args.batches), args.prompt_tok)
    native_tok_per_s(core, prompts[:2], 4)
    generate_tok_per_s(model, prompts[:2], 4)
    rate: dict[str, float] = {}
    decode_rate: dict[str, float] = {}
    generate_rate: dict[str, float] = {}
    limits: list[float] = []
    grouped: list[float] = []
    for batch in args.batches:
        ours, decode, theirs = [], [], []
        for _ in range(args.repeats):
            total, steps = native_tok_per_s(core, prompts[:batch], args.new_tok)
            ours.append(total)
            decode.append(steps)
            if batch == COMPARED:
                limits.append(limit_tok_per_s(core, batch))
                grouped.append(native_tok_per_s(core, prompts[:batch], args.new_tok, group=8)[0])
                theirs.append(generate_tok_per_s(model, prompts[:batch], args.new_tok))
        rate[str(batch)], decode_rate[str(batch)] = statistics.median(ours), statistics.median(decode)
        if theirs:
            generate_rate[str(batch)] = statistics.median(theirs)
        sys.stdout.write(f"{batch:4d} requests: {rate[str(batch)]:8.0f} tok/s, decode {decode_rate[str(batch)]:.0f}\n")
    key = str(COMPARED)
    limit = statistics.median(limits) if limits else limit_tok_per_s(core, COMPARED)
    vllm = vllm_tok_per_s(args.vllm_python, args.model, prompts[:COMPARED], args)
    result = {
        "benchmark": "engine",
        "threads": args.threads,
        "cpu_time": args.cpu_time,
        "prompt_tok": args.prompt_tok,
        "new_tok": args.new_tok,
        "tok_per_s": {k: round(v, 1) for k, v in rate.items()},
        "decode_tok_per_s": {k: round(v, 1) for k, v in decode_rate.items()},
        "tok_per_s_groups_64": round(statistics.median(grouped), 1) if grouped else None,
        "generate_tok_per_s_64": round(generate_rate[key], 1) if key in generate_rate else None,
        "limit_tok_per_s_64": round(limit, 1),
        "ratio_generate_64": round(rate[key] / generate_rate[key], 2) if key in generate_rate else None,
        "ratio_vllm_64": round(rate[key] / vllm, 2) if vllm and key in rate else None,
        "limit_share_64": round(decode_rate[key] / limit, 3) if key in rate else None,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
