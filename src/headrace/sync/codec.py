"""Chunks: how one part of a tensor's change travels, and how it is put in place, proven and taken back.

Mode    body                                              needs the old bits    twice is once
ctx     positions and steps given old exponents           yes                   no
xor     old XOR new, zstd                                 yes                   no
set     positions and new bits                            no                    yes
dense   all new bits as byte planes, zstd                 no                    yes
raw     all new bits                                      no                    yes

Every chunk carries xxh3-128 digests of its body, of the new bits and, where the body depends on them, of the old bits.
A body is data from elsewhere: it is bounded by what its chunk declares, and whatever does not fit is a SyncError that
names the tensor. float32 can travel, but nearly all of its elements change with each step (99.9 % on synthetic
weights at lr 1e-6) and the delta is more than half of the weights: deliver the dtype that is served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.errors import SyncError, did_you_mean
from headrace.sync.bits import Bits, Layout, as_bits, from_planes, layout_of, planes
from headrace.sync.codec_ctx import kernels, read_ctx, write_ctx
from headrace.sync.entropy import DeltaStats as DeltaStats
from headrace.sync.entropy import stats as stats
from headrace.sync.gaps import read_gaps, write_gaps
from headrace.sync.streams import Reader, frame

Mode = Literal["ctx", "xor", "set", "dense", "raw"]
MODES: tuple[Mode, ...] = get_args(Mode)
CHUNK_ELEMS = 4 * 1024 * 1024
"""Most elements of a chunk: large enough that tables per exponent pay, small enough to stay in the caches."""

_SPARSE: tuple[Mode, ...] = ("ctx", "set", "xor")  # modes in which "no change" is an empty body
_DENSE: Mode = "dense"
_BASED: tuple[Mode, ...] = ("ctx", "xor")
_SMALL_BYTES = 4096
_CLEAR: dict[Mode, float] = {"ctx": 0.2, "set": 0.04}
"""Density up to which the mode beat all after it on every weight measured, so that trying those is time lost."""
_CLEAR_SIZE_FRAC = 0.5
_CTX_WIDTH_BYTES = 4

Pair = tuple[str, NDArray[Any] | None, NDArray[Any], str]
"""Name, old array or None, new array, safetensors dtype name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of one tensor's change."""

    tensor: str
    start: int
    """First element, in the flat tensor."""
    elems: int
    """At most CHUNK_ELEMS."""
    changed: int
    """Elements whose bits differ; all of them when the encoder had no old bits."""
    mode: Mode
    dtype: str
    """safetensors name."""
    body: bytes
    body_digest: str
    """xxh3-128, hex, like the other two."""
    old_digest: str
    """Of the old bits; empty when the mode needs none."""
    new_digest: str
    """Of the new bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Which elements of a chunk get which bits."""

    positions: NDArray[np.uint32]
    """Increasing, from the chunk's start."""
    bits: Bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """What `apply_chunk` overwrote."""

    positions: NDArray[np.uint32]
    bits: Bits


def encode_chunk(
    old: NDArray[Any] | None,
    new: NDArray[Any],
    *,
    tensor: str,
    start: int,
    dtype: str,
    allowed: Sequence[Mode] = MODES,
) -> Chunk:
    """The change from old to new (contiguous, equal sizes, at most CHUNK_ELEMS) in the smallest allowed mode.

    `raw` is the last resort even where it is not allowed, so that no body exceeds the new bits. Where few elements
    changed, `ctx` (else `set`) is taken without trying the others, which lose there by far.
    Raises SyncError for arrays, dtypes or modes that cannot be encoded.
    """
    layout = layout_of(dtype, tensor)
    bits = as_bits(new, dtype, tensor)
    base = None if old is None else as_bits(old, dtype, tensor)
    _check_request(tensor, bits, base, allowed)
    positions = None if base is None else kernels().changed_positions(base, bits)
    mode, body = _smallest(base, bits, positions, layout, allowed)
    new_digest = _digest(bits)
    return Chunk(
        tensor=tensor,
        start=start,
        elems=bits.size,
        changed=bits.size if positions is None else positions.size,
        mode=mode,
        dtype=dtype,
        body=body,
        body_digest=xxhash.xxh3_128_hexdigest(body),
        old_digest=_old_digest(base, positions, new_digest) if mode in _BASED else "",
        new_digest=new_digest,
    )


