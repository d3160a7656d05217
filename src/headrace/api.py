"""The Python form: what the command line calls, and what your own loop is written with.

    import headrace as hr

    run = hr.open("recipe.toml", reward=my_reward)
    async for batch in run.batches():               # flow decides what and when
        await run.forward_backward(batch)
        await run.optim_step()
        await run.publish()

`hr.train("recipe.toml")` is that loop, with Ctrl-C, from a plain function. `async with hr.open(...) as run` around the
loop ends roles in order when the body raises; without it they are killed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.config.load import config_from_overrides, load_recipe
from headrace.config.schema import RunConfig
from headrace.envs.env import RewardFn
from headrace.envs.registry import build_task
from headrace.errors import ConfigError, boundary
from headrace.hub.fetch import ensure_model
from headrace.launch.local import LocalLauncher
from headrace.loop import resume as resuming
from headrace.loop import setup
from headrace.loop.evaluate import evaluate_model
from headrace.loop.run import Run
from headrace.records import Rollout
from headrace.telemetry.records import EvalRecord, RunSummary
from headrace.telemetry.silent import SilentView
from headrace.telemetry.view import View


def open(
    recipe: str | Path | RunConfig,
    *,
    reward: RewardFn | str | None = None,
    overrides: Sequence[str] = (),
    resume: str | Path | None = None,
    view: View | None = None,
) -> Run:
    """Prepare a run: read the recipe, fetch the model, build the task. Nothing is started before `batches()`.

    recipe: a TOML file or a RunConfig. reward: `score(rollout, prompt) -> float or dict`, or a name; unset takes the
    recipe's. overrides: "flow.max_lag_steps=2" and the like. resume: a run folder to go on from; then `recipe` must be
    the run's own (see `resumed_recipe`). view: where progress goes; unset is silent.
    Raises ConfigError, DataError or PluginError for what cannot work.
    """
    if isinstance(recipe, RunConfig):
        config = config_from_overrides(overrides, recipe)
    else:
        config = load_recipe(Path(recipe), overrides)
    view = view or SilentView()
    task = build_task(config.env, seed=config.seed, recipe_dir=config.recipe_dir, reward=reward)
    model_dir = ensure_model(config.model.name, view.progress) if setup.needs_model(config) else None
    return Run(
        config,
        task=task,
        model_dir=model_dir,
        make_launcher=LocalLauncher,
        view=view,
        resume_from=Path(resume) if resume is not None else None,
    )


def resumed_recipe(run: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe that a run folder was started with, with overrides (more steps, say)."""
    return config_from_overrides(overrides, resuming.recipe_of(Path(run)))


def train(
    recipe: str | Path | RunConfig,
    *,
    reward: RewardFn | str | None = None,
    overrides: Sequence[str] = (),
    resume: str | Path | None = None,
    view: View | None = None,
) -> RunSummary:
    """Train to the end and return the summary. Ctrl-C once ends after the step under way, with everything saved."""
    run = open(recipe, reward=reward, overrides=overrides, resume=resume, view=view)

    async def body() -> None:
        with _interruptible(run):
            async with run:
                async for batch in run.batches():
                    await run.train_on(batch)
                    await run.publish()

    asyncio.run(body())
    assert run.summary is not None  # batches() ends with finish() or an exception
    return run.summary


@contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """First SIGINT or SIGTERM: end cleanly. Second: cancel."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if run.interrupted:
            task.cancel()
        else:
            run.interrupt()

    caught: list[signal.Signals] = []
    with suppress(NotImplementedError, RuntimeError):  # not the main thread, or not Unix: default handling
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
            caught.append(number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def evaluate(
    config: RunConfig,
    *,
    reward: RewardFn | str | None = None,
    view: View | None = None,
    logs: Path | None = None,
) -> tuple[EvalRecord, list[Rollout]]:
    """Held-out accuracy of config.model on config.env, with eval.temperature; starts only a generator."""
    view = view or SilentView()
    task = build_task(config.env, seed=config.seed, recipe_dir=config.recipe_dir, reward=reward)
    model_dir = ensure_model(config.model.name, view.progress)
    logs = logs or Path(config.out) / "logs"
    with boundary(ConfigError, f"out = {config.out!r}: making {logs} for the generator's log"):
        logs.mkdir(parents=True, exist_ok=True)
    evaluating = evaluate_model(
        config,
        task=task,
        model_dir=model_dir,
        make_launcher=LocalLauncher,
        logs=logs,
        view=view,
    )
    return asyncio.run(evaluating)
