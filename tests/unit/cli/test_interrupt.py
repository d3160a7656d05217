"""Ctrl-C in a run of real processes: it ends cleanly, says so by its exit code, and can be resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TASK = """
name = "scripted"
steps = 100000
out = "{out}"
[env]
kind = "jsonl"
eval_prompts = 5
[env.options]
file = "questions.jsonl"
[flow]
batch_groups = 2
group_size = 2
zero_signal = "keep"
[engine]
kind = "scripted"
[trainer]
kind = "scripted"
[eval]
before = false
after = false
"""


@pytest.mark.slow
def test_ctrl_c_saves_and_exits_130(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TASK.format(out=tmp_path / "runs"), encoding="utf-8")
    command = [sys.executable, "-u", "-c", "from headrace.cli import main; main()", "train"]
    with subprocess.Popen(
        [*command, str(recipe), "--no-live"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if re.search(r"step 3/", line):
                process.send_signal(signal.SIGINT)
                break
        seen.append(process.stdout.read())
        assert process.wait(60) == 130, "".join(seen)
    (run,) = (tmp_path / "runs").glob("scripted-*")
    steps = max(int(p.name.removeprefix("step")) for p in (run / "checkpoints").glob("step*"))
    assert steps >= 3
    done = subprocess.run(
        [*command, "--resume", str(run), "--no-live", "--set", f"steps={steps + 2}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {steps + 1}/{steps + 2}" in done.stdout
    assert f"step {steps}/" not in done.stdout
