"""headrace weights: deltas between checkpoints as files, and folders that are published and followed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import weights_choose, weights_store

if TYPE_CHECKING:
    from headrace.sync.delta_file import Delta

weights = typer.Typer(
    help="Deltas between safetensors checkpoints: make, apply, prove, publish, follow. Works without a training run.",
    no_args_is_help=True,
)

AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
THREADS = Annotated[
    int,
    typer.Option("--threads", help="For hashing and encoding.", show_default="number of cores, at most 8", min=0),
]
CHECKPOINT_HELP = "Checkpoint: a .safetensors file, or a folder with model.safetensors or with shards and their index."
DELTA = Annotated[Path, typer.Argument(metavar="DELTA", help="Delta file.", show_default=False)]


@weights.command("diff")
def diff(
    old: Annotated[Path, typer.Argument(metavar="A", help=CHECKPOINT_HELP, show_default=False)],
    new: Annotated[Path, typer.Argument(metavar="B", help="Checkpoint with the same tensors.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to write it.", show_default=False)],
    threads: THREADS = 0,
    as_json: AS_JSON = False,
) -> None:
    """Write the delta that leads from A to B.

    Examples:

      headrace weights diff step-100 step-110 -o 110.delta

      headrace weights diff a.safetensors b.safetensors -o ab.delta --json
    """
    from headrace.cli import weights_view
    from headrace.cli.console import byte_progress
    from headrace.sync.checkpoint import open_checkpoint
    from headrace.sync.delta_file import make_delta, write_delta
    from headrace.sync.delta_summary import summarize

    before, after = open_checkpoint(old), open_checkpoint(new)
    with byte_progress("diff", transient=True) as progress:
        delta = make_delta(before, after, threads=_threads(threads), progress=progress)
        delta = write_delta(delta, out, progress=progress)
    weights_view.show_summary(summarize(delta), title=str(out), as_json=as_json)


@weights.command("apply")
def apply(
    base: Annotated[Path, typer.Argument(metavar="A", help=CHECKPOINT_HELP, show_default=False)],
    delta: DELTA,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT", help="Write a new checkpoint here.", show_default=False),
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Change A's own files instead.")] = False,
    threads: THREADS = 0,
    as_json: AS_JSON = False,
) -> None:
    """Apply a delta to what it was made from; prove the result.

    With -o, shards, config and tokenizer are as in A. With --in-place, old
    values are on disk before the first new one; an update that was cut off,
    even by kill -9, is taken back by the next one or by `headrace weights
    recover`.

    Examples:

      headrace weights apply step-100 110.delta -o step-110

      headrace weights apply serving 110.delta --in-place
    """
    from headrace.cli import weights_view
    from headrace.cli.console import byte_progress
    from headrace.errors import ConfigError
    from headrace.sync.delta_apply import apply_in_place, apply_to_copy
    from headrace.sync.delta_file import read_delta

    if in_place == (out is not None):
        raise ConfigError("apply needs one of -o OUT (write a new checkpoint) and --in-place (change A)")
    change = read_delta(delta)
    with byte_progress("apply", transient=True) as progress:
        if out is None:
            apply_in_place(base, change, threads=_threads(threads), progress=progress)
        else:
            apply_to_copy(base, change, out, threads=_threads(threads), progress=progress)
    changed = sum(chunk.changed for chunk in change.manifest.chunks)
    weights_view.show_applied(out or base, change.after.digest, changed, as_json=as_json)


@weights.command("verify")
def verify(
    left: Annotated[Path, typer.Argument(metavar="A", help=CHECKPOINT_HELP, show_default=False)],
    right: Annotated[Path, typer.Argument(metavar="DELTA|B", help="Delta or checkpoint.", show_default=False)],
    threads: THREADS = 0,
    as_json: AS_JSON = False,
) -> None:
    """Is A the from- or to-version of a delta, or equal to B?

    Equality is of all bits, by digest. When it is neither: exit code 2 and the
    first difference by name. How tensors are spread over files is no
    difference.

    Examples:

      headrace weights verify step-110 110.delta

      headrace weights verify step-110 replica --json
    """
    from headrace.cli import ERROR_EXIT, weights_view
    from headrace.cli.console import byte_progress
    from headrace.sync.checkpoint import open_checkpoint
    from headrace.sync.delta_apply import first_difference, which
    from headrace.sync.delta_file import is_delta, read_delta

    checkpoint, count = open_checkpoint(left), _threads(threads)
    if is_delta(right):
        delta = read_delta(right)
        with byte_progress("verify", transient=True) as progress:
            found = which(checkpoint, delta, threads=count, progress=progress)
        proven = weights_view.show_which(left, right, delta, found, as_json=as_json)
    else:
        other = open_checkpoint(right)
        with byte_progress("verify", transient=True) as progress:
            tables = (
                checkpoint.table(threads=count, progress=progress, stage="hashing A"),
                other.table(threads=count, progress=progress, stage="hashing B"),
            )
        difference = first_difference(checkpoint, other, tables)
        proven = weights_view.show_equality(left, right, tables, difference, as_json=as_json)
    if not proven:
        raise typer.Exit(ERROR_EXIT)


@weights.command("inspect")
def inspect(
    what: Annotated[
        list[Path], typer.Argument(metavar="DELTA | A B", help="One delta, or two checkpoints.", show_default=False)
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots.", show_default=False)
    ] = None,
    threads: THREADS = 0,
    as_json: AS_JSON = False,
) -> None:
    """Show what changed, where and by how much.

    A step is the distance between neighbouring values of the dtype. The limit
    is the entropy of these changes for somebody who holds the old weights.

    Examples:

      headrace weights inspect 110.delta

      headrace weights inspect step-100 step-110 --html flips.html
    """
    from headrace.cli import weights_view
    from headrace.errors import DataError, boundary
    from headrace.sync.delta_summary import summarize

    found = summarize(_delta_of(what, _threads(threads)))
    title = " -> ".join(map(str, what))
    weights_view.show_summary(found, title=title, as_json=as_json, in_full=True)
    if html is not None:
        from headrace.cli.console import err
        from headrace.cli.weights_page import write_page

        with boundary(DataError, f"writing --html {html}"):
            write_page(found, html, title=title)
        err().print(f"page: {html}", style="dim", soft_wrap=True)


@weights.command("recover")
def recover(path: Annotated[Path, typer.Argument(metavar="A", help=CHECKPOINT_HELP, show_default=False)]) -> None:
    """Take back an `apply --in-place` that was cut off.

    The version before it is there again.

    Example: headrace weights recover serving
    """
    from headrace.sync.checkpoint import recover as take_back
    from headrace.sync.delta_apply import alone

    with alone(path):
        found = take_back(path)
    typer.echo(f"{path}: the version before the interrupted change is back" if found else f"{path}: nothing to recover")


weights.command("publish")(weights_store.publish)
weights.command("pull")(weights_store.pull)
weights.command("log")(weights_store.log)
weights.command("squash")(weights_store.squash)
weights.command("gc")(weights_store.collect)
weights.command("choose")(weights_choose.choose)


def _threads(wanted: int) -> int:
    return wanted or min(8, os.cpu_count() or 1)


def _delta_of(what: list[Path], threads: int) -> Delta:
    from headrace.cli.console import byte_progress
    from headrace.errors import ConfigError, DataError
    from headrace.sync.checkpoint import open_checkpoint
    from headrace.sync.delta_file import is_delta, make_delta, read_delta

    if len(what) == 1:
        if what[0].exists() and not is_delta(what[0]):
            raise DataError(f"{what[0]} is no delta file; two checkpoints can be inspected together: inspect A B")
        return read_delta(what[0])
    if len(what) != 2:
        raise ConfigError(f"inspect takes one delta or two checkpoints, not {len(what)} paths")
    before, after = map(open_checkpoint, what)
    with byte_progress("inspect", transient=True) as progress:
        return make_delta(before, after, threads=threads, progress=progress)
