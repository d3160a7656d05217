"""docs/metrics.md lists exactly the names that a run reports."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tiny import random_batch, recipe, tiny_model

from headrace.records import Batch
from headrace.telemetry.records import EvalRecord, RunSummary, StepRecord
from headrace.telemetry.report import NUMERICS
from headrace.trainer.torch_learner import build

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")


def names(heading: str) -> set[str]:
    """Names in the first columns of the tables under a heading of second level."""
    (section,) = re.findall(rf"^## {heading}.*?$(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    firsts = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in firsts for name in re.findall(r"`([^`]+)`", cell)}


def with_two_lags(batch: Batch) -> Batch:
    """The batch taken one version later, its first group sampled then, the others before."""
    for number, group in enumerate(batch.groups):
        for sample in group.samples:
            sample.policy_version_T[:] = 1 if number == 0 else 0
    return dataclasses.replace(batch, version=1)


def test_numerics_are_those_of_the_learner(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path))
    batch = with_two_lags(random_batch(3))
    reported: set[str] = set()
    for loss in ({"kind": "pg"}, {"kind": "ppo", "kl_coef": 0.1}, {"kind": "cispo"}, {"kind": "gspo"}):
        learner = build(config=recipe(loss=loss).model_dump(), model_dir=model)
        reported |= set(learner.forward_backward(batch).metrics)
    split = {n for n in reported if n.endswith(("_lag0", "_lag_pos"))}
    assert {n.removesuffix("_lag0").removesuffix("_lag_pos") for n in split} <= reported
    assert reported - split == names("Numerics")
    assert set(NUMERICS) - {"grad_norm"} <= reported


@pytest.mark.parametrize(
    ("record", "heading"),
    [(StepRecord, "One step"), (EvalRecord, "Evaluation"), (RunSummary, "End of the run")],
)
def test_records_are_explained(record: type, heading: str) -> None:
    fields = {f.name for f in dataclasses.fields(record)} - {"kind", "metrics"}
    # time_s and version mean the same in every record.
    assert fields - names(heading) - {"time_s", "version"} == set()
    assert names(heading) - fields == set()
