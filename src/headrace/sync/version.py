"""What a version is, and the documents that lead from one to the next.

A version's name is its digest: blake3 over the hashes of all chunks of its *new state*, so it is the same whether a
receiver came by a chain of deltas, by one merged delta or by a keyframe. Integers are labels for people.

Documents come from a store that others may write, so they are parsed strictly: unknown keys, sizes out of bounds,
names that could be paths, NaN and overlapping chunks are refused before any byte of a pack is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.errors import SyncError
from headrace.sync.bits import LAYOUTS
from headrace.sync.codec import CHUNK_ELEMS, Chunk, Mode
from headrace.sync.store import OBJECT_KEY

CODEC_VERSION: Literal[1] = 1
MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
MAX_PACK_BYTES = 1024 * 1024 * 1024
MAX_ELEMS = 2**42
_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "uint8": "U8", "int8": "I8", "bool": "BOOL", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
}  # fmt: skip
"""NumPy's (and ml_dtypes') names to those of safetensors."""

Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""blake3, hex: a version."""
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""xxh3-128, hex: a chunk."""
Key = Annotated[str, Field(pattern=f"^{OBJECT_KEY}$")]
Count = Annotated[int, Field(ge=0, le=MAX_ELEMS)]


class Document(BaseModel):
    """Strict and frozen, like every document here."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """Canonical JSON: keys in order of the fields, no blanks."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode()


class TensorSpec(Document):
    """Identity of one tensor, without its values."""

    name: Name
    dtype: str
    """safetensors name: BF16, F32, F8_E4M3, ..."""
    shape: tuple[Count, ...] = Field(max_length=16)

    @property
    def elems(self) -> int:
        return math.prod(self.shape)

    @property
    def starts(self) -> range:
        """First element of each chunk; none for a tensor without elements."""
        return range(0, self.elems, CHUNK_ELEMS)

    @field_validator("name")
    @classmethod
    def _no_path(cls, name: str) -> str:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"{name!r} reads like a path")
        return name

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if dtype not in LAYOUTS:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(sorted(LAYOUTS))}")
        return dtype

    @model_validator(mode="after")
    def _bounded(self) -> TensorSpec:
        if self.elems > MAX_ELEMS:
            raise ValueError(f"{self.name} has {self.elems} elements, at most {MAX_ELEMS} are allowed")
        return self


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return LAYOUTS[dtype].width_bytes


def dtype_name(name: str, array: NDArray[Any]) -> str:
    """safetensors name of an array's dtype; SyncError for one that no version can hold."""
    dtype = _DTYPES.get(array.dtype.name)
    if dtype is None:
        raise SyncError(f"tensor {name!r} has dtype {array.dtype.name}; a version holds {', '.join(_DTYPES)} only")
    return dtype


def state_hash(values: NDArray[Any]) -> str:
    """xxh3-128 over the raw little-endian bytes of a contiguous chunk, hex."""
    return xxhash.xxh3_128_hexdigest(values.reshape(-1).view(np.uint8).data)


