"""What an engine's steps cost, measured while it works: the planner's `calibrate` fits its laws to these points."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

KEEP = 64
"""Newest measurements of one kind: a first step that compiles something is one of many, and then forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """All decode steps with the same number of running requests."""

    running: int
    steps: int
    context_tok: float
    """Mean sum of the requests' contexts, over the newest KEEP steps."""
    step_s: float
    """Median over the newest KEEP steps."""


@dataclass(slots=True)
class _Steps:
    count: int = 0
    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEEP))


class StepProfile:
    """Collects measurements; a few hundred bytes for each number of running requests that occurred."""

    def __init__(self) -> None:
        self._decode: dict[int, _Steps] = {}
        self._prefill: deque[tuple[int, float]] = deque(maxlen=4 * KEEP)

    def decoded(self, *, running: int, context_tok: int, seconds: float) -> None:
        """One decode step of `running` requests that attended to `context_tok` tokens in all."""
        steps = self._decode.setdefault(running, _Steps())
        steps.count += 1
        steps.newest.append((context_tok, seconds))

    def prefilled(self, *, tok: int, seconds: float) -> None:
        """One prefill of `tok` prompt tokens."""
        self._prefill.append((tok, seconds))

    def decode_points(self) -> tuple[DecodePoint, ...]:
        return tuple(
            DecodePoint(
                running=running,
                steps=steps.count,
                context_tok=sum(tok for tok, _ in steps.newest) / len(steps.newest),
                step_s=median(seconds for _, seconds in steps.newest),
            )
            for running, steps in sorted(self._decode.items())
        )

    def prefills(self) -> tuple[tuple[int, float], ...]:
        """(tokens, seconds) of the newest prefills."""
        return tuple(self._prefill)
