"""Strict options of environment kinds: unknown or wrong options are refused with the nearest valid names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors import ConfigError, did_you_mean


class EnvOptions(BaseModel):
    """Base of every kind's options: frozen, unknown keys are errors, field docstrings are descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


OptionsT = TypeVar("OptionsT", bound=BaseModel)


def parse_options(model: type[OptionsT], options: Mapping[str, Any], *, kind: str) -> OptionsT:
    """Validate `options` of environment `kind` against its schema.

    Raises ConfigError that lists every wrong option with the value seen; unknown ones come with the nearest names.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as exc:
        lines = []
        for issue in exc.errors():
            key = ".".join(str(part) for part in issue["loc"]) or "(all)"
            if issue["type"] == "extra_forbidden":
                name = str(issue["loc"][-1])
                hint = did_you_mean(name, model.model_fields) if len(issue["loc"]) == 1 else "there is no such option"
                lines.append(f"env.options.{key} = {issue['input']!r} is unknown; {hint}")
            elif issue["type"] == "value_error" and not issue["loc"]:
                lines.append(f"env.options: {issue['msg'].removeprefix('Value error, ')}")
            else:
                seen = "" if issue["type"] == "missing" else f" = {issue['input']!r}"
                lines.append(f"env.options.{key}{seen}: {issue['msg'].removeprefix('Value error, ')}")
        raise ConfigError(f"options of env.kind = {kind!r} do not fit: " + "; ".join(lines)) from exc
