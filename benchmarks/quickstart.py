"""What `make train` reaches: held-out accuracy before and after, and the seconds of training in between.

    python benchmarks/quickstart.py [--runs 1] [--set key=value]

Runs recipes/quickstart.toml as it is. With several runs the seeds differ and medians count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from headrace.api import train
from headrace.config.load import load_recipe
from headrace.telemetry.records import RunSummary

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    found: list[RunSummary] = []
    for seed in range(args.runs):
        with tempfile.TemporaryDirectory() as out:
            config = load_recipe(RECIPE, [*args.changes, f"seed={seed}", f"out={json.dumps(out)}"])
            found.append(train(config))
        sys.stderr.write(f"seed {seed}: {found[-1].accuracy_before} -> {found[-1].accuracy_after}\n")
    before = [s.accuracy_before or 0.0 for s in found]
    after = [s.accuracy_after or 0.0 for s in found]
    result = {
        "accuracy_before": statistics.median(before),
        "accuracy_after": statistics.median(after),
        "gain_points": round(100 * statistics.median(a - b for a, b in zip(after, before, strict=True)), 1),
        "train_s": round(statistics.median(s.train_s for s in found), 1),
        "total_s": round(statistics.median(s.total_s for s in found), 1),
        "steps": found[0].steps,
        "eval_prompts": found[0].eval_prompts,
        "all_gains_points": [round(100 * (a - b), 1) for a, b in zip(after, before, strict=True)],
        "lag_hist": found[-1].lag_hist,
        "wasted_frac": round(sum(found[-1].wasted_tok.values()) / found[-1].generated_tok, 3),
        "trainer_shares": {k: round(v, 3) for k, v in found[-1].trainer_shares.items()},
        "generator_shares": {k: round(v, 3) for k, v in found[-1].generator_shares.items()},
        "balanced": all(s.balanced for s in found),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
