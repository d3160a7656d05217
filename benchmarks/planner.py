"""How fast the planner is.

    python benchmarks/planner.py [--parts sequences_per_s] [--repeats 7] [--steps 40]

    sequences_per_s   rollouts per second that the simulator takes from admission to their end, one process: 64 groups
                      of 16, 16 engines, pipeline with lag 4, lognormal lengths; the real flow controller decides

Last line: one JSON object; each number is the median of the repeats.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from headrace.config.schema import FlowConfig
from headrace.planner.cost import DecodeTable, EngineCost, HandOffCost, TrainerCost
from headrace.planner.draws import Draws
from headrace.planner.simulate import Parts, Simulation
from headrace.planner.spec import PlanSpec

SEATS = 256
ENGINES = 16


def engine() -> EngineCost:
    """An 8-billion-parameter model on one H100, roughly: what matters here is that nothing is degenerate."""
    seats = range(SEATS + 1)
    table = DecodeTable(
        mem_s=(0.007,) * (SEATS + 1),
        mem_s_per_tok=6e-8,
        flop_s=tuple(4e-5 * b for b in seats),
        flop_s_per_tok=1e-10,
        other_s=tuple(0.003 + 1e-6 * b for b in seats),
    )
    return EngineCost(
        decode=table,
        prefill_s_per_tok=4e-5,
        prefill_s_per_tok2=1e-9,
        prefill_s_min=0.01,
        kv_capacity_tok=350_000,
        max_running=SEATS,
    )


def simulation(spec: PlanSpec, draws: Draws, *, steps: int) -> Simulation:
    """A plan whose two sides are about as fast as each other."""
    flow = FlowConfig(mode="pipeline", batch_groups=spec.batch_groups, group_size=spec.group_size, max_lag_steps=4)
    parts = Parts(
        flow=flow,
        engines=(engine(),) * ENGINES,
        trainer=TrainerCost(s_per_tok=1.2e-5, s_per_tok2=1e-10, fixed_s=2.0, mfu=0.35),
        hand_off=HandOffCost(publish_s=0.5, transfer_s=2.0, pause_s=0.3, bytes=1.6e10),
    )
    return Simulation(parts, draws, steps=steps)


def sequences_per_s(args: argparse.Namespace) -> dict[str, Any]:
    """Rollouts per second of the simulator. Lengths are drawn before the clock starts: a search draws them once."""
    spec = PlanSpec(batch_groups=64, group_size=16)
    draws = Draws(spec, seed=spec.seed)
    simulation(spec, draws, steps=args.steps).run()
    rates = []
    for repeat in range(args.repeats):
        simulated = simulation(spec, draws, steps=args.steps)
        began_s = time.perf_counter()
        simulated.run()
        seconds = time.perf_counter() - began_s
        rollouts = sum(e.seats - e.b for e in simulated.engines)
        rates.append(rollouts / seconds)
        print(f"repeat {repeat}: {rollouts} rollouts in {seconds:.3f} s = {rates[-1]:,.0f}/s")  # noqa: T201
    return {"sequences_per_s": round(statistics.median(rates)), "sequences_per_s_target": 100_000}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"sequences_per_s": sequences_per_s}
"""Each part adds its numbers to the result."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="optimizer batches per simulation")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for part in args.parts:
        result |= PARTS[part](args)
    result |= {"repeats": args.repeats, "steps": args.steps}
    result |= {"python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
