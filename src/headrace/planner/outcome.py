"""What a simulated (or closed-form, or measured) plan does: the numbers that every table and plot shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One plan over some optimizer steps. Steady state: the warm-up steps are left out of rates and percentiles."""

    steps: int
    wall_s: float
    """Of all simulated steps, warm-up included."""
    samples_per_s: float
    """Trained rollouts per second."""
    trained_tok_per_s: float
    """Trained response tokens per second."""
    step_s_mean: float
    step_s_p50: float
    step_s_p99: float
    step_s: tuple[float, ...] = ()
    """Each step after warm-up."""
    trainer_shares: Mapping[str, float] = field(default_factory=dict)
    """busy, wait_data, wait_bound, hand_off, idle."""
    generator_shares: Mapping[str, float] = field(default_factory=dict)
    """decode, prefill, paused, idle: of engine seconds."""
    lag_hist: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens by lag."""
    sample_lag_hist: Mapping[int, int] = field(default_factory=dict)
    """Trained samples by the lag of their oldest token."""
    generated_tok: int = 0
    trained_tok: int = 0
    masked_tok: int = 0
    wasted_tok: Mapping[str, int] = field(default_factory=dict)
    """By reason (flow/ledger.py)."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Final groups by bucket."""
    kv_used_frac: float = 0.0
    """Mean over engine time."""
    kv_peak_frac: float = 0.0
    running_mean: float = 0.0
    """Rollouts decoded at once, over all engines."""
    queued_mean: float = 0.0
    """Rollouts that wait in engines' queues."""
    tool_mean: float = 0.0
    """Rollouts in tools, sandboxes' start or grading."""
    preemptions: int = 0
    rollout_s_mean: float = 0.0
    """From admission to graded."""
    rollout_s_p50: float = 0.0
    rollout_s_p99: float = 0.0
    rollout_s_max: float = 0.0
    queue_s_mean: float = 0.0
    """A completed group waits until it is taken."""

    @property
    def lag_mean(self) -> float:
        """Token-weighted."""
        whole = sum(self.lag_hist.values())
        return sum(lag * tok for lag, tok in self.lag_hist.items()) / whole if whole else 0.0

    @property
    def lag_p99(self) -> int:
        """Token-weighted: 99 % of trained tokens have at most this lag."""
        return percentile(self.lag_hist, 0.99)

    @property
    def lag_max(self) -> int:
        return max(self.lag_hist, default=0)

    @property
    def wasted_frac(self) -> float:
        """Of generated tokens."""
        return sum(self.wasted_tok.values()) / self.generated_tok if self.generated_tok else 0.0

    @property
    def trainer_idle_frac(self) -> float:
        """Waiting for data or held by the bound."""
        return self.trainer_shares.get("wait_data", 0.0) + self.trainer_shares.get("wait_bound", 0.0)

    @property
    def generator_idle_frac(self) -> float:
        return self.generator_shares.get("idle", 0.0)


def percentile(histogram: Mapping[int, int], share: float) -> int:
    """Smallest value v so that at least `share` of the counts lie at or below v; 0 for an empty histogram."""
    whole = sum(histogram.values())
    seen = 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= share * whole:
            return value
    return 0
