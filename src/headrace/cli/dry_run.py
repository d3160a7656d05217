"""headrace train --dry-run: everything that can be checked without starting a process of the run."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from headrace.cli.console import out, warn
from headrace.cli.masks import show_masks
from headrace.config.load import resolved_json
from headrace.config.schema import RunConfig
from headrace.envs.check import check_task
from headrace.envs.env import Task
from headrace.envs.registry import build_task
from headrace.errors import ConfigError, DataError
from headrace.hub.fetch import ensure_model, list_models
from headrace.loop.setup import ENGINES, LEARNERS, factory_of, needs_model, threads

GOLD_PROMPTS = 20
"""How many gold answers are put through environment and reward."""
TOKENISED_PROMPTS = 2000
"""How many prompts are tokenised to find the longest."""


def dry_run(config: RunConfig) -> None:
    """Print resolved settings and derived numbers; raise what a run could only fail on. Warnings go to stderr."""
    typer.echo(resolved_json(config), nl=False)
    for kind, known, key in (
        (config.engine.kind, ENGINES, "engine.kind"),
        (config.trainer.kind, LEARNERS, "trainer.kind"),
    ):
        factory_of(kind, known, key=key)
    task = build_task(config.env, seed=config.seed, recipe_dir=config.recipe_dir)
    folder, model = _model(config)
    longest = longest_prompt_tok(task, folder) if folder is not None else None
    refuse_impossible(config, task, longest)
    rows = derived(config) | {
        "prompts": f"{len(task.train)} to train on, {len(task.eval)} held out"
        + (f" ({', '.join(task.families)})" if task.families else ""),
        "longest prompt": "unknown (tokenizer not here)"
        if longest is None
        else f"{longest} tokens and the chat template",
        "gold answers": check_gold(task, config),
        "model": model,
    }
    table = Table("derived", "value", title=f"{config.name}: nothing was started")
    for name, value in rows.items():
        table.add_row(name, value)
    out().print(table)
    if folder is not None or not needs_model(config):
        show_masks(config, task, folder)
    for message in warnings(config):
        warn(message)


def derived(config: RunConfig) -> dict[str, str]:
    """Numbers that follow from the settings."""
    flow, sampling = config.flow, config.sampling
    rollouts = flow.batch_groups * flow.group_size
    running = _running(config)
    cores = threads(config)
    return {
        "mode": f"{flow.mode}, weights swap {'between two decode steps' if flow.in_flight else 'between batches'}",
        "lag bound": f"{flow.lag_bound} optimizer steps, then {flow.on_bound}",
        "slots": f"{flow.slots} groups between admission and landed weights",
        "samples per step": f"{rollouts} rollouts ({flow.batch_groups} groups x {flow.group_size}), "
        f"a group trains with at least {flow.min_scored}",
        "tokens per step": f"at most {rollouts * sampling.max_new_tok * config.env.max_turns} sampled "
        f"({sampling.max_new_tok} per call, {config.env.max_turns} calls)",
        "rollouts at once": f"{running}, of which {min(running, config.engine.max_batch)} decode together",
        "samples in all": f"{config.steps * rollouts} in {config.steps} steps",
        "threads": f"{cores.generator} generating, {cores.trainer} training",
    }


def refuse_impossible(config: RunConfig, task: Task, longest_tok: int | None) -> None:
    """ConfigError for what the schema cannot see: settings against task and tokenizer."""
    if len(task.train) < config.flow.batch_groups:
        raise ConfigError(
            f"flow.batch_groups = {config.flow.batch_groups} is more than the {len(task.train)} prompts of the task: "
            "a batch never holds one prompt twice; lower it or add prompts"
        )
    room_tok = config.engine.max_context_tok - config.sampling.max_new_tok
    if longest_tok is not None and longest_tok > room_tok:
        raise ConfigError(
            f"the longest prompt has {longest_tok} tokens, engine.max_context_tok = {config.engine.max_context_tok} "
            f"less sampling.max_new_tok = {config.sampling.max_new_tok} leaves {room_tok}: raise max_context_tok"
        )


def check_gold(task: Task, config: RunConfig) -> str:
    """Gold answers must score 1.0. DataError that names the first that does not; own rewards only warn."""
    checks = check_task(task, GOLD_PROMPTS, recipe_dir=config.recipe_dir)
    if not checks:
        return "none to check: prompts carry no answer"
    bad = [c for c in checks if not c.ok]
    if not bad:
        return f"{len(checks)} of {len(checks)} score 1.0"
    first = bad[0]
    message = (
        f"{len(bad)} of {len(checks)} gold answers do not score 1.0; first: prompt {first.prompt.id!r} with answer "
        f"{first.prompt.answer!r} scored {first.grade.reward}"
        + (f" ({first.grade.error})" if first.grade.error else "")
    )
    # A reward of one's own may want more than the bare answer; one of ours that refuses it is a broken task.
    if ":" in config.env.reward or ":" in config.env.kind:
        warn(message)
        return f"{len(checks) - len(bad)} of {len(checks)} score 1.0"
    raise DataError(message)


def warnings(config: RunConfig) -> list[str]:
    """Settings that work but waste something."""
    found = []
    flow = config.flow
    # While one batch trains the others generate; right after the start it is one batch more, which passes.
    running = min(_running(config), max(1, flow.lag_bound) * flow.batch_groups * flow.group_size)
    if running > 2 * config.engine.max_batch:
        found.append(
            f"about {running} rollouts run at once but engine.max_batch = {config.engine.max_batch} decode together: "
            "the others wait in the engine's queue and grow older"
        )
    if flow.batch_groups % config.trainer.updates_per_batch:
        found.append(
            f"trainer.updates_per_batch = {config.trainer.updates_per_batch} does not divide flow.batch_groups = "
            f"{flow.batch_groups}: the updates get unequal shares"
        )
    if flow.on_bound == "drop" or flow.oversample > 0:
        found.append("rollouts will be cancelled on purpose; the summary counts their tokens as wasted")
    return found


def longest_prompt_tok(task: Task, folder: Path) -> int | None:
    """Most tokens in one prompt's messages, without the chat template: a lower bound. None without a fast tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    prompts = [task.train[i] for i in range(min(len(task.train), TOKENISED_PROMPTS))]
    texts = ["\n".join(m.content for m in p.messages) for p in prompts]
    return max(len(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=False))


def _model(config: RunConfig) -> tuple[Path | None, str]:
    if not needs_model(config):
        return None, "none: engine and trainer are scripted"
    for status in list_models():
        if status.source.name == config.model.name and not status.present:
            return None, f"{config.model.name}: will be fetched ({status.source.size_bytes / 1e6:.0f} MB)"
    folder = ensure_model(config.model.name)
    return folder, f"{config.model.name}: {folder}"


def _running(config: RunConfig) -> int:
    most = config.flow.slots * config.flow.group_size
    return min(most, config.flow.max_running) if config.flow.max_running else most
