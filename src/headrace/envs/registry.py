"""From configuration to a Task: kinds by name, own ones by "module:attr"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headrace.config.schema import EnvConfig
from headrace.envs import arithmetic_game, dataset, jsonl, reasoning_gym
from headrace.envs.env import RewardFn, Task
from headrace.envs.grading import load_reward
from headrace.envs.options import parse_options
from headrace.errors import ConfigError, PluginError, did_you_mean
from headrace.plugins import resolve

KINDS = ("reasoning_gym", "jsonl", "dataset", "arithmetic_game")


def build_task(env: EnvConfig, *, seed: int, recipe_dir: Path, reward: RewardFn | str | None = None) -> Task:
    """Build prompts, episodes and reward of `env`. Same config and seed, same prompts in the same order.

    `reward` (callable, "module:function" or built-in name) comes before env.reward, which comes before the kind's own.
    Relative paths and modules start at `recipe_dir`. Raises ConfigError, PluginError or DataError.
    """
    chosen = reward if reward is not None else env.reward
    own_reward = load_reward(chosen, recipe_dir) if chosen else None
    task = _kind(env, seed, recipe_dir, own_reward)
    if own_reward is not None:
        task = replace(task, reward=own_reward)
    if not task.train or not task.eval:
        raise ConfigError(f"env.kind = {env.kind!r} gave {len(task.train)} train and {len(task.eval)} eval prompts; "
                          "both must have some")  # fmt: skip
    return task


def _kind(env: EnvConfig, seed: int, recipe_dir: Path, own_reward: RewardFn | None) -> Task:
    n = env.eval_prompts
    match env.kind:
        case "reasoning_gym":
            gym_options = parse_options(reasoning_gym.ReasoningGymOptions, env.options, kind=env.kind)
            return reasoning_gym.build(gym_options, seed=seed, eval_prompts=n)
        case "jsonl":
            jsonl_options = parse_options(jsonl.JsonlOptions, env.options, kind=env.kind)
            return jsonl.build(jsonl_options, seed=seed, eval_prompts=n, recipe_dir=recipe_dir, reward=own_reward)
        case "dataset":
            data_options = parse_options(dataset.DatasetOptions, env.options, kind=env.kind)
            return dataset.build(data_options, seed=seed, eval_prompts=n, recipe_dir=recipe_dir, reward=own_reward)
        case "arithmetic_game":
            game_options = parse_options(arithmetic_game.ArithmeticGameOptions, env.options, kind=env.kind)
            return arithmetic_game.build(game_options, seed=seed, eval_prompts=n, max_turns=env.max_turns)
        case kind if ":" in kind:
            return _own(kind, env.options, {"seed": seed, "eval_prompts": n, "recipe_dir": recipe_dir})
    raise ConfigError(f"env.kind = {env.kind!r} is unknown; {did_you_mean(env.kind, KINDS)} "
                      "(or 'module:attr' of your own)")  # fmt: skip


def _own(kind: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> Task:
    """A Task, or a factory of one. A factory gets `options` as keywords (or, if it has an attribute `Options`, a
    pydantic model, one validated instance), and seed, eval_prompts and recipe_dir if its signature names them."""
    found = resolve(kind, what="env.kind", search=Path(given["recipe_dir"]).resolve())
    if isinstance(found, Task):
        if options:
            raise ConfigError(f"env.kind = {kind!r} is a Task, not a factory: it takes no env.options "
                              f"({', '.join(options)})")  # fmt: skip
        return found
    if not callable(found):
        raise PluginError(f"env.kind = {kind!r} is {type(found).__name__}; it must be a Task or a factory of one")
    parameters = inspect.signature(found).parameters
    extra = {name: value for name, value in given.items() if name in parameters and name not in options}
    schema = getattr(found, "Options", None)
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        task = found(parse_options(schema, options, kind=kind), **extra)
    else:
        _check_keywords(found, options, kind)
        task = found(**options, **extra)
    if not isinstance(task, Task):
        raise PluginError(f"env.kind = {kind!r} returned {type(task).__name__}; it must return headrace.envs.env.Task")
    return task


def _check_keywords(factory: Callable[..., Any], options: Mapping[str, Any], kind: str) -> None:
    parameters = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            raise ConfigError(f"env.options.{name} = {options[name]!r} is unknown to {kind!r}; "
                              + did_you_mean(name, parameters))  # fmt: skip
