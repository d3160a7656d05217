"""Shares, rates and the verdict on timelines with round numbers."""

import pytest

from headrace.flow.health import STEADY_STEPS, Health


def steps(
    count: int,
    *,
    wait_data: float = 0.0,
    wait_bound: float = 0.0,
    busy: float = 0.0,
    hand_off: float = 0.0,
    blocked: float = 0.0,
    zero_groups: int = 0,
    env_s: float = 0.0,
    in_flight: bool = True,
    health: Health | None = None,
) -> Health:
    """Each step uses 8 samples in 2 groups; seconds per state as given."""
    now = 0.0 if health is None else 10_000.0
    health = health or Health(in_flight=in_flight, lag_bound=2)
    health.trainer("hand_off", now)
    health.generator(True, now)
    for _ in range(count):
        began = now
        health.generator(True, now)
        health.trainer("wait_data", now := now + hand_off)
        health.trainer("wait_bound", now := now + wait_data)
        health.trainer("busy", now := now + wait_bound)
        health.generator(False, began + blocked)
        for _ in range(2):
            health.scored(4, 40, zero_signal=False)
        for _ in range(zero_groups):
            health.scored(4, 40, zero_signal=True)
        health.observe_rollout(1.0, env_s, 0.0)
        health.step_ended(8, now := now + busy)
    return health


def test_shares_and_rates() -> None:
    health = steps(4, wait_data=3.0, wait_bound=1.0, busy=4.0, hand_off=2.0, blocked=1.0)
    shares = health.trainer_shares()
    assert shares == pytest.approx({"wait_data": 0.3, "wait_bound": 0.1, "busy": 0.4, "hand_off": 0.2, "idle": 0.0})
    assert health.trainer_shares(whole_run=True) == pytest.approx(shares)
    assert health.production_per_s() == pytest.approx(0.8)
    assert health.production_tok_per_s() == pytest.approx(8.0)
    assert health.consumption_per_s() == pytest.approx(2.0)
    assert health.rho() == pytest.approx(0.4)
    assert health.blocked_frac() == pytest.approx(0.1)
    assert health.capacity_per_s() == pytest.approx(8 / 9)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"wait_data": 5.0, "busy": 5.0}, "generation_bound"),
        ({"wait_data": 5.0, "busy": 5.0, "env_s": 3.0}, "environment_bound"),
        ({"wait_data": 5.0, "busy": 5.0, "blocked": 5.0}, "sync_bound"),
        ({"busy": 5.0, "hand_off": 5.0}, "sync_bound"),
        ({"busy": 10.0, "blocked": 5.0}, "training_bound"),
        ({"busy": 5.0, "wait_bound": 4.0, "wait_data": 1.0}, "bound_by_staleness"),
        ({"busy": 9.5, "wait_data": 0.5, "zero_groups": 3}, "signal_starved"),
        ({"busy": 9.5, "wait_data": 0.5}, "balanced"),
    ],
)
def test_verdict_and_its_remedy(times: dict[str, float], verdict: str) -> None:
    health = steps(STEADY_STEPS, **times)
    assert health.verdict == verdict
    assert bool(health.remedies()) == (verdict != "balanced")


def test_one_odd_step_does_not_change_the_verdict() -> None:
    health = steps(8, wait_data=5.0, busy=5.0)
    health = steps(STEADY_STEPS - 1, busy=100.0, blocked=90.0, health=health)
    assert health.verdict == "generation_bound"


def test_gain_of_more_generation_is_the_idle_half_of_the_trainer() -> None:
    health = steps(4, wait_data=5.0, busy=5.0)
    assert health.remedies()[0] == "more generation (2.00 x today's keeps the trainer busy): +100% samples/s"


def test_gain_of_overlap_in_sync_mode() -> None:
    """Generation 5 s, training 5 s, taking turns: overlapped both run all the time."""
    health = steps(4, wait_data=5.0, busy=5.0, blocked=5.0, in_flight=False)
    assert health.verdict == "sync_bound"
    assert health.remedies() == ["let both sides overlap (flow.mode = 'pipeline'): +100% samples/s"]


def test_nothing_yet() -> None:
    health = Health(in_flight=True, lag_bound=1)
    assert health.rho() == 0.0
    assert sum(health.trainer_shares().values()) == 0.0
    assert health.verdict == "balanced"
    assert health.last_step.wall_s == 0.0
