"""Folders of Hugging Face `datasets`: columns are mapped, splits named, errors say what there is."""

from __future__ import annotations

import pytest

from headrace.config.schema import EnvConfig
from headrace.envs.registry import build_task
from headrace.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


def build(folder, **options):
    env = EnvConfig(kind="dataset", options={"path": "data", **options}, eval_prompts=2)
    return build_task(env, seed=0, recipe_dir=folder)


def table(n, offset=0):
    return datasets.Dataset.from_list([{"q": f"q {i}", "a": str(i), "level": 1} for i in range(offset, offset + n)])


def test_columns_are_mapped(tmp_path):
    table(6).save_to_disk(str(tmp_path / "data"))
    task = build(tmp_path, prompt="q", answer="a")
    assert (len(task.train), len(task.eval)) == (4, 2)
    assert task.train[0].messages[0].content == f"q {task.train[0].answer}"
    assert task.train[0].row["level"] == 1


def test_splits(tmp_path):
    datasets.DatasetDict({"train": table(4), "test": table(3, 2)}).save_to_disk(str(tmp_path / "data"))
    task = build(tmp_path, prompt="q", answer="a", eval_split="test")
    assert [p.answer for p in task.eval] == ["2", "3"]
    assert [p.answer for p in task.train] == ["0", "1"]  # what is held out is not trained on
    with pytest.raises(ConfigError, match="did you mean 'test'"):
        build(tmp_path, prompt="q", answer="a", eval_split="tests")


def test_errors(tmp_path):
    with pytest.raises(DataError, match="is no folder written by"):
        build(tmp_path)
    table(6).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(DataError, match="row 0: column 'prompt'"):
        build(tmp_path)
    with pytest.raises(ConfigError, match="without splits"):
        build(tmp_path, prompt="q", eval_split="test")
