"""How far the planner's predictions lie from measurements that it has not seen.

    python benchmarks/planner_accuracy.py [--parts steps decode own] [--own FILE] [--serving FILE]

    steps    step seconds of public RL runs (src/headrace/planner/fixtures), simulated on the product's own costs.
             untuned: constants from serving rows only, MFU 40 %, no overhead. built_in: the constants that ship,
             which are fitted to these very rows. left_out: six constants fitted to all other rows. Held out as well:
             all rows of the same configuration (releases repeat them), and all rows of the same model.
    decode   seconds per output token of measured serving rows (--serving, or HEADRACE_SERVING_DATA). untuned: the
             seeds. fitted: five constants per chip, engine and number format, from half of the configurations; the
             error is that of the other half. null without the table.
    own      step seconds of our own runs. FILE is JSON: {"runs": [{"name", "spec": {...}, "setting": {...},
             "calibration": path or "", "step_s"}]}; the calibration must not have seen the run. null without --own.

Last line: one JSON object. mape_published_steps (left out), mape_decode_rows (fitted) and mape_own_runs are mean
absolute errors, as shares.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.errors import PlanError
from headrace.planner.assemble import CostBook, parts
from headrace.planner.calibrate_serving import fit_serving, read_rows
from headrace.planner.constants import Constants, builtin, load
from headrace.planner.fixtures_data import RunRow, load_fixtures
from headrace.planner.setting import Setting
from headrace.planner.simulate import simulate
from headrace.planner.spec import PlanSpec
from headrace.planner.step_fit import (
    NAMES,
    PUBLISHED,
    StepConstants,
    anchored,
    fit,
    held_out_fits,
    left_out_fits,
    percent_errors,
    scorable,
    simulated_step_s,
    untuned,
)

ANCHORS = 2
"""How often closed forms are brought in line with the simulator while fitting."""


def same_configuration(row: RunRow) -> object:
    """Rows that different releases repeat."""
    run = row.run
    return run.model, run.gpu, run.precision, run.mode, run.lag, run.gpus


def model_name(row: RunRow) -> str:
    return row.run.model


def predictions(rows: Sequence[RunRow], constants: Sequence[Constants]) -> list[float]:
    return [simulated_step_s(row.run, known) for row, known in zip(rows, constants, strict=True)]


def published_steps() -> dict[str, Any]:
    rows = [row for fixture in load_fixtures() for row in scorable(fixture.runs)]
    base = untuned()
    whole = PUBLISHED
    for _ in range(ANCHORS):
        step_s = anchored(rows, whole.constants(base))
        whole = fit(rows, base, start=whole, step_s=step_s)
    kinds: dict[str, Callable[[], list[StepConstants]]] = {
        "in_sample": lambda: [whole] * len(rows),
        "left_out": lambda: left_out_fits(rows, base, whole, step_s=step_s),
        "configuration_held_out": lambda: left_out_fits(rows, base, whole, step_s=step_s, key=same_configuration),
        "model_held_out": lambda: held_out_fits(rows, base, whole, key=model_name, step_s=step_s),
    }
    constants = {"untuned": [base] * len(rows), "built_in": [builtin()] * len(rows)}
    constants |= {name: [found.constants(base) for found in fits()] for name, fits in kinds.items()}
    errors = {name: percent_errors(rows, predictions(rows, known)) for name, known in constants.items()}
    print(f"{'step':32}{'published':>10}" + "".join(f"{name[:14]:>15}" for name in errors))  # noqa: T201
    for i, row in enumerate(rows):
        cells = "".join(f"{errors[name][i]:+14.0f}%" for name in errors)
        print(f"{row.name:32}{row.published['step_s']:10.1f}{cells}")  # noqa: T201
    mape = {name: float(abs(values).mean()) / 100 for name, values in errors.items()}
    middle = {name: float(statistics.median(abs(values))) / 100 for name, values in errors.items()}
    for title, values in (("mean", mape), ("median", middle)):
        print(f"{title + ' absolute error':42}" + "".join(f"{100 * value:14.1f}%" for value in values.values()))  # noqa: T201
    print("fit to all:", ", ".join(f"{name} {getattr(whole, name):.3g}" for name in NAMES), flush=True)  # noqa: T201
    return {
        "rows": len(rows),
        "mape": {name: round(value, 4) for name, value in mape.items()},
        "median": {name: round(value, 4) for name, value in middle.items()},
        "constants": {name: round(getattr(whole, name), 4) for name in NAMES},
    }


def decode_rows(path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.is_file():
        return None
    _, report = fit_serving(read_rows(path), builtin(), name="accuracy", date="2026-11-29")
    print(f"{'serving rows':44}{'rows':>6}{'untuned':>10}{'fitted':>10}")  # noqa: T201
    for score in report.groups:
        print(f"{'/'.join(score.group):44}{score.rows:6}{score.untuned:10.1%}{score.fitted:10.1%}")  # noqa: T201
    print(f"{'all':44}{report.rows:6}{report.untuned:10.1%}{report.fitted:10.1%}", flush=True)  # noqa: T201
    return {
        "rows": report.rows,
        "skipped": sum(report.skipped.values()),
        "untuned": round(report.untuned, 4),
        "untuned_median": round(report.untuned_median, 4),
        "fitted": round(report.fitted, 4),
        "fitted_median": round(report.fitted_median, 4),
    }


def setting_of(data: dict[str, Any], where: str) -> Setting:
    known = {field.name for field in fields(Setting)}
    if unknown := sorted(set(data) - known):
        raise PlanError(f"{where}: a setting has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return Setting(**data)


def own_runs(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    errors = {}
    print(f"{'own run':44}{'measured':>10}{'predicted':>10}{'error':>9}")  # noqa: T201
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        spec, setting = PlanSpec.model_validate(run["spec"]), setting_of(run["setting"], run["name"])
        book = CostBook(spec, load(run.get("calibration", "")))
        steps = 8 + 2 + setting.max_lag_steps
        step_s = simulate(parts(book, setting), book.draws(), steps=steps, warm_up=steps - 8).step_s_mean
        errors[run["name"]] = step_s / run["step_s"] - 1.0
        print(f"{run['name']:44}{run['step_s']:10.3f}{step_s:10.3f}{errors[run['name']]:+9.1%}")  # noqa: T201
    mape = statistics.fmean(abs(error) for error in errors.values())
    return {"runs": len(errors), "mape": round(mape, 4), "errors": {k: round(v, 4) for k, v in errors.items()}}


def serving_table(given: Path | None) -> Path | None:
    """The path given, or the environment's."""
    named = os.environ.get("HEADRACE_SERVING_DATA")
    return given or (Path(named) if named else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["steps", "decode", "own"], choices=["steps", "decode", "own"])
    parser.add_argument("--own", type=Path)
    parser.add_argument("--serving", type=Path)
    args = parser.parse_args()
    began_s = time.perf_counter()
    steps = published_steps() if "steps" in args.parts else None
    decode = decode_rows(serving_table(args.serving)) if "decode" in args.parts else None
    own = own_runs(args.own) if "own" in args.parts else None
    result = {
        "benchmark": "planner_accuracy",
        "mape_published_steps": None if steps is None else steps["mape"]["left_out"],
        "mape_decode_rows": None if decode is None else decode["fitted"],
        "mape_own_runs": None if own is None else own["mape"],
        "published_steps": steps,
        "decode_rows": decode,
        "own_runs": own,
        "seconds": round(time.perf_counter() - began_s, 1),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
