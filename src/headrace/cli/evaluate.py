"""headrace eval: held-out accuracy of a model or of a finished run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.config.schema import RunConfig
    from headrace.telemetry.records import EvalRecord


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="Model name, model folder, or run folder.")],
    env: Annotated[
        str,
        typer.Option("--env", help="Kind of task (setting env.kind); a run's own is the default.", show_default=False),
    ] = "",
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Take task and settings from a recipe.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: key=value in TOML; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as one line of JSON.")] = False,
) -> None:
    """Ask every held-out prompt once, greedily, and print the accuracy with its 95 % interval.

    Examples:

      headrace eval smollm2-135m-instruct --recipe recipes/quickstart.toml

      headrace eval runs/quickstart-20260101-120000

      headrace eval ./my-model --env jsonl --set env.options.file=data/test.jsonl --set env.reward=numeric
    """
    from headrace.api import evaluate as run
    from headrace.cli.console import err
    from headrace.telemetry.view import make_view

    config = _config(model, env, recipe, changes or [])
    with make_view(config, console=err()) as view:
        record, _ = run(config, view=view)
    _show(record, as_json=as_json)


def _config(model: str, env: str, recipe: Path | None, changes: list[str]) -> RunConfig:
    from headrace.config.load import config_from_overrides, load_recipe, override
    from headrace.errors import ConfigError
    from headrace.loop.resume import recipe_of

    run = Path(model)
    is_run = (run / "run.json").is_file()
    base: RunConfig | None = None
    if recipe is not None:
        base = load_recipe(recipe)
    elif is_run:
        base = recipe_of(run)
    elif not env:
        _must_exist(model)
        raise ConfigError(f"say what to ask {model}: --env KIND with its options, or --recipe RECIPE")
    if env:
        # Options belong to a kind: those of another kind would only be refused.
        same_kind = base is not None and base.env.kind == env
        changes = [override("env.kind", env), *([] if same_kind else ["env.options={}", "env.reward="]), *changes]
    name = _model_of(run) if is_run else model
    return config_from_overrides([override("model.name", name), *changes], base)


def _must_exist(model: str) -> None:
    from headrace.errors import DataError, did_you_mean
    from headrace.hub.fetch import list_models

    known = [s.source.name for s in list_models()]
    if model not in known and not Path(model).exists():
        runs = [str(p.parent) for p in Path(model).parent.glob("*/run.json")]
        raise DataError(f"{model!r} is no run folder, model folder or known model; {did_you_mean(model, known + runs)}")


def _model_of(run: Path) -> str:
    """The model folder of a run; DataError with the way to get one when the run has none."""
    from headrace.errors import DataError
    from headrace.loop.resume import complete_checkpoints

    if (run / "model").is_dir():
        return str(run / "model")
    saved = complete_checkpoints(run)
    if not saved:
        raise DataError(
            f"{run} has neither model nor checkpoint: it is still running, or it ended before its first one"
        )
    step = saved[-1][0]
    raise DataError(
        f"{run} has no model yet: a run writes it at its end. Go on with `headrace train --resume {run}`, or end it "
        f"at its newest checkpoint with `headrace train --resume {run} --set steps={step}`"
    )


def interval(solved_frac: float, prompts: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927, JASA 22:209)."""
    z = 1.959964
    centre = solved_frac + z * z / (2 * prompts)
    half = z * math.sqrt(solved_frac * (1 - solved_frac) / prompts + z * z / (4 * prompts * prompts))
    scale = 1 + z * z / prompts
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _show(record: EvalRecord, *, as_json: bool) -> None:
    import dataclasses
    import json

    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(record)))
        return
    low, high = interval(record.accuracy, record.prompts)
    outcomes = ", ".join(f"{name} {count}" for name, count in record.outcomes.items())
    typer.echo(f"accuracy  {record.accuracy:.1%}  (95 % interval {low:.1%} to {high:.1%}, {record.prompts} prompts)")
    typer.echo(f"reward    {record.reward_mean:.3f} mean")
    typer.echo(f"outcomes  {outcomes}")
    typer.echo(f"response  {record.response_tok_mean:.1f} tokens mean, {record.eval_s:.1f} s in all")
