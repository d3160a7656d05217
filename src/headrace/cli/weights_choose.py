"""headrace weights choose: which mode of the codec for which link, before anything is built."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.sync.choice import Choice, Situation


def choose(
    bandwidth: Annotated[
        str,
        typer.Option("--bandwidth", help="Of the narrowest link, like 1Gbit or 2GB/s.", show_default=False),
    ],
    model_bytes: Annotated[
        str,
        typer.Option(
            "--model-bytes", metavar="SIZE", help="A whole version in bfloat16, like 16GB.", show_default=False
        ),
    ],
    density: Annotated[
        float,
        typer.Option("--density", metavar="SHARE", help="Weights that change, over all weights.", min=0.0, max=1.0),
    ] = 0.0164,
    replicas: Annotated[
        int,
        typer.Option("--replicas", metavar="N", help="Copies that pass that link; 1 with a relay behind it.", min=1),
    ] = 1,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Of the publisher, and of each replica.", min=1)
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict each mode's seconds from publish to serving; name the best.

    Speeds are those of one core of a small test machine; `headrace weights
    diff` shows what yours does. Density: 1.64 % is Adam at a learning rate of
    1e-6, 0.2 % at 1e-7, 4 % at 3e-6; `headrace weights inspect` measures it.
    The best mode gets as few threads as cost at most 5 % of time.

    Examples:

      headrace weights choose --bandwidth 1Gbit --model-bytes 16GB --replicas 4

      headrace weights choose --bandwidth 10Gbit --model-bytes 3GB --density 0.002
    """
    from headrace.sync.choice import Situation, read_quantity
    from headrace.sync.choice import choose as best_mode

    situation = Situation(
        model_bytes=read_quantity(model_bytes, "bytes"),
        density=density,
        bandwidth_bytes_per_s=read_quantity(bandwidth, "bytes/s"),
        replicas=replicas,
        threads=threads,
        receiver_threads=threads,
    )
    found = best_mode(situation)
    if as_json:
        typer.echo(json.dumps(_as_dict(situation, found), indent=2))
    else:
        _show(found)


def _as_dict(situation: Situation, found: Choice) -> dict[str, object]:
    rows = [dataclasses.asdict(p) | {"bottleneck": p.bottleneck} for p in (found.best, *found.others)]
    return {
        "situation": dataclasses.asdict(situation),
        "mode": found.best.mode,
        "threads": found.threads,
        "allowed": found.allowed,
        "why": found.why,
        "modes": rows,
    }


def _show(found: Choice) -> None:
    from headrace.cli.console import out
    from headrace.cli.fitted_table import Cells, fitted_table
    from headrace.cli.weights_view import WIDTH_MAX, size
    from headrace.sync.choice import STAGES, seconds_text

    rows = (found.best, *found.others)
    columns = (
        Cells("mode", [p.mode for p in rows], 0, words=True),
        Cells("threads", [str(p.threads) for p in rows], 3),
        Cells("size", [size(p.body_bytes) for p in rows], 2),
        *(Cells(name, [seconds_text(p.stages[name]) for p in rows], 1) for name in STAGES),
        Cells("total", [seconds_text(p.total_s) for p in rows], 0),
    )
    console = out()
    styles = ["bold", *[""] * len(found.others)]
    console.print(fitted_table(columns, min(console.width, WIDTH_MAX), styles))
    console.print(found.why, soft_wrap=True)
