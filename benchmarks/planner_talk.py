"""Asynchronous over synchronous RL as a distribution, not as one figure.

    python benchmarks/planner_talk.py [--page docs/planner-talk.md] [--simulate-best 4] [--sim-steps 16]

Applied Compute's talk (2025) reports about 1.6 times the speed of synchronous RL for a Qwen model of 30 billion
parameters, 40 prompts x 32 rollouts a batch and a lag of at most 5 steps, without saying on how many chips, how long
the answers were or how they spread. The planner is asked for every combination of these, and for speeds that are off
in either direction: the best pipeline plan over the best synchronous plan, both simulated on the same rollouts.

Last line: one JSON object with median, p10, p90 and share_at_least_1_6 over all rows in which both plans are possible,
the number of impossible ones, and the rows. --page writes them as a table for people.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from headrace.errors import PlanError
from headrace.planner.constants import Constants, builtin
from headrace.planner.search import search
from headrace.planner.sensitivity import slower
from headrace.planner.spec import ClusterConfig, LimitsConfig, PlanSpec, ResponseConfig, SearchConfig

MODEL, GPU = "qwen3-30b-a3b", "h100"
GROUPS, MEMBERS, LAG = 40, 32, 5
MEANS_TOK = (1000, 2000, 4000, 8000)
CAP_FACTOR = 8
SIGMAS = (0.5, 1.0)
CHIPS = (8, 16, 32, 64)
OFF = 1.3
"""Factor by which one side's speed is off against the other's; what both share cancels in the ratio."""
CALIBRATIONS = {"as built in": (1.0, 1.0), "decode slower": (OFF, 1 / OFF), "training slower": (1 / OFF, OFF)}
CLAIM = 1.6
PROMPT_TOK = 512


@dataclass(frozen=True)
class Row:
    """One point of the grid."""

    mean_tok: int
    sigma: float
    gpus: int
    calibration: str
    speedup: float | None
    """Samples per second of the best pipeline plan over those of the best synchronous one; None: one cannot run."""
    pipeline: str = ""
    pipeline_binds: str = ""
    lag_mean: float = 0.0
    sync: str = ""
    sync_binds: str = ""
    why_not: str = ""


def spec(mean_tok: int, sigma: float, gpus: int, args: argparse.Namespace) -> PlanSpec:
    """The talk's batch and lag with everything that it leaves open filled in."""
    return PlanSpec(
        model=MODEL,
        batch_groups=GROUPS,
        group_size=MEMBERS,
        prompt_tok=PROMPT_TOK,
        response=ResponseConfig(mean_tok=mean_tok, cap_tok=CAP_FACTOR * mean_tok, sigma=sigma),
        cluster=ClusterConfig(gpu=GPU, num_gpus=gpus),
        limits=LimitsConfig(max_lag_steps=LAG),
        search=SearchConfig(modes=("pipeline",), simulate_best=args.simulate_best, sim_steps=args.sim_steps),
    )


def row(mean_tok: int, sigma: float, gpus: int, calibration: str, constants: Constants, wanted: PlanSpec) -> Row:
    """Search once; the best synchronous plan comes with it."""
    at = {"mean_tok": mean_tok, "sigma": sigma, "gpus": gpus, "calibration": calibration}
    try:
        found = search(wanted, constants=constants)
    except PlanError as exc:
        return Row(**at, speedup=None, why_not=str(exc))  # type: ignore[arg-type]
    if found.best_sync is None:
        return Row(**at, speedup=None, why_not="no synchronous plan")  # type: ignore[arg-type]
    return Row(
        **at,  # type: ignore[arg-type]
        speedup=round(found.speedup, 3),
        pipeline=found.best.setting.words(),
        pipeline_binds=found.best.binding,
        lag_mean=round(found.best.metrics.lag_mean, 2),
        sync=found.best_sync.setting.words(),
        sync_binds=found.best_sync.binding,
    )


