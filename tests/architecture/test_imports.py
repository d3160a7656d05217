"""What may be loaded by what."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "accelerate", "peft", "datasets", "reasoning_gym", "numba")


def loaded(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after `statement`."""
    script = (
        f"{statement}\nimport sys\nprint(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "module",
    [
        "headrace.config.load",
        "headrace.config.document",
        "headrace.flow.events",
        "headrace.telemetry.records",
        "headrace.envs.env",
        "headrace.envs.registry",
        "headrace.planner.plan",
        "headrace.planner.page",
        "headrace.records",
        "headrace.roles",
        "headrace.plugins",
        "headrace.sync.manifest",
        "headrace.hub.fetch",
        "headrace.rollout.engine",
        "headrace.trainer.learner",
        "headrace.cli",
    ],
)
def test_loads_without_torch(module: str) -> None:
    assert not loaded(f"import {module}") & set(HEAVY)


def test_help_is_light() -> None:
    statement = (
        "import sys\nfrom headrace.cli import main\ntry:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass"
    )
    assert not loaded(statement) & {*HEAVY, "numpy"}


def test_importing_headrace_is_light() -> None:
    assert not loaded("import headrace") & set(HEAVY)
