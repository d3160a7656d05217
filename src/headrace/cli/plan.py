"""headrace plan: what a run will do, cost and wait for, before it is paid for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.default_group import DefaultGroup
from headrace.cli.plan_spec import Source, takes_spec

if TYPE_CHECKING:
    from headrace.config.schema import RunConfig
    from headrace.planner.plan import Plan

plan = typer.Typer(
    cls=DefaultGroup,
    help="Predict a run: the best split, step time, lag, waste and cost. `headrace plan --help` has examples.",
)

TIMELINE_STEPS = 6
"""Optimizer steps in the page's timeline."""
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@plan.command("make")
@takes_spec
def make(
    source: Source,
    top: Annotated[int, typer.Option("--top", help="Plans to show.", min=1)] = 8,
    as_json: AS_JSON = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with plots.", show_default=False)
    ] = None,
    emit: Annotated[
        Path | None, typer.Option("--emit", help="Write the best plan as a recipe for `train`.", show_default=False)
    ] = None,
) -> None:
    """Find the best plans for a model, chips and a workload.

    Also: headrace plan compare A B, plan explain, plan fixtures, plan chips, plan models.

    Examples:

      headrace plan --model qwen3-8b --gpu h100 --num-gpus 16 --response-tok 4000 --response-cap 16384

      headrace plan spec.toml --html plan.html

      headrace plan --recipe recipes/quickstart.toml --gpu cpu --num-gpus 2 --emit planned.toml

      headrace plan spec.toml --set response.sigma=0.7 --set cluster.num_gpus=32 --json
    """
    from headrace.cli.console import out

    found = _planned(source)
    if as_json:
        typer.echo(found.to_json())
    else:
        from headrace.cli.plan_view import print_plan

        print_plan(out(), found, top=top)
    if html is not None:
        _write_html(found, html)
    if emit is not None:
        _write_recipe(found, source.read_recipe(), emit)


@plan.command("explain")
@takes_spec
def explain(source: Source) -> None:
    """Say in words why the best plan is the best, what binds it, what would change it and what is uncertain.

    Example: headrace plan explain --model qwen3-30b-a3b --gpu h100 --num-gpus 32
    """
    from headrace.planner.explain import explain as explained

    typer.echo(explained(_planned(source)))


@plan.command("compare")
def compare(
    what: Annotated[
        list[str], typer.Argument(metavar="A B...", help="Specs (TOML), saved plans (--json) or run folders.")
    ],
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="For specs: name or file (headrace calibrate).")
    ] = None,
) -> None:
    """Put plans beside each other, or a plan beside the run that followed it.

    Examples:

      headrace plan compare a.toml b.toml

      headrace plan compare plan.json runs/quickstart-20260101-120000
    """
    from headrace.cli.console import out
    from headrace.cli.plan_compare import side_of
    from headrace.cli.plan_tables import print_comparison
    from headrace.errors import ConfigError

    if len(what) < 2:
        raise ConfigError(f"there is nothing to compare {what[0]} with; name two or more specs, plans or runs")
    print_comparison(out(), [side_of(name, calibration) for name in what])


@plan.command("fixtures")
def fixtures(as_json: AS_JSON = False) -> None:
    """Predicted against published: every row that we typed from public tables, with its error.

    Example: headrace plan fixtures
    """
    from headrace.cli.console import err, out
    from headrace.planner.scoreboard import rows_json, score

    with err().status("predicting every published row"):
        rows = score()
    if as_json:
        typer.echo(rows_json(rows))
        return
    from headrace.cli.plan_tables import print_scoreboard

    print_scoreboard(out(), rows)


@plan.command("chips")
def list_chips() -> None:
    """The chips that --gpu knows, with memory, bandwidth, price and source."""
    from headrace.cli.console import out
    from headrace.cli.plan_tables import print_chips

    print_chips(out())


@plan.command("models")
def list_models() -> None:
    """The models that --model knows; a path to any config.json works too."""
    from headrace.cli.console import out
    from headrace.cli.plan_tables import print_models

    print_models(out())


def _planned(source: Source) -> Plan:
    from headrace.cli.calibrate import calibrations_dir
    from headrace.cli.console import err
    from headrace.planner.plan import plan as make_plan

    wanted = source.read()
    with err().status("searching") as status:
        return make_plan(wanted, calibrations=calibrations_dir(), progress=status.update)


def _write_html(found: Plan, path: Path) -> None:
    from headrace.cli.calibrate import calibrations_dir
    from headrace.cli.console import err
    from headrace.errors import ConfigError, boundary
    from headrace.planner.calibrations import choose
    from headrace.planner.evaluate import evaluate_setting
    from headrace.planner.page import write_page
    from headrace.planner.sim_trace import Trace

    trace = Trace()
    constants = choose(found.spec, calibrations_dir())
    evaluate_setting(found.spec, found.best.setting, constants, steps=TIMELINE_STEPS, trace=trace)
    with boundary(ConfigError, f"writing --html {path}"):
        write_page(found, path, trace=trace)
    err().print(f"page: {path}", style="dim", soft_wrap=True)


def _write_recipe(found: Plan, base: RunConfig | None, path: Path) -> None:
    from headrace.cli.console import err, write_whole
    from headrace.errors import ConfigError, boundary
    from headrace.planner.recipe import recipe_of_plan

    text = recipe_of_plan(found.spec, found.best.setting, base=base, about=found.about())
    with boundary(ConfigError, f"writing --emit {path}"):
        write_whole(path, text)
    err().print(f"recipe: {path}  (headrace train {path})", style="dim", soft_wrap=True)
