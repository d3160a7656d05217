"""Vidur (MLSys 2024), one engine, timed. Runs in a virtual environment of its own (README.md beside this file).

    python vidur_sim.py arguments.json

The arguments are described in step_law.py. Vidur's package holds no profiles (it fetches them from a model hub when it
starts), so its predictor of execution times is replaced by the given cost law; events, scheduler (its vLLM one), KV
blocks and requests are Vidur's own. Metrics, traces and plots are off, which makes it faster. The clock runs over
`Simulator.run` alone: neither imports nor set-up count. The last line of the output is one JSON object.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import tempfile
import time
from typing import Any

from step_law import StepLaw, read_arguments, report

MODEL = "meta-llama/Llama-3-8B"
PREFILL_BATCH_TOK = 4096
"""Its default for max_tokens_in_batch."""


def predictor_of(law: StepLaw, prefill_s: float) -> type:
    """A class in the place of Vidur's regression models, which it builds itself."""
    from vidur._native.entities import ExecutionTime  # noqa: PLC0415

    class LawPredictor:
        """Either prompts or decode steps are in a batch of the vLLM scheduler, never both."""

        def __init__(self, **_: Any) -> None: ...

        def get_execution_time(self, batch: Any, _: int) -> Any:
            if batch.num_prefill_tokens:
                seconds = prefill_s * batch.size
            else:
                seconds = law.decode_s(batch.size, batch.total_num_kv_tokens)
            return ExecutionTime(1, *[0.0] * 13, seconds * 1e3)  # the last term counts once, in ms

    return LawPredictor


def generator_of(requests: list[Any]) -> type:
    """A class in the place of Vidur's generators: the given requests, in the given order."""

    class GivenRequests:
        def __init__(self, _: Any) -> None: ...

        def generate(self) -> list[Any]:
            return requests

    return GivenRequests


def configuration(args: dict[str, Any], folder: str) -> Any:
    """One replica on one chip."""
    from vidur import config  # noqa: PLC0415

    longest_tok = args["prompt_tok"] + max(args["response_tok"]) + 1
    return config.SimulationConfig(
        log_level="error",
        cluster_config=config.ClusterConfig(
            num_replicas=1,
            replica_config=config.ReplicaConfig(model_name=MODEL, num_pipeline_stages=1, tensor_parallel_size=1),
            cache_config=config.CacheConfig(num_blocks=args["kv_capacity_tok"] // 16, watermark_blocks_fraction=0.0),
            replica_scheduler_config=config.VllmSchedulerConfig(
                batch_size_cap=args["max_running"], max_tokens_in_batch=PREFILL_BATCH_TOK
            ),
        ),
        request_generator_config=config.SyntheticRequestGeneratorConfig(
            length_generator_config=config.FixedRequestLengthGeneratorConfig(max_tokens=longest_tok)
        ),
        metrics_config=config.MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, store_plots=False, output_dir=folder
        ),
    )


def main() -> None:
    args, law = read_arguments()
    from vidur.entities import Request  # noqa: PLC0415
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry as Predictors  # noqa: PLC0415
    from vidur.request_generator import RequestGeneratorRegistry as Generators  # noqa: PLC0415
    from vidur.simulator import Simulator  # noqa: PLC0415
    from vidur.types import ExecutionTimePredictorType, RequestGeneratorType  # noqa: PLC0415

    # A prefill yields the first token without a decode step: one token more makes as many steps as response_tok says.
    requests = [Request(0.0, args["prompt_tok"], tok + 1) for tok in args["response_tok"]]
    Predictors.unregister(ExecutionTimePredictorType.RANDOM_FORREST)
    Predictors.register(ExecutionTimePredictorType.RANDOM_FORREST, predictor_of(law, args["prefill_s"]))
    Generators.unregister(RequestGeneratorType.SYNTHETIC)
    Generators.register(RequestGeneratorType.SYNTHETIC, generator_of(requests))
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        simulator = Simulator(configuration(args, folder))
        with contextlib.redirect_stdout(nowhere):
            began_s = time.perf_counter()
            simulator.run()
            sim_s = time.perf_counter() - began_s
    report(
        "vidur",
        importlib.metadata.version("vidur"),
        args,
        sim_s=sim_s,
        makespan_s=max(r.completed_at for r in requests),
        preemptions=sum(r.num_restarts for r in requests),
    )


if __name__ == "__main__":
    main()
