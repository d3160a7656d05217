"""How fast the planner is.

    python benchmarks/planner.py [--parts sequences_per_s plan_s peers] [--repeats 7] [--steps 40]
                                 [--plan-repeats 5] [--peer-python /tmp/venv-sim/bin/python] [--rounds 3]

    sequences_per_s   rollouts per second that the simulator takes from admission to their end, one process: 64 groups
                      of 16, 16 engines, pipeline with lag 4, lognormal lengths; the real flow controller decides
    plan_s            seconds of planning for 64 H200s in this process after one warm-up, and plan_cli_s of the whole
                      command `headrace plan` in a process of its own
    peers             the same requests on one engine with the same cost law through other open simulators
                      (peers/README.md), in turns with ours; only with --peer-python. `ratio`: our sequences per
                      second over theirs. `makespan_ratio`: our predicted time until the last request ends over theirs

Last line: one JSON object; each number is the median of the repeats.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config.schema import FlowConfig
from headrace.planner.constants import builtin
from headrace.planner.cost import DecodeTable, EngineCost, HandOffCost, TrainerCost
from headrace.planner.draws import Draws
from headrace.planner.engine_cost import engine_cost
from headrace.planner.hardware import chip
from headrace.planner.models import model
from headrace.planner.plan import plan
from headrace.planner.simulate import Parts, Simulation
from headrace.planner.spec import ClusterConfig, LimitsConfig, PlanSpec, ResponseConfig

SEATS = 256
ENGINES = 16
PEERS = Path(__file__).parent / "peers"
SIMULATORS = {"vidur": "vidur_sim.py", "sched_sim": "sched_sim_fcfs.py"}
PLANNED = PlanSpec(
    model="qwen3-30b-a3b",
    batch_groups=64,
    group_size=16,
    prompt_tok=512,
    response=ResponseConfig(mean_tok=8000, cap_tok=32768),
    cluster=ClusterConfig(gpu="h200", num_gpus=64),
    limits=LimitsConfig(max_lag_steps=4),
)
CLI_FLAGS = {
    "--model": PLANNED.model,
    "--gpu": PLANNED.cluster.gpu,
    "--num-gpus": PLANNED.cluster.num_gpus,
    "--batch-groups": PLANNED.batch_groups,
    "--group-size": PLANNED.group_size,
    "--prompt-tok": PLANNED.prompt_tok,
    "--response-tok": PLANNED.response.mean_tok,
    "--response-cap": PLANNED.response.cap_tok,
    "--max-lag-steps": PLANNED.limits.max_lag_steps,
}
ONE_ENGINE_MODEL, ONE_ENGINE_CHIP = "llama-3.1-8b", "h100"
PROMPT_TOK = 512
RESPONSES = ResponseConfig(mean_tok=1000, cap_tok=4096)
WARM_UPS = 3
"""Of our short simulation before a turn; a peer's runs for seconds and needs none."""


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


