"""What every learner must do. Run it on yours: `check_learner(make, batch, tmp_path)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import DataError
from headrace.records import Batch


def arrays_of(learner: Any) -> dict[str, np.ndarray]:
    """Copies of the served weights."""
    return {name: np.array(array) for name, array in learner.named_arrays()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Bitwise equality."""
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def check_learner(make: Callable[[], Any], batch: Batch, folder: Path) -> None:
    """`make` builds a fresh learner from the same initial weights each time."""
    learner = make()
    before = arrays_of(learner)
    assert same(before, arrays_of(make())), "two learners from the same recipe start with the same weights"
    for name, array in learner.named_arrays():
        assert array.flags.c_contiguous, name
        assert array.dtype.name in ("bfloat16", "float32", "float16"), name

    report = learner.forward_backward(batch)
    assert same(before, arrays_of(learner)), "forward_backward leaves the weights alone"
    assert report.trained_tok == batch.trained_tok
    assert report.forward_tok >= report.trained_tok
    assert np.isfinite(report.loss)
    assert all(np.isfinite(v) for v in report.metrics.values())
    step = learner.optim_step()
    assert step.step == 1
    assert np.isfinite(step.grad_norm)
    after = arrays_of(learner)
    assert not same(before, after), "a step changes the weights"

    saved = folder / "saved"
    saved.mkdir()
    learner.save(saved)
    learner.train(batch)
    resumed = make()
    resumed.load(saved)
    assert same(after, arrays_of(resumed)), "load restores the weights"
    forward, optim = resumed.train(batch)
    assert len(forward) == len(optim) >= 1
    assert same(arrays_of(learner), arrays_of(resumed)), "resumed equals uninterrupted, bit for bit"

    empty = folder / "empty"
    empty.mkdir()
    unchanged = arrays_of(resumed)
    with pytest.raises(DataError):
        resumed.load(empty)
    assert same(unchanged, arrays_of(resumed)), "a refused load changes nothing"
    assert isinstance(learner.describe(), dict)
