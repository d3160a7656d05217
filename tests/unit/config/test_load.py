"""Recipes: what loads, and what an error says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.load import (
    config_from_overrides,
    key_lines,
    load_recipe,
    parse_override,
    resolved_json,
)
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_empty_recipe_is_all_defaults(tmp_path: Path) -> None:
    config = load_recipe(recipe(tmp_path, ""))
    assert config.flow.lag_bound == 2
    assert config.recipe_dir == tmp_path.resolve()


def test_values_and_overrides(tmp_path: Path) -> None:
    path = recipe(tmp_path, "steps = 3\n[flow]\nmode = 'sync'\n[sampling]\nstop = [\"\\n\", '.']\n[optim]\nlr = 1\n")
    config = load_recipe(
        path, ["flow.mode=pipeline", "flow.max_lag_steps=4", "env.options.min_terms=2", "optim.lr=3e-6"]
    )
    assert (config.steps, config.flow.mode, config.flow.lag_bound) == (3, "pipeline", 4)
    assert config.sampling.stop == ("\n", ".")
    assert config.env.options == {"min_terms": 2}
    assert config.optim.lr == 3e-6


def test_bound_error_names_key_value_limit_file_and_line(tmp_path: Path) -> None:
    path = recipe(tmp_path, "steps = 2\n\n[flow]\n# a comment\nmax_lag_steps = -1\n")
    assert error(path) == f"flow.max_lag_steps = -1 must be >= 0 ({path}, line 5)"


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[flow]\nmax_lag_step = 1\n")
    assert error(path) == f"flow.max_lag_step is not a setting; did you mean 'max_lag_steps'? ({path}, line 2)"
    assert "did you mean 'flow'?" in error(recipe(tmp_path, "[flwo]\nmode = 'sync'\n"))


def test_wrong_choice_names_the_choices_and_the_nearest(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[flow]\nmode = 'sinc'\n")
    message = error(path)
    assert "flow.mode = \"sinc\" must be one of 'sync', 'one_step_off', 'pipeline'; did you mean 'sync'?" in message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("steps = '8'", 'steps = "8" must be an integer'),
        ("steps = true", "steps = true must be an integer"),
        ("steps = 1.5", "steps = 1.5 must be an integer"),
        ("name = 1", "name = 1 must be a string"),
        ("flow = 3", "flow = 3 must be a table"),
        ("optim.lr = 'fast'", 'optim.lr = "fast" must be a number'),
        ("optim.betas = [0.9]", "optim.betas.1"),
        ("eval.before = 1", "eval.before = 1 must be true or false"),
        ("sampling.stop = 'x'", 'sampling.stop = "x" must be an array'),
    ],
)
def test_types_are_strict(tmp_path: Path, line: str, says: str) -> None:
    message = error(recipe(tmp_path, line + "\n"))
    assert says in message
    assert "line 1)" in message


def test_every_problem_has_its_line(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[flow]\nbatch_groups = 0\ngroup_size = 1\n[optim]\nlr = 0.0\n")
    lines = error(path).splitlines()
    assert [line.split(" must")[0] for line in lines] == [
        "flow.batch_groups = 0",
        "flow.group_size = 1",
        "optim.lr = 0.0",
    ]
    assert all(f"line {n})" in line for n, line in zip((2, 3, 5), lines, strict=True))


def test_impossible_combination_points_at_the_key_that_was_written(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[flow]\nmode = 'sync'\n\nmax_lag_steps = 2\n")
    assert error(path).startswith("flow.max_lag_steps = 2 contradicts mode = 'sync'")
    assert error(path).endswith(f"({path}, line 4)")
    path = recipe(tmp_path, "[trainer]\n\nupdates_per_batch = 2\n")
    assert error(path).startswith("trainer.updates_per_batch = 2 needs a loss that clips")
    assert error(path).endswith(f"({path}, line 3)")


def test_errors_of_overrides_name_the_flag(tmp_path: Path) -> None:
    path = recipe(tmp_path, "[flow]\nbatch_groups = 4\n")
    assert error(path, "flow.batch_groups=0") == "flow.batch_groups = 0 must be >= 1 (--set)"
    assert error(path, "flow.batchgroups=1").endswith("did you mean 'batch_groups'? (--set)")
    assert error(path, "name=12") == "name = 12 must be a string; quote it: --set 'name=\"12\"' (--set)"
    assert error(path, "foo.bar=1").endswith("(--set)")
    assert error(path, "flow.batch_groups.x=1") == "flow.batch_groups.x: flow.batch_groups = 4 is not a table (--set)"
    assert "must look like section.key=value" in error(path, "flow.batch_groups")
    assert "must look like section.key=value" in error(path, "flow..x=1")


def test_broken_files(tmp_path: Path) -> None:
    path = recipe(tmp_path, "steps = = 2\n")
    assert "is not valid TOML" in error(path)
    assert "line 1" in error(path)
    assert error(tmp_path / "recipes.toml").endswith("did you mean 'recipe.toml'?")
    assert "there is no folder" in error(tmp_path / "no" / "recipe.toml")
    assert "cannot read recipe" in error(tmp_path)


def test_recipe_dir_is_not_for_recipes(tmp_path: Path) -> None:
    assert "recipe_dir is set by the loader" in error(recipe(tmp_path, "recipe_dir = '/x'\n"))


def test_resolved_json_reads_back_equal(tmp_path: Path) -> None:
    text = "steps = 7\n[env.options]\ntask = 'chain_sum'\n[model]\nsystem_prompt = ''\n[optim]\nlr = 1e-5\n"
    config = load_recipe(recipe(tmp_path, text), ["flow.max_lag_steps=3"])
    assert RunConfig.model_validate_json(resolved_json(config), strict=True) == config


def test_config_from_overrides_keeps_the_base(tmp_path: Path) -> None:
    base = load_recipe(recipe(tmp_path, "[flow]\nbatch_groups = 3\n"))
    config = config_from_overrides(["env.kind=jsonl"], base)
    assert (config.flow.batch_groups, config.env.kind, config.recipe_dir) == (3, "jsonl", base.recipe_dir)
    assert config_from_overrides([]).flow.batch_groups == 8


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a= 1e-5", 1e-5),
        ("a=true", True),
        ("a=[1, 2]", [1, 2]),
        ("a={b = 1}", {"b": 1}),
        ("a='1'", "1"),
        ("a=word", "word"),
        ("a=/path/x=y", "/path/x=y"),
        ("a=", ""),
        ("a=1\nb=2", "1\nb=2"),
    ],
)
def test_override_values(text: str, value: object) -> None:
    assert parse_override(text) == (("a",), value)


def test_key_lines_over_several_lines() -> None:
    text = 'a = 1\n\n[x]\nb = [\n  1,\n  2,\n]\nc = """\nd = 4\n"""\n[y."z.w"]\ne.f = { g = 1 }\n[[t]]\nh = 1\n'
    lines = key_lines(text)
    assert lines[("a",)] == 1
    assert lines[("x",)] == 3
    assert lines[("x", "b")] == 4
    assert lines[("x", "c")] == 8
    assert ("d",) not in lines
    assert lines[("y", "z.w")] == 11
    assert lines[("y", "z.w", "e", "f", "g")] == 12
    assert lines[("t", "h")] == 14


@given(st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(), max_size=6), st.integers(0, 3))
def test_key_lines_finds_every_key(values: dict[str, int], gap: int) -> None:
    rows = [f"{key} = {value}" + "\n" * gap for key, value in values.items()]
    lines = key_lines("\n".join(rows))
    assert lines == {(key,): 1 + i * (gap + 1) for i, key in enumerate(values)}
