"""headrace weights as real processes: a folder and a web server as stores, Ctrl-C, and kill -9 at every bad moment."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.sync.checkpoint import open_checkpoint
from headrace.sync.folder import publish_folder
from headrace.sync.store import Store

pytestmark = pytest.mark.timeout(900)  # many processes, each of which may compile its kernels first

COMMAND = [sys.executable, "-u", "-m", "headrace", "weights"]
DYING = """
import os, signal, sys
from headrace.cli import main
from headrace.sync.staging import Patch

def dying(real, at):
    calls = []
    def call(*args, **options):
        calls.append(args)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call

what, at = sys.argv[1], int(sys.argv[2])
if what == "replace":
    os.replace = dying(os.replace, at)
else:
    Patch.apply = dying(Patch.apply, at)
main(["weights", *sys.argv[3:]])
"""
"""A command whose process gets SIGKILL before its nth rename, or before its nth patch is written."""
SHAPES = {"embed.weight": (300, 64), "layers.0.w": (64, 200), "layers.1.w": (64, 200), "norm": (64,)}


def checkpoint(folder: Path, version: int) -> Path:
    """Version n: n random steps from the first one."""
    rng = np.random.default_rng(5)
    values = {n: rng.standard_normal(s).astype(np.float32) * np.float32(0.03) for n, s in SHAPES.items()}
    for _ in range(version):
        for name, array in values.items():
            values[name] = (array + rng.standard_normal(array.shape) * 1e-5).astype(np.float32)
    folder.mkdir(parents=True)
    save_file({n: a.astype(ml_dtypes.bfloat16) for n, a in values.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def weights(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=300, check=False)


def ok(*args: object) -> str:
    done = weights(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def publish(path: Path, store: Path) -> None:
    publish_folder(path, Store(str(store)))


def dies(what: str, at: int, *args: object) -> bool:
    """Whether the process got as far as being killed."""
    command = [sys.executable, "-c", DYING, what, str(at), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def bits(folder: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in open_checkpoint(folder).bits.items()}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """`tmp_path` as a web server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            return None

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="store")
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def follow(*args: object) -> subprocess.Popen[str]:
    command = [*COMMAND, "pull", "--json", "--every", "0.05", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def landed(stream: IO[str] | None) -> int:
    """The next version that a follower says it holds."""
    assert stream is not None
    return int(json.loads(stream.readline())["version"])


@pytest.mark.slow
@pytest.mark.parametrize("by", ["folder", "web"])
def test_a_follower_is_killed_and_goes_on(tmp_path: Path, served: str, by: str) -> None:
    store, folder = tmp_path / "store", tmp_path / "replica"
    url = str(store) if by == "folder" else f"{served}/store"
    versions = [checkpoint(tmp_path / f"v{i}", i) for i in range(4)]
    ok("publish", versions[0], "--store", store)
    first = follow("--store", url, "--follow", folder, "--files-from", versions[0])
    with first:
        assert landed(first.stdout) == 0
        publish(versions[1], store)
        assert landed(first.stdout) == 1
        first.kill()
    assert bits(folder) == bits(versions[1])
    publish(versions[2], store)
    second = follow("--store", url, "--follow", folder)
    with second:
        assert landed(second.stdout) == 2
        publish(versions[3], store)
        assert landed(second.stdout) == 3
        second.send_signal(signal.SIGINT)
        assert second.wait(120) == 130
    assert bits(folder) == bits(versions[3])
    assert json.loads((folder / "version.json").read_text(encoding="utf-8"))["version"] == 3
    assert sorted(p.name for p in folder.iterdir() if p.name != ".packs") == [
        "config.json", "model.safetensors", "version.json",
    ]  # fmt: skip
    assert json.loads(ok("verify", folder, versions[3], "--json"))["equal"] is True


@pytest.mark.slow
def test_kill_before_every_rename_of_an_update(tmp_path: Path, served: str) -> None:
    """Of the pack that was fetched, of the weights, of version.json."""
    old, new = checkpoint(tmp_path / "old", 0), checkpoint(tmp_path / "new", 1)
    made, folder = tmp_path / "made", tmp_path / "replica"
    publish(old, tmp_path / "store")
    pull = ("pull", "--store", f"{served}/store", "--once", "--follow")
    ok(*pull, made)
    publish(new, tmp_path / "store")
    seen = []
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        if not dies("replace", len(seen) + 1, *pull, folder):
            break
        found = bits(folder)
        assert found in (bits(old), bits(new))
        seen.append(found == bits(new))
        if len(seen) >= 2:
            ok(*pull, folder)
            assert bits(folder) == bits(new)
            assert json.loads((folder / "version.json").read_text(encoding="utf-8"))["version"] == 1
            assert not list(folder.glob("*.partial"))
    assert seen == [False, False, True]
    assert bits(folder) == bits(new)


@pytest.mark.slow
def test_kill_in_the_middle_of_a_change_in_place(tmp_path: Path) -> None:
    old, new, delta = checkpoint(tmp_path / "old", 0), checkpoint(tmp_path / "new", 1), tmp_path / "d.delta"
    before = bits(old)
    ok("diff", old, new, "-o", delta)
    for at in (1, 4):
        assert dies("patch", at, "apply", old, delta, "--in-place")
        refused = weights("verify", old, delta)
        assert refused.returncode == 2
        assert "headrace weights recover" in refused.stderr
        ok("recover", old)
        assert bits(old) == before
    assert dies("patch", 3, "apply", old, delta, "--in-place")
    ok("apply", old, delta, "--in-place")
    assert bits(old) == bits(new)
    assert json.loads(ok("verify", old, delta, "--json"))["is"] == "to"


def test_errors_are_one_line_and_exit_2(tmp_path: Path) -> None:
    done = weights("verify", tmp_path / "nope", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"DataError: {tmp_path / 'nope'}: there is no such file or folder\n"
