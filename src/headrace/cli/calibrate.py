"""headrace calibrate: from what was measured to the constants that later plans use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.planner.constants import Constants


def calibrations_dir() -> Path:
    """$HEADRACE_HOME/calibrations, or the same below ~/.cache/headrace."""
    from headrace.hub.fetch import models_dir

    return models_dir().parent / "calibrations"


def calibrate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Finished run folders of one model.", show_default=False),
    ] = None,
    serving: Annotated[
        Path | None,
        typer.Option(
            "--serving",
            envvar="HEADRACE_SERVING_DATA",
            help="CSV of measured serving rows (docs/planner.md).",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the calibration.")] = "mine",
    chip: Annotated[str, typer.Option("--gpu", help="Chip that the runs used; cpu = cores.")] = "cpu",
    base: Annotated[str, typer.Option("--base", help="Calibration to start from; empty = the seeds.")] = "",
) -> None:
    """Fit the planner's constants to runs of yours, or to a table of serving measurements.

    The result is saved by name; `headrace plan --calibration NAME` uses it, and every plan says what it rests on.

    Examples:

      headrace calibrate runs/quickstart-20260101-120000

      headrace calibrate runs/a runs/b --name laptop

      headrace calibrate --serving rows.csv --name fleet
    """
    from headrace.cli.console import out
    from headrace.errors import ConfigError
    from headrace.planner.constants import load, save

    if not runs and serving is None:
        raise ConfigError("give run folders (headrace calibrate runs/NAME) or --serving rows.csv")
    constants = load(base, calibrations_dir())
    if serving is not None:
        constants = _from_serving(serving, constants, name)
    if runs:
        constants = _from_runs(runs, constants, name, chip)
    path = save(constants, calibrations_dir())
    out().print(f"saved as {name!r}: {path}", soft_wrap=True)
    out().print(f"use it with  headrace plan ... --calibration {name}", style="dim", soft_wrap=True)


def _from_runs(runs: list[Path], constants: Constants, name: str, chip: str) -> Constants:
    from datetime import date

    from rich.table import Table

    from headrace.cli.console import out
    from headrace.errors import ConfigError
    from headrace.loop.resume import recipe_of
    from headrace.planner.calibrate import calibrate_runs
    from headrace.planner.measure import fit_batches, fit_decode, measure_run

    models = {recipe_of(run).model.name for run in runs}
    if len(models) > 1:
        raise ConfigError(f"the runs train different models ({', '.join(sorted(models))}); calibrate one at a time")
    measured = [measure_run(run) for run in runs]
    table = Table("run", "threads", "decode law", "error", "training law", "error", "publish", "transfer", "pause")
    for run in measured:
        decode, batch = fit_decode(run.decode_points), fit_batches(run.batch_points, run.optim_s)
        base_s, request_s, token_s = decode.coefficients
        fixed_s, tok_s = batch.coefficients
        table.add_row(
            Path(run.run).name,
            f"{run.generator_threads}+{run.trainer_threads}",
            f"{base_s * 1e3:.1f} ms + {request_s * 1e3:.3f} ms/request + {token_s * 1e6:.2f} us/tok",
            f"{decode.error_frac:.1%}",
            f"{fixed_s:.2f} s + {tok_s * 1e3:.3f} ms/tok",
            f"{batch.error_frac:.1%}",
            f"{run.publish_s:.2f} s",
            f"{run.transfer_s:.2f} s",
            f"{run.pause_s:.3f} s",
        )
    out().print(table)
    return calibrate_runs(measured, model=models.pop(), chip=chip, name=name, base=constants, today=date.today())


def _from_serving(path: Path, constants: Constants, name: str) -> Constants:
    from datetime import date

    from rich.table import Table

    from headrace.cli.console import out
    from headrace.planner.calibrate_serving import fit_serving, read_rows

    fitted, report = fit_serving(read_rows(path), constants, name=name, date=date.today().isoformat(), hold_out=False)
    table = Table("chip", "engine", "precision", "rows", "untuned error", "held-out error")
    for score in report.groups:
        group = score.group
        table.add_row(
            group.chip, group.engine, group.precision, str(score.rows), f"{score.untuned:.1%}", f"{score.fitted:.1%}"
        )
    out().print(table)
    out().print(
        f"{report.rows} rows: mean error of a decode step {report.untuned:.1%} with the seeds, {report.fitted:.1%} "
        "fitted on half of the configurations and tested on the other half; saved is the fit to all",
        soft_wrap=True,
    )
    for reason, count in report.skipped.items():
        out().print(f"left out: {count} rows ({reason})", style="dim", soft_wrap=True)
    return fitted