def decode_changes(chunk: Chunk, old: NDArray[Any] | None = None) -> Changes:
    """Positions and new bits, for a scatter elsewhere. `ctx` and `xor` need the old bits and check them.

    The new digest is not checked here: that takes the whole new chunk. `dense` and `raw` name every position, or with
    `old` only those that differ. Raises SyncError.
    """
    layout = _check_header(chunk)
    base = None if old is None else as_bits(old, chunk.dtype, chunk.tensor)
    if base is not None and base.size != chunk.elems:
        _refuse(chunk, f"it covers {chunk.elems} elements, the array has {base.size}")
    if chunk.mode in _BASED:
        if base is None:
            _refuse(chunk, f"mode {chunk.mode} needs the old weights")
        if _digest(base) != chunk.old_digest:
            _refuse(chunk, "the weights here are not those that it changes (old digest differs)")
    if not chunk.body and chunk.mode in _SPARSE and not chunk.changed:
        return Changes(positions=np.zeros(0, np.uint32), bits=np.zeros(0, layout.unsigned))
    return _read(chunk, base, layout)


def decode_chunk(chunk: Chunk, old: NDArray[Any] | None = None) -> NDArray[Any]:
    """All new bits of the chunk, as unsigned integers in a new array. Only `dense` and `raw` work without `old`.

    Checks the digests of body, old bits and new bits; raises SyncError.
    """
    if old is None and chunk.mode not in (_DENSE, "raw"):
        _refuse(chunk, f"mode {chunk.mode} needs the old weights")
    changes = decode_changes(chunk, old)
    if old is None:
        whole = changes.bits
    else:
        whole = as_bits(old, chunk.dtype, chunk.tensor).copy()
        whole[changes.positions] = changes.bits
    _check_new(chunk, whole)
    return whole


def apply_chunk(chunk: Chunk, target: NDArray[Any]) -> Undo:
    """Change `target` (the chunk's elements: contiguous, writable, the served dtype or its bits) in place.

    Returns what `undo` needs. Raises SyncError with the target as it was.
    """
    if not target.flags.writeable:
        _refuse(chunk, "the target is read-only")
    changes = decode_changes(chunk, target)
    bits = as_bits(target, chunk.dtype, chunk.tensor)
    before = Undo(positions=changes.positions, bits=bits[changes.positions])
    bits[changes.positions] = changes.bits
    try:
        _check_new(chunk, bits)
    except SyncError:
        undo(target, before)
        raise
    return before


def undo(target: NDArray[Any], record: Undo) -> None:
    """Put back what `apply_chunk` overwrote, bit for bit, in time that grows with the number of changes only."""
    if not target.flags.c_contiguous:
        raise SyncError("the weights to restore are not contiguous")
    target.reshape(-1).view(record.bits.dtype)[record.positions] = record.bits


def warm_up(dtype: str) -> None:
    """Compile (or load from numba's cache) what chunks of this dtype need, before a pause waits for it."""
    layout = layout_of(dtype, "")
    old, new = np.zeros(64, layout.unsigned), np.zeros(64, layout.unsigned)
    new[7] = 1
    apply_chunk(encode_chunk(old, new, tensor="", start=0, dtype=dtype), old)


