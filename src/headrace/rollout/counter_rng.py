"""Uniform numbers from a counter: u(seed, position) depends on nothing else, so neither does a sampled token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection whose output bits look independent."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        return x ^ (x >> np.uint64(31))


def uniform(seed_B: NDArray[np.uint64], position_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in the open interval (0, 1), one for each (seed, position) pair; float64 [B].

    The seed is mixed before the position is added: neighbouring seeds are not shifted copies of one stream.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seed_B * _STEP + _STEP) + position_B * _STEP)
    return ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


def seed_bits(seed: int) -> np.uint64:
    """Any Python int as 64 bits (two's complement)."""
    return np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
