"""From TOML to a typed document (a recipe, say), with errors that name key, value, what is allowed, file and line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError, did_you_mean

Key = tuple[str, ...]
Document = TypeVar("Document", bound=BaseModel)
OVERRIDE = "--set"

_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_TYPES = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be an array",
    "model_type": "must be a table",
    "dict_type": "must be a table",
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe; `overrides` are "dotted.key=value" strings that win over the file.

    A value is parsed as TOML (`flow.max_lag_steps=2`, `sampling.stop=["\\n"]`); what is not TOML is taken as a string
    (`flow.mode=sync`). Raises ConfigError with one line for each thing that is wrong.
    """
    path = Path(path)
    data, lines = _read_toml(path)
    if "recipe_dir" in data:
        raise ConfigError(f"recipe_dir is set by the loader, remove it ({_place(path, lines, ('recipe_dir',))})")
    origin: dict[Key, str] = {key: f"{path}, line {line}" for key, line in lines.items()}
    for text in overrides:
        key, value = parse_override(text)
        _set(data, key, value)
        origin[key] = OVERRIDE
    data["recipe_dir"] = str(path.resolve().parent)
    return _validate(RunConfig, data, origin, default_origin=str(path))


def load_document(
    schema: type[Document],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    what: str = "document",
    places: Mapping[str, str] | None = None,
) -> Document:
    """Read a TOML file of another schema; `path` None: overrides on the schema's defaults. Errors as load_recipe.

    `places` says for overridden keys ("cluster.num_gpus") where their value comes from ("--num-gpus") if not --set.
    """
    data: dict[str, Any] = {}
    origin: dict[Key, str] = {}
    if path is not None:
        data, lines = _read_toml(Path(path), what)
        origin = {key: f"{path}, line {line}" for key, line in lines.items()}
    for text in overrides:
        key, value = parse_override(text)
        _set(data, key, value)
        origin[key] = (places or {}).get(".".join(key), OVERRIDE)
    return _validate(schema, data, origin, default_origin="defaults" if path is None else str(path))


def config_from_overrides(overrides: Sequence[str], base: RunConfig | None = None) -> RunConfig:
    """A RunConfig without a recipe file: `base` (default: the schema's defaults) changed by overrides."""
    base = base if base is not None else RunConfig(recipe_dir=Path.cwd())
    data = base.model_dump(mode="json", exclude_unset=True)
    data["recipe_dir"] = str(base.recipe_dir)
    origin: dict[Key, str] = {}
    for text in overrides:
        key, value = parse_override(text)
        _set(data, key, value)
        origin[key] = OVERRIDE
    return _validate(RunConfig, data, origin, default_origin="defaults")


def document(schema: type[Document], data: Mapping[str, Any]) -> Document:
    """A document from nested mappings; errors name the key and what is allowed."""
    return _validate(schema, dict(data), {}, default_origin="argument")


def resolved_json(config: RunConfig) -> str:
    """Every setting with its final value, as JSON text; RunConfig.model_validate_json reads it back to an equal one."""
    return config.model_dump_json(indent=2) + "\n"


def override(name: str, text: str) -> str:
    """The override that sets `name` to exactly `text`, whatever is in it (a TOML string may be written as JSON)."""
    return f"{name}={json.dumps(text, ensure_ascii=False)}"


def parse_override(text: str) -> tuple[Key, Any]:
    """Split "flow.max_lag_steps=2" into (("flow", "max_lag_steps"), 2).

    >>> parse_override("flow.mode=sync")
    (('flow', 'mode'), 'sync')
    """
    name, separator, raw = text.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not separator or not all(key):
        raise ConfigError(f"{text!r} must look like section.key=value ({OVERRIDE})")
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
    except tomllib.TOMLDecodeError:
        return key, raw.strip()
    # A line break inside `raw` could smuggle in a second key; then the text is a plain string.
    return key, parsed["value"] if set(parsed) == {"value"} else raw


