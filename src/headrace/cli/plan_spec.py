"""From a spec file, a recipe and flags to a PlanSpec. Flags win over files, --set wins over flags."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from headrace.config.schema import RunConfig
    from headrace.planner.spec import PlanSpec


def _flag(kind: Any, name: str, text: str) -> Any:
    return Annotated[kind | None, typer.Option(name, help=text, show_default=False)]


FLAGS: Mapping[str, tuple[Any, str]] = {
    "model": (_flag(str, "--model", "Name (plan models) or path of a config.json."), "model"),
    "gpu": (_flag(str, "--gpu", "Chip (plan chips); cpu = cores."), "cluster.gpu"),
    "num_gpus": (_flag(int, "--num-gpus", "Chips in all."), "cluster.num_gpus"),
    "batch_groups": (_flag(int, "--batch-groups", "Groups per batch."), "batch_groups"),
    "group_size": (_flag(int, "--group-size", "Rollouts per group."), "group_size"),
    "prompt_tok": (_flag(int, "--prompt-tok", "Mean prompt length."), "prompt_tok"),
    "response_tok": (_flag(float, "--response-tok", "Mean response length."), "response.mean_tok"),
    "response_cap": (_flag(int, "--response-cap", "Longest response."), "response.cap_tok"),
    "max_lag_steps": (_flag(int, "--max-lag-steps", "Largest lag of a trained token."), "limits.max_lag_steps"),
    "steps": (_flag(int, "--steps", "Optimizer steps of the run."), "steps"),
    "price": (_flag(float, "--price", "Dollars per chip-hour."), "cluster.usd_per_gpu_h"),
    "objective": (_flag(str, "--objective", "wall, usd_per_mtok or quality."), "search.objective"),
    "calibration": (_flag(str, "--calibration", "Name or file (headrace calibrate)."), "calibration"),
}
"""Option by parameter: its annotation, and the key that it sets."""
_PLACES: Mapping[str, Any] = {
    "spec": Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="TOML file with a spec (docs/planner.md).", show_default=False),
    ],
    "recipe": _flag(Path, "--recipe", "Plan for this recipe instead of a spec."),
}
_CHANGES = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change any setting: key=value in TOML; repeatable.", metavar="KEY=VALUE"),
]


@dataclass(frozen=True, slots=True)
class Source:
    """What a command line says of a spec."""

    spec: Path | None = None
    recipe: Path | None = None
    given: Mapping[str, Any] | None = None
    """Values by names of FLAGS; None = not given."""
    changes: Sequence[str] = ()

    def read(self, narrowed: Sequence[str] = ()) -> PlanSpec:
        """The spec that all of it describes; `narrowed` are changes that --set may undo. Raises ConfigError."""
        return read_spec(self.spec, self.recipe, dict(self.given or {}), [*narrowed, *self.changes])

    def read_recipe(self) -> RunConfig | None:
        """The recipe itself, if one was given."""
        from headrace.config.load import load_recipe

        return None if self.recipe is None else load_recipe(self.recipe)


def takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the arguments that describe a spec; it gets them as its first parameter, a Source."""
    hints = get_type_hints(command, include_extras=True)
    own = list(inspect.signature(command).parameters.values())[1:]
    shared = {**_PLACES, **{name: kind for name, (kind, _) in FLAGS.items()}, "changes": _CHANGES}

    def call(**values: Any) -> None:
        taken = {name: values.pop(name) for name in shared}
        given = {name: taken[name] for name in FLAGS}
        command(Source(taken["spec"], taken["recipe"], given, tuple(taken["changes"] or ())), **values)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in shared.items()
    ]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def read_spec(spec: Path | None, recipe: Path | None, flags: dict[str, Any], changes: list[str] | None) -> PlanSpec:
    """The spec that file, recipe, flags and --set describe together. Raises ConfigError with key and place."""
    from headrace.config.load import load_document, load_recipe, override
    from headrace.errors import ConfigError
    from headrace.planner.recipe import spec_of_recipe
    from headrace.planner.spec import PlanSpec

    if spec is not None and recipe is not None:
        raise ConfigError(f"give a spec ({spec}) or --recipe {recipe}, not both")
    given = [
        override(FLAGS[name][1], value) if isinstance(value, str) else f"{FLAGS[name][1]}={value}"
        for name, value in flags.items()
        if value is not None
    ]
    places = {FLAGS[name][1]: f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None}
    if recipe is None:
        if spec is None and flags.get("model") is None:
            raise ConfigError(
                "say what to plan for: a spec (headrace plan spec.toml), --recipe RECIPE, or flags "
                "(headrace plan --model qwen3-8b --gpu h100 --num-gpus 8)"
            )
        return load_document(PlanSpec, spec, [*given, *(changes or [])], what="spec", places=places)
    found = spec_of_recipe(load_recipe(recipe))
    data = found.model_dump(mode="json", exclude_unset=True)
    written = [f"{key}={_toml(value)}" for key, value in _leaves(data)]
    places = dict.fromkeys((key for key, _ in _leaves(data)), str(recipe)) | places
    return load_document(PlanSpec, None, [*written, *given, *(changes or [])], what="spec", places=places)


def _leaves(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            found += _leaves(value, f"{key}.")
        elif value is not None:
            found.append((key, value))
    return found


def _toml(value: Any) -> str:
    """A value as TOML; JSON and TOML agree on strings, numbers, true, false and flat arrays."""
    return json.dumps(value)
