"""Runs check.py in a process of its own: on CUDA where there is one, and always in its CPU form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).with_name("check.py")


def run_check(device: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK), "--device", device], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.stdout.startswith("{"), done.stderr
    found = json.loads(done.stdout)
    failed = {name: value for name, value in found.items() if isinstance(value, dict) and not value["ok"]}
    assert not failed, json.dumps(failed, indent=2)
    assert done.returncode == 0
    assert found["device"] == device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_computes_what_the_cpu_computes() -> None:
    run_check("cuda")


@pytest.mark.slow
def test_the_check_itself_holds_on_the_cpu() -> None:
    run_check("cpu")
