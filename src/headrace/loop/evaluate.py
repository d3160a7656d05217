"""Held-out evaluation: every prompt once, at exactly one version, with explicit denominators."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from headrace.clock import Clock, WallClock
from headrace.config.schema import RunConfig
from headrace.envs.env import Task
from headrace.envs.grading import GraderPool
from headrace.errors import FlowError
from headrace.loop import setup
from headrace.loop.player import Player
from headrace.records import Prompt, Rollout
from headrace.roles import Launcher
from headrace.rollout.remote import RemoteEngine
from headrace.telemetry.records import EvalRecord
from headrace.telemetry.view import View

SOLVED = 0.999
"""Rewards from here on count as solved."""


async def evaluate(
    *,
    player: Player,
    task: Task,
    version: int,
    started_s: float,
    clock: Clock,
    progress: Callable[[str, int, int], None],
    at_once: int,
) -> tuple[EvalRecord, list[Rollout]]:
    """Play all held-out prompts, `at_once` at a time; FlowError if any token came from another version.

    A rollout that failed in the infrastructure is tried once more, then counts as not solved and is listed by outcome.
    """
    begin_s = clock.now()
    gate = asyncio.Semaphore(at_once)
    done = 0

    async def one(index: int, prompt: Prompt) -> Rollout:
        nonlocal done
        async with gate:
            rollout = await player.play_eval(prompt, index=index, version=version)
            if not rollout.outcome.trains:
                rollout = await player.play_eval(prompt, index=index, version=version)
        done += 1
        progress(f"evaluating version {version}", done, len(task.eval))
        return rollout

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, p)) for i, p in enumerate(task.eval)]
    rollouts = [t.result() for t in tasks]
    for rollout in rollouts:
        for seen in (rollout.oldest_version, rollout.newest_version):
            if seen is not None and seen != version:
                raise FlowError(f"evaluation of version {version}: {rollout.group_id} has tokens of version {seen}")
    rewards = [r.reward if r.reward is not None else 0.0 for r in rollouts]
    record = EvalRecord(
        time_s=clock.now() - started_s,
        version=version,
        prompts=len(rollouts),
        accuracy=sum(r >= SOLVED for r in rewards) / len(rewards),
        reward_mean=sum(rewards) / len(rewards),
        outcomes=dict(Counter(str(r.outcome) for r in rollouts)),
        eval_s=clock.now() - begin_s,
        response_tok_mean=sum(r.generated_tok for r in rollouts) / len(rollouts),
    )
    return record, rollouts


async def evaluate_model(
    config: RunConfig,
    *,
    task: Task,
    model_dir: Path | None,
    make_launcher: Callable[[Path], Launcher],
    logs: Path,
    view: View,
) -> tuple[EvalRecord, list[Rollout]]:
    """Evaluate a model on its own: a generator and graders, no trainer. Everything started is ended again."""
    clock = WallClock()
    launcher = make_launcher(logs)
    grader = GraderPool(
        task.reward,
        workers=config.env.grade_workers,
        deadline_s=config.env.grade_deadline_s,
        recipe_dir=config.recipe_dir,
    )
    try:
        view.status("starting the generator")
        spec = setup.generator_spec(config, model_dir, "eval")
        handle = await launcher.spawn(spec, deadline_s=config.launch.start_deadline_s)
        engine = RemoteEngine(
            handle,
            call_deadline_s=config.launch.call_deadline_s,
            generate_deadline_s=config.env.rollout_deadline_s + 60.0,
        )
        player = Player(config, task=task, engine=engine, codec=setup.codec(config, model_dir), grader=grader)
        return await evaluate(
            player=player,
            task=task,
            version=(await engine.stats()).version,
            started_s=clock.now(),
            clock=clock,
            progress=view.progress,
            at_once=2 * config.engine.max_batch,
        )
    finally:
        await grader.close()
        await launcher.close()
