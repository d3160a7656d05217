"""The planner's commands, called as a shell would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.app import app
from headrace.config.load import load_recipe
from headrace.errors import ConfigError, DataError

SMALL = [
    "--model", "qwen3-8b", "--gpu", "h100", "--num-gpus", "8", "--batch-groups", "16", "--group-size", "8",
    "--response-tok", "800", "--response-cap", "4096", "--set", "search.simulate_best=2", "--set", "search.sim_steps=6",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_calibrations(headrace_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans use what the machine's user has calibrated; tests must not."""
    monkeypatch.delenv("HEADRACE_SERVING_DATA", raising=False)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def test_flags_alone_make_a_plan() -> None:
    done = run("plan", *SMALL)
    assert done.exit_code == 0
    for words in ("what binds", "qwen3-8b", "h100", "confidence", "speed-up"):
        assert words in done.stdout


def test_json_html_and_recipe_come_from_one_plan(tmp_path: Path) -> None:
    html, recipe = tmp_path / "plan.html", tmp_path / "planned.toml"
    done = run("plan", *SMALL, "--json", "--html", str(html), "--emit", str(recipe))
    best = json.loads(done.stdout)["best"]
    config = load_recipe(recipe)
    assert config.flow.mode == best["setting"]["mode"]
    assert config.flow.max_running == max(8, best["setting"]["max_running"])
    page = html.read_text()
    assert 'src="http' not in page
    assert best["words"].split()[0] in page


def test_two_plans_and_one_saved_plan_are_compared(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(run("plan", *SMALL, "--json").stdout)
    spec = tmp_path / "other.toml"
    spec.write_text(
        'model = "qwen3-8b"\nbatch_groups = 16\ngroup_size = 8\n[cluster]\nnum_gpus = 16\n'
        "[response]\nmean_tok = 800\ncap_tok = 4096\n[search]\nsimulate_best = 2\nsim_steps = 6\n"
    )
    done = run("plan", "compare", str(saved), str(spec))
    assert "saved" in done.stdout
    assert "calibration builtin" in " ".join(done.stdout.split())
    assert "other" in done.stdout
    assert "samples/s" in done.stdout


def test_simulate_takes_a_fixed_split_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = run(
        "simulate", *SMALL, "--mode", "pipeline", "--gen-gpus", "4", "--sim-steps", "6", "--json", "--trace", str(trace)
    )
    shown = json.loads(done.stdout)
    assert (shown["setting"]["gen_gpus"], shown["calibration"]) == (4, "builtin")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"train", "swap"} <= {event["name"] for event in events}


def test_a_recipe_is_simulated_as_it_is() -> None:
    done = run("simulate", "--recipe", "recipes/sync.toml", "--num-gpus", "2", "--sim-steps", "4", "--json")
    setting = json.loads(done.stdout)["setting"]
    assert (setting["mode"], setting["colocated"], setting["gen_tp"]) == ("sync", True, 2)


def test_a_recipe_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "planned.toml"
    target.mkdir()  # a folder of that name stands in the way of the rename
    with pytest.raises(ConfigError, match="writing --emit"):
        run("plan", *SMALL, "--emit", str(target))
    assert list(tmp_path.iterdir()) == [target]


def test_explain_fixtures_chips_and_models_are_readable() -> None:
    assert "What binds" in run("plan", "explain", *SMALL).stdout
    assert "h100" in run("plan", "chips").stdout
    assert "qwen3-30b-a3b" in run("plan", "models").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("plan",), "say what to plan for"),
        (("plan", "--model", "qwen3-8b", "--num-gpus", "0"), "num_gpus = 0 must be >= 1 .--num-gpus"),
        (("plan", "spec.toml", "--recipe", "recipes/sync.toml"), "not both"),
        (("plan", "compare", "nothing.json", "b"), "no run folder, no saved plan"),
        (("simulate", *SMALL, "--mode", "pipelin"), "did you mean 'pipeline'"),
        (("calibrate",), "give run folders"),
    ],
)
def test_wrong_use_is_explained(args: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*args)


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"best": {}}')
    with pytest.raises(DataError, match=r"x\.json is no saved plan"):
        run("plan", "compare", str(path), str(path))
