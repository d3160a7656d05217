"""Is what an accelerator computes what the CPU computes? Prints one JSON verdict; exit code 0 exactly if all is well.

    python tests/gpu/check.py                 # cuda (or mps)
    python tests/gpu/check.py --device cpu    # the CPU against itself: proves this script, not an accelerator

Random tiny models in float32 unless a check says otherwise; nothing is downloaded. Under a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "integration"), str(TESTS / "unit" / "rollout"), str(TESTS / "unit" / "trainer")]

import tiny  # noqa: E402  (tests/unit/trainer)
import tiny_runs  # noqa: E402  (tests/integration)
from in_process import InProcessLauncher  # noqa: E402
from run_tools import steps_of, summary_of, train  # noqa: E402

from headrace.config.schema import EngineConfig, RunConfig, SyncConfig  # noqa: E402
from headrace.records import Completion, GenRequest, SamplingParams  # noqa: E402
from headrace.rollout.native.core import NativeCore, build  # noqa: E402
from headrace.rollout.native.loading import load_model, named_tensors, to_array  # noqa: E402
from headrace.sync.manifest import Manifest  # noqa: E402
from headrace.trainer.publishing import Publishing  # noqa: E402
from headrace.trainer.torch_learner import TorchLearner  # noqa: E402

RUN = "check"
LOGP_TOL, STEP_TOL, BF16_TOL = 1e-4, 1e-3, 0.05
"""Largest difference in nats: engine in float32, learner after optimizer steps, and the mean one in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where checks run, and their model."""

    device: str
    model: Path
    folder: Path

    def core(self, device: str, **engine: Any) -> NativeCore:
        dtype = engine.pop("dtype", "float32")
        config = EngineConfig(**({"max_batch": 16, "max_context_tok": tiny_runs.CONTEXT_TOK} | engine))
        return build(model_dir=str(self.model), engine=config.model_dump(), dtype=dtype, device=device, run_id=RUN)

    def recipe(self, device: str, **sections: Any) -> RunConfig:
        model = {"name": str(self.model), "dtype": "float32", "device": device}
        return tiny_runs.tiny_recipe(self.model, self.folder / f"runs-{time.monotonic_ns()}", model=model, **sections)

    def changed_weights(self, mode: Any) -> tuple[Manifest, Manifest]:
        """Version 0, the model, and version 1: a third of its elements with noise; as snapshots or as deltas."""
        torch.manual_seed(1)
        folder, way = str(self.folder / f"weights-{mode}"), Publishing(SyncConfig(mode=mode), threads=1)
        named = named_tensors(load_model(str(self.model), torch.float32))
        first = way.publish([(n, to_array(w)) for n, w in named.items()], folder=folder, run_id=RUN, version=0)
        noisy = {n: w + 0.03 * torch.randn_like(w) * (torch.rand_like(w) < 0.3) for n, w in named.items()}
        return first, way.publish([(n, to_array(w)) for n, w in noisy.items()], folder=folder, run_id=RUN, version=1)


def requests(temperature: float, tokens: int = 24) -> list[GenRequest]:
    """Prompts of many lengths, two of them in one group."""
    rng = np.random.default_rng(0)
    prompts = [tuple(int(i) for i in rng.integers(20, 200, n)) for n in (1, 2, 9, 30, 64)]
    prompts.append(prompts[-1])
    sampling = SamplingParams(temperature=temperature, max_new_tok=tokens)
    return [
        GenRequest(
            id=f"r{n}", prompt_ids=ids, sampling=dataclasses.replace(sampling, seed=n), group_id="g" if n > 3 else ""
        )
        for n, ids in enumerate(prompts)
    ]


def finish(core: NativeCore) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while core.busy:
        done |= {c.request_id: c for c in core.step()}
    return done


def same_tokens(ours: dict[str, Completion], theirs: dict[str, Completion]) -> tuple[bool, float]:
    """Whether all ids are equal, and the largest difference of log-probs up to the first that is not."""
    worst, equal = 0.0, True
    for name, a in ours.items():
        b = theirs[name]
        n = min(len(a.ids_N), len(b.ids_N))
        differ = np.flatnonzero(a.ids_N[:n] != b.ids_N[:n])
        equal &= len(a.ids_N) == len(b.ids_N) and not len(differ)
        upto = int(differ[0]) if len(differ) else n
        worst = max(worst, float(np.abs(a.logp_N[:upto] - b.logp_N[:upto]).max(initial=0.0)))
    return equal, worst


# --- checks: each returns numbers, with "ok" -----------------------------------------------------------------------


def engine_tokens(bench: Bench) -> dict[str, Any]:
    """Greedy and sampled tokens and their log-probs, with and without fixed shapes."""
    found: dict[str, Any] = {"ok": True}
    for temperature in (0.0, 1.0):
        for deterministic in (False, True):
            both = []
            for device in (bench.device, "cpu"):
                core = bench.core(device, deterministic=deterministic)
                core.add(requests(temperature))
                both.append(finish(core))
            equal, worst = same_tokens(*both)
            found[f"t{temperature:g}{'_fixed' if deterministic else ''}"] = {"equal": equal, "dlogp_max": worst}
            found["ok"] &= equal and worst < LOGP_TOL
    return found


def engine_swap(bench: Bench) -> dict[str, Any]:
    """Weights swap in the middle of completions, on both devices at the same step, for each KV policy; by a snapshot on
    one side and a delta on the other, so that both are the same."""
    found: dict[str, Any] = {"ok": True}
    versions = {mode: bench.changed_weights(mode) for mode in ("full", "delta")}
    for kv, mode in (("keep", "full"), ("keep", "delta"), ("recompute", "delta"), ("flush", "delta")):
        both = []
        for device, way in ((bench.device, mode), ("cpu", "full")):
            base, manifest = versions[way]
            core = bench.core(device)
            core.stage(base)
            core.swap(0, "keep")
            core.add(requests(0.0))
            done = {c.request_id: c for _ in range(8) for c in core.step()}
            core.stage(manifest)
            report = core.swap(1, kv)
            done |= finish(core)
            both.append(done)
            spans = {s.policy_version for c in done.values() for s in c.spans}
            found["ok"] &= spans == {0, 1} and report.digest == manifest.digest and core.stats().version == 1
        equal, worst = same_tokens(*both)
        found[f"{kv}_{mode}"] = {"equal": equal, "dlogp_max": worst}
        found["ok"] &= equal and worst < LOGP_TOL
    return found


def engine_bfloat16(bench: Bench) -> dict[str, Any]:
    """bfloat16 on the device against float32 on the CPU: log-probs of the same greedy tokens."""
    both = []
    for device, dtype in ((bench.device, "bfloat16"), ("cpu", "float32")):
        core = bench.core(device, dtype=dtype)
        core.add(requests(0.0))
        both.append(finish(core))
    first = [abs(float(a.logp_N[0] - both[1][name].logp_N[0])) for name, a in both[0].items()]
    return {"ok": bool(np.mean(first) < BF16_TOL), "dlogp_mean": float(np.mean(first))}


def learner_steps(bench: Bench) -> dict[str, Any]:
    """Three optimizer steps of each kind on the same batches: losses, norms and log-probs."""
    found: dict[str, Any] = {"ok": True}
    cases: dict[str, dict[str, Any]] = {
        "full": {},
        "lora": {"lora": {"rank": 4}},
        "ppo": {"loss": {"kind": "ppo", "kl_coef": 0.1}, "trainer": {"updates_per_batch": 2}},
        "small_micro_batches": {"trainer": {"micro_batch_tok": 32, "head_chunk_tok": 7}},
    }
    for name, sections in cases.items():
        reports, logps = [], []
        for device in (bench.device, "cpu"):
            config = bench.recipe(device, optim={"lr": 1e-3}, **sections)
            learner = TorchLearner(config, str(bench.model))
            trained = [learner.train(tiny.random_batch(seed=n)) for n in range(3)]
            reports.append([(f.loss, o.grad_norm) for fs, os in trained for f, o in zip(fs, os, strict=True)])
            logps.append(learner.logp(tiny.random_batch(seed=9)))
        loss = float(np.abs(np.subtract(*reports)).max())
        worst = float(np.abs(logps[0] - logps[1]).max())
        found[name] = {"loss_and_norm_diff_max": loss, "dlogp_max": worst}
        found["ok"] &= loss < STEP_TOL * (1 + float(np.abs(reports[1]).max())) and worst < STEP_TOL
    return found


def learner_checkpoint(bench: Bench) -> dict[str, Any]:
    """Save, load into a fresh learner, step: the same bits as without; the export holds the device's weights."""
    config = bench.recipe(bench.device, optim={"lr": 1e-3})
    one, two = (TorchLearner(config, str(bench.model)) for _ in range(2))
    one.train(tiny.random_batch(seed=0))
    folder = bench.folder / "state"
    folder.mkdir()
    one.save(folder)
    two.load(folder)
    batch = tiny.random_batch(seed=1)
    for learner in (one, two):
        learner.train(batch)
    diff = max(
        float(np.abs(a.astype(np.float32) - b.astype(np.float32)).max())
        for (_, a), (_, b) in zip(one.named_arrays(), two.named_arrays(), strict=True)
    )
    one.export(bench.folder / "exported")
    served = dict(named_tensors(load_model(str(bench.folder / "exported"), torch.float32)))
    exported = all(np.array_equal(np.asarray(a), to_array(served[n])) for n, a in one.named_arrays())
    # Sums on accelerators may be ordered by chance; on the CPU the bits are the same.
    limit = 0.0 if bench.device == "cpu" else 1e-5
    return {"ok": exported and diff <= limit, "weights_diff_max": diff, "export_equal": exported}


