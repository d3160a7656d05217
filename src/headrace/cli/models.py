"""headrace models: what recipes can name, and fetching it."""

from __future__ import annotations

from typing import Annotated

import typer

models = typer.Typer(help="Models that recipes can name.", no_args_is_help=True)


@models.command("list")
def list_() -> None:
    """Names, sizes, licences, and whether each one is here.

    Example: headrace models list
    """
    from rich.table import Column, Table

    from headrace.cli.console import out
    from headrace.hub.fetch import list_models

    table = Table(Column("name", no_wrap=True), "parameters", "download", "licence", Column("here", overflow="fold"))
    for status in list_models():
        known = status.source
        size = f"{known.size_bytes / 1e6:.0f} MB"
        here = str(status.folder) if status.present else "no"
        table.add_row(known.name, f"{known.parameters / 1e6:.0f} M", size, known.license, here)
    out().print(table)


@models.command("get")
def get(name: Annotated[str, typer.Argument(help="A name from `headrace models list`, or a folder to check.")]) -> None:
    """Fetch a model now (a run fetches what it needs by itself) and print its folder.

    Example: headrace models get smollm2-135m-instruct
    """
    from headrace.cli.console import byte_progress
    from headrace.hub.fetch import ensure_model

    with byte_progress(name) as progress:
        folder = ensure_model(name, progress)
    typer.echo(str(folder))
