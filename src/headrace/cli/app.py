"""The commands and their names."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from headrace.cli.calibrate import calibrate
from headrace.cli.evaluate import evaluate
from headrace.cli.models import models
from headrace.cli.plan import plan
from headrace.cli.report import report
from headrace.cli.runs import runs
from headrace.cli.simulate import simulate
from headrace.cli.train import train
from headrace.cli.weights import weights

app = typer.Typer(
    help="RL post-training for language models in which generator and trainer run at matching rates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(plan, name="plan")
app.command("simulate")(simulate)
app.command("calibrate")(calibrate)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("report")(report)
app.add_typer(models, name="models")
app.add_typer(runs, name="runs")
app.add_typer(weights, name="weights")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (works anywhere).")] = False,
) -> None:
    """RL post-training for language models in which generator and trainer run at matching rates."""
