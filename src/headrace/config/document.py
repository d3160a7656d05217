"""Pages of settings, generated from their schemas: `python -m headrace.config.document docs` writes all of them."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import astuple, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.plugins import resolve

_HIDDEN = {"recipe_dir"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One generated page."""

    schema: str
    """module:attr; a name, because schemas of higher layers have pages too."""
    head: str
    """Markdown above the tables."""


PAGES: Mapping[str, Page] = {
    "config.md": Page(
        schema="headrace.config.schema:RunConfig",
        head="""# Settings

Generated from `src/headrace/config/schema.py` by `make docs`; do not edit.
Every setting goes in a recipe (TOML) or on the command line: `--set flow.max_lag_steps=2`.
Unknown keys, wrong types and impossible combinations are refused before anything starts.
""",
    ),
    "plan-spec.md": Page(
        schema="headrace.planner.spec:PlanSpec",
        head="""# Plan specs

Generated from `src/headrace/planner/spec.py` by `make docs`; do not edit. [planner.md](planner.md) explains the use.
Every setting goes in a spec (TOML, `headrace plan SPEC`) or on the command line: `--set response.sigma=0.7`.
Unknown keys, wrong types and impossible combinations are refused before anything is searched.
""",
    ),
    "planner-constants.md": Page(
        schema="headrace.planner.constants:Constants",
        head="""# Constants of the planner

Generated from `src/headrace/planner/constants.py` by `make docs`; do not edit. [planner.md](planner.md) has the
equations. Each constant has a value, a unit, a source, a date and a grade; `headrace calibrate` replaces them.
""",
    ),
}
"""File name to page."""


def render(name: str) -> str:
    """One of PAGES as Markdown."""
    page = PAGES[name]
    schema: type[BaseModel] = resolve(page.schema, what=f"the schema of {name}")
    sections = {n: model for n, f in schema.model_fields.items() if (model := _model(f)) is not None}
    top = {n: f for n, f in schema.model_fields.items() if n not in sections and n not in _HIDDEN}
    parts = [page.head, _table("Top level", schema.__doc__ or "", top)]
    parts += [_table(f"[{n}]", model.__doc__ or "", model.model_fields) for n, model in sections.items()]
    return "\n".join(parts)


def write(folder: Path) -> None:
    """Write every page into `folder`, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (folder / name).write_text(render(name), encoding="utf-8")


def _table(title: str, text: str, fields: dict[str, FieldInfo]) -> str:
    rows = [f"## {title}", "", _one_line(text), "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "unset" if field.default is None else _value(_default(field))
        allowed = _cell(_type(field.annotation) + _bounds(field))
        rows.append(f"| `{name}` | {allowed} | {default} | {_cell(_one_line(field.description or ''))} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def _value(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):  # a number with its origin
        number, *origin = astuple(value)
        return f"{_value(number)} {_cell('; '.join(filter(None, origin)))}"
    if isinstance(value, float) and value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"`{value:g}`"
    return f"`{json.dumps(value)}`"


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
        return "array of " + re.sub("^(integer|number|string)", r"\1s", _type(args[0]))
    if origin is dict or annotation is dict:
        return "table"
    if is_dataclass(annotation):
        return "number with its origin"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "tables"
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
