"""Bytes of a chunk's body: variable-length integers and zstd frames, written and read with every length bounded."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import numpy as np
import zstandard
from numpy.typing import NDArray

from headrace.errors import SyncError

_LEVEL = 1  # measured on sparse streams: level 3 gains nothing
_VARINT_BYTES = 5  # 35 bits: more than any count or length here
_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: contexts are costly to make and not safe to share."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
        _local.decompressor = zstandard.ZstdDecompressor()
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    _compressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor


def varint(number: int) -> bytes:
    """Seven bits a byte, lowest first; the top bit says that more follow."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def frame(data: NDArray[Any]) -> bytes:
    """Length and zstd frame of a contiguous array; the data themselves where zstd does not shrink them.

    The reader knows the unpacked size, so a length equal to it says "stored" and needs no flag.
    """
    packed = _compressor().compress(data.view(np.uint8).data) if data.size else b""
    if len(packed) >= data.nbytes:
        packed = data.tobytes()
    return varint(len(packed)) + packed


class Reader:
    """Walks over one body. Every refusal is a SyncError that begins with `what`."""

    def __init__(self, body: bytes, what: str) -> None:
        self._body = memoryview(body)
        self._at = 0
        self._what = what

    def refuse(self, reason: str) -> NoReturn:
        raise SyncError(f"{self._what}: {reason}")

    def take(self, size: int, name: str) -> memoryview:
        """The next `size` bytes."""
        left = len(self._body) - self._at
        if size > left:
            self.refuse(f"cut off: {name} needs {size} bytes, {left} are left")
        self._at += size
        return self._body[self._at - size : self._at]

    def byte(self, name: str) -> int:
        return self.take(1, name)[0]

    def varint(self, name: str, *, most: int) -> int:
        """The next variable-length integer, at most `most`."""
        number = 0
        for i in range(_VARINT_BYTES):
            byte = self.byte(name)
            number |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                break
        else:
            self.refuse(f"{name} is longer than {_VARINT_BYTES} bytes")
        if number > most:
            self.refuse(f"{name} is {number}, at most {most} is possible")
        return number

    def frame(self, size: int, name: str) -> NDArray[np.uint8]:
        """The next frame, which must unpack to exactly `size` bytes; checked before anything is allocated."""
        packed = self.take(self.varint(f"length of {name}", most=size), name)
        if len(packed) == size:
            return np.frombuffer(packed, np.uint8)
        try:
            declared = zstandard.get_frame_parameters(packed).content_size
            if declared != size:
                self.refuse(f"{name} declares {declared} bytes unpacked, {size} are expected")
            data = _decompressor().decompress(packed, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            self.refuse(f"{name} is not a zstd frame: {exc}")
        if len(data) != size:
            self.refuse(f"{name} unpacks to {len(data)} bytes, {size} are expected")
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        """Refuse trailing bytes."""
        if self._at != len(self._body):
            self.refuse(f"{len(self._body) - self._at} bytes are left over")
