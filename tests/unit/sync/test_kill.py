"""kill -9 before every step on disk, of publishing, applying, following and collecting (tests/servants)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "servants" / "delivery_kills.py"


@pytest.mark.slow
@pytest.mark.parametrize(("job", "at_least"), [("publish", 20), ("apply", 6), ("follow", 6), ("collect", 25)])
def test_kill_at_every_step(tmp_path: Path, job: str, at_least: int) -> None:
    """Faults 16, 17, 27 and 28 with a real signal; the script checks what is left after each death."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), job, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least
