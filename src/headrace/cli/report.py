"""headrace report: a run as a page and a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

PICTURE = "timeline.png"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder; the run may still be going on.")],
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Also write the timeline as a trace for ui.perfetto.dev.", show_default=False),
    ] = None,
) -> None:
    """Write report.html and timeline.png into a run folder and print their paths.

    Examples:

      headrace report runs/quickstart-20260101-120000

      headrace report runs/quickstart-20260101-120000 --trace trace.json
    """
    from headrace.cli.console import warn
    from headrace.errors import ConfigError, DataError, boundary
    from headrace.loop.resume import read_about
    from headrace.telemetry.report import write_report
    from headrace.telemetry.timeline import read_timeline, telling_window

    read_about(run)
    with boundary(DataError, f"writing the report of {run}"):
        typer.echo(str(write_report(run)))
    timeline = read_timeline(run)
    window = telling_window(timeline)
    if window is None:
        warn("no optimizer step was done yet: there is no timeline to draw")
    elif find_spec("matplotlib") is None:
        warn(f"{PICTURE} needs matplotlib: pip install matplotlib")
    else:
        from headrace.telemetry.plot import plot

        with boundary(DataError, f"drawing the timeline of {run}"):
            plot(timeline, run / PICTURE, window=window, title=run.resolve().name)
        typer.echo(str(run / PICTURE))
    if trace is not None:
        with boundary(ConfigError, f"writing --trace {trace}"):
            timeline.to_chrome(trace)
        typer.echo(str(trace))
