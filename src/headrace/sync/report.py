"""What one delivery cost, split into its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Of one publish or one landing. Times that the side does not spend are 0."""

    version: int
    digest: str
    density: float = 0.0
    """Changed elements over all elements."""
    full_bytes: int = 0
    """Of the whole version, uncompressed."""
    bytes_by_mode: Mapping[str, int] = field(default_factory=dict)
    """Bytes of chunk bodies per mode of the codec."""
    limit_bytes: float = 0.0
    """Entropy bound of the same changes; 0 where it was not computed."""
    resynced: bool = False
    """A keyframe was needed although the receiver held a version."""
    diff_s: float = 0.0
    """Publisher: hashing and comparing."""
    encode_s: float = 0.0
    put_s: float = 0.0
    get_s: float = 0.0
    decode_s: float = 0.0
    """Receiver: checking, decoding and staging, while the old version is served."""
    pause_s: float = 0.0
    """Nothing was decoded by the engine; holds apply_s and verify_s."""
    apply_s: float = 0.0
    verify_s: float = 0.0

    @property
    def body_bytes(self) -> int:
        return sum(self.bytes_by_mode.values())

    @property
    def ratio(self) -> float:
        """Full size over what travelled; an empty delta counts as one byte."""
        return self.full_bytes / max(1, self.body_bytes)

    @property
    def ratio_to_limit(self) -> float:
        """Bound over what travelled: 1.0 is perfect; 0 where no bound was computed."""
        return self.limit_bytes / self.body_bytes if self.body_bytes else 0.0
