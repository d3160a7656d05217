"""The generated settings page."""

from __future__ import annotations

from headrace.config.document import render
from headrace.config.schema import RunConfig


def test_every_setting_has_a_row_with_meaning() -> None:
    page = render()
    for name, field in RunConfig.model_fields.items():
        if name == "recipe_dir":
            continue
        inner = getattr(field.annotation, "model_fields", {name: field})
        for key, setting in inner.items():
            assert setting.description, f"{name}.{key} has no docstring"
            assert f"| `{key}` |" in page


def test_rows_show_bounds_choices_and_defaults() -> None:
    page = render()
    assert "| `steps` | integer >= 1 | `50` | Optimizer steps. |" in page
    assert '`"sync"`, `"one_step_off"`, `"pipeline"`' in page
    assert "| `max_lag_steps` | integer >= 0 | unset |" in page
