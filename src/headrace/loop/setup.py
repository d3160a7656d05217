"""From a recipe to role specifications: which factory, which arguments, how many threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError, did_you_mean
from headrace.roles import RoleSpec
from headrace.rollout.codec import ByteCodec, Codec

ENGINES = {"native": "headrace.rollout.native.core:build", "scripted": "headrace.rollout.scripted:build"}
LEARNERS = {"torch": "headrace.trainer.torch_learner:build", "scripted": "headrace.trainer.scripted:build"}


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads of each role."""

    generator: int
    trainer: int


def threads(config: RunConfig, cores: int | None = None) -> Threads:
    """Roles that take turns get every core; roles that overlap share them, the trainer taking the larger half."""
    cores = cores or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    half = max(1, cores // 2)
    auto = (cores, cores) if config.flow.mode == "sync" else (half, max(1, cores - half))
    return Threads(config.engine.threads or auto[0], config.trainer.threads or auto[1])


def factory_of(kind: str, known: dict[str, str], *, key: str) -> str:
    """The "module:attr" behind a built-in kind, or the user's own; ConfigError with the nearest name."""
    if ":" in kind:
        return kind
    if kind not in known:
        raise ConfigError(f"{key} = {kind!r} is not a built-in kind or 'module:attr': {did_you_mean(kind, known)}")
    return known[kind]


def generator_spec(config: RunConfig, model_dir: Path | None, run_id: str) -> RoleSpec:
    """The role that generates."""
    kwargs: dict[str, Any] = {"engine": config.engine.model_dump(mode="json"), "run_id": run_id}
    if config.engine.kind == "native":
        kwargs |= {"model_dir": str(model_dir), "dtype": config.model.dtype, "device": config.model.device}
    else:
        kwargs |= {"options": dict(config.engine.options)}
    if config.engine.kind in ENGINES:
        kwargs |= {"verify_every": config.sync.verify_every}
    core = factory_of(config.engine.kind, ENGINES, key="engine.kind")
    return RoleSpec(
        name="generator",
        factory="headrace.rollout.worker:build_servant",
        kwargs={"core": core, "kwargs": kwargs, "search": str(config.recipe_dir)},
        threads=threads(config).generator,
    )


def trainer_spec(config: RunConfig, model_dir: Path | None) -> RoleSpec:
    """The role that trains."""
    return RoleSpec(
        name="trainer",
        factory="headrace.trainer.worker:build_servant",
        kwargs={
            "factory": factory_of(config.trainer.kind, LEARNERS, key="trainer.kind"),
            "kwargs": {"config": config.model_dump(mode="json"), "model_dir": str(model_dir)},
            "sync": config.sync.model_dump(mode="json"),
            "threads": threads(config).trainer,
            "search": str(config.recipe_dir),
        },
        threads=threads(config).trainer,
    )


def needs_model(config: RunConfig) -> bool:
    """False when both engine and learner are scripted."""
    return not (config.engine.kind == "scripted" and config.trainer.kind == "scripted")


def codec(config: RunConfig, model_dir: Path | None) -> Codec:
    """How conversations become token ids in this run."""
    if model_dir is None:
        return ByteCodec()
    from headrace.rollout.chat import ChatCodec  # noqa: PLC0415  transformers takes seconds, runs without a model none

    return ChatCodec(model_dir, system_prompt=config.model.system_prompt)
