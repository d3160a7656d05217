"""The shape of a language model as costs need it, and the table of known models (facts/models.toml).

A model of the table is a config.json cut to the keys that define its shape, read by model_reader like any other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import PlanError
from headrace.planner.facts import Grade, find_name, graded, table
from headrace.planner.model_reader import ModelShape, read_config

__all__ = ["ModelEntry", "ModelShape", "model", "models", "read_config"]

_DROP = ("-instruct", "-chat", "-base", "-thinking", "-it", "-hf", "-2507", "-0528", "-0324", "-fp8", "-nvfp4", "-bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One row of the table."""

    name: str
    title: str
    """As its publisher spells it."""
    source: str
    date: str
    grade: Grade
    note: str = ""


def model(name_or_path: str) -> ModelShape:
    """Shape of a model of the table, or of a Hugging Face config.json (or the folder that holds one).

    Case, organisation and endings such as '-Instruct' or '-FP8' do not matter. A folder with a config.json wins over
    a name. Raises PlanError with the nearest names, or naming the key that a config.json lacks.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".json" or (path / "config.json").is_file() or name_or_path.startswith((".", "/", "~")):
        return _from_file(path)
    rows = table("models.toml")
    return _from_table(find_name(name_or_path, rows["models"], what="model", drop=_DROP, aliases=rows["aliases"]))


def models() -> tuple[ModelEntry, ...]:
    """Every model of the table, in its order."""
    return tuple(_entry(name) for name in table("models.toml")["models"])


def _entry(name: str) -> ModelEntry:
    rows = table("models.toml")
    row = rows["models"][name]
    source = rows["sources"][row["source"]]
    return ModelEntry(
        name=name,
        title=row["title"],
        source=source["text"],
        date=source["date"],
        grade=graded(source["grade"], where=f"facts/models.toml: {name}"),
        note=row.get("note", ""),
    )


@cache
def _from_table(name: str) -> ModelShape:
    entry = _entry(name)
    shape = read_config(table("models.toml")["models"][name]["config"], name=name)
    return replace(shape, source=f"{entry.source} ({entry.date})", grade=entry.grade)


def _from_file(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise PlanError(f"model {str(path)!r}: cannot read {file}: {exc.strerror}") from exc
    except ValueError as exc:
        raise PlanError(f"model {str(path)!r}: {file} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise PlanError(f"model {str(path)!r}: {file} holds no JSON object")
    shape = read_config(config, name=str(file))
    return replace(shape, name=file.parent.resolve().name, source=str(file))
