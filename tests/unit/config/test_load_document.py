from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.load import load_document
from headrace.errors import ConfigError
from headrace.planner.spec import PlanSpec


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('model = "qwen3-8b"\n[cluster]\ngpu = "h100"\nnum_gpus = 16\n')
    spec = load_document(PlanSpec, path, ["cluster.num_gpus=32"], what="spec")
    assert (spec.model, spec.cluster.gpu, spec.cluster.num_gpus) == ("qwen3-8b", "h100", 32)


def test_errors_name_key_value_file_line_and_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('model = "qwen3-8b"\n[cluster]\nnum_gpu = 16\n')
    with pytest.raises(
        ConfigError, match=r"cluster.num_gpu is not a setting; did you mean 'num_gpus'.*spec.toml, line 3"
    ):
        load_document(PlanSpec, path, what="spec")


def test_errors_name_the_flag_that_a_value_came_from() -> None:
    with pytest.raises(ConfigError, match=r"cluster.num_gpus = 0 must be >= 1 \(--num-gpus\)"):
        load_document(PlanSpec, None, ["cluster.num_gpus=0"], places={"cluster.num_gpus": "--num-gpus"})


def test_a_missing_file_is_called_what_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no spec"):
        load_document(PlanSpec, tmp_path / "spec.toml", what="spec")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("zero_signal_frac=1.0", "filters every group"),
        ("response.mean_tok=90000.0", "cannot lie above cap_tok"),
        ("response.sigma_within=2.0", "is a part of sigma"),
    ],
)
def test_impossible_specs_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_document(PlanSpec, None, [change])