def encode_tensors(
    pairs: Iterable[Pair],
    *,
    threads: int,
    allowed: Sequence[Mode] = MODES,
    progress: Callable[[int], None] | None = None,
) -> list[Chunk]:
    """All chunks of all tensors, in the order given; the same whatever the number of threads.

    Arrays may have any shape and strides (copied when not contiguous). A tensor without elements is one empty chunk.
    `pairs` is consumed as work gets done, so it may make its arrays one by one. `progress` hears the bytes of weights
    done so far. Raises SyncError.
    """
    if threads < 1:
        raise SyncError(f"threads = {threads} must be >= 1")
    chunks: list[Chunk] = []
    waiting: deque[Future[Chunk]] = deque()
    done_bytes = 0

    def collect() -> None:
        nonlocal done_bytes
        chunk = waiting.popleft().result()
        chunks.append(chunk)
        done_bytes += chunk.elems * layout_of(chunk.dtype, chunk.tensor).width_bytes
        if progress is not None:
            progress(done_bytes)

    with ThreadPoolExecutor(threads, thread_name_prefix="delta-encode") as pool:
        try:
            for tensor, start, old, new, dtype in _parts(pairs):
                if len(waiting) >= 2 * threads:
                    collect()
                work = pool.submit(encode_chunk, old, new, tensor=tensor, start=start, dtype=dtype, allowed=allowed)
                waiting.append(work)
            while waiting:
                collect()
        finally:
            for future in waiting:
                future.cancel()
    return chunks


def _parts(pairs: Iterable[Pair]) -> Iterator[tuple[str, int, Bits | None, Bits, str]]:
    """Chunk-sized views."""
    for name, old, new, dtype in pairs:
        if old is not None and old.shape != new.shape:
            raise SyncError(f"tensor {name!r} changed its shape from {old.shape} to {new.shape}")
        bits = as_bits(np.ascontiguousarray(new), dtype, name)
        base = None if old is None else as_bits(np.ascontiguousarray(old), dtype, name)
        for start in range(0, max(bits.size, 1), CHUNK_ELEMS):
            part = slice(start, start + CHUNK_ELEMS)
            yield name, start, None if base is None else base[part], bits[part], dtype


def _smallest(
    old: Bits | None, new: Bits, positions: NDArray[np.uint32] | None, layout: Layout, allowed: Sequence[Mode]
) -> tuple[Mode, bytes]:
    """Mode and body. Among equals the simplest wins."""
    usable: list[Mode] = [
        mode
        for mode in (*_SPARSE, _DENSE)
        if mode in allowed
        and (positions is not None or mode == _DENSE)
        and (mode != "ctx" or layout.width_bytes <= _CTX_WIDTH_BYTES)
    ]
    if positions is not None and not positions.size and usable and usable[0] in _SPARSE:
        return usable[0], b""
    best: tuple[Mode, bytes] | None = None
    for mode in usable:
        body = _write(mode, old, new, positions, layout)
        if len(body) < (new.nbytes if best is None else len(best[1])):
            best = (mode, body)
        clear = positions is not None and positions.size <= _CLEAR.get(mode, 0.0) * new.size
        if clear and new.nbytes > _SMALL_BYTES and len(body) <= _CLEAR_SIZE_FRAC * new.nbytes:
            break
    return best or ("raw", new.tobytes())


def _write(mode: Mode, old: Bits | None, new: Bits, positions: NDArray[np.uint32] | None, layout: Layout) -> bytes:
    if mode == _DENSE or old is None or positions is None:
        return b"".join(frame(plane) for plane in planes(new))
    if mode == "xor":
        return frame(old ^ new)
    if mode == "ctx":
        return write_ctx(old, new, positions, layout, kernels())
    gaps = np.diff(positions, prepend=np.uint32(0)) - np.uint32(1)
    gaps[0] = positions[0]
    return write_gaps(gaps) + b"".join(frame(plane) for plane in planes(new[positions]))


