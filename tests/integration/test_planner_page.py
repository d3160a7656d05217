"""The commands of docs/planner.md run, in its order; but for those that need runs or rows of yours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
QUICK = "--set search.simulate_best=1 --set search.sim_steps=4"
NOT_HERE = ("runs/", "rows.csv", "--calibration laptop", "headrace train")
"""Words of commands that need something of the reader's."""
SLOW = ("agentic.toml", "plan fixtures")
"""Covered by tests of their own."""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if not any(words in line for words in (*NOT_HERE, *SLOW))]


def quick(line: str) -> str:
    """The same, searching less, where it searches by itself."""
    if re.search(r"plan (compare|chips|models)", line):
        return line
    command, arrow, file = line.partition(" > ")
    return f"{command} {QUICK}{arrow}{file}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_of_the_page_run(tmp_path: Path) -> None:
    for folder in ("examples", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HEADRACE_HOME": str(tmp_path / "home"), "COLUMNS": "120"}
    assert len(commands()) >= 10
    for line in commands():
        done = subprocess.run(["bash", "-ec", quick(line)], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
    for name in ("plan.json", "plan.html", "planned.toml", "trace.json"):
        assert (tmp_path / name).stat().st_size > 100, name