def rows(args: argparse.Namespace) -> list[Row]:
    """The whole grid, said as it goes."""
    out = []
    for name, (decode, training) in CALIBRATIONS.items():
        constants = slower(builtin(), decode, training)
        for mean_tok, sigma, gpus in product(MEANS_TOK, SIGMAS, CHIPS):
            one = row(mean_tok, sigma, gpus, name, constants, spec(mean_tok, sigma, gpus, args))
            said = "impossible" if one.speedup is None else f"{one.speedup:.2f}x  {one.pipeline}  over  {one.sync}"
            print(f"{name}, mean {mean_tok}, sigma {sigma}, {gpus} {GPU}: {said}", flush=True)  # noqa: T201
            out.append(one)
    return out


def summary(found: Sequence[Row]) -> dict[str, object]:
    """What the last line says, but for the rows."""
    ratios = [r.speedup for r in found if r.speedup is not None]
    p10, median, p90 = np.quantile(ratios, (0.1, 0.5, 0.9)).tolist()
    return {
        "median": round(median, 3),
        "p10": round(p10, 3),
        "p90": round(p90, 3),
        "least": min(ratios),
        "most": max(ratios),
        "share_at_least_1_6": round(sum(r >= CLAIM for r in ratios) / len(ratios), 3),
        "impossible": len(found) - len(ratios),
    }


# ---- the page --------------------------------------------------------------------------------------------------------

PAGE = """# How much faster is asynchronous?

Written by `python benchmarks/planner_talk.py --page docs/planner-talk.md`; nothing here was measured on chips.

Applied Compute's talk (2025) reports about {claim} times the speed of synchronous RL for a Qwen model of 30 billion
parameters, batches of {groups} prompts x {members} rollouts = {batch:,}, and a lag of at most {lag} steps.
It does not say how many chips, how long the answers, or how wide their spread. Here the planner fills these in:

- {model} on {chips} H100;
- mean lengths of {means} tokens, cap {cap_factor} x the mean, prompts of {prompt} tokens, sigma {sigmas};
- speeds as built in, and with decode and training each off by a factor of {off} in opposite directions.

Both sides of each ratio are the best that the search finds, simulated on the same rollouts; the synchronous one is
the fastest on all chips.

| speed-up of the best pipeline plan over the best synchronous plan | |
|---|---|
| median of {possible} combinations | **{median:.2f}x** |
| P10 to P90 | {p10:.2f}x to {p90:.2f}x |
| least, most | {least:.2f}x, {most:.2f}x |
| share with at least {claim}x | {share:.0%} |
| combinations that cannot run | {impossible} |

"P10 to P90" is over this grid, which counts every combination alike; nobody says that they are equally likely.

## By combination

Speed-up with the built-in constants, and its range when decode or training is off; below it the mean lag in steps and
what binds the pipeline plan.

{table}
## By one input at a time

Medians over everything else.

{sides}
## Why

- **Chips.** The synchronous plan waits for the longest of {batch:,} rollouts while its engines run empty, and the more
  chips share one batch, the emptier they are. That is what asynchrony wins back, so the gain grows with the chips.
- **Few chips leave no choice.** Weights, gradients and optimizer state take about 490 GB. Eight H100 hold them only if
  all eight train, in turns with generating: a pipeline on 8 needs LoRA or chips with more memory. On 16, memory ties
  up at least half of them in training, whatever the lengths ask for: with long answers, generation gets too little and
  asynchrony gains little or nothing.
- **Long answers.** The longer they are, the larger the part of a step that is decoding with engines full either way,
  and the less there is to win back. For 64 chips 1,000 tokens are short; for 16 chips 4,000 are long.
- **The bound on lag.** At most {slots} groups may be between admission and landing, and nothing that trains may be
  older than {lag} steps, so that a step cannot be much shorter than a fifth of what the longest rollout takes. Where
  that binds, the plan says "lag bound". A wide spread therefore cuts both ways: it hurts the synchronous plan more
  while answers are short, and the bound more when they are long.
- **Slots.** "generation: slots" means {max_seqs} sequences in each engine (`cluster.max_seqs`): both modes meet it,
  the synchronous one as waves.
- **What is not in these ranges.** Errors that both plans share cancel in a ratio; overheads that only one of them has
  do not. [The scoreboard](scoreboard.md) lists published rows in which asynchronous lost, and what was predicted.
"""


