"""Prompts from a folder that Hugging Face `datasets` saved with save_to_disk (a Dataset or a DatasetDict)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.envs.env import RewardFn, Task
from headrace.envs.jsonl import JsonlOptions, prompt_of, require_answers, split
from headrace.envs.options import EnvOptions
from headrace.envs.prompts import fingerprint, question_key
from headrace.envs.rewards import exact
from headrace.envs.single_turn import SingleTurnEnv
from headrace.errors import ConfigError, DataError, boundary, did_you_mean
from headrace.records import Prompt


class DatasetOptions(EnvOptions):
    """Options of env.kind = "dataset"."""

    path: str
    """Folder written by save_to_disk, relative to the recipe."""
    split: str = "train"
    """Split to train on, if the folder is a DatasetDict."""
    eval_split: str = ""
    """Held-out split; empty holds out env.eval_prompts questions of `split`, chosen by content hash."""
    prompt: str = "prompt"
    """Column with the question as text."""
    messages: str = "messages"
    """Column with a list of {role, content}; used where the prompt column is missing."""
    answer: str = "answer"
    """Column with the gold answer; may be missing."""
    id: str = "id"
    """Column with a unique id; where missing, the row number is the id."""
    template: str = "{prompt}"
    """Text of the user message; {prompt} is replaced by the prompt column."""
    system: str = ""
    """System message put before prompts given as text."""


def build(options: DatasetOptions, *, seed: int, eval_prompts: int, recipe_dir: Path, reward: RewardFn | None) -> Task:
    """Load, map columns and split. The kind's own reward is `exact`.

    Raises DataError with folder and row, ConfigError for a wrong split or a missing `datasets` package.
    """
    with boundary(ConfigError, "env.kind = 'dataset' needs the package datasets"):
        import datasets  # noqa: PLC0415  slow to import; only this kind needs it
    folder = recipe_dir / options.path
    with boundary(DataError, f"{folder} is no folder written by datasets.save_to_disk"):
        loaded = datasets.load_from_disk(str(folder))
    train = _prompts(_one(loaded, options.split, "split", folder), options, folder, prefix="")
    if options.eval_split:
        held_out = _prompts(_one(loaded, options.eval_split, "eval_split", folder), options, folder, prefix="eval-")
        held_out = held_out[:eval_prompts]
        asked = {question_key(p) for p in held_out}
        train = [p for p in train if question_key(p) not in asked]
    else:
        train, held_out = split(train, eval_prompts=eval_prompts, seed=seed, source=str(folder))
    require_answers(train + held_out, reward, str(folder))
    return Task(
        train=train, eval=held_out, make_env=SingleTurnEnv, reward=reward or exact,
        fingerprint=fingerprint(train, held_out), families=tuple(sorted({p.task for p in train})),
    )  # fmt: skip


def _one(loaded: Any, name: str, option: str, folder: Path) -> Any:
    if not isinstance(loaded, dict):
        if option == "eval_split":
            raise ConfigError(f"env.options.eval_split = {name!r}: {folder} is one data set without splits")
        return loaded
    if name not in loaded:
        raise ConfigError(f"env.options.{option} = {name!r} is not in {folder}; {did_you_mean(name, loaded)}")
    return loaded[name]


def _prompts(rows: Any, options: DatasetOptions, folder: Path, *, prefix: str) -> list[Prompt]:
    columns = JsonlOptions(
        file=str(folder), prompt=options.prompt, messages=options.messages, answer=options.answer, id=options.id,
        template=options.template, system=options.system,
    )  # fmt: skip
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        where = f"{folder}, row {number}"
        prompt = prompt_of(row, columns, where=where, default_id=f"{prefix}{number}", task=folder.name)
        if prompt.id in seen:
            raise DataError(f"{where}: id {prompt.id!r} is already that of row {seen[prompt.id]}; ids must be unique")
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{folder} holds no prompts")
    return prompts
