"""What a usable model folder is, and the marker that says a cached one is whole."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from headrace.errors import DataError
from headrace.hub.registry import ModelSource

MARKER = "headrace-source.json"
"""Written last: source, and size and sha256 of every file. A folder without it is not used."""
_CHUNK_BYTES = 1 << 20


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_folder(folder: Path) -> Path:
    """The folder itself if it holds a model in Hugging Face layout; else DataError that says what is missing."""
    problems = []
    if not (folder / "config.json").is_file():
        problems.append("config.json")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        problems.append("tokenizer.json")
    problems.extend(_missing_weights(folder))
    if problems:
        have = sorted(p.name for p in folder.iterdir())
        shown = ", ".join(have[:8]) + (", ..." if len(have) > 8 else "")
        raise DataError(
            f"{folder} is not a model folder in Hugging Face layout: it lacks {', '.join(problems)} "
            f"(it has {shown or 'no files'})"
        )
    return folder


def _missing_weights(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return []
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors (or model.safetensors.index.json with its shards)"]
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise DataError(f"{index} is not an index of shards: {exc!r}") from exc
    return [name for name in shards if not (folder / name).is_file()]


def write_marker(folder: Path, source: ModelSource) -> None:
    """Record source and content of a finished folder; all files are on disk before the marker is."""
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    marker = folder / MARKER
    with marker.open("w", encoding="utf-8") as out:
        json.dump({"source": asdict(source), "files": files}, out, indent=2)
        out.flush()
        os.fsync(out.fileno())


def is_whole(folder: Path, source: ModelSource) -> bool:
    """The marker names this very source and every file it lists has its size (contents were hashed when written)."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = marker["files"].items()
        return marker["source"]["wheel_sha256"] == source.wheel_sha256 and all(
            (folder / name).stat().st_size == info["bytes"] for name, info in files
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