def page(found: Sequence[Row]) -> str:
    """Markdown."""
    told = summary(found)
    possible = [r for r in found if r.speedup is not None]
    return PAGE.format(
        claim=CLAIM,
        groups=GROUPS,
        members=MEMBERS,
        batch=GROUPS * MEMBERS,
        lag=LAG,
        slots=(LAG + 1) * GROUPS,
        model=MODEL,
        chips=", ".join(map(str, CHIPS)),
        means=", ".join(f"{m:,}" for m in MEANS_TOK),
        cap_factor=CAP_FACTOR,
        prompt=PROMPT_TOK,
        sigmas=" and ".join(map(str, SIGMAS)),
        off=OFF,
        possible=len(possible),
        median=told["median"],
        p10=told["p10"],
        p90=told["p90"],
        least=told["least"],
        most=told["most"],
        share=told["share_at_least_1_6"],
        impossible=told["impossible"],
        table=_grid(found),
        sides=_sides(possible),
        max_seqs=ClusterConfig().max_seqs,
    )


def _by(found: Iterable[Row], key: Callable[[Row], str]) -> list[tuple[str, list[Row]]]:
    sets: dict[str, list[Row]] = defaultdict(list)
    for one in found:
        sets[key(one)].append(one)
    return sorted(sets.items(), key=lambda item: -len(item[1]))


def _grid(found: Sequence[Row]) -> str:
    cells: dict[tuple[int, float, int], list[Row]] = defaultdict(list)
    for one in found:
        cells[one.mean_tok, one.sigma, one.gpus].append(one)
    lines = [
        "| mean tokens | sigma | " + " | ".join(f"{n} H100" for n in CHIPS) + " |",
        "|---|---|" + "---|" * len(CHIPS),
    ]
    for mean_tok, sigma in product(MEANS_TOK, SIGMAS):
        shown = " | ".join(_cell(cells[mean_tok, sigma, n]) for n in CHIPS)
        lines.append(f"| {mean_tok:,} | {sigma} | {shown} |")
    return "\n".join(lines) + "\n"


def _cell(found: Sequence[Row]) -> str:
    ratios = [r.speedup for r in found if r.speedup is not None]
    if not ratios:
        return "does not fit"
    middle = next((r for r in found if r.calibration == next(iter(CALIBRATIONS))), found[0])
    if middle.speedup is None:
        return f"{min(ratios):.2f} to {max(ratios):.2f}"
    shown = f"{middle.speedup:.2f}"
    shown = f"**{shown}**" if middle.speedup >= CLAIM else shown
    return f"{shown} ({min(ratios):.2f} to {max(ratios):.2f})<br>lag {middle.lag_mean:.1f}, {middle.pipeline_binds}"


def _sides(possible: Sequence[Row]) -> str:
    inputs: dict[str, Callable[[Row], str]] = {
        "chips": lambda r: f"{r.gpus} H100",
        "mean length": lambda r: f"{r.mean_tok:,} tokens",
        "spread": lambda r: f"sigma {r.sigma}",
        "speeds": lambda r: r.calibration,
        "pipeline bound by": lambda r: r.pipeline_binds,
        "synchronous bound by": lambda r: r.sync_binds,
    }
    lines = ["| input | value | combinations | median speed-up | at least 1.6x |", "|---|---|---|---|---|"]
    for what, key in inputs.items():
        for value, members in _by(possible, key):
            ratios = [r.speedup for r in members if r.speedup is not None]
            share = sum(r >= CLAIM for r in ratios) / len(ratios)
            lines.append(f"| {what} | {value} | {len(members)} | {statistics.median(ratios):.2f}x | {share:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the result as Markdown")
    parser.add_argument("--simulate-best", type=int, default=4, help="settings that each search simulates")
    parser.add_argument("--sim-steps", type=int, default=16, help="batches of each simulation")
    args = parser.parse_args()
    found = rows(args)
    if args.page is not None:
        args.page.write_text(page(found), encoding="utf-8")
    print(json.dumps(summary(found) | {"rows": [asdict(r) for r in found]}))  # noqa: T201


if __name__ == "__main__":
    main()
