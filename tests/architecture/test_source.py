"""Rules about the source text that no linter checks."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headrace"
FILES = sorted(SOURCE.rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 600, 100
EXEMPT: dict[str, str] = {}
"""Path, or path::function, to the reason why it may be longer."""


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_size_budget() -> None:
    offenders = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > FILE_LINES and relative(path) not in EXEMPT:
            offenders.append(f"{relative(path)}: {lines} lines, {FILE_LINES} allowed")
        for function in functions(ast.parse(text)):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > FUNCTION_LINES and f"{relative(path)}::{function.name}" not in EXEMPT:
                offenders.append(f"{relative(path)}::{function.name}: {length} lines, {FUNCTION_LINES} allowed")
    assert not offenders, "\n".join(offenders)


def test_every_module_says_what_it_is() -> None:
    missing = [relative(p) for p in FILES if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert not missing


def test_only_the_command_line_prints() -> None:
    offenders = [
        f"{relative(path)}:{node.lineno}"
        for path in FILES
        if not relative(path).startswith("cli/")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint")
    ]
    assert not offenders


def test_environment_is_read_in_few_places() -> None:
    offenders = [
        f"{relative(path)}:{node.lineno}"
        for path in FILES
        if not relative(path).startswith(("config/", "launch/", "hub/"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    ]
    assert not offenders


def test_broad_excepts_are_at_seams_and_say_why() -> None:
    """`except Exception` only in errors.boundary, or with a reason in the same line (ruff wants the noqa)."""
    offenders = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, ast.ExceptHandler) or relative(path) == "errors.py":
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(
                c is None or (isinstance(c, ast.Name) and c.id in ("Exception", "BaseException")) for c in caught
            )
            ends_in_raise = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if broad and not ends_in_raise and not re.search(r"#.*\w+ \w+ \w+", lines[node.lineno - 1]):
                offenders.append(f"{relative(path)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    assert not offenders, "\n".join(offenders)


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    allowed = {"api.py": "NotImplementedError"}  # caught there: asyncio raises it where it has no signal handlers
    offenders = [
        f"{relative(path)}: {match.group()}"
        for path in FILES
        for match in words.finditer(path.read_text(encoding="utf-8"))
        if allowed.get(relative(path)) != match.group()
    ]
    assert not offenders


def declares_all(path: Path) -> bool:
    return any(
        isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


@pytest.mark.parametrize("path", [p for p in FILES if declares_all(p)], ids=relative)
def test_public_names_equal_all(path: Path) -> None:
    """`__all__` names what exists, sorted, and every public name of that module that was made for the public."""
    dotted = ".".join(("headrace", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    names = list(module.__all__)
    assert names == sorted(set(names))
    assert [n for n in names if not hasattr(module, n)] == []
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == dotted and callable(value)
    }
    assert own <= set(names)
