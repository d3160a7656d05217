"""The generated pages of settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from headrace.config.document import PAGES, render, write
from headrace.config.schema import RunConfig
from headrace.planner.spec import PlanSpec


@pytest.mark.parametrize(("name", "schema"), [("config.md", RunConfig), ("plan-spec.md", PlanSpec)])
def test_every_setting_has_a_row_with_meaning(name: str, schema: type[BaseModel]) -> None:
    page = render(name)
    for key, field in schema.model_fields.items():
        if key == "recipe_dir":
            continue
        inner = getattr(field.annotation, "model_fields", {key: field})
        for setting_key, setting in inner.items():
            assert setting.description, f"{key}.{setting_key} has no docstring"
            assert f"| `{setting_key}` |" in page


def test_rows_show_bounds_choices_and_defaults() -> None:
    page = render("config.md")
    assert "| `steps` | integer >= 1 | `50` | Optimizer steps. |" in page
    assert '`"sync"`, `"one_step_off"`, `"pipeline"`' in page
    assert "| `max_lag_steps` | integer >= 0 | unset |" in page


def test_arrays_say_what_they_hold() -> None:
    page = render("plan-spec.md")
    assert '| `modes` | array of `"sync"`, `"one_step_off"`, `"pipeline"` |' in page
    assert "| `gen_tp` | array of integers >= 1 | `[]` |" in page
    assert "| `at_frac` | array of numbers >= 0 and &lt;= 1 |" in page
    assert "| `stop` | array of strings |" in render("config.md")


def test_every_page_is_written(tmp_path: Path) -> None:
    write(tmp_path / "docs")
    assert {p.name: p.read_text(encoding="utf-8") for p in (tmp_path / "docs").iterdir()} == {
        n: render(n) for n in PAGES
    }


def test_numbers_with_an_origin_show_it() -> None:
    page = render("planner-constants.md")
    assert "| `smooth_p` | number with its origin | `6.0` exponent; middle of 4 to 8; 2026-11-29; guess |" in page
    assert "| `serving` | array of tables | `[]` |" in page
