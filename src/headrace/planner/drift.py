"""How a workload moves during a run: lengths and model calls, as multipliers at shares of the run."""

from __future__ import annotations

import numpy as np

from headrace.errors import PlanError
from headrace.planner.spec import DriftConfig

PRESETS: dict[str, tuple[float, float]] = {
    "none": (1.0, 1.0),
    "base_zero": (4.0, 1.0),
    "thinking": (1.3, 1.0),
    "agentic": (3.8, 51 / 20),
    "length_penalised": (0.6, 1.0),
}
"""Multipliers of length and turns at the end of the run; 1 at its start, linear between.

agentic: SemiAnalysis, "RL systems: mind the gap", 16 June 2026, GLM-5: sequences 7.3 K to 28 K tokens, tool calls 20 to
51 within 25 steps. thinking: the same source, Qwen3-235B-Thinking, responses 10.2 K to 13.6 K within 10 steps. The
other two are round numbers for what replications of R1-Zero and of length penalties report: guesses.
"""


def drift_factors(config: DriftConfig, at: float) -> tuple[float, float]:
    """Multipliers of (response length, turns) at a share of the run, 0 to 1. Before the first own knot and after the
    last one its values hold. PlanError: a share outside the run."""
    if not 0.0 <= at <= 1.0:
        raise PlanError(f"drift at {at:g}: a share of the run lies between 0 and 1")
    if not config.at_frac:
        length, turns = PRESETS[config.preset]
        return 1.0 + at * (length - 1.0), 1.0 + at * (turns - 1.0)
    still = (1.0,) * len(config.at_frac)
    return (
        float(np.interp(at, config.at_frac, config.length or still)),
        float(np.interp(at, config.at_frac, config.turns or still)),
    )


def drift_points(config: DriftConfig) -> tuple[float, ...]:
    """Shares of the run to plan for, ascending: start, middle, end and own knots; the start alone if nothing moves."""
    shares = sorted({0.0, 0.5, 1.0, *config.at_frac})
    first = drift_factors(config, 0.0)
    if all(drift_factors(config, share) == first for share in shares):
        return (0.0,)
    return tuple(shares)
