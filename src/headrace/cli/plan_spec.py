"""From a spec file, a recipe and flags to a PlanSpec. Flags win over files, --set wins over flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.planner.spec import PlanSpec

SPEC = Annotated[
    Path | None, typer.Argument(metavar="[SPEC]", help="TOML file with a spec (docs/planner.md).", show_default=False)
]
RECIPE = Annotated[
    Path | None, typer.Option("--recipe", help="Plan for this recipe instead of a spec.", show_default=False)
]
MODEL = Annotated[
    str | None, typer.Option("--model", help="Name (plan models) or path of a config.json.", show_default=False)
]
GPU = Annotated[str | None, typer.Option("--gpu", help="Chip (plan chips); cpu = cores.", show_default=False)]
NUM_GPUS = Annotated[int | None, typer.Option("--num-gpus", help="Chips in all.", show_default=False)]
BATCH = Annotated[int | None, typer.Option("--batch-groups", help="Groups per batch.", show_default=False)]
GROUP = Annotated[int | None, typer.Option("--group-size", help="Rollouts per group.", show_default=False)]
PROMPT = Annotated[int | None, typer.Option("--prompt-tok", help="Mean prompt length.", show_default=False)]
RESPONSE = Annotated[float | None, typer.Option("--response-tok", help="Mean response length.", show_default=False)]
CAP = Annotated[int | None, typer.Option("--response-cap", help="Longest response.", show_default=False)]
LAG = Annotated[int | None, typer.Option("--max-lag-steps", help="Largest lag of a trained token.", show_default=False)]
STEPS = Annotated[int | None, typer.Option("--steps", help="Optimizer steps of the run.", show_default=False)]
PRICE = Annotated[float | None, typer.Option("--price", help="Dollars per chip-hour.", show_default=False)]
OBJECTIVE = Annotated[
    str | None, typer.Option("--objective", help="wall, usd_per_mtok or quality.", show_default=False)
]
CALIBRATION = Annotated[
    str | None, typer.Option("--calibration", help="Name or file (headrace calibrate).", show_default=False)
]
CHANGES = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change any setting: key=value in TOML; repeatable.", metavar="KEY=VALUE"),
]

KEYS = {
    "model": "model",
    "gpu": "cluster.gpu",
    "num_gpus": "cluster.num_gpus",
    "batch_groups": "batch_groups",
    "group_size": "group_size",
    "prompt_tok": "prompt_tok",
    "response_tok": "response.mean_tok",
    "response_cap": "response.cap_tok",
    "max_lag_steps": "limits.max_lag_steps",
    "steps": "steps",
    "price": "cluster.usd_per_gpu_h",
    "objective": "search.objective",
    "calibration": "calibration",
}


def read_spec(spec: Path | None, recipe: Path | None, flags: dict[str, Any], changes: list[str] | None) -> PlanSpec:
    """The spec that file, recipe, flags and --set describe together. Raises ConfigError with key and place."""
    from headrace.config.load import load_document, load_recipe, override
    from headrace.errors import ConfigError
    from headrace.planner.recipe import spec_of_recipe
    from headrace.planner.spec import PlanSpec

    if spec is not None and recipe is not None:
        raise ConfigError(f"give a spec ({spec}) or --recipe {recipe}, not both")
    given = [
        override(KEYS[name], value) if isinstance(value, str) else f"{KEYS[name]}={value}"
        for name, value in flags.items()
        if value is not None
    ]
    places = {KEYS[name]: f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None}
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
    import json

    return json.dumps(value)
