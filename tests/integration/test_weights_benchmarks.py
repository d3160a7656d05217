"""benchmarks/weights_codec.py and weights_e2e.py print what they promise, on weights of a few thousand elements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_runs
from safetensors.numpy import save_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPES = {"model.embed_tokens.weight": (600, 64), "model.layers.0.q.weight": (64, 64), "model.norm.weight": (64,)}


def last_object(script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """What weights_pairs.py would leave behind, but for its size."""
    rng = np.random.default_rng(0)
    master = {name: rng.standard_normal(shape).astype(np.float32) * 0.03 for name, shape in SHAPES.items()}
    for step in range(4):
        served = {name: values.astype(ml_dtypes.bfloat16) for name, values in master.items()}
        save_file(served, tmp_path / f"{step}.safetensors")
        for values in master.values():
            values += rng.uniform(-1e-6, 1e-6, values.shape).astype(np.float32)
    rows = [
        {"start": start, "lr": 1e-6, "step": step, "old": f"{step - 1}.safetensors", "new": f"{step}.safetensors"}
        for start in ("running", "resumed")
        for step in (1, 3)
    ]
    (tmp_path / "index.json").write_text(json.dumps({"model": "three tensors", "pairs": rows}))
    return tmp_path


def test_codec(pairs: Path) -> None:
    result = last_object("weights_codec.py", "--pairs", str(pairs), "--repeats", "1")
    assert result["pairs"] == 4
    for start in ("", "_resumed"):
        # 1 to 2 % of the elements change, by one step: index and value take 6 bytes for each.
        assert 50 < result[f"ratio{start}"] < 400
        assert result[f"gain_vs_index_value{start}"] == pytest.approx(
            6 * result[f"changed{start}"] / 2 * result[f"ratio{start}"], rel=0.1
        )
        assert result[f"gain_vs_xor_zstd{start}"] > 1
        assert result[f"gain_vs_gap_zstd{start}"] > 1
        assert 0.3 < result[f"ratio_to_limit{start}"] < 1
    for key in ("encode_gb_s_core", "apply_gb_s_core", "peak_mem_ratio"):
        assert result[key] >= 0


def test_links_and_faults(pairs: Path) -> None:
    arguments = ["--parts", "links", "faults", "--pairs", str(pairs), "--replicas", "2", "--gbit-s", "0.5"]
    result = last_object("weights_e2e.py", *arguments)
    assert result["pause_share_of_reload"] is None, "that part was not asked for"
    (row,) = result["links"]
    assert row["full"]["bytes"] == result["full_bytes"] == 2 * sum(np.prod(shape) for shape in SHAPES.values())
    assert 0 < row["delta"]["bytes"] < row["full"]["bytes"]
    assert row["full"]["total_s"] > 2 * row["full"]["bytes"] * 8e-9 / 0.5, "two replicas share the link"
    recovery = {row["fault"]: row for row in result["recovery"]}
    assert len(recovery) >= 15
    assert recovery["none (an update)"]["way"] == "delta"
    assert recovery["drifted base"]["way"] == "keyframe"
    assert recovery["crash in apply"]["way"] == "rollback, delta"
    assert recovery["crash in apply and undo"]["way"] == "fenced, keyframe"
    assert recovery["killed in apply (journal)"]["way"] == "undo journal, delta"
    assert recovery["pause takes too long"]["seconds"] > 0.5


def test_engine(tmp_path: Path) -> None:
    model = tiny_runs.build_model(tmp_path / "model")
    result = last_object("weights_e2e.py", "--parts", "engine", "--elems", "3000", "--model", str(model))
    assert result["engine_delta_pause_s"] > 0
    assert result["pause_share_of_reload"] > 0
