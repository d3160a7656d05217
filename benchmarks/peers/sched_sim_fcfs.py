"""sched-sim, one engine, timed. Runs in a virtual environment of its own (README.md beside this file).

    python sched_sim_fcfs.py arguments.json

The arguments are described in step_law.py. Its roofline is replaced by the given cost law; events, scheduler (first
come, first served: continuous batching with whole prompts), KV blocks and requests are its own. The clock runs over
`Simulator.run` alone. The last line of the output is one JSON object.
"""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from step_law import StepLaw, read_arguments, report

LAYERS, KV_HEADS, ELEM_BYTES = 32, 8, 2
WEIGHTS_GIB, BUFFER_GIB = 1.0, 0.5
GIB = 1024**3


def latency_of(law: StepLaw, prompt_tok: int, prefill_s: float) -> Any:
    """An object in the place of RooflineLatencyModel, with the methods that the engine calls."""

    class LawLatency:
        launch_overhead_s = 0.0

        def compute_prefill_step_time(self, prefill_tok: int) -> float:
            return prefill_tok / prompt_tok * prefill_s

        def compute_decode_step_time(self, running: int, context_tok: int) -> float:
            return law.decode_s(running, context_tok)

        def compute_mixed_step_time(self, prefill_tok: int, running: int, context_tok: int) -> float:
            return prefill_tok / prompt_tok * prefill_s + law.decode_s(running, context_tok)

    return LawLatency()


def hardware_of(args: dict[str, Any]) -> Any:
    """A chip with as much memory for KV entries as was asked for."""
    from sched_sim.hardware.profile import HardwareProfile  # noqa: PLC0415

    return HardwareProfile(
        name="given",
        vram_gb=args["kv_capacity_tok"] * args["kv_bytes_per_tok"] / GIB + WEIGHTS_GIB + BUFFER_GIB,
        parameter_count_billions=WEIGHTS_GIB * GIB / ELEM_BYTES / 1e9,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=args["kv_bytes_per_tok"] // (2 * LAYERS * KV_HEADS * ELEM_BYTES),
        dtype_bytes=ELEM_BYTES,
    )


def simulator_of(args: dict[str, Any], law: StepLaw) -> Any:
    """Engine, scheduler and memory, with all requests submitted at time 0."""
    from sched_sim.core.event_engine import Simulator  # noqa: PLC0415
    from sched_sim.core.request import Request  # noqa: PLC0415
    from sched_sim.memory.block_manager import BlockManager  # noqa: PLC0415
    from sched_sim.memory.preemption import PreemptionHandler  # noqa: PLC0415
    from sched_sim.schedulers.fcfs import FCFSScheduler  # noqa: PLC0415

    hardware = hardware_of(args)
    latency = latency_of(law, args["prompt_tok"], args["prefill_s"])
    blocks = BlockManager(hardware, safety_buffer_gb=BUFFER_GIB)
    scheduler = FCFSScheduler(blocks, latency, PreemptionHandler(blocks, latency), max_batch_size=args["max_running"])
    simulator = Simulator(hardware, scheduler)
    prompt_tok = args["prompt_tok"]
    simulator.submit_workload(
        [
            Request(request_id=str(number), arrived_at=0.0, prompt_tokens=prompt_tok, output_tokens=tok)
            for number, tok in enumerate(args["response_tok"])
        ]
    )
    return simulator


def main() -> None:
    args, law = read_arguments()
    simulator = simulator_of(args, law)
    began_s = time.perf_counter()
    simulator.run()
    sim_s = time.perf_counter() - began_s
    report(
        "sched_sim",
        importlib.metadata.version("sched-sim"),
        args,
        sim_s=sim_s,
        makespan_s=max(r.completed_at for r in simulator.all_requests),
        preemptions=sum(r.preemptions_count for r in simulator.all_requests),
    )


if __name__ == "__main__":
    main()
