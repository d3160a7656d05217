"""The part of headrace weights that talks to a store: publish, pull, log, squash, gc."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

STORE = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="URL",
        help="Folder, file://, s3://, gs:// (fsspec), or http(s):// to pull from.",
        show_default=False,
    ),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def publish(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint: a folder or a .safetensors file.", show_default=False)
    ],
    store: STORE,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Name of the run. [default: the store's, else 'weights']")
    ] = None,
    keyframe_every: Annotated[
        int, typer.Option("--keyframe-every", metavar="N", help="Also store every Nth version whole.", min=1)
    ] = 25,
    as_json: AS_JSON = False,
) -> None:
    """Publish a checkpoint as a store's next version.

    Whole the first time, then as deltas. What is the newest version already is
    not published again. Publishing takes the run over: a training run that
    publishes into the same store is fenced off.

    Examples:

      headrace weights publish step-100 --store /mnt/shared/policy

      headrace weights publish step-110 --store s3://bucket/policy
    """
    from headrace.cli import weights_view
    from headrace.cli.console import err
    from headrace.sync.folder import publish_folder
    from headrace.sync.store import Store

    with err().status("reading the store") as status:
        done = publish_folder(
            path,
            Store(store),
            run_id=run_id,
            keyframe_every=keyframe_every,
            threads=min(8, os.cpu_count() or 1),
            stage=status.update,
        )
    weights_view.show_published(done, as_json=as_json)


def pull(
    store: STORE,
    folder: Annotated[
        Path, typer.Option("--follow", metavar="DIR", help="Folder to keep in step.", show_default=False)
    ],
    once: Annotated[bool, typer.Option("--once", help="Stop when the newest version is there.")] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", metavar="S", help="End with an error when no new version came for S seconds.", min=0),
    ] = None,
    every_s: Annotated[
        float, typer.Option("--every", metavar="S", help="Seconds between looks at the store.", min=0.05)
    ] = 1.0,
    files_from: Annotated[
        Path | None,
        typer.Option("--files-from", metavar="DIR", help="Copy config and tokenizer from here.", show_default=False),
    ] = None,
    lease: Annotated[
        bool,
        typer.Option("--lease/--no-lease", help="Keep the collector off what is being read (writes to the store)."),
    ] = True,
    as_json: AS_JSON = False,
) -> None:
    """Keep a folder at a store's newest version.

    By deltas from what it holds. Each version is a new model.safetensors that
    replaces the old one as a whole, then version.json. Ctrl-C and kill -9 leave
    a whole version at any time, and the next pull goes on. With --json, one
    line per version.

    Examples:

      headrace weights pull --store /mnt/policy --follow serving --files-from a

      headrace weights pull --store https://x.org/policy --follow serving --once
    """
    from headrace.cli import weights_view
    from headrace.cli.console import err, warn
    from headrace.sync.folder import follow
    from headrace.sync.store import Store

    said: set[str] = set()

    def failed(error: Exception) -> None:
        if str(error) not in said:
            said.add(str(error))
            warn(f"{error}; the folder keeps its version, the next try comes soon")

    landings = follow(
        Store(store),
        folder,
        once=once,
        timeout_s=timeout_s,
        every_s=every_s,
        lease=lease,
        files_from=files_from,
        failed=failed,
    )
    with _terminated_like_interrupted(), contextlib.closing(landings):
        try:
            for landing in landings:
                weights_view.show_landing(landing, folder, as_json=as_json)
        except KeyboardInterrupt:
            err().print(f"stopped; {folder} holds a whole version or none", style="dim", soft_wrap=True)
            raise


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which is how services are stopped, ends a follower as Ctrl-C does; and so does SIGINT where a shell that
    started it in the background had it ignored."""
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def log(
    store: STORE,
    count: Annotated[int, typer.Option("-n", help="Edges to show, newest first; 0 shows all.", min=0)] = 20,
    as_json: AS_JSON = False,
) -> None:
    """Show a store's versions and the ways between them.

    Example: headrace weights log --store /mnt/shared/policy
    """
    from headrace.cli import weights_view
    from headrace.sync.folder import newest
    from headrace.sync.store import Store

    head, catalog = newest(Store(store))
    weights_view.show_log(store, head, catalog, count=count, as_json=as_json)


def squash(
    store: STORE,
    first: Annotated[str, typer.Argument(metavar="FROM", help="Version: number or digest.", show_default=False)],
    last: Annotated[str, typer.Argument(metavar="TO", help="Later version.", show_default=False)],
    as_json: AS_JSON = False,
) -> None:
    """Merge the deltas between two versions into one.

    It is smaller than their sum. The chain stays: who comes late takes
    whichever way has the fewest bytes. Needs memory for two copies of the
    model.

    Example: headrace weights squash --store /mnt/shared/policy 3 19
    """
    from headrace.cli import weights_view
    from headrace.cli.console import err
    from headrace.sync.compactor import Compactor
    from headrace.sync.folder import newest, resolve
    from headrace.sync.store import Store

    place = Store(store)
    head, catalog = newest(place)
    source, target = resolve(catalog, first), resolve(catalog, last)
    with err().status("merging"):
        edge = Compactor(place, run_id=head.run_id).squash(source, target)
    weights_view.show_squashed(edge, catalog, first=first, last=last, as_json=as_json)


def collect(
    store: STORE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="Newest versions to keep reachable.", min=0)] = 64,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="S", help="Leave objects younger than this many seconds.", min=0)
    ] = 3600.0,
    as_json: AS_JSON = False,
) -> None:
    """Delete old ways, and objects that nothing names.

    The newest keyframe and all after it stay, and whatever a replica holds a
    lease on.

    Example: headrace weights gc --store /mnt/shared/policy --dry-run
    """
    from headrace.cli.console import err, out
    from headrace.cli.weights_view import size
    from headrace.sync.compactor import Compactor
    from headrace.sync.folder import newest
    from headrace.sync.store import Store

    place = Store(store)
    head, _ = newest(place)
    with err().status("looking"):
        done = Compactor(place, run_id=head.run_id).collect(keep_versions=keep, grace_s=grace_s, dry_run=dry_run)
    about: dict[str, Any] = {"dry_run": dry_run, "edges": done.edges, "objects": done.objects, "bytes": done.bytes}
    if as_json:
        typer.echo(json.dumps(about))
        return
    verb = "would go" if dry_run else "gone"
    out().print(f"{verb}: {done.edges} ways, {done.objects} objects, {size(done.bytes)}")
