"""Consecutive checkpoints of this project's own training, for the benchmarks of weight delivery.

    python benchmarks/weights_pairs.py DIR [--set key=value]

SmolLM2-135M-instruct on recipes/quickstart.toml. Four batches of 4 groups of 8 rollouts are sampled once, by the native
engine with the untrained weights; the learner then takes real steps on them, in turn, at a constant learning rate, and
the bf16 weights before and after some steps are written as they are served. Two kinds of trajectories:

running  masters and moments as after 8 steps at the recipe's 2e-5 (as far as 160 steps at 1e-6), then 11 steps
resumed  masters on the bf16 grid and no moments: what a run starts with from a checkpoint in bf16

index.json lists the pairs and how they were made; a folder that has one is left as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.numpy import save_file

import headrace as hr
from headrace.config.load import load_recipe
from headrace.config.schema import RunConfig
from headrace.hub.fetch import ensure_model
from headrace.records import Batch
from headrace.telemetry.silent import SilentView
from headrace.trainer.torch_learner import TorchLearner

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
INDEX = "index.json"
BATCHES, GROUPS, WARM_STEPS = 4, 4, 8
SYNC = ("flow.mode='sync'", "flow.max_lag_steps=0")


@dataclass(frozen=True)
class Trajectory:
    """Steps from one start."""

    start: str
    lr: float
    pairs: tuple[int, ...]
    """Steps whose weights before and after are kept; 1 is the first one."""


TRAJECTORIES = (
    Trajectory("running", 1e-6, (2, 6, 11)),
    Trajectory("resumed", 1e-6, (1, 2, 6)),
    Trajectory("resumed", 1e-5, (1, 2, 6)),
    Trajectory("running", 1e-5, (2, 6, 11)),
    Trajectory("running", 5e-6, (2, 6, 11)),
)


def sampled(changes: Sequence[str]) -> list[Batch]:
    """Batches sampled from the untrained model."""
    with tempfile.TemporaryDirectory() as out:
        own = [f"out={json.dumps(out)}", "steps=1", *SYNC, "eval.before=false", "eval.after=false"]
        config = load_recipe(RECIPE, [*changes, *own, f"flow.batch_groups={BATCHES * GROUPS}"])
        whole = asyncio.run(_first_batch(config))
    return [replace(whole, groups=whole.groups[i * GROUPS : (i + 1) * GROUPS]) for i in range(BATCHES)]


async def _first_batch(config: RunConfig) -> Batch:
    async with hr.open(config) as run:
        async for batch in run.batches():
            return batch
    raise SystemExit("the run gave no batch")


def make(folder: Path, changes: Sequence[str] = ()) -> None:
    """Fill a folder; nothing is done where its index is there already."""
    if (folder / INDEX).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    begun_s = time.perf_counter()
    batches = sampled(changes)
    config = load_recipe(RECIPE, changes)
    sys.stderr.write(f"sampled {len(batches)} batches in {time.perf_counter() - begun_s:.0f} s\n")
    model_dir = str(ensure_model(config.model.name, SilentView().progress))

    def learner(lr: float) -> TorchLearner:
        constant = [f"optim.lr={lr}", "optim.warmup_steps=0", "optim.schedule='constant'", "steps=1000"]
        return TorchLearner(load_recipe(RECIPE, [*changes, *constant]), model_dir)

    warm = learner(config.optim.lr)
    for batch in (batches * 2)[:WARM_STEPS]:
        warm.train(batch)
    state = {name: tensor.clone() for name, tensor in warm.masters.state().items()}
    rows = []
    for way in TRAJECTORIES:
        at = learner(way.lr)
        if way.start == "running":
            at.masters.restore(state, WARM_STEPS)
        for step in range(1, max(way.pairs) + 1):
            files = [f"{way.start}-{way.lr:g}-{s}.safetensors" for s in (step - 1, step)]
            if step in way.pairs:
                _keep(at, folder / files[0])
            at.train(batches[step % len(batches)])
            if step in way.pairs:
                _keep(at, folder / files[1])
                rows.append({"start": way.start, "lr": way.lr, "step": step, "old": files[0], "new": files[1]})
        sys.stderr.write(f"{way.start} at {way.lr:g}: {time.perf_counter() - begun_s:.0f} s\n")
    made = {"model": config.model.name, "made": " ".join((__doc__ or "").split()), "torch": torch.__version__}
    (folder / INDEX).write_text(json.dumps({**made, "pairs": rows}, indent=1) + "\n")


def _keep(learner: TorchLearner, path: Path) -> None:
    if not path.exists():
        save_file(dict(learner.named_arrays()), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    make(args.folder, args.changes)


if __name__ == "__main__":
    main()
