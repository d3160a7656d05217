"""loss.exact_logp in the learner: what is published is what old tokens are scored by."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tiny import batch_of, random_batch, recipe, tiny_model

from headrace.config.schema import RunConfig
from headrace.records import Batch
from headrace.trainer.torch_learner import TorchLearner, build
from headrace.trainer.worker import LearnerServant, build_servant

NAMES = {
    f"{factor}/{name}"
    for factor in ("numeric_ratio", "lag_ratio")
    for name in ("kl_k1", "kl_k3", "abs_mean", "abs_max", "ess_token")
} | {f"exact/{name}" for name in ("scored_frac", "unknown_tok", "forward_frac", "versions", "score_s")}


PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_page_lists_exactly_these_names() -> None:
    (section,) = re.findall(r"^## Exact factors.*?$(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == NAMES


def settings(exact: str = "all", **changes: Any) -> RunConfig:
    sections: dict[str, Any] = {"loss": {"exact_logp": exact, "exact_logp_frac": 0.4}, "optim": {"lr": 0.02}}
    return recipe(**{**sections, **changes})


def servant_of(model: Path, config: RunConfig) -> LearnerServant:
    return build_servant(
        factory="torch",
        kwargs={"config": config.model_dump(), "model_dir": str(model)},
        sync=config.sync.model_dump(),
    )


def sampled(learner: TorchLearner, batch: Batch, version: int) -> Batch:
    """The batch as an engine with the learner's present weights would have made it."""
    logp = iter(learner.logp(batch).tolist())
    rows = []
    for s in batch.samples:
        row = s.logp_T.copy()
        row[s.loss_mask_T] = [next(logp) for _ in range(int(s.loss_mask_T.sum()))]
        versions = np.full(len(s.ids_T), version, np.int32)
        rows.append(replace(s, logp_T=row, policy_version_T=versions, kv_version_T=versions))
    groups = [[s for s in rows if s.group_id == g.group_id] for g in batch.groups]
    return batch_of(*groups, version=version)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_factors_of_old_and_new_samples(tmp_path: Path, lora_rank: int) -> None:
    model = tiny_model(tmp_path / "model")
    config = settings(lora={"rank": lora_rank})
    learner = build(config=config.model_dump(), model_dir=str(model))
    servant = servant_of(model, config)
    store = str(tmp_path / "store")
    servant.publish(store, "run-1", 0)
    first, second = sampled(learner, random_batch(0), 0), sampled(learner, random_batch(1), 0)
    ((report,), _) = servant.train(first)
    assert set(report.metrics) >= NAMES
    assert report.metrics["numeric_ratio/abs_max"] < 1e-4
    assert report.metrics["lag_ratio/abs_max"] == 0.0
    assert report.metrics["exact/forward_frac"] == 0.0, "tokens of lag 0 cost nothing"
    servant.publish(store, "run-1", 1)
    ((report,), _) = servant.train(replace(second, version=1))
    table = report.metrics
    assert table["exact/scored_frac"] == 1.0
    assert table["numeric_ratio/abs_max"] < 1e-4, "version 0 is scored by version 0"
    assert table["lag_ratio/abs_mean"] > 100 * table["numeric_ratio/abs_mean"]
    assert table["lag_ratio/kl_k1"] == pytest.approx(table["kl_infer_train/k1"], abs=1e-4)
    assert 0 < table["exact/forward_frac"] <= 1.0


def test_several_updates_and_a_bound(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    loss = {"kind": "ppo", "exact_logp": "sampled", "exact_logp_frac": 0.4}
    config = settings(loss=loss, trainer={"updates_per_batch": 2})
    servant = servant_of(model, config)
    servant.publish(str(tmp_path / "store"), "run-1", 0)
    reports, _ = servant.train(random_batch(0))
    assert "exact/scored_frac" not in reports[0].metrics
    assert 0 < reports[-1].metrics["exact/scored_frac"] < 1.0
    assert 0 < reports[-1].metrics["exact/forward_frac"] <= 0.4
    assert reports[-1].metrics["lag_ratio/abs_max"] == 0.0, "now is the batch's version, not the half-way weights"


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    weights = []
    for exact in ("off", "all"):
        servant = servant_of(model, settings(exact))
        servant.publish(str(tmp_path / f"store-{exact}"), "run-1", 0)
        reports, _ = servant.train(random_batch(0))
        assert ("exact/scored_frac" in reports[0].metrics) == (exact == "all")
        weights.append({name: array.copy() for name, array in servant._learner.named_arrays()})
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync": {"mode": "full"}}, "set sync.mode = 'delta'"),
        ({"flow": {"mode": "pipeline", "max_lag_steps": 8}}, "newest 8 versions"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        settings("all", **changes)
