"""What a published version is: names, shapes, dtypes, digest, and where the bytes lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from headrace.sync.report import SyncReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a version."""

    name: str
    dtype: str
    """safetensors name: BF16, F32, F16."""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of the raw little-endian bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullManifest:
    """One version published as a snapshot. Equality of versions is equality of digests."""

    run_id: str
    """A receiver refuses manifests of another run."""
    version: int
    digest: str
    """Hash over the tensors' names, dtypes, shapes and digests in sorted order of names, hex."""
    path: str
    """safetensors file with the full weights."""
    tensors: tuple[TensorInfo, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreManifest:
    """One version published in a store of deltas. The way there is the receiver's choice: it depends on what it holds.

    Its digest is that of `sync.version.Table`: the same by whatever way a receiver comes.
    """

    run_id: str
    version: int
    digest: str
    store: str
    """URL of the store."""
    report: SyncReport
    """What publishing it cost."""


Manifest = FullManifest | StoreManifest
"""What an engine stages."""


def chain_digest(tensors: Iterable[TensorInfo]) -> str:
    """Digest of a version from its tensors' identities in sorted order of names (xxh3-128, hex)."""
    state = xxhash.xxh3_128()
    for info in sorted(tensors, key=lambda t: t.name):
        state.update(f"{info.name}\0{info.dtype}\0{info.shape}\0{info.digest}\n".encode())
    return state.hexdigest()
