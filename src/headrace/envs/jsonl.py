"""Prompts from a JSON Lines file: one object per line with `prompt` (text) or `messages`, and perhaps `answer`, `id`.

Lines end at newline characters only: the odd separators that Python's splitlines() also honours (U+2028, form feed,
...) are ordinary characters inside JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from pydantic import Field

from headrace.envs.env import RewardFn, Task
from headrace.envs.options import EnvOptions
from headrace.envs.prompts import fingerprint, question_key, split_by_content, with_system
from headrace.envs.rewards import exact
from headrace.envs.single_turn import SingleTurnEnv
from headrace.errors import ConfigError, DataError, did_you_mean
from headrace.records import Message, Prompt

Role = Literal["system", "user", "assistant", "tool"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


class JsonlOptions(EnvOptions):
    """Options of env.kind = "jsonl"."""

    file: str = Field(min_length=1)
    """Path of the training file, relative to the recipe."""
    eval_file: str = ""
    """Path of the held-out file; empty holds out env.eval_prompts questions of `file`, chosen by content hash."""
    prompt: str = "prompt"
    """Column with the question as text."""
    messages: str = "messages"
    """Column with a list of {role, content}; used where the prompt column is missing."""
    answer: str = "answer"
    """Column with the gold answer (text or number); may be missing."""
    id: str = "id"
    """Column with a unique id; where missing, the line number is the id."""
    template: str = "{prompt}"
    """Text of the user message; {prompt} is replaced by the prompt column."""
    system: str = ""
    """System message put before prompts given as text."""


def build(options: JsonlOptions, *, seed: int, eval_prompts: int, recipe_dir: Path, reward: RewardFn | None) -> Task:
    """Read, check and split. The kind's own reward is `exact`.

    Raises DataError with file and line: bad JSON, missing or wrong columns, duplicate ids, too few rows.
    """
    train = read(recipe_dir / options.file, options)
    if options.eval_file:
        held_out = read(recipe_dir / options.eval_file, options, prefix="eval-")[:eval_prompts]
        asked = {question_key(p) for p in held_out}
        train = [p for p in train if question_key(p) not in asked]
        if not train:
            raise DataError(
                f"{options.file}: every prompt also occurs in {options.eval_file}; nothing is left to train"
            )
    else:
        train, held_out = split(train, eval_prompts=eval_prompts, seed=seed, source=options.file)
    require_answers(train + held_out, reward, options.file)
    return Task(
        train=train, eval=held_out, make_env=SingleTurnEnv, reward=reward or exact,
        fingerprint=fingerprint(train, held_out), families=tuple(sorted({p.task for p in train})),
    )  # fmt: skip


def split(prompts: list[Prompt], *, eval_prompts: int, seed: int, source: str) -> tuple[list[Prompt], list[Prompt]]:
    """Hold out `eval_prompts` distinct questions; DataError if fewer are left to train on than are held out."""
    distinct = len({question_key(p) for p in prompts})
    if distinct < 2 * eval_prompts:
        raise DataError(
            f"{source}: {distinct} distinct prompts cannot be split into env.eval_prompts = {eval_prompts} held out "
            f"and as many to train on; set env.eval_prompts to at most {distinct // 2} or give env.options.eval_file"
        )
    return split_by_content(prompts, held_out=eval_prompts, seed=seed)


def require_answers(prompts: list[Prompt], reward: RewardFn | None, source: str) -> None:
    """Without an own reward, every prompt needs a gold answer to compare with."""
    lacking = [p.id for p in prompts if not p.answer]
    if reward is None and lacking:
        raise ConfigError(
            f"{source}: {len(lacking)} of {len(prompts)} prompts have no gold answer (first: {lacking[0]!r}), and "
            "env.reward names no reward that could do without"
        )


def read(path: Path, options: JsonlOptions, *, prefix: str = "") -> list[Prompt]:
    """All prompts of a file, in order; blank lines are skipped."""
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        prompt = prompt_of(row, options, where=where, default_id=f"{prefix}{number}", task=path.stem)
        if prompt.id in lines:
            raise DataError(f"{where}: id {prompt.id!r} is already that of line {lines[prompt.id]}; ids must be unique")
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} holds no prompts")
    return prompts


def prompt_of(row: Mapping[str, Any], options: JsonlOptions, *, where: str, default_id: str, task: str) -> Prompt:
    """One row as a Prompt. DataError that names `where` and the columns there are."""
    answer = row.get(options.answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise DataError(f"{where}: {options.answer} = {answer!r:.100} must be text or a number")
    return Prompt(
        id=str(row.get(options.id, default_id)),
        messages=_messages(row, options, where),
        answer="" if answer is None else str(answer),
        task=str(row.get("task", task)),
        row=row,
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise DataError(f"{path} cannot be read: {exc.strerror}") from exc
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:  # also bytes that are no UTF-8
            raise DataError(f"{path}, line {number}: not JSON: {exc}: {line[:80]!r}") from exc
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {type(row).__name__} where an object {{...}} is expected")
        yield number, row


def _messages(row: Mapping[str, Any], options: JsonlOptions, where: str) -> tuple[Message, ...]:
    text, chat = row.get(options.prompt), row.get(options.messages)
    if isinstance(text, str) and text.strip():
        return with_system(options.system, options.template.replace("{prompt}", text))
    if chat is None:
        hint = did_you_mean(options.prompt, row) if row else "the row is empty"
        raise DataError(f"{where}: column {options.prompt!r} must be non-empty text, or column {options.messages!r} a "
                        f"list of messages; seen {text!r:.80}; {hint}")  # fmt: skip
    if not isinstance(chat, list) or not chat:
        raise DataError(f"{where}: {options.messages} = {chat!r:.100} must be a non-empty list of {{role, content}}")
    messages = []
    for at, message in enumerate(chat):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise DataError(f"{where}: {options.messages}[{at}] = {message!r:.100} must have a role of "
                            f"{', '.join(ROLES)} and text as content")  # fmt: skip
        messages.append(Message(role=cast(Role, role), content=content))
    if messages[-1].role == "assistant":
        raise DataError(f"{where}: the last message is the assistant's; a prompt must end before the answer")
    return tuple(messages)
