"""The publishing side: write one version durably, then name it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.errors import SyncError, boundary
from headrace.sync.manifest import FullManifest, TensorInfo, chain_digest
from headrace.sync.version import dtype_name, state_hash

_SERVED = ("BF16", "F16", "F32")
"""Dtypes of full snapshots."""


def tensor_info(name: str, array: NDArray[np.generic]) -> TensorInfo:
    """Identity of one tensor: dtype, shape and xxh3-128 of its raw bytes."""
    dtype = dtype_name(name, array)
    if dtype not in _SERVED:
        raise SyncError(
            f"tensor {name!r} has dtype {array.dtype.name}; a full snapshot holds {', '.join(_SERVED)} only"
        )
    if not array.flags.c_contiguous:
        raise SyncError(f"tensor {name!r} is not contiguous; its bytes would not be its values")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(array.shape), digest=state_hash(array))


def write_version(
    folder: Path,
    *,
    run_id: str,
    version: int,
    arrays: Iterable[tuple[str, NDArray[np.generic]]],
    durable: bool = True,
) -> FullManifest:
    """Write a full snapshot as `folder`/v000012.safetensors: temp file, fsync, rename; then return its manifest.

    `arrays` are C-contiguous with shapes as served. `durable=False` leaves out the fsync (half of the time), for
    snapshots that only travel to processes on this machine: they survive a kill, not a power cut.
    Raises SyncError; a failed write leaves no file behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"v{version:06d}.safetensors"
    partial = path.with_suffix(f".partial-{os.getpid()}")
    tensors = dict(arrays)
    infos = tuple(tensor_info(name, array) for name, array in sorted(tensors.items()))
    manifest = FullManifest(
        run_id=run_id,
        version=version,
        digest=chain_digest(infos),
        path=str(path),
        tensors=infos,
        bytes=sum(a.nbytes for a in tensors.values()),
    )
    try:
        with boundary(SyncError, f"writing version {version} to {path}"):
            about = {"run_id": run_id, "version": str(version), "digest": manifest.digest}
            save_file(tensors, partial, metadata=about)
            if durable:
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def retain(folder: Path, versions: Iterable[int]) -> None:
    """Delete snapshots of all versions but these."""
    keep = {f"v{version:06d}.safetensors" for version in versions}
    for path in folder.glob("v*.safetensors"):
        if path.name not in keep:
            path.unlink(missing_ok=True)
