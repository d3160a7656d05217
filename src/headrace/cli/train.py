"""headrace train: from a recipe to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.config.schema import RunConfig


def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE", help="TOML file with the settings (docs/config.md lists them).", show_default=False
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: key=value in TOML; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with this run folder; the recipe may then be left out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check recipe, task and rewards, print derived numbers, start nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of run folders (setting `out`).")] = None,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Live view, or one plain line per step.")] = True,
) -> None:
    """Train a model as a recipe says.

    Ctrl-C ends after the step under way and saves everything for --resume.

    Examples:

      headrace train recipes/quickstart.toml

      headrace train recipes/quickstart.toml --set flow.mode=sync --set steps=10

      headrace train recipes/quickstart.toml --dry-run

      headrace train --resume runs/quickstart-20260101-120000
    """
    config = _config(recipe, changes or [], resume, out)
    if dry_run:
        from headrace.cli.dry_run import dry_run as check

        check(config)
        return
    _run(config, resume=resume, live=live)


def _config(recipe: Path | None, changes: list[str], resume: Path | None, out: Path | None) -> RunConfig:
    from headrace.config.load import load_recipe, override
    from headrace.errors import ConfigError

    if out is not None:
        changes = [*changes, override("out", str(out))]
    if recipe is not None:
        return load_recipe(recipe, changes)
    if resume is None:
        raise ConfigError(
            "give a recipe (headrace train recipes/quickstart.toml) or a run to go on with (--resume RUN)"
        )
    from headrace.api import resumed_recipe

    return resumed_recipe(resume, changes)


def _run(config: RunConfig, *, resume: Path | None, live: bool) -> None:
    from headrace.api import train as run
    from headrace.cli.console import out
    from headrace.telemetry.view import make_view

    with make_view(config, console=out(), live=live) as view:
        summary = run(config, resume=resume, view=view)
    view.print_summary(summary)
    if summary.reason == "interrupted":
        raise typer.Exit(130)
