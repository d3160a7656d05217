"""The run folder, and going on from it.

runs/NAME-DATE/
├── run.json          run id, recipe as resolved, task fingerprint
├── ledger.sqlite     every prompt attempt and rollout
├── metrics.jsonl     what the live view showed      trace.jsonl, stimulus-v*.jsonl: what happened when
├── report.html       the same as a page, written at the end (`headrace report` writes it at any time)
├── checkpoints/step000010/   learner state; complete exactly if it holds COMPLETE
├── weights/          versions on their way to the engine (scratch)
├── model/            the trained model in Hugging Face layout
└── logs/             one file per role
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError, DataError, boundary

MARKER = "COMPLETE"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder, and the lock that keeps a second process out of it."""

    path: Path
    run_id: str
    lock: IO[str]

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def release(self) -> None:
        """Remove scratch files and let others in."""
        shutil.rmtree(self.weights, ignore_errors=True)
        self.lock.close()


def create(config: RunConfig, fingerprint: str) -> RunFolder:
    """A new run folder under config.out; never an existing one."""
    stem = Path(config.out) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = stem
    for suffix in range(1, 1000):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = stem.with_name(f"{stem.name}-{suffix}")
        except OSError as exc:
            raise ConfigError(
                f"out = {config.out!r}: cannot make the run folder {path}: {exc.strerror}; choose a folder that can "
                "be written (--out FOLDER)"
            ) from exc
    run_id = uuid.uuid4().hex[:12]
    lock = _lock(path)
    about = {"run_id": run_id, "fingerprint": fingerprint, "recipe": json.loads(config.model_dump_json())}
    write_atomically(path / "run.json", json.dumps(about, indent=2))
    return RunFolder(path, run_id, lock)


def read_about(path: Path) -> dict[str, Any]:
    """What run.json says; DataError when `path` is not a run folder."""
    file = path / "run.json"
    if not file.exists():
        runs = sorted(p.parent.name for p in path.parent.glob("*/run.json")) if path.parent.exists() else []
        hint = f"; runs in {path.parent}: {', '.join(runs[-5:])}" if runs else ""
        raise DataError(f"{path} is not a run folder: it has no run.json{hint}")
    with boundary(DataError, f"reading {file}"):
        about: dict[str, Any] = json.loads(file.read_text())
    return about


def recipe_of(path: Path) -> RunConfig:
    """The resolved recipe that a run was started with."""
    return RunConfig.model_validate(read_about(path)["recipe"])


def reopen(path: Path, fingerprint: str) -> RunFolder:
    """Open a run folder to go on; refuses one that another process holds or whose prompts have changed."""
    about = read_about(path)
    if about["fingerprint"] != fingerprint:
        raise DataError(
            f"{path} was run on other prompts (fingerprint {about['fingerprint'][:12]}, now {fingerprint[:12]}): "
            "resume with the same env options and data files, or start a new run"
        )
    return RunFolder(path, about["run_id"], _lock(path))


def _lock(path: Path) -> IO[str]:
    file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"{path} is in use by another process; wait for it or stop it first") from None
    return file


def write_atomically(path: Path, text: str) -> None:
    """Write to a temp file, flush to disk, rename."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


async def save_checkpoint(
    folder: RunFolder, version: int, save: Callable[[str], Awaitable[None]], *, keep: int
) -> Path:
    """Let the learner write into a temp folder, mark it complete, rename it; only then delete older ones."""
    final = folder.checkpoints / f"step{version:06d}"
    partial = folder.checkpoints / f".partial-{version:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    with boundary(DataError, f"saving checkpoint {final}"):
        partial.mkdir(parents=True)
        await save(str(partial))
        write_atomically(partial / MARKER, json.dumps({"version": version, "run_id": folder.run_id}))
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
    for _, old in complete_checkpoints(folder.path)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def complete_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(version, folder) of every complete checkpoint, oldest first. Half-written ones do not count."""
    found = [p for p in (run / "checkpoints").glob("step*") if (p / MARKER).exists()]
    return sorted((int(p.name.removeprefix("step")), p) for p in found)
