"""benchmarks/planner.py prints what it promises, and gives its peers the law that we simulate with."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from headrace.planner.constants import builtin
from headrace.planner.cost import EngineCost
from headrace.planner.engine_cost import engine_cost
from headrace.planner.hardware import chip
from headrace.planner.models import model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cost() -> EngineCost:
    return engine_cost(
        model("llama-3.1-8b"),
        chip("h100"),
        tp=1,
        precision="bf16",
        mem_frac=0.9,
        max_seqs=16,
        context_tok=1000.0,
        constants=builtin(),
    )


@pytest.mark.parametrize(("running", "context_tok"), [(1, 1), (1, 512), (7, 30_000), (16, 400_000)])
def test_the_peers_law_is_ours(cost: EngineCost, running: int, context_tok: int) -> None:
    law = loaded(BENCHMARKS / "peers" / "step_law.py").StepLaw(**json.loads(json.dumps(asdict(cost.decode))))
    assert law.decode_s(running, context_tok) == pytest.approx(cost.decode.step_s(running, context_tok), rel=1e-12)


def test_one_engine_agrees_with_a_step_by_step_loop(cost: EngineCost) -> None:
    """Each seat freed is taken by the next in line; two neighbours share a prompt, charged to the first of them."""
    tok = [(5, 400), (33, 33), (256, 1), (90, 700), (12, 48), (300, 299), (64, 2), (128, 31), (9, 77), (500, 41)]
    benchmark = loaded(BENCHMARKS / "planner.py")
    _, makespan_s = benchmark.one_engine(cost, benchmark.Given(tok))

    prompt_s = cost.prefill_s(512)
    waiting = [(n, group) for group, pair in enumerate(tok) for n in pair]
    running: list[list[int]] = []  # [tokens left, context, group]
    now_s = 0.0
    while waiting or running:
        while waiting and len(running) < cost.max_running:
            left, group = waiting.pop(0)
            now_s += 0.0 if any(r[2] == group for r in running) else prompt_s
            running.append([left, 512, group])
        # A step reads the context as it is in the middle of it.
        now_s += cost.decode.step_s(len(running), sum(r[1] for r in running) + len(running) / 2)
        running = [[left - 1, context + 1, group] for left, context, group in running if left > 1]
    assert makespan_s == pytest.approx(now_s, rel=1e-4)


def test_it_prints_one_object_last() -> None:
    command = [sys.executable, str(BENCHMARKS / "planner.py"), "--parts", "sequences_per_s", "peers"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--steps", "2"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["sequences_per_s"] > 0
    assert "peers" not in result, "there is no --peer-python"
