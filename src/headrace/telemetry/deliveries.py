"""Sums over the deliveries of a run: what travelled, what it is compared with, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

PARTS = ("diff_s", "encode_s", "put_s", "get_s", "decode_s", "pause_s", "apply_s", "verify_s")
"""Where the time of a delivery goes. The first three are the trainer's; apply and verify are inside the pause."""


class Cost(Protocol):
    """As `sync.report.SyncReport`, which this layer does not know."""

    @property
    def density(self) -> float: ...
    @property
    def full_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> float: ...
    @property
    def body_bytes(self) -> int: ...
    @property
    def resynced(self) -> bool: ...


@dataclass(slots=True)
class DeliveryTotals:
    """Only grows. The first version of a process, which is its base, is not part of the sums of sizes."""

    base_bytes: int = 0
    """Of the base."""
    versions: int = 0
    """Published after the base."""
    sent_bytes: int = 0
    """Of chunk bodies of these versions, as published; each replica fetches as much."""
    full_bytes: int = 0
    """Of the same versions as full snapshots."""
    density_sum: float = 0.0
    limit_bytes: float = 0.0
    """Entropy limit of the versions for which it was computed."""
    limited_bytes: int = 0
    """What those versions took."""
    landings: int = 0
    resyncs: int = 0
    """Landings that needed a keyframe although a version was held."""
    failed_swaps: int = 0
    """Swaps that were taken back."""
    pause_max_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """By PARTS, the base excluded."""

    def published(self, cost: Cost) -> None:
        """One version was published."""
        if not self.base_bytes:
            self.base_bytes = max(1, cost.body_bytes)
            return
        self.versions += 1
        self.sent_bytes += cost.body_bytes
        self.full_bytes += cost.full_bytes
        self.density_sum += cost.density
        if cost.limit_bytes:
            self.limit_bytes += cost.limit_bytes
            self.limited_bytes += cost.body_bytes
        self._spend(cost)

    def landed(self, cost: Cost) -> None:
        """One version is served."""
        self.landings += 1
        self.resyncs += cost.resynced
        if self.landings > 1:
            self._spend(cost)
            self.pause_max_s = max(self.pause_max_s, float(getattr(cost, "pause_s", 0.0)))

    def _spend(self, cost: Cost) -> None:
        for part in PARTS:
            self.seconds[part] = self.seconds.get(part, 0.0) + float(getattr(cost, part))

    def summary(self) -> Mapping[str, float]:
        """Sizes, ratios and *means per version* of the times; empty when nothing came after the base."""
        if not self.versions:
            return {}
        landed = max(1, self.landings - 1)
        per = {part: self.versions if part in PARTS[:3] else landed for part in PARTS}
        return {
            "versions": self.versions,
            "base_bytes": self.base_bytes,
            "bytes": self.sent_bytes / self.versions,
            "full_bytes": self.full_bytes / self.versions,
            "ratio": self.full_bytes / max(1, self.sent_bytes),
            "ratio_to_limit": self.limit_bytes / self.limited_bytes if self.limited_bytes else 0.0,
            "density": self.density_sum / self.versions,
            "resyncs": self.resyncs,
            "failed_swaps": self.failed_swaps,
            "pause_max_s": self.pause_max_s,
            **{part: seconds / per[part] for part, seconds in self.seconds.items()},
        }
