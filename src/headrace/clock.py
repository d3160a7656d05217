"""Time as a dependency: the run uses WallClock, the simulator and the tests VirtualClock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. Swapping it is the whole difference between simulation and reality."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes backwards."""
        ...


class WallClock:
    """Monotonic real time, in seconds."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Time that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def now(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        """Move forward to `time_s`; moving back raises ValueError."""
        if time_s < self.now_s:
            raise ValueError(f"virtual time cannot go back from {self.now_s} to {time_s}")
        self.now_s = time_s
