"""Multipliers over the run."""

import pytest

from headrace.errors import PlanError
from headrace.planner.drift import PRESETS, drift_factors, drift_points
from headrace.planner.spec import DriftConfig


def test_presets_are_all_there() -> None:
    assert PRESETS.keys() == set(DriftConfig.model_fields["preset"].annotation.__args__)


@pytest.mark.parametrize(
    ("preset", "middle", "end"),
    [
        ("none", (1.0, 1.0), (1.0, 1.0)),
        ("base_zero", (2.5, 1.0), (4.0, 1.0)),
        ("thinking", (1.15, 1.0), (1.3, 1.0)),
        ("agentic", (2.4, 1.775), (3.8, 2.55)),
        ("length_penalised", (0.8, 1.0), (0.6, 1.0)),
    ],
)
def test_a_preset_is_linear(preset: str, middle: tuple[float, float], end: tuple[float, float]) -> None:
    config = DriftConfig.model_validate({"preset": preset})
    assert drift_factors(config, 0.0) == (1.0, 1.0)
    assert drift_factors(config, 0.5) == pytest.approx(middle)
    assert drift_factors(config, 1.0) == pytest.approx(end)


def test_own_knots_override_the_preset_and_hold_outside() -> None:
    config = DriftConfig(preset="base_zero", at_frac=(0.2, 0.6), length=(1.0, 3.0), turns=(2.0, 1.0))
    assert drift_factors(config, 0.0) == (1.0, 2.0)
    assert drift_factors(config, 0.4) == pytest.approx((2.0, 1.5))
    assert drift_factors(config, 1.0) == (3.0, 1.0)
    assert drift_factors(DriftConfig(at_frac=(0.0, 1.0), turns=(1.0, 3.0)), 0.5) == (1.0, 2.0)


def test_where_to_plan() -> None:
    assert drift_points(DriftConfig()) == (0.0,)
    assert drift_points(DriftConfig(at_frac=(0.0, 1.0), length=(2.0, 2.0))) == (0.0,)
    assert drift_points(DriftConfig(preset="thinking")) == (0.0, 0.5, 1.0)
    assert drift_points(DriftConfig(at_frac=(0.0, 0.3, 1.0), length=(1.0, 0.7, 2.0))) == (0.0, 0.3, 0.5, 1.0)


@pytest.mark.parametrize("at", [-0.1, 1.1, float("nan")])
def test_a_share_outside_the_run(at: float) -> None:
    with pytest.raises(PlanError, match="between 0 and 1"):
        drift_factors(DriftConfig(preset="thinking"), at)
