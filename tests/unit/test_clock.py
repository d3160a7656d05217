"""Clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clock import Clock, VirtualClock, WallClock


def test_wall_clock_never_goes_back() -> None:
    clock: Clock = WallClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_virtual_clock_moves_only_when_told(times: list[float]) -> None:
    clock = VirtualClock()
    for time_s in sorted(times):
        clock.advance_to(time_s)
        assert clock.now() == clock.now() == time_s


def test_virtual_clock_refuses_to_go_back() -> None:
    clock = VirtualClock(5.0)
    with pytest.raises(ValueError, match=r"from 5\.0 to 4\.0"):
        clock.advance_to(4.0)
