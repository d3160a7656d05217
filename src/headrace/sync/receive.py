"""The receiving side: read a version, prove that it is what its manifest says."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize, safe_open

from headrace.errors import SyncError, boundary
from headrace.sync.manifest import Manifest, chain_digest
from headrace.sync.publish import tensor_info

_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}


def read_version(manifest: Manifest, *, run_id: str) -> dict[str, NDArray[np.generic]]:
    """Load all tensors of a version and check run id, names, dtypes, shapes and digests.

    Raises SyncError that names the first difference; nothing is returned then.
    """
    if manifest.run_id != run_id:
        raise SyncError(f"version {manifest.version} belongs to run {manifest.run_id!r}, this is {run_id!r}")
    path = Path(manifest.path)
    with boundary(SyncError, f"reading version {manifest.version} from {path}"):
        with safe_open(path, framework="numpy") as file:
            stored = (file.metadata() or {}).get("run_id")
        tensors: dict[str, NDArray[np.generic]] = {
            name: np.frombuffer(view["data"], dtype=_DTYPES[view["dtype"]]).reshape(view["shape"])
            for name, view in deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        }
    if stored != run_id:
        raise SyncError(f"{path} was written by run {stored!r}, this is {run_id!r}")
    infos = tuple(tensor_info(name, array) for name, array in sorted(tensors.items()))
    if infos != manifest.tensors:
        said = {t.name: t for t in manifest.tensors}
        found = {t.name: t for t in infos}
        for name in sorted(said.keys() | found.keys()):
            if said.get(name) != found.get(name):
                raise SyncError(
                    f"version {manifest.version}: tensor {name!r} differs: "
                    f"manifest says {said.get(name)}, {path} has {found.get(name)}"
                )
    if chain_digest(infos) != manifest.digest:
        raise SyncError(f"version {manifest.version}: digest {chain_digest(infos)} is not {manifest.digest}")
    return tensors
