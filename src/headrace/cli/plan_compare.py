"""What `headrace plan compare` puts beside each other: a spec, a saved plan, or a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cli.plan_tables import Side


def side_of(name: str, calibration: str | None) -> Side:
    """`name`: a run folder (measured), a plan saved with --json, or a spec in TOML (planned now, best plan).

    Raises ConfigError for what is none of these, and what planning or reading raises.
    """
    from headrace.errors import ConfigError

    path = Path(name)
    if path.is_dir():
        return _run(path)
    if path.suffix == ".json" and path.is_file():
        return _saved(path)
    if path.suffix == ".toml":
        return _spec(path, calibration)
    raise ConfigError(
        f"{name!r} is no run folder, no saved plan (headrace plan ... --json > plan.json) and no spec (.toml)"
    )


def _run(folder: Path) -> Side:
    from headrace.cli.plan_tables import Side
    from headrace.planner.measured import metrics_of_run

    return Side(name=folder.resolve().name, what="measured", metrics=metrics_of_run(folder))


def _saved(path: Path) -> Side:
    from pydantic import TypeAdapter, ValidationError

    from headrace.cli.plan_tables import Side
    from headrace.errors import DataError
    from headrace.planner.outcome import Metrics

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        best = data["best"]
        metrics = TypeAdapter(Metrics).validate_python(best["metrics"])
        return Side(
            name=path.stem,
            what=f"{best['words']} (calibration {data['calibration']})",
            metrics=metrics,
            usd_per_step=best["usd_per_step"],
            usd_per_mtok=best["usd_per_mtok"],
        )
    except (ValueError, KeyError, TypeError, ValidationError) as exc:
        raise DataError(f"{path} is no saved plan (headrace plan ... --json): {exc}") from exc


def _spec(path: Path, calibration: str | None) -> Side:
    from headrace.cli.calibrate import calibrations_dir
    from headrace.cli.plan_spec import read_spec
    from headrace.cli.plan_tables import Side
    from headrace.planner.plan import plan

    made = plan(read_spec(path, None, {"calibration": calibration}, None), calibrations=calibrations_dir())
    found = made.best
    return Side(
        name=path.stem,
        what=f"{found.setting.words()} (calibration {made.calibration})",
        metrics=found.metrics,
        usd_per_step=found.usd_per_step,
        usd_per_mtok=found.usd_per_mtok,
    )
