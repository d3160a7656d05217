"""A free-running run with weights that swap under running requests: what old versions score is what the engine said."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_runs
from in_process import InProcessLauncher
from run_tools import steps_of, summary_of, train

TOLERANCE = 1e-4
"""Log-prob difference that float32 leaves between two ways to compute the same thing."""


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_numeric_mismatch_is_rounding_however_large_the_lag(tmp_path: Path, kv: str) -> None:
    model = tiny_runs.build_model(tmp_path / "model", ends=False)
    recipe = tiny_runs.tiny_recipe(
        model,
        tmp_path / "runs",
        steps=8,
        flow={"mode": "pipeline", "batch_groups": 1},
        sampling={"max_new_tok": 240},
        engine={"deterministic": False, "kv_on_swap": kv},
        loss={"exact_logp": "all"},
    )
    run = train(recipe, make_launcher=InProcessLauncher)
    steps = steps_of(summary_of(run).run_dir)
    assert len(steps) == 8
    for step in steps:
        assert step.metrics["exact/scored_frac"] == 1.0
        assert step.metrics["numeric_ratio/abs_max"] < TOLERANCE
        assert step.lag_max > 0 or step.metrics["lag_ratio/abs_max"] == 0.0
    assert max(step.metrics["exact/versions"] for step in steps) > 1, "weights swapped under running requests"
    assert max(step.metrics["lag_ratio/abs_max"] for step in steps) > 100 * TOLERANCE