def whole_run(bench: Bench) -> dict[str, Any]:
    """The loop with engine and learner on the device, synchronous and pipelined."""
    found: dict[str, Any] = {"ok": True}
    for mode in ("sync", "pipeline"):
        config = bench.recipe(bench.device, steps=4, flow={"mode": mode, "batch_groups": 2, "group_size": 4})
        summary = summary_of(train(config, make_launcher=InProcessLauncher))
        # Tokens of older versions differ because of the weights; only those of lag 0 must agree.
        first = steps_of(summary.run_dir)[: 4 if mode == "sync" else 1]
        worst = max(s.metrics["abs_dlogp/max"] for s in first)
        found[mode] = {"dlogp_max": worst, "balanced": summary.balanced, "train_s": round(summary.train_s, 2)}
        found["ok"] &= worst < LOGP_TOL and summary.balanced and summary.steps == 4
    return found


CHECKS: tuple[Callable[[Bench], dict[str, Any]], ...] = (
    engine_tokens,
    engine_swap,
    engine_bfloat16,
    learner_steps,
    learner_checkpoint,
    whole_run,
)


def verdict(device: str) -> dict[str, Any]:
    """Run every check; one that raises has failed, the others still run."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
    if device == "cpu":
        found["note"] = "CPU against itself: this proves the script, not an accelerator"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, tiny_runs.build_model(Path(folder) / "model"), Path(folder))
        for check in CHECKS:
            began_s = time.perf_counter()
            try:
                result = check(bench)
            except Exception:  # noqa: BLE001  the verdict holds whatever went wrong
                result = {"ok": False, "error": traceback.format_exc()}
            found[check.__name__] = {"seconds": round(time.perf_counter() - began_s, 2)} | result
    found["ok"] = all(found[check.__name__]["ok"] for check in CHECKS)
    return found


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=best_device(), help="cuda, mps or cpu; the best one there is by default")
    found = verdict(parser.parse_args().device)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
