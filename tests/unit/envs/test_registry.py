"""Kinds by name and by "module:attr"; rewards in three ways; errors with the nearest names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.config.schema import EnvConfig
from headrace.envs.registry import build_task
from headrace.errors import ConfigError, PluginError

MODULE = """
from pydantic import BaseModel, ConfigDict
from headrace.envs.env import Task
from headrace.envs.single_turn import SingleTurnEnv
from headrace.records import Prompt, Message

def make(n: int = 2, *, seed: int, eval_prompts: int) -> Task:
    def prompts(name, count):
        said = [(Message(role="user", content=f"{seed} {name} {i}"),) for i in range(count)]
        return [Prompt(id=f"{name}{i}", messages=messages) for i, messages in enumerate(said)]
    return Task(train=prompts("t", n), eval=prompts("e", eval_prompts), make_env=SingleTurnEnv,
                reward=lambda r, p: 1.0, fingerprint="f")

class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    n: int = 2

def strict(options, *, seed, eval_prompts):
    return make(options.n, seed=seed, eval_prompts=eval_prompts)

strict.Options = Strict
ready = make(1, seed=9, eval_prompts=1)
not_a_task = lambda: 3
number = 3

def reward(rollout, prompt):
    return 0.5
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "my_env_x3.py").write_text(MODULE)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_env_x3", raising=False)
    return tmp_path


def build(recipe_dir, kind, reward=None, env_reward="", **options):
    env = EnvConfig(kind=kind, options=options, eval_prompts=3, reward=env_reward)
    return build_task(env, seed=7, recipe_dir=recipe_dir, reward=reward)


@pytest.mark.parametrize("kind", ["my_env_x3:make", "my_env_x3:strict"])
def test_factories_get_options_and_what_their_signature_names(recipe, kind):
    task = build(recipe, kind, n=5)
    assert (len(task.train), len(task.eval)) == (5, 3)
    assert task.train[0].messages[0].content == "7 t 0"
    with pytest.raises(ConfigError, match=r"did you mean 'n'|valid names: "):
        build(recipe, kind, nn=5)


def test_a_ready_task(recipe):
    assert build(recipe, "my_env_x3:ready").train[0].messages[0].content == "9 t 0"
    with pytest.raises(ConfigError, match=r"takes no env\.options"):
        build(recipe, "my_env_x3:ready", n=1)


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("reasoning_gim", ConfigError, "did you mean 'reasoning_gym'"),
        ("my_env_x3:mak", PluginError, "did you mean 'make'"),
        ("no_module_x3:make", PluginError, "there is no module"),
        ("my_env_x3:number", PluginError, "it must be a Task or a factory"),
        ("my_env_x3:not_a_task", PluginError, "returned int"),
    ],
)
def test_kinds_that_do_not_exist(recipe, kind, error, says):
    with pytest.raises(error) as caught:
        build(recipe, kind)
    assert says in str(caught.value)


def test_empty_sets_are_refused(recipe):
    with pytest.raises(ConfigError, match="0 train and 3 eval"):
        build(recipe, "my_env_x3:make", n=0)


def test_rewards_argument_then_config_then_own(recipe):
    own = build(recipe, "my_env_x3:make")
    assert own.reward(None, None) == 1.0
    assert build(recipe, "my_env_x3:make", env_reward="my_env_x3:reward").reward(None, None) == 0.5
    assert build(recipe, "my_env_x3:make", env_reward="numeric").reward.__name__ == "numeric"

    def mine(rollout, prompt):
        return 0.0

    assert build(recipe, "my_env_x3:make", reward=mine, env_reward="numeric").reward is mine
    with pytest.raises(ConfigError, match=r"did you mean 'exact'"):
        build(recipe, "my_env_x3:make", env_reward="exct")
    with pytest.raises(ConfigError, match="it must be a function"):
        build(recipe, "my_env_x3:make", env_reward="my_env_x3:number")


def test_paths_start_at_the_recipe(tmp_path):
    (tmp_path / "d.jsonl").write_text("\n".join(f'{{"prompt": "q{i}", "answer": "{i}"}}' for i in range(8)))
    assert len(build(tmp_path, "jsonl", file="d.jsonl").train) == 5
    assert Path.cwd() != tmp_path
