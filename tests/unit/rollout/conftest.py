"""Puts the shared helpers of this folder on its tests' import path, and the tiny models on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a model of `tiny_engine.MODELS` lies."""
    import tiny_engine  # noqa: PLC0415 - found by the line above
    import torch  # noqa: PLC0415 - most tests here need none

    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(1)
            made[name] = tmp_path_factory.mktemp(name)
            tiny_engine.MODELS[name]().save_pretrained(made[name])
        return made[name]

    return folder