def _read(chunk: Chunk, old: Bits | None, layout: Layout) -> Changes:
    reader = Reader(chunk.body, _name(chunk))
    if chunk.mode == "ctx" or chunk.mode == "set":
        if not chunk.changed:
            reader.refuse("nothing changed, but it has a body")
        if chunk.mode == "ctx":
            assert old is not None
            positions, bits = read_ctx(reader, old, chunk.changed, layout, kernels())
        else:
            ends = np.cumsum(read_gaps(reader, chunk.changed, chunk.elems).astype(np.int64) + 1)
            positions = (ends - 1).astype(np.uint32)
            bits = _read_planes(reader, chunk.changed, layout)
            reader.end()
        return Changes(positions=positions, bits=bits)
    size_bytes = chunk.elems * layout.width_bytes
    if chunk.mode == "xor":
        assert old is not None
        whole = reader.frame(size_bytes, "XOR").view(layout.unsigned) ^ old
    elif chunk.mode == _DENSE:
        whole = _read_planes(reader, chunk.elems, layout)
    else:
        whole = np.frombuffer(reader.take(size_bytes, "raw"), layout.unsigned)
    reader.end()
    if old is None:
        return Changes(positions=np.arange(chunk.elems, dtype=np.uint32), bits=whole)
    positions = kernels().changed_positions(old, whole)
    return Changes(positions=positions, bits=whole[positions])


def _read_planes(reader: Reader, elems: int, layout: Layout) -> Bits:
    return from_planes([reader.frame(elems, f"byte plane {i}") for i in range(layout.width_bytes)], layout)


def _check_request(tensor: str, new: Bits, old: Bits | None, allowed: Sequence[Mode]) -> None:
    if new.size > CHUNK_ELEMS:
        raise SyncError(f"tensor {tensor!r}: a chunk of {new.size} elements, at most {CHUNK_ELEMS} are allowed")
    if old is not None and old.size != new.size:
        raise SyncError(f"tensor {tensor!r} has {old.size} old elements and {new.size} new ones")
    if not allowed:
        raise SyncError(f"tensor {tensor!r}: no mode is allowed; valid modes: {', '.join(MODES)}")
    for mode in allowed:
        if mode not in MODES:
            raise SyncError(f"tensor {tensor!r}: mode {mode!r} is unknown; {did_you_mean(mode, MODES)}")


def _check_header(chunk: Chunk) -> Layout:
    """What can be known before the body is opened."""
    layout = layout_of(chunk.dtype, chunk.tensor)
    if chunk.mode not in MODES:
        _refuse(chunk, f"mode {chunk.mode!r} is unknown; {did_you_mean(str(chunk.mode), MODES)}")
    if chunk.mode == "ctx" and layout.width_bytes > _CTX_WIDTH_BYTES:
        _refuse(chunk, f"mode ctx does not serve {chunk.dtype}")
    if not 0 <= chunk.elems <= CHUNK_ELEMS or chunk.start < 0:
        _refuse(chunk, f"{chunk.elems} elements from {chunk.start}: 0 to {CHUNK_ELEMS} from 0 or later are possible")
    if not 0 <= chunk.changed <= chunk.elems:
        _refuse(chunk, f"{chunk.changed} of {chunk.elems} elements changed")
    if len(chunk.body) > chunk.elems * layout.width_bytes:
        _refuse(chunk, f"its body of {len(chunk.body)} bytes is larger than the weights")
    if xxhash.xxh3_128_hexdigest(chunk.body) != chunk.body_digest:
        _refuse(chunk, "its body is damaged (digest differs)")
    return layout


def _check_new(chunk: Chunk, bits: Bits) -> None:
    if _digest(bits) != chunk.new_digest:
        _refuse(chunk, "the result is not what was published (new digest differs)")


def _digest(bits: Bits) -> str:
    return xxhash.xxh3_128_hexdigest(bits.view(np.uint8).data)


def _old_digest(old: Bits | None, positions: NDArray[np.uint32] | None, new_digest: str) -> str:
    """Of the old bits, which are the new ones when nothing changed."""
    unchanged = positions is not None and not positions.size
    return new_digest if unchanged or old is None else _digest(old)


def _name(chunk: Chunk) -> str:
    return f"tensor {chunk.tensor!r}, {chunk.elems} elements from {chunk.start}, mode {chunk.mode}"


def _refuse(chunk: Chunk, reason: str) -> NoReturn:
    raise SyncError(f"{_name(chunk)}: {reason}")
