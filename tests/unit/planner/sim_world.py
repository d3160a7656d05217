"""Tiny fakes for the simulator: draws as plain functions, engines and trainers with round numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import FlowConfig
from headrace.planner.cost import DecodeTable, EngineCost, HandOffCost, TrainerCost
from headrace.planner.simulate import Parts


@dataclass(frozen=True)
class Scene:
    """One episode."""

    turn_tok: tuple[int, ...]
    tool_tok: tuple[int, ...] = ()
    tool_s: tuple[float, ...] = ()
    start_s: float = 0.0
    grade_s: float = 0.0
    fails: bool = False


class FakeDraws:
    """Lengths from a function of (ordinal, member, attempt); rewards mixed unless `flat` says that they are equal."""

    def __init__(
        self,
        length: Callable[[int, int, int], int],
        *,
        members: int,
        prompt_tok: int = 10,
        flat: Callable[[int], bool] = lambda _: False,
        scene: Callable[[int, int, int], Scene] | None = None,
    ) -> None:
        self._length, self._members, self._prompt_tok, self._flat = length, members, prompt_tok, flat
        self._scene = scene

    def lengths(self, ordinal: int, attempt: int = 0) -> Sequence[int]:
        return [self._length(ordinal, member, attempt) for member in range(self._members)]

    def prompt_tok(self, ordinal: int) -> int:
        return self._prompt_tok

    def rewards(self, ordinal: int, attempt: int = 0) -> Sequence[float]:
        return [0.0 if self._flat(ordinal) else float(member % 2) for member in range(self._members)]

    def episode(self, ordinal: int, member: int, attempt: int = 0) -> Scene | None:
        return None if self._scene is None else self._scene(ordinal, member, attempt)


def constant(tok: int) -> Callable[[int, int, int], int]:
    return lambda ordinal, member, attempt: tok


def lognormal(mean_tok: float, sigma: float, *, seed: int = 0, cap_tok: int = 10**6) -> Callable[[int, int, int], int]:
    """Independent lengths with this mean (before the cap)."""

    def length(ordinal: int, member: int, attempt: int) -> int:
        rng = random.Random(f"{seed}/{ordinal}/{member}/{attempt}")
        return min(cap_tok, max(1, round(mean_tok * rng.lognormvariate(-sigma * sigma / 2, sigma))))

    return length


def engine(
    *,
    base_s: float = 0.01,
    per_running_s: float = 0.0,
    s_per_tok: float = 0.0,
    max_running: int = 64,
    kv_tok: int = 10**7,
    **rest: Any,
) -> EngineCost:
    """Steps of base_s + per_running_s * b + s_per_tok * context seconds; prefill is free unless `rest` says more."""
    mem_s = tuple(base_s + per_running_s * b for b in range(max_running + 1))
    zeros = (0.0,) * (max_running + 1)
    table = DecodeTable(mem_s=mem_s, mem_s_per_tok=s_per_tok, flop_s=zeros, flop_s_per_tok=0.0, other_s=zeros)
    costs: dict[str, Any] = {"prefill_s_per_tok": 0.0, "prefill_s_per_tok2": 0.0, "prefill_s_min": 0.0} | rest
    return EngineCost(decode=table, kv_capacity_tok=kv_tok, max_running=max_running, **costs)


def trainer(batch_s: float, *, s_per_tok: float = 0.0) -> TrainerCost:
    return TrainerCost(s_per_tok=s_per_tok, s_per_tok2=0.0, fixed_s=batch_s, mfu=0.3)


FREE = HandOffCost(publish_s=0.0, transfer_s=0.0, pause_s=0.0, bytes=0.0)


def parts(flow: FlowConfig, *, engines: int = 1, batch_s: float = 1.0, **changes: Any) -> Parts:
    """A plan with `engines` equal engines."""
    whole = Parts(flow=flow, engines=(engine(),) * engines, trainer=trainer(batch_s), hand_off=FREE)
    return replace(whole, **changes)
