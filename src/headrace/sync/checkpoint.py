"""Checkpoints on disk: one safetensors file, or a folder with model.safetensors or with shards and their index.

Tensors are mapped, never read as a whole. How they are spread over files is no part of a version: the same weights in
one file and in seven shards have the same digest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, SyncError, boundary
from headrace.sync.bits import Bits
from headrace.sync.codec import CHUNK_ELEMS
from headrace.sync.journal import Journal
from headrace.sync.layout import read_layout
from headrace.sync.replica import JOURNAL, VERSION, WEIGHTS
from headrace.sync.version import Table, TensorSpec, item_bytes, state_hash

INDEX = "model.safetensors.index.json"
_STALE = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".delta"}
"""Other forms of weights: they would not be those of the version beside which they are carried."""

Progress = Callable[[str, int, int], None]
"""Hears (stage, bytes done, bytes in all)."""


def silent(stage: str, done: int, total: int) -> None:
    """Nobody listens."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Tensors of a checkpoint as flat bits of mapped files."""

    path: Path
    files: tuple[Path, ...]
    specs: Mapping[str, TensorSpec]
    """In order of names."""
    bits: Mapping[str, Bits]
    maps: tuple[np.memmap[Any, Any], ...]

    @property
    def full_bytes(self) -> int:
        """Of all tensors."""
        return sum(spec.elems * item_bytes(spec.dtype) for spec in self.specs.values())

    def flush(self) -> None:
        """Bring what was written to disk."""
        for part in self.maps:
            part.flush()

    def chunks(self) -> Iterator[tuple[TensorSpec, int, Bits]]:
        """(tensor, first element, bits) of every chunk."""
        for name, spec in self.specs.items():
            for start in spec.starts:
                yield spec, start, self.bits[name][start : start + CHUNK_ELEMS]

    def table(self, *, threads: int = 1, progress: Progress = silent, stage: str = "hashing") -> Table:
        """Hash everything: which version this is."""
        done_bytes = 0
        hashes: dict[str, list[str]] = {name: [] for name in self.specs}
        with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
            for (spec, _, bits), digest in zip(
                self.chunks(), pool.map(state_hash, (bits for _, _, bits in self.chunks())), strict=True
            ):
                hashes[spec.name].append(digest)
                done_bytes += bits.nbytes
                progress(stage, done_bytes, self.full_bytes)
        return Table(specs=self.specs, hashes={n: tuple(row) for n, row in hashes.items()}, aliases={})


def open_checkpoint(path: Path, *, writable: bool = False) -> Checkpoint:
    """Map a checkpoint. Raises DataError that says what was found instead.

    `writable` opens it for changes in place, after taking back one that was cut off; without it such a checkpoint is
    refused, because it is neither the old version nor the new one.
    """
    files = _files(path)
    own, *shared = _journals(path)
    torn = own.exists() and not writable
    if torn or any(journal.exists() for journal in shared):
        where = path if torn else path.parent
        raise DataError(
            f"{where}: a change in place was cut off; "
            f"`headrace weights recover {where}` puts the version before it back"
        )
    specs: dict[str, TensorSpec] = {}
    bits: dict[str, Bits] = {}
    maps = []
    for file in files:
        mapped, layout = _mapped(file, writable=writable)
        maps.append(mapped)
        for name, (spec, values) in layout.items():
            if name in specs:
                raise DataError(f"{path}: tensor {name!r} is in {file.name} and in another shard too")
            specs[name], bits[name] = spec, values if writable or values.flags.aligned else values.copy()
    if not specs:
        raise DataError(f"{path} holds no tensors")
    ordered = dict(sorted(specs.items()))
    found = Checkpoint(path=path, files=files, specs=ordered, bits={n: bits[n] for n in ordered}, maps=tuple(maps))
    if writable:
        journal_of(found).recover(found.bits)
    return found


def recover(path: Path) -> bool:
    """Take back a change in place that was cut off; False where there was none."""
    found = _journals(path)[0].exists()
    open_checkpoint(path, writable=found)
    return found


def journal_of(checkpoint: Checkpoint) -> Journal:
    """Where a change in place of this checkpoint is recorded."""
    return Journal(_journals(checkpoint.path)[0], flush=checkpoint.flush)


def carried(path: Path) -> list[Path]:
    """Files beside the weights that belong to the model (config, tokenizer), not other forms of its weights."""
    if not path.is_dir():
        return []
    skip = {INDEX, VERSION, JOURNAL}
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file() and not file.name.startswith(".") and file.name not in skip and file.suffix not in _STALE
    )


def copy_files(pairs: Sequence[tuple[Path, Path]], progress: Progress = silent) -> None:
    """Copy files, with bytes done; the copies can be written to."""
    total = sum(source.stat().st_size for source, _ in pairs)
    done = 0
    for source, target in pairs:
        with source.open("rb") as reader, target.open("wb") as writer:
            while block := reader.read(16 * 1024 * 1024):
                writer.write(block)
                done += len(block)
                progress("copying", done, total)
        shutil.copymode(source, target)
        target.chmod(target.stat().st_mode | 0o200)


def _files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else (path,)
    single, index = path / WEIGHTS, path / INDEX
    if single.is_file() and index.is_file():
        raise DataError(f"{path} holds both {WEIGHTS} and {INDEX}: name the one that is meant")
    if index.is_file():
        return _indexed(index)
    if single.is_file():
        return (single,)
    others = sorted(file.name for file in path.glob("*.safetensors"))
    hint = f"; it holds {', '.join(others[:3])}: name that file" if others else ""
    raise DataError(f"{path} holds neither {WEIGHTS} nor {INDEX}{hint}")


def _indexed(index: Path) -> tuple[Path, ...]:
    """Shards that an index names. They must lie beside it, and hold all tensors that it says they hold."""
    with boundary(DataError, f"{index} is no valid index of shards"):
        weight_map: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DataError(f"{index} names the shard {name!r}: it must be a .safetensors file beside the index")
        if not (index.parent / name).is_file():
            raise DataError(f"{index.parent / name}: the shard is missing, {index.name} names it")
    for name in names:
        held = _mapped(index.parent / name, writable=False)[1]
        missing = sorted(tensor for tensor, shard in weight_map.items() if shard == name and tensor not in held)
        if missing:
            raise DataError(f"{index.parent / name} has no tensor {missing[0]!r}, {index.name} says that it has")
    return tuple(index.parent / name for name in names)


def _mapped(file: Path, *, writable: bool) -> tuple[np.memmap[Any, Any], dict[str, tuple[TensorSpec, Bits]]]:
    with boundary(DataError, f"{file} is no valid safetensors file"):
        mapped = np.memmap(file, dtype=np.uint8, mode="r+" if writable else "r")
    whole: NDArray[np.uint8] = np.asarray(mapped)
    try:
        return mapped, read_layout(whole, str(file))
    except SyncError as exc:
        raise DataError(str(exc)) from exc


def _journals(path: Path) -> list[Path]:
    """Where the journal of this checkpoint lies, then where one that also changes its files would lie."""
    if path.is_dir():
        return [path / JOURNAL]
    own = path.with_name(f"{path.name}.{JOURNAL}")
    shared = path.parent / JOURNAL
    return [shared] if path.name in (WEIGHTS, INDEX) else [own, shared]
