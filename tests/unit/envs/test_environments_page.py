"""docs/environments.md names every kind, option and built-in reward, and its own environment works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.config.schema import EnvConfig
from headrace.envs.arithmetic_game import ArithmeticGameOptions
from headrace.envs.dataset import DatasetOptions
from headrace.envs.jsonl import JsonlOptions
from headrace.envs.reasoning_gym import ReasoningGymOptions
from headrace.envs.registry import KINDS, build_task
from headrace.envs.rewards import BUILT_IN

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", [ReasoningGymOptions, JsonlOptions, DatasetOptions, ArithmeticGameOptions])
def test_every_option_is_on_the_page_and_has_a_description(model):
    for name, field in model.model_fields.items():
        assert f"`{name}`" in PAGE, name
        assert field.description, name


def test_every_kind_and_reward_is_on_the_page():
    for name in (*KINDS, *BUILT_IN):
        assert f"`{name}`" in PAGE, name


def test_the_pages_own_environment_works(tmp_path):
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "page_env_x5.py").write_text(source)
    env = EnvConfig(kind="page_env_x5:make", options={"most": 2}, eval_prompts=4)
    task = build_task(env, seed=0, recipe_dir=tmp_path)
    assert (len(task.train), len(task.eval)) == (100, 4)
