"""Puts a run together: folder, roles, controller, pipeline. Everything that `Run.close` takes apart again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.clock import Clock
from headrace.config.schema import RunConfig
from headrace.envs.env import Task
from headrace.envs.grading import GraderPool
from headrace.errors import RoleDiedError
from headrace.flow.stimulus import Setup
from headrace.loop import resume, setup
from headrace.loop.handoff import Handoff
from headrace.loop.journal import Journal
from headrace.loop.pipeline import Pipeline
from headrace.loop.player import Player
from headrace.loop.recorder import Recorder
from headrace.loop.replica import Replica
from headrace.roles import Handle, Launcher
from headrace.rollout.engine import Engine
from headrace.rollout.remote import RemoteEngine
from headrace.telemetry.view import View
from headrace.trainer.remote import RemoteLearner

MakeLauncher = Callable[[Path], Launcher]
T = TypeVar("T")


@dataclass(slots=True)
class Parts:
    """What exists between start and close."""

    folder: resume.RunFolder
    launcher: Launcher
    journal: Journal
    grader: GraderPool
    replica: Replica
    player: Player
    learner: RemoteLearner
    handoff: Handoff
    pipeline: Pipeline
    recorder: Recorder
    watcher: asyncio.Task[None]
    version: int
    """Version of the weights that trainer and generator hold."""

    async def close(self) -> None:
        """End tasks before roles, roles before files. If this is cancelled, processes and files go all the same."""
        try:
            self.watcher.cancel()
            await self.replica.close()
            await self.pipeline.abandon()
            await self.grader.close()
            await self.launcher.close()
        finally:
            with ExitStack() as last:  # every one runs, whatever the others raise
                last.callback(self.folder.release)
                last.callback(self.journal.close)
                last.callback(self.recorder.close)
                last.callback(self.launcher.kill)
                last.callback(self.grader.kill)


async def assemble(
    config: RunConfig,
    *,
    task: Task,
    model_dir: Path | None,
    resume_from: Path | None,
    make_launcher: MakeLauncher,
    view: View,
    clock: Clock,
) -> Parts:
    """Create or reopen the run folder, start the roles, restore state, and hand the first version over.

    On any failure everything that was started is ended again.
    """
    if resume_from is None:
        folder = resume.create(config, task.fingerprint)
    else:
        folder = resume.reopen(resume_from, task.fingerprint)
    launcher = make_launcher(folder.logs)
    try:
        return await _assemble(config, task, model_dir, resume_from is not None, folder, launcher, view, clock)
    except BaseException:
        await launcher.close()
        folder.release()
        raise


async def _assemble(
    config: RunConfig,
    task: Task,
    model_dir: Path | None,
    resumed: bool,
    folder: resume.RunFolder,
    launcher: Launcher,
    view: View,
    clock: Clock,
) -> Parts:
    start_s, call_s = config.launch.start_deadline_s, config.launch.call_deadline_s

    async def spawn_generator() -> tuple[Handle, Engine]:
        handle = await launcher.spawn(setup.generator_spec(config, model_dir, folder.run_id), deadline_s=start_s)
        longest_s = config.env.rollout_deadline_s + 60.0
        return handle, RemoteEngine(handle, call_deadline_s=call_s, generate_deadline_s=longest_s)

    starting = _Starting(view, "loading the model" if setup.needs_model(config) else "starting")
    replica = Replica(spawn_generator, notice=view.message, fail=lambda error: pipeline.fail(error))
    view.message(f"run folder {folder.path}")
    view.status("starting generator and trainer")
    trainer, _ = await asyncio.gather(
        starting.show("trainer", launcher.spawn(setup.trainer_spec(config, model_dir), deadline_s=start_s)),
        starting.show("generator", replica.start()),
    )
    learner = RemoteLearner(trainer, call_deadline_s=call_s)
    version = await _load_checkpoint(folder, learner, view) if resumed else 0
    journal = Journal(folder.ledger)
    plan = Setup(
        flow=config.flow,
        curriculum=config.curriculum,
        prompts=len(task.train),
        seed=config.seed,
        rows=tuple(journal.rows()),
        version=version,
        steps=config.steps,
    )
    controller, restored = plan.restore()
    journal.write(controller.ledger.drain_changes())
    recorder = Recorder(config, folder.path, controller=controller, setup=plan, clock=clock, view=view)
    if resumed:
        recorder.resumed(version, restored)
    grader = GraderPool(
        task.reward,
        workers=config.env.grade_workers,
        deadline_s=config.env.grade_deadline_s,
        recipe_dir=config.recipe_dir,
    )
    player = Player(config, task=task, engine=replica, codec=setup.codec(config, model_dir), grader=grader)
    handoff = Handoff(config, run_id=folder.run_id, folder=folder.weights, learner=learner, engine=replica, clock=clock)
    pipeline = Pipeline(
        config,
        controller=controller,
        task=task,
        player=player,
        handoff=handoff,
        journal=journal,
        clock=clock,
        recorder=recorder,
    )
    view.status(f"handing version {version} to the generator")
    view.role("generator", f"ready for version {version}", waits_for="trainer")
    manifest = await handoff.publish(version)
    view.role("generator", f"loading version {version}")
    await handoff.land(manifest)
    view.role("generator", "ready")
    watcher = asyncio.create_task(_watch(trainer, pipeline), name="trainer watch")
    return Parts(
        folder=folder,
        launcher=launcher,
        journal=journal,
        grader=grader,
        replica=replica,
        player=player,
        learner=learner,
        handoff=handoff,
        pipeline=pipeline,
        recorder=recorder,
        watcher=watcher,
        version=version,
    )


class _Starting:
    """Shows which role is still starting and who waits for it."""

    def __init__(self, view: View, doing: str) -> None:
        self._view = view
        self._doing = doing
        self._under_way: list[str] = []

    async def show(self, name: str, start: Awaitable[T]) -> T:
        """Wait for `start`, telling the view before and after."""
        self._under_way.append(name)
        self._view.role(name, self._doing)
        result = await start
        self._under_way.remove(name)
        self._view.role(name, "ready", waits_for=", ".join(self._under_way))
        return result


async def _load_checkpoint(folder: resume.RunFolder, learner: RemoteLearner, view: View) -> int:
    """Newest complete checkpoint's version, its state loaded; 0 and the initial weights when there is none."""
    found = resume.complete_checkpoints(folder.path)
    if not found:
        view.status("no checkpoint yet: going on from the initial weights")
        return 0
    version, path = found[-1]
    view.status(f"restoring step {version} from {path}")
    await learner.load(str(path))
    return version


async def _watch(trainer: Handle, pipeline: Pipeline) -> None:
    """A dead trainer ends the run: its weights since the checkpoint are gone. `--resume` goes on from there."""
    pipeline.fail(RoleDiedError(await trainer.died()))
