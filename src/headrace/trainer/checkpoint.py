"""Learner checkpoints and exported models: safetensors and JSON, never pickle.

A checkpoint folder holds `state.safetensors` (masters, optimizer moments) and `learner.json` (step, fingerprint), the
latter written last: without it the folder is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import DataError, boundary

FORMAT = 1
_STATE, _INDEX = "state.safetensors", "learner.json"
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def layout_digest(parameters: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Short hash of parameter names and shapes: what flat buffers mean."""
    text = "\n".join(f"{name} {shape}" for name, shape in parameters)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_state(
    folder: Path, tensors: Mapping[str, Tensor], *, step: int, fingerprint: Mapping[str, Any], rng: Mapping[str, Any]
) -> None:
    """Write a checkpoint into an existing folder; learner.json last, synced."""
    with boundary(DataError, f"writing a learner checkpoint to {folder}"):
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, folder / _STATE)
        _sync(folder / _STATE)
        index = {"format": FORMAT, "step": step, "fingerprint": dict(fingerprint), "rng": dict(rng)}
        partial = folder / f"{_INDEX}.partial"
        partial.write_text(json.dumps(index, indent=2) + "\n")
        _sync(partial)
        partial.replace(folder / _INDEX)


def read_state(
    folder: Path, *, fingerprint: Mapping[str, Any], expect: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], int, dict[str, Any]]:
    """(tensors, step, rng state) of a checkpoint.

    Nothing is returned and nothing changes (DataError that names each difference) when its fingerprint or its tensors'
    names and shapes are not the expected ones.
    """
    path = folder / _INDEX
    if not path.is_file():
        raise DataError(f"{folder} is not a learner checkpoint: {_INDEX} is missing (unfinished or another kind)")
    with boundary(DataError, f"reading {path}"):
        index = json.loads(path.read_text())
    if index.get("format") != FORMAT:
        raise DataError(f"{path} has format {index.get('format')!r}; this version reads {FORMAT}")
    stored = index["fingerprint"]
    wrong = [
        f"{key}: checkpoint has {stored.get(key)!r}, this learner {fingerprint.get(key)!r}"
        for key in sorted(stored.keys() | fingerprint.keys())
        if stored.get(key) != fingerprint.get(key)
    ]
    if wrong:
        raise DataError(f"checkpoint {folder} does not fit: " + "; ".join(wrong))
    with boundary(DataError, f"reading {folder / _STATE}"), safe_open(folder / _STATE, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if shapes != dict(expect):
        raise DataError(f"checkpoint {folder} holds tensors {shapes}; this learner needs {dict(expect)}")
    with boundary(DataError, f"reading {folder / _STATE}"):
        return load_file(folder / _STATE), int(index["step"]), dict(index["rng"])


def rng_state() -> dict[str, Any]:
    """State of torch's CPU generator as plain data (nothing in the built-in learner draws from it; own losses may)."""
    return {"torch": torch.get_rng_state().numpy().tobytes().hex()}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Inverse of `rng_state`."""
    if "torch" in state:
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def export_model(folder: Path, *, model_dir: Path, arrays: Iterable[tuple[str, NDArray[Any]]], dtype: str) -> None:
    """Write a Hugging Face folder: configuration and tokenizer of `model_dir`, weights in serving dtype."""
    with boundary(DataError, f"exporting the model to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            if (model_dir / name).is_file():
                shutil.copyfile(model_dir / name, folder / name)
        config = json.loads((model_dir / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        partial = folder / "model.safetensors.partial"
        save_arrays(dict(arrays), partial, metadata={"format": "pt"})
        _sync(partial)
        partial.replace(folder / "model.safetensors")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
