"""Names of the form "module:attr"."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import PluginError
from headrace.plugins import require_methods, resolve


@pytest.fixture(autouse=True)
def _python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`resolve` adds to sys.path; no test may see another's folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_resolves_a_standard_name() -> None:
    assert resolve("math:pi", what="number") == 3.141592653589793


def test_finds_a_module_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "hr_plugin_beside.py").write_text("def score(): return 7\n", encoding="utf-8")
    assert resolve("hr_plugin_beside:score", what="env.reward", search=tmp_path)() == 7


@pytest.mark.parametrize("name", ["score", "module:", ":score", ""])
def test_form(name: str) -> None:
    with pytest.raises(PluginError, match="must look like 'module:attribute'"):
        resolve(name, what="env.reward")


def test_missing_module_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="there is no module 'hr_none'") as caught:
        resolve("hr_none:score", what="env.reward", search=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_missing_attribute_names_the_nearest() -> None:
    with pytest.raises(PluginError, match="module 'math' has no 'sqr'; did you mean 'sqrt'"):
        resolve("math:sqr", what="env.reward")


def test_a_module_that_lacks_its_own_import_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "hr_plugin_needy.py").write_text("import hr_not_installed\n", encoding="utf-8")
    with pytest.raises(PluginError, match="needs 'hr_not_installed', which is missing"):
        resolve("hr_plugin_needy:score", what="env.reward", search=tmp_path)


def test_errors_inside_a_users_module_keep_their_traceback(tmp_path: Path) -> None:
    (tmp_path / "hr_plugin_broken.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        resolve("hr_plugin_broken:score", what="env.reward", search=tmp_path)


def test_require_methods() -> None:
    require_methods([], ("append", "pop"), what="list")
    with pytest.raises(PluginError, match=r"env .* lacks reset, step; it has .*append"):
        require_methods([], ("append", "reset", "step"), what="env")