def _read_toml(path: Path, what: str = "recipe") -> tuple[dict[str, Any], dict[Key, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(_not_found(path, what)) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {what} {path}: {exc}") from exc
    try:
        return tomllib.loads(text), key_lines(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc


def _not_found(path: Path, what: str) -> str:
    folder = path.parent
    near = sorted(p.name for p in folder.glob("*.toml")) if folder.is_dir() else []
    if near:
        return f"there is no {what} {path}; {did_you_mean(path.name, near)}"
    return f"there is no {what} {path}" + ("" if folder.is_dir() else f": there is no folder {folder}")


def key_lines(text: str) -> dict[Key, int]:
    """Line (from 1) of every table and key of a valid TOML document.

    tomllib gives no positions, but every statement of a valid document is a valid document by itself: statements are
    found by adding lines until one parses. Keys inside a value (inline tables) get the line of their statement.
    """
    lines = text.splitlines()
    found: dict[Key, int] = {}
    table: Key = ()
    start = 0
    while start < len(lines):
        stop = start + 1
        while True:
            statement = "\n".join(lines[start:stop])
            try:
                parsed = tomllib.loads(statement)
                break
            except tomllib.TOMLDecodeError:
                if stop >= len(lines):
                    raise
                stop += 1
        keys = list(_paths(parsed))
        is_header = lines[start].lstrip().startswith("[")
        if is_header:
            table = keys[-1]
        for key in keys:
            found.setdefault(key if is_header else table + key, start + 1)
        start = stop
    return found


def _paths(value: Mapping[str, Any], prefix: Key = ()) -> list[Key]:
    paths: list[Key] = []
    for name, inner in value.items():
        key = (*prefix, name)
        paths.append(key)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        if isinstance(inner, dict):
            paths.extend(_paths(inner, key))
    return paths


def _place(path: Path, lines: Mapping[Key, int], key: Key) -> str:
    return f"{path}, line {lines[key]}" if key in lines else str(path)


def _set(data: dict[str, Any], key: Key, value: Any) -> None:
    node = data
    for depth, part in enumerate(key[:-1], start=1):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(key)}: {'.'.join(key[:depth])} = {inner!r} is not a table ({OVERRIDE})")
        node = inner
    node[key[-1]] = value


def _validate(
    schema: type[Document], data: dict[str, Any], origin: Mapping[Key, str], *, default_origin: str
) -> Document:
    try:
        # Through JSON, since only there strict types (no "8" for 8, no true for 1) still take arrays for tuples.
        return schema.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as exc:
        problems = [_explain(schema, error, origin, default_origin) for error in exc.errors()]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from exc


def _explain(schema: type[BaseModel], error: ErrorDetails, origin: Mapping[Key, str], default_origin: str) -> str:
    """One line for one pydantic error."""
    key = tuple(str(part) for part in error["loc"])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "value_error":
        return _explain_combination(key, str(context["error"]), origin, default_origin)
    where = _origin(key, origin, default_origin)
    name = ".".join(key)
    seen = f"{name} = {json.dumps(value, default=str)}" if not isinstance(value, dict) else name
    if kind == "extra_forbidden":
        known = [n for n in _section(schema, key[:-1]).model_fields if n != "recipe_dir"]
        return f"{name} is not a setting; {did_you_mean(key[-1], known)} ({where})"
    if kind in _BOUNDS:
        sign, bound = _BOUNDS[kind]
        return f"{seen} must be {sign} {context[bound]:g} ({where})"
    if kind == "literal_error":
        allowed = str(context["expected"])
        near = did_you_mean(str(value), re.findall(r"'([^']*)'", allowed))
        hint = f"; {near}" if near.startswith("did") else ""
        return f"{seen} must be one of {allowed.replace(' or ', ', ')}{hint} ({where})"
    if kind in _TYPES:
        quote = f"; quote it: {OVERRIDE} '{name}=\"{value}\"'" if kind == "string_type" and where == OVERRIDE else ""
        return f"{seen} {_TYPES[kind]}{quote} ({where})"
    return f"{seen} {error['msg'].replace('Input should be', 'must be')} ({where})"


def _explain_combination(key: Key, message: str, origin: Mapping[Key, str], default_origin: str) -> str:
    """A validator's own text; its line is that of the first key it names that the user wrote."""
    named = [(*key, *name.split(".")) for name in re.findall(r"\b([a-z][a-z_.]*) = ", message)]
    written = [n for n in named if n in origin]
    where = origin[written[0]] if written else _origin(key, origin, default_origin)
    starts_with_key = bool(key and named and message.startswith(named[0][-1] + " = "))
    prefix = ".".join(key)
    return f"{prefix}{'.' if starts_with_key else ': ' if prefix else ''}{message} ({where})"


def _origin(key: Key, origin: Mapping[Key, str], default_origin: str) -> str:
    for stop in range(len(key), 0, -1):
        if key[:stop] in origin:
            return origin[key[:stop]]
    inside = [place for written, place in origin.items() if key and written[: len(key)] == key]
    return inside[0] if inside else default_origin


def _section(schema: type[BaseModel], key: Key) -> type[BaseModel]:
    model = schema
    for part in key:
        model = cast("type[BaseModel]", model.model_fields[part].annotation)
    return model
