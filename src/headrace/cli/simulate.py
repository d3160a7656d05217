"""headrace simulate: one setting in detail."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.plan_spec import Source, takes_spec


@takes_spec
def simulate(
    source: Source,
    mode: Annotated[
        str | None, typer.Option("--mode", help="sync, one_step_off or pipeline.", show_default=False)
    ] = None,
    gen_gpus: Annotated[int | None, typer.Option("--gen-gpus", help="Chips that generate.", show_default=False)] = None,
    gen_tp: Annotated[int | None, typer.Option("--gen-tp", help="Chips of one engine.", show_default=False)] = None,
    max_running: Annotated[
        int | None, typer.Option("--max-running", help="Rollouts at once.", show_default=False)
    ] = None,
    sim_steps: Annotated[int, typer.Option("--sim-steps", help="Optimizer batches to simulate.", min=2)] = 24,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Simulate one setting: what is not given is chosen as `headrace plan` would.

    With --recipe and --gpu cpu (its default) that is the recipe's own setting: what `headrace train` will do.

    Examples:

      headrace simulate spec.toml --mode pipeline --gen-gpus 48 --gen-tp 4 --trace trace.json

      headrace simulate --model qwen3-8b --gpu h100 --num-gpus 16 --mode sync

      headrace simulate --recipe recipes/quickstart.toml --num-gpus 2
    """
    import dataclasses
    import json

    from headrace.cli.calibrate import calibrations_dir
    from headrace.cli.console import err, out, write_whole
    from headrace.errors import ConfigError, boundary
    from headrace.planner.calibrations import choose
    from headrace.planner.evaluate import evaluate_setting
    from headrace.planner.recipe import CPU, setting_of_recipe
    from headrace.planner.search import search
    from headrace.planner.sim_trace import Trace

    fixed = {"search.modes": mode, "search.gen_gpus": gen_gpus, "search.gen_tp": gen_tp}
    narrowed = [f"{key}={json.dumps([value])}" for key, value in fixed.items() if value is not None]
    wanted, recipe = source.read(narrowed), source.read_recipe()
    constants = choose(wanted, calibrations_dir())
    with err().status("simulating"):
        if recipe is not None and wanted.cluster.gpu == CPU and not narrowed:
            setting = setting_of_recipe(recipe, wanted.cluster.num_gpus)
        else:
            setting = search(wanted, constants=constants).best.setting
        if max_running is not None:
            setting = dataclasses.replace(setting, max_running=max(max_running, wanted.group_size))
        lanes = Trace() if trace is not None else None
        found = evaluate_setting(wanted, setting, constants, steps=sim_steps, trace=lanes)
    if as_json:
        data = {
            "calibration": constants.name,
            "setting": dataclasses.asdict(setting),
            "metrics": dataclasses.asdict(found.metrics),
        }
        typer.echo(json.dumps(data, indent=1))
    else:
        from headrace.cli.plan_tables import print_simulation

        print_simulation(
            out(),
            found.metrics,
            title=setting.words(),
            usd_per_step=found.usd_per_step,
            usd_per_mtok=found.usd_per_mtok,
        )
        out().print(f"calibration {constants.name} ({constants.date})", style="dim")
    if trace is not None and lanes is not None:
        with boundary(ConfigError, f"writing --trace {trace}"):
            write_whole(trace, lanes.chrome_json())
        err().print(f"trace: {trace}", style="dim", soft_wrap=True)
