"""docs/config.md, generated from the schema: `python -m headrace.config.document docs/config.md`."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.schema import RunConfig

_HIDDEN = {"recipe_dir"}
_HEAD = """# Settings

Generated from `src/headrace/config/schema.py` by `make docs`; do not edit.
Every setting goes in a recipe (TOML) or on the command line: `--set flow.max_lag_steps=2`.
Unknown keys, wrong types and impossible combinations are refused before anything starts.
"""


def render() -> str:
    """The whole page as Markdown."""
    sections = {n: f for n, f in RunConfig.model_fields.items() if _model(f) is not None}
    top = {n: f for n, f in RunConfig.model_fields.items() if n not in sections and n not in _HIDDEN}
    parts = [_HEAD, _table("Top level", RunConfig.__doc__ or "", top)]
    for name, field in sections.items():
        model = _model(field)
        assert model is not None
        parts.append(_table(f"[{name}]", model.__doc__ or "", model.model_fields))
    return "\n".join(parts)


def write(path: Path) -> None:
    """Write the page; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(), encoding="utf-8")


def _table(title: str, text: str, fields: dict[str, FieldInfo]) -> str:
    rows = [f"## {title}", "", _one_line(text), "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "unset" if field.default is None else f"`{_value(_default(field))}`"
        allowed = _cell(_type(field.annotation) + _bounds(field))
        rows.append(f"| `{name}` | {allowed} | {default} | {_cell(_one_line(field.description or ''))} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def _value(value: Any) -> str:
    if isinstance(value, float) and value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:g}"
    return json.dumps(value)


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = args[0]
        bounds = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return _type(inner) + _bound_text(bounds)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(a)}`" for a in args)
    if origin in (Union, types.UnionType):
        return ", ".join(_type(a) for a in args if a is not type(None))
    if origin is tuple:
        return "array of " + {"str": "strings"}.get(args[0].__name__, "numbers")
    if origin is dict or annotation is dict:
        return "table"
    return {bool: "true, false", int: "integer", float: "number", str: "string"}.get(annotation, str(annotation))


def _bounds(field: FieldInfo) -> str:
    return _bound_text(field.metadata)


def _bound_text(metadata: list[Any]) -> str:
    bounds = []
    for item in metadata:
        for kind, sign, attr in ((Ge, ">=", "ge"), (Gt, ">", "gt"), (Le, "<=", "le"), (Lt, "<", "lt")):
            if isinstance(item, kind):
                bounds.append(f"{sign} {getattr(item, attr):g}")
    return (" " + " and ".join(bounds)) if bounds else ""


def _model(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