def plan_s(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a plan for 64 chips is there: of the call, and of the command with its start."""
    calls_s = [plan(PLANNED).plan_s for _ in range(args.plan_repeats + 1)][1:]
    command = [sys.executable, "-m", "headrace", "plan", "--json"]
    command += [str(part) for flag in CLI_FLAGS.items() for part in flag]
    commands_s = []
    for _ in range(args.plan_repeats):
        began_s = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        commands_s.append(time.perf_counter() - began_s)
    return {
        "plan_s": round(statistics.median(calls_s), 3),
        "plan_cli_s": round(statistics.median(commands_s), 3),
    }


@dataclass(frozen=True)
class Given:
    """One batch of requests, all known beforehand."""

    tok: Sequence[Sequence[int]]
    """(groups, members)"""

    def lengths(self, ordinal: int, attempt: int = 0) -> Sequence[int]:
        return self.tok[ordinal]

    def prompt_tok(self, ordinal: int) -> int:
        return PROMPT_TOK

    def rewards(self, ordinal: int, attempt: int = 0) -> Sequence[float]:
        return (0.0, 1.0)

    def episode(self, ordinal: int, member: int, attempt: int = 0) -> None:
        return None


def one_engine(cost: EngineCost, requests: Given) -> tuple[float, float]:
    """All requests at once on one engine, as one synchronous step: (seconds it took, predicted makespan)."""
    parts = Parts(
        flow=FlowConfig(mode="sync", batch_groups=len(requests.tok), group_size=2),
        engines=(cost,),
        trainer=TrainerCost(s_per_tok=0.0, s_per_tok2=0.0, fixed_s=0.0, mfu=1.0),
        hand_off=HandOffCost(publish_s=0.0, transfer_s=0.0, pause_s=0.0, bytes=0.0),
    )
    simulated = Simulation(parts, requests, steps=1)
    began_s = time.perf_counter()
    metrics = simulated.run()
    took_s = time.perf_counter() - began_s
    if metrics.preemptions:
        sys.exit(f"{metrics.preemptions} preemptions: simulators differ in whom they preempt; simulate fewer sequences")
    return took_s, metrics.wall_s


def peer_arguments(cost: EngineCost, requests: Given) -> dict[str, Any]:
    """What peers/step_law.py describes. Two members share a prompt here; the peers charge half of it to each."""
    shape = model(ONE_ENGINE_MODEL)
    return {
        "response_tok": [tok for group in requests.tok for tok in group],
        "prompt_tok": PROMPT_TOK,
        "prefill_s": cost.prefill_s(PROMPT_TOK) / 2,
        "max_running": cost.max_running,
        "kv_capacity_tok": cost.kv_capacity_tok,
        "decode": asdict(cost.decode),
        "kv_bytes_per_tok": round(shape.kv_bytes(1.0) - shape.kv_bytes(0.0)),
    }


def run_peer(python: str, name: str, arguments: Path) -> dict[str, Any]:
    """One simulation by a peer, in its own environment."""
    command = [python, str(PEERS / SIMULATORS[name]), str(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["preemptions"]:
        sys.exit(f"{name}: {found['preemptions']} preemptions; simulate fewer sequences")
    return found


def peers(args: argparse.Namespace) -> dict[str, Any]:
    """Ours, each peer, ours, each peer, ..."""
    if args.peer_python is None:
        return {}
    groups = args.sequences // 2
    spec = PlanSpec(batch_groups=groups, group_size=2, prompt_tok=PROMPT_TOK, response=RESPONSES)
    draws = Draws(spec, seed=spec.seed)
    requests = Given([draws.lengths(ordinal) for ordinal in range(groups)])
    cost = engine_cost(
        model(ONE_ENGINE_MODEL),
        chip(ONE_ENGINE_CHIP),
        tp=1,
        precision="bf16",
        mem_frac=0.9,
        max_seqs=SEATS,
        context_tok=PROMPT_TOK + draws.law.second_moment() / (2 * draws.law.mean_tok),
        constants=builtin(),
    )
    ours: list[float] = []
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIMULATORS}
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder) / "arguments.json"
        arguments.write_text(json.dumps(peer_arguments(cost, requests)))
        for number in range(args.rounds):
            took = [one_engine(cost, requests) for _ in range(args.repeats + WARM_UPS)][WARM_UPS:]
            makespan_s = took[-1][1]
            ours.append(statistics.median(2 * groups / took_s for took_s, _ in took))
            print(f"round {number + 1}: headrace {ours[-1]:,.0f}/s")  # noqa: T201
            for name, rounds in theirs.items():
                rounds.append(run_peer(args.peer_python, name, arguments))
                print(f"round {number + 1}: {name} {rounds[-1]['sequences_per_s']:,.0f}/s")  # noqa: T201
    rate = statistics.median(ours)
    found: dict[str, Any] = {}
    for name, rounds in theirs.items():
        peer_rate = statistics.median(r["sequences_per_s"] for r in rounds)
        found[name] = {
            "version": rounds[-1]["version"],
            "sequences_per_s": round(peer_rate, 1),
            "ratio": round(rate / peer_rate, 1),
            "makespan_ratio": round(makespan_s / rounds[-1]["makespan_s"], 5),
        }
    return {
        "one_engine_sequences_per_s": round(rate),
        "one_engine_makespan_s": round(makespan_s, 3),
        "sequences": 2 * groups,
        "rounds": args.rounds,
        "peers": found,
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "sequences_per_s": sequences_per_s,
    "plan_s": plan_s,
    "peers": peers,
}
"""Each part adds its numbers to the result."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="optimizer batches per simulation")
    parser.add_argument("--plan-repeats", type=int, default=5)
    parser.add_argument("--peer-python", help="of the environment that the peers are installed in")
    parser.add_argument("--rounds", type=int, default=3, help="turns of ours and each peer")
    parser.add_argument("--sequences", type=int, default=2048, help="requests on the one engine")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for part in args.parts:
        result |= PARTS[part](args)
    result |= {"repeats": args.repeats, "steps": args.steps}
    result |= {"python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
