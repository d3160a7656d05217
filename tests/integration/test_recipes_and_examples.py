"""Every recipe and example that ships runs, with the real model, for a step or two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.hub.fetch import ensure_model

ROOT = Path(__file__).parents[2]
RECIPES = sorted(p.name for p in (ROOT / "recipes").glob("*.toml"))

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    ensure_model("smollm2-135m-instruct")


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    small = ["steps=2", f"out={tmp_path}", "env.eval_prompts=8", "flow.batch_groups=2", "flow.group_size=4"]
    sets = [
        part for change in (*small, "flow.zero_signal=keep", "sampling.max_new_tok=8") for part in ("--set", change)
    ]
    shown = run("-m", "headrace", "train", f"recipes/{recipe}", "--no-live", *sets)
    assert "balanced" in shown
    (model,) = tmp_path.glob("*/model*")
    assert (model / "model.safetensors").exists() or recipe == "scripted.toml"


def test_the_inline_loop() -> None:
    assert "step   1  reward" in run("examples/01_loop.py", "--steps", "1")


def test_the_custom_loop(tmp_path: Path) -> None:
    shown = run("examples/02_custom_loop.py", "--steps", "2", "--out", str(tmp_path))
    assert "step   2  reward" in shown
    assert "steps done" in shown
