"""What the integration tests share: drive a run, look at its folder, find and watch its processes."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.config.schema import RunConfig
from headrace.envs.registry import build_task
from headrace.hub.fetch import ensure_model
from headrace.launch.local import LocalLauncher
from headrace.loop import setup
from headrace.loop.assembly import MakeLauncher
from headrace.loop.run import Run
from headrace.records import Batch
from headrace.telemetry.log import read_log
from headrace.telemetry.records import RunSummary, StepRecord
from headrace.telemetry.silent import SilentView

SERVANTS = Path(__file__).parents[1] / "servants"


def train(
    config: RunConfig,
    *,
    during: Callable[[Run, int], None] | None = None,
    resume: Path | None = None,
    make_launcher: MakeLauncher = LocalLauncher,
    batches: list[Batch] | None = None,
) -> Run:
    """Train to the end. `during` is called with the batch's version between training and publishing; `batches` is
    filled with what was trained."""
    run = Run(
        config,
        task=build_task(config.env, seed=config.seed, recipe_dir=config.recipe_dir),
        model_dir=ensure_model(config.model.name) if setup.needs_model(config) else None,
        make_launcher=make_launcher,
        view=SilentView(),
        resume_from=resume,
    )

    async def body() -> None:
        async with run:
            async for batch in run.batches():
                assert len(batch.groups) == config.flow.batch_groups
                await run.train_on(batch)
                if batches is not None:
                    batches.append(batch)
                if during is not None:
                    during(run, batch.version)
                await run.publish()

    asyncio.run(body())
    return run


def summary_of(run: Run) -> RunSummary:
    assert run.summary is not None
    return run.summary


def steps_of(run_dir: str | Path) -> list[StepRecord]:
    return [r for r in read_log(Path(run_dir)) if isinstance(r, StepRecord)]


def only_run(out: Path) -> Path:
    (path,) = (p.parent for p in out.glob("*/run.json"))
    return path


def role_pid(run: Run, name: str) -> int:
    return next(pid for pid, role in roles_of(run.path).items() if role == name)


def roles_of(run_dir: Path) -> dict[int, str]:
    """Living role processes whose log is in this run's folder."""
    found: dict[int, str] = {}
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            command = (proc / "cmdline").read_bytes().split(b"\0")
            log = os.readlink(proc / "fd" / "1")
            state = (proc / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if b"headrace.launch.worker" in command and log.startswith(str(run_dir.resolve())) and state != "Z":
            found[int(proc.name)] = Path(log).stem
    return found


def wait_until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    ends_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_s, "it never happened"
        time.sleep(0.02)


def trained(run_dir: Path) -> list[tuple[Any, ...]]:
    """Who trained when, with which tokens and rewards."""
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        return db.execute(
            "SELECT a.taken_version, a.ordinal, a.prompt_index, a.rewards, a.trained_tok FROM attempts a "
            "WHERE a.bucket = 'trained' ORDER BY a.taken_version, a.ordinal"
        ).fetchall()


def assert_nothing_trained_twice(run_dir: Path) -> None:
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        twice = db.execute(
            "SELECT ordinal, count(*) FROM attempts WHERE bucket = 'trained' GROUP BY ordinal HAVING count(*) > 1"
        ).fetchall()
    assert twice == []