@dataclass(frozen=True)
class Table:
    """A version: its tensors and the hash of each of their chunks. Equality of versions is equality of digests."""

    specs: Mapping[str, TensorSpec]
    """In order of names. Tied tensors are here once."""
    hashes: Mapping[str, tuple[str, ...]]
    """Per tensor, one xxh3-128 per chunk of CHUNK_ELEMS elements."""
    aliases: Mapping[str, str]
    """Other names of tied tensors, each with the name under which the tensor is kept."""

    @cached_property
    def digest(self) -> str:
        """blake3 over names, dtypes, shapes and chunk hashes in order of names, then aliases."""
        root = blake3(f"headrace version 1, chunks of {CHUNK_ELEMS}\n".encode())
        for name in sorted(self.specs):
            spec = self.specs[name]
            row = [name, spec.dtype, list(spec.shape), list(self.hashes[name])]
            root.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        for alias in sorted(self.aliases):
            root.update(json.dumps([alias, self.aliases[alias]], separators=(",", ":")).encode() + b"\n")
        return root.hexdigest()

    def owner(self, name: str) -> str:
        """The name under which a perhaps tied tensor is kept."""
        return self.aliases.get(name, name)

    def updated(self, news: Mapping[tuple[str, int], str]) -> Table:
        """The version after chunks, given as (tensor, first element), took on new states."""
        rows = {name: list(self.hashes[name]) for name in {name for name, _ in news}}
        for (name, start), new in news.items():
            rows[name][start // CHUNK_ELEMS] = new
        return replace(self, hashes={**self.hashes, **{name: tuple(row) for name, row in rows.items()}})

    def layout_difference(self, other: Table) -> str | None:
        """First difference in names, dtypes, shapes or ties, in words; None where a delta can lead to `other`."""
        for name in sorted(self.specs.keys() | other.specs.keys()):
            mine, theirs = self.specs.get(name), other.specs.get(name)
            if mine != theirs:
                said = [f"{s.dtype} {list(s.shape)}" if s else "absent" for s in (mine, theirs)]
                return f"tensor {name!r} was {said[0]} and is {said[1]}"
        if dict(self.aliases) != dict(other.aliases):
            return f"tied tensors were {dict(self.aliases)} and are {dict(other.aliases)}"
        return None

    def chunk(self, name: str, start: int) -> str:
        """Hash of the chunk at an element; SyncError where there is none."""
        spec = self.specs.get(name)
        if spec is None or start not in spec.starts:
            raise SyncError(f"there is no chunk at element {start} of tensor {name!r} in version {self.digest[:12]}")
        return self.hashes[name][start // CHUNK_ELEMS]


class PackRef(Document):
    """One pack: bodies of chunks one after the other."""

    key: Key
    size: Annotated[int, Field(ge=1, le=MAX_PACK_BYTES)]


class ChunkEntry(Document):
    """One chunk of a manifest and where its body lies."""

    tensor: Name
    start: Count
    """First element in the flattened tensor; a multiple of CHUNK_ELEMS."""
    elems: Annotated[int, Field(ge=1, le=CHUNK_ELEMS)]
    changed: Count
    mode: Mode
    pack: Annotated[int, Field(ge=0)]
    """Index into the manifest's packs."""
    offset: Annotated[int, Field(ge=0, le=MAX_PACK_BYTES)]
    size: Annotated[int, Field(ge=0, le=MAX_PACK_BYTES)]
    body: Hash
    """Of the bytes in the pack."""
    old: Hash | None
    """Of the state that the chunk applies to; None when its body does not depend on it."""
    new: Hash
    """Of the state that it leads to."""

    def chunk(self, body: bytes, dtype: str) -> Chunk:
        """The codec's form."""
        return Chunk(
            tensor=self.tensor,
            start=self.start,
            elems=self.elems,
            changed=self.changed,
            mode=self.mode,
            dtype=dtype,
            body=body,
            body_digest=self.body,
            old_digest=self.old or "",
            new_digest=self.new,
        )


class _Manifest(Document):
    codec: Literal[1]
    """CODEC_VERSION; a receiver of another version refuses."""
    run_id: Name
    epoch: Annotated[int, Field(ge=1)]
    """Counts starts of the run's publisher."""
    version: Count
    """Label."""
    to_digest: Digest
    packs: tuple[PackRef, ...]
    chunks: tuple[ChunkEntry, ...]
    """In order of (tensor, start), each at most once."""
    full_bytes: Annotated[int, Field(ge=0)]
    """Of the whole version, uncompressed."""
    created_at_s: float
    """By the publisher's clock; for people only."""

    @property
    def body_bytes(self) -> int:
        """Of all chunks as they travel."""
        return sum(chunk.size for chunk in self.chunks)

    @model_validator(mode="after")
    def _consistent(self) -> _Manifest:
        order = [(chunk.tensor, chunk.start) for chunk in self.chunks]
        if order != sorted(set(order)):
            raise ValueError("chunks are not in order, or one appears twice")
        for chunk in self.chunks:
            if chunk.pack >= len(self.packs) or chunk.offset + chunk.size > self.packs[chunk.pack].size:
                raise ValueError(f"chunk {chunk.start} of {chunk.tensor!r} lies outside of its pack")
            if chunk.start % CHUNK_ELEMS or chunk.changed > chunk.elems:
                raise ValueError(f"chunk {chunk.start} of {chunk.tensor!r}: start or number of changes cannot be")
        return self


class DeltaManifest(_Manifest):
    """The way from one version to another with the same tensors."""

    kind: Literal["delta"] = "delta"
    from_digest: Digest
    density: Annotated[float, Field(ge=0, le=1)]
    """Changed elements over all elements."""
    limit_bytes: Annotated[float, Field(ge=0)]
    """Entropy bound (class of the old exponent known, steps in units of the last place) of these changes."""
    step: Count
    """Optimizer step that made it."""


class BaseManifest(_Manifest):
    """A keyframe: everything, from nothing."""

    kind: Literal["base"] = "base"
    tensors: tuple[TensorSpec, ...]
    aliases: dict[Name, Name]
    hashes: dict[Name, tuple[Hash, ...]]
    """Per tensor, its chunks' states."""

    def table(self) -> Table:
        """The version that this leads to. Raises SyncError when the parts do not make the digest."""
        table = Table(specs={spec.name: spec for spec in self.tensors}, hashes=self.hashes, aliases=self.aliases)
        fits = len(table.specs) == len(self.tensors) and table.specs.keys() == self.hashes.keys()
        if not fits or any(len(self.hashes[s.name]) != len(s.starts) for s in self.tensors):
            raise SyncError(f"keyframe of version {self.version}: hashes do not belong to its tensors")
        if {(c.tensor, c.start) for c in self.chunks} != {(s.name, at) for s in self.tensors for at in s.starts}:
            raise SyncError(f"keyframe of version {self.version} does not hold all chunks of its tensors")
        if not set(self.aliases.values()) <= table.specs.keys() or set(self.aliases) & table.specs.keys():
            raise SyncError(f"keyframe of version {self.version}: aliases name no tensors")
        if table.digest != self.to_digest:
            raise SyncError(f"keyframe of version {self.version}: digest {table.digest}, it says {self.to_digest}")
        return table


def check_chunk(chunk: ChunkEntry, spec: TensorSpec | None) -> None:
    """Refuse a chunk that does not lie on the grid of its tensor or is larger than what it stands for."""
    if spec is None:
        raise SyncError(f"tensor {chunk.tensor!r} of the manifest is unknown to this version")
    if chunk.start not in spec.starts or chunk.elems != min(CHUNK_ELEMS, spec.elems - chunk.start):
        raise SyncError(f"chunk {chunk.start} + {chunk.elems} does not fit tensor {chunk.tensor!r} {list(spec.shape)}")
    limit = chunk.elems * item_bytes(spec.dtype) * 1.01 + 4096
    if chunk.size > limit:
        raise SyncError(f"chunk {chunk.start} of {chunk.tensor!r} has {chunk.size} bytes, more than raw values have")


_D = TypeVar("_D", bound=Document)


def parse(kind: type[_D], data: bytes, where: str) -> _D:
    """Read a document; SyncError names the first thing that is wrong and where it came from."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise SyncError(f"{where}: {len(data)} bytes, a document has at most {MAX_DOCUMENT_BYTES}")
    try:
        return kind.model_validate_json(data)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        raise SyncError(f"{where} is no valid {kind.__name__}: {at}: {first['msg']}") from exc


def elements(specs: Iterable[TensorSpec]) -> int:
    """Number of elements of all tensors."""
    return sum(spec.elems for spec in specs)
