"""headrace runs: what earlier runs were and how they ended."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

runs = typer.Typer(help="Earlier runs.", no_args_is_help=True)


@runs.command("list")
def list_(folder: Annotated[Path, typer.Argument(help="Folder of run folders.")] = Path("runs")) -> None:
    """All runs in a folder, oldest first, with held-out accuracy before and after.

    Example: headrace runs list
    """
    from rich.table import Column, Table

    from headrace.cli.console import out

    table = Table(Column("run", no_wrap=True), "steps", "before", "after", "trained", Column("end", overflow="fold"))
    for path in sorted(p.parent for p in folder.glob("*/run.json")):
        records = read_metrics(path)
        summary: dict[str, Any] = next((r for r in reversed(records) if r.get("kind") == "summary"), {})
        steps = sum(r.get("kind") == "step" for r in records)
        table.add_row(
            path.name,
            str(summary.get("steps", steps)),
            _percent(summary.get("accuracy_before")),
            _percent(summary.get("accuracy_after")),
            f"{summary['train_s']:.0f} s" if "train_s" in summary else "",
            str(summary.get("reason", "no summary: running or killed")),
        )
    if not table.row_count:
        typer.echo(f"no runs in {folder}")
        return
    out().print(table)


@runs.command("show")
def show(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    recipe: Annotated[bool, typer.Option("--recipe", help="Print the resolved recipe instead, as JSON.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """The summary of one run, or its resolved recipe.

    Example: headrace runs show runs/quickstart-20260101-120000 --recipe
    """
    from headrace.cli.console import out
    from headrace.config.load import resolved_json
    from headrace.errors import DataError
    from headrace.loop.resume import read_about, recipe_of
    from headrace.telemetry.log import read_log
    from headrace.telemetry.records import RunSummary
    from headrace.telemetry.summary import print_summary

    if recipe:
        typer.echo(resolved_json(recipe_of(run)), nl=False)
        return
    read_about(run)
    summary = next((r for r in reversed(read_log(run)) if isinstance(r, RunSummary)), None)
    if summary is None:
        raise DataError(f"{run} has no summary: it is still running or was killed (go on with --resume {run})")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(summary), indent=2))
    else:
        print_summary(out(), summary)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records of metrics.jsonl; a last line that was cut by a kill is left out."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
