"""PipelineRL's throughput model (arXiv 2509.19128, appendix): when does training in flight beat taking turns?

Time unit: one *flash*, in which a chip at full arithmetic speed passes one token forward. A chip that decodes h
sequences yields U(h) tokens per flash; training a token costs tau flashes. The paper measured U; its case study needs
only U(192) and the shape below it. Ours is a power law through a given point: exponent 1 is the straight line, and
0.95 gives the paper's conventional generation rate (18.3), which a straight line misses (17.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.planner.closed import solve_ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Chips, batch and curve of one case. Lengths are uniform on 1 to L, so that the longest is twice the mean."""

    chips: int
    batch: int
    """Sequences per optimizer step."""
    tau: float
    """Flashes to train one token."""
    at_h: float
    """U is known here ..."""
    at_u: float
    """... and has this value."""
    exponent: float = 1.0
    """U(h) = at_u * (h / at_h) ** exponent."""

    def u(self, h: float) -> float:
        """Tokens per flash and chip with h sequences at once."""
        return float(self.at_u * (h / self.at_h) ** self.exponent)

    def pipeline_rates(self, generating: int, h: float) -> tuple[float, float]:
        """(generation, training) in tokens per flash with `generating` chips of h sequences each, always full."""
        return generating * self.u(h), (self.chips - generating) / self.tau

    def max_lag_steps(self, generating: int, h: float) -> int:
        """g_max = ceil(H * I * L_max / (mean L * B)): optimizer steps while the longest sequence is decoded."""
        return math.ceil(h * generating * 2.0 / self.batch - 1e-9)

    def conventional_rates(self, steps: float) -> tuple[float, float]:
        """(generation, training) of all chips in turns, `steps` optimizer steps per round of generation.

        A chip starts with h = steps * B / N sequences of which h * (1 - t/L) run at token t; its rate is tokens over
        time = (h*L/2) / integral of h(t)/U(h(t)) = U(h) * (2 - exponent) / 2.
        """
        h = steps * self.batch / self.chips
        return self.chips * self.u(h) * (2.0 - self.exponent) / 2.0, self.chips / self.tau

    def conventional_rate(self, steps: float) -> float:
        """Tokens per flash, taking turns: the harmonic sum of the two rates."""
        gen, train = self.conventional_rates(steps)
        return 1.0 / (1.0 / gen + 1.0 / train)

    def best_pipeline(self, lag_steps: int) -> tuple[int, int, float]:
        """(generating chips, sequences on each, tokens per flash) of the fastest pipeline within a lag."""
        best = (0, 0, 0.0)
        for generating in range(1, self.chips):
            h = int(lag_steps * self.batch / (2 * generating))
            if h < 1:
                break
            rate = min(self.pipeline_rates(generating, h))
            best = max(best, (generating, h, rate), key=lambda found: found[2])
        return best

    def speedup(self, lag_steps: int) -> float:
        """Best pipeline over taking turns, both with at most `lag_steps` of lag."""
        return self.best_pipeline(lag_steps)[2] / self.conventional_rate(lag_steps)


def exponent_for(case: Case, steps: float, gen_rate: float) -> float:
    """The exponent in [0, 1] with which `case` would generate `gen_rate` tokens per flash conventionally.

    At one point (at_h, at_u) above the round's h, a smaller exponent means a higher curve below it.
    """

    def negated(exponent: float) -> float:
        return -replace(case, exponent=exponent).conventional_rates(steps)[0]

    return solve_ascending(negated, -gen_rate, 0.0, 1.0)
