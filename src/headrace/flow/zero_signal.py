"""Groups with equal rewards: no advantage, no gradient. Filter and refill, within a budget per batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt

from headrace.config.schema import FlowConfig
from headrace.flow.group import Row

BINS = ("0", "(0, 0.25]", "(0.25, 0.5]", "(0.5, 0.75]", "(0.75, 1)", "1")


def deviation(rewards: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = sum(rewards) / len(rewards)
    return sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))


class SignalFilter:
    """Counts what was filtered since the last batch and refuses to hunt for ever."""

    def __init__(self, flow: FlowConfig) -> None:
        self.filtered = 0
        """Zero-signal groups since the last batch was taken."""
        self._policy = flow.zero_signal
        self._eps = flow.signal_eps
        self._limit = flow.refill_limit
        self._histogram = dict.fromkeys(BINS, 0)

    def filters(self, rewards: Sequence[float]) -> bool:
        """Judge a complete group: True means that it is filtered (and counted)."""
        self._histogram[_bin(sum(rewards) / len(rewards))] += 1
        if self._policy == "keep" or deviation(rewards) > self._eps:
            return False
        if self._policy == "stop_after" and self.filtered >= self._limit:
            return False
        self.filtered += 1
        return True

    @property
    def spent(self) -> bool:
        """The budget of this batch is overdrawn."""
        return self.filtered > self._limit

    def explain(self) -> str:
        histogram = ", ".join(f"{name}: {count}" for name, count in self._histogram.items())
        return (
            f"flow.refill_budget is spent: {self.filtered} groups with equal rewards since the last batch, "
            f"allowed {self._limit}. Groups completed since then by mean reward: {histogram}. "
            "Almost all at 0 or 1: the tasks are too hard or too easy for this policy; else look at the reward"
        )

    def batch_taken(self) -> None:
        self.filtered = 0
        self._histogram = dict.fromkeys(BINS, 0)

    def resume(self, kept: Iterable[Row], *, version: int) -> None:
        """Count again what was filtered for the batch that is taken at `version` (exact in sync mode)."""
        for row in kept:
            if row.admitted_version == version and row.bucket == "filtered_zero_signal":
                self.filters(row.rewards)


def _bin(mean: float) -> str:
    if mean <= 0.0 or mean >= 1.0:
        return BINS[0] if mean <= 0.0 else BINS[-1]
    return BINS[1 + min(3, int(mean * 4 - 1e-12))]
