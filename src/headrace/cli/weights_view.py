"""What headrace weights prints: tables for people, JSON for machines. Fits 80 columns and wider."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table as Grid
from rich.text import Text

from headrace.cli.console import err, out
from headrace.cli.fitted_table import Cells, fitted_table
from headrace.telemetry.format import count, duration, percent
from headrace.telemetry.panels import ACCENT

if TYPE_CHECKING:
    from headrace.sync.catalog import Catalog, Edge, Head
    from headrace.sync.delta_apply import Difference
    from headrace.sync.delta_file import Delta
    from headrace.sync.delta_summary import LayerChange, Summary
    from headrace.sync.folder import Landing, Published
    from headrace.sync.report import SyncReport
    from headrace.sync.version import Table

WIDTH_MAX = 120
BAR, HALF = "█", "▌"
SHORT = 12
"""Digits of a digest in tables; more than enough to be told apart, and `squash` takes them."""


def size(number: float) -> str:
    """Bytes with three digits.

    >>> size(7), size(85_433), size(16_000_000_000)
    ('7 B', '85.4 kB', '16 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {unit}" if number < 999.5 * scale else f"{number / scale:,.0f} {unit}"
    return f"{number:.0f} B"


def show_summary(found: Summary, *, title: str, as_json: bool, in_full: bool = False) -> None:
    """A delta: the numbers, and `in_full` also steps and layers."""
    if as_json:
        typer.echo(json.dumps(summary_json(found, title=title), indent=2))
        return
    console = out()
    console.print(Text(title, style=f"bold {ACCENT}"), soft_wrap=True)
    console.print(_pairs(_facts(found)), soft_wrap=True)
    if not in_full:
        return
    width = min(console.width, WIDTH_MAX)
    if found.changed:
        console.print(Text("\nsteps of the last place, either way", style=f"bold {ACCENT}"))
        console.print(_steps(found.steps, width))
    console.print(Text("\nlayers", style=f"bold {ACCENT}"))
    console.print(_layers(found.layers, width))


def summary_json(found: Summary, *, title: str) -> dict[str, Any]:
    """The same numbers, units in names."""
    about = dataclasses.asdict(found)
    about["layers"] = [{**dataclasses.asdict(row), "density_frac": row.density_frac} for row in found.layers]
    return {
        "delta": title,
        **about,
        "density_frac": found.density_frac,
        "ratio": found.ratio,
        "ratio_to_limit": found.ratio_to_limit,
    }


def show_applied(path: Path, digest: str, changed: int, *, as_json: bool) -> None:
    """After `apply`."""
    if as_json:
        typer.echo(json.dumps({"path": str(path), "digest": digest, "changed": changed}))
        return
    out().print(_pairs({str(path): f"{count(changed)} weights changed, proven", "version": digest}), soft_wrap=True)


def show_which(path: Path, delta_path: Path, delta: Delta, found: str | Difference, *, as_json: bool) -> bool:
    """After `verify A DELTA`; whether A is one of the two versions."""
    proven = isinstance(found, str)
    digests = {"from": delta.before.digest, "to": delta.after.digest}
    if as_json:
        about: dict[str, Any] = {"is": found if isinstance(found, str) else None}
        about |= {f"{name}_digest": digest for name, digest in digests.items()}
        typer.echo(json.dumps(about | _difference_json(None if isinstance(found, str) else found)))
    elif isinstance(found, str):
        verb = "starts from" if found == "from" else "leads to"
        out().print(_pairs({str(path): f"is the {found}-version: {delta_path} {verb} it", "version": digests[found]}),
                    soft_wrap=True)  # fmt: skip
    else:
        _refused(f"{path} is neither version of {delta_path}: {found.words}")
    return proven


def show_equality(
    left: Path, right: Path, tables: Sequence[Table], difference: Difference | None, *, as_json: bool
) -> bool:
    """After `verify A B`; whether they are equal."""
    digests = [table.digest for table in tables]
    if as_json:
        typer.echo(json.dumps({"equal": difference is None, "digests": digests} | _difference_json(difference)))
    elif difference is None:
        out().print(_pairs({f"{left}": f"equals {right}, bit for bit", "version": digests[0]}), soft_wrap=True)
    else:
        _refused(f"{left} and {right} differ: {difference.words}\n  {digests[0]}\n  {digests[1]}")
    return difference is None


def show_published(done: Published, *, as_json: bool) -> None:
    """After `publish`."""
    if as_json:
        about: dict[str, Any] = {"run_id": done.run_id, "version": done.version, "digest": done.digest}
        about |= {"published": done.report is not None, "keyframe": done.keyframe}
        typer.echo(json.dumps(about | _report_json(done.report)))
        return
    if done.report is None:
        out().print(
            _pairs({f"version {done.version}": "is these weights already", "digest": done.digest}), soft_wrap=True
        )
        return
    report = done.report
    what = f"{size(report.body_bytes)} of {size(report.full_bytes)}, {_ratio(report.ratio)}"
    whole = (
        " (stored whole)" if done.keyframe and report.density == 1.0 else " (and stored whole)" if done.keyframe else ""
    )
    facts = {f"version {done.version}": what + whole, "digest": done.digest}
    if report.limit_bytes:
        facts["density"] = f"{_share(report.density)}, {percent(report.ratio_to_limit)} of the limit"
    facts["time"] = _times({"diff": report.diff_s, "encode": report.encode_s, "put": report.put_s})
    out().print(_pairs(facts), soft_wrap=True)


def show_landing(landing: Landing, folder: Path, *, as_json: bool) -> None:
    """One line each time a followed folder got somewhere."""
    if as_json:
        about: dict[str, Any] = {"run_id": landing.run_id, "version": landing.version, "digest": landing.digest}
        typer.echo(json.dumps(about | {"folder": str(folder)} | _report_json(landing.report)))
        return
    line = Text.assemble((f"version {landing.version}", f"bold {ACCENT}"), f"  {landing.digest[:SHORT]}  ")
    if landing.report is None:
        line.append("held already", style="dim")
    else:
        report = landing.report
        spent_s = report.get_s + report.decode_s + report.apply_s + report.verify_s
        line.append(f"{size(report.body_bytes)}, {_ratio(report.ratio)}, {duration(spent_s)}")
        line.append("  resynced by a keyframe" if report.resynced else "", style="yellow")
    out().print(line, soft_wrap=True)


def show_log(url: str, head: Head, catalog: Catalog, *, count: int, as_json: bool) -> None:
    """Edges of a catalog, newest first."""
    edges = list(reversed(catalog.edges))
    shown = edges[:count] if count else edges
    if as_json:
        about = {"run_id": head.run_id, "epoch": head.epoch, "version": head.version, "digest": head.digest}
        rows = [edge.model_dump(mode="json") for edge in shown]
        typer.echo(json.dumps({**about, "bytes": sum(e.bytes for e in edges), "edges": rows}, indent=2))
        return
    console = out()
    console.print(Text(f"{url}  run {head.run_id}, epoch {head.epoch}", style=f"bold {ACCENT}"), soft_wrap=True)
    kinds = ["keyframe" if e.source is None else f"{e.span} merged" if e.span > 1 else "delta" for e in shown]
    columns = (
        Cells(
            "version", [f"{edge.version}{' <- head' if edge.target == head.digest else ''}" for edge in shown], 0, True
        ),
        Cells("kind", kinds, 1, True),
        Cells("from", [(edge.source or "nothing")[:SHORT] for edge in shown], 2, True),
        Cells("to", [edge.target[:SHORT] for edge in shown], 0, True),
        Cells("size", [size(edge.bytes) for edge in shown], 0),
        Cells("packs", [str(len(edge.packs)) for edge in shown], 3),
    )
    styles = ["bold" if edge.source is None else "" for edge in shown]
    console.print(fitted_table(columns, min(console.width, WIDTH_MAX), styles))
    hidden = f"; {len(edges) - len(shown)} older ones not shown (-n 0)" if len(shown) < len(edges) else ""
    console.print(Text(f"{len(edges)} ways, {size(sum(edge.bytes for edge in edges))}{hidden}", style="dim"))


def show_squashed(edge: Edge, catalog: Catalog, *, first: str, last: str, as_json: bool) -> None:
    """After `squash`, against the chain that it stands beside."""
    if as_json:
        typer.echo(json.dumps(edge.model_dump(mode="json")))
        return
    into = {e.target: e for e in catalog.edges if e.span == 1 and e.source is not None}
    chain_bytes, at = 0, edge.target
    while at != edge.source and at in into:
        chain_bytes += into[at].bytes
        at = into[at].source or ""
    chain = f", the chain has {size(chain_bytes)}" if at == edge.source and chain_bytes else ""
    out().print(_pairs({f"{first} -> {last}": f"{size(edge.bytes)} for {edge.span} versions{chain}"}), soft_wrap=True)


# --- parts


def _facts(found: Summary) -> dict[str, str]:
    modes = ", ".join(f"{name} {size(use.bytes)} ({use.chunks} chunks)" for name, use in found.modes.items())
    header = size(found.file_bytes - found.body_bytes)
    facts = {
        "size": f"{size(found.file_bytes)} of {size(found.full_bytes)}, {_ratio(found.ratio)} (header {header})",
        "limit": f"{size(found.limit_bytes)}, reached to {percent(found.ratio_to_limit)}",
        "density": f"{_share(found.density_frac)}: {count(found.changed)} of {count(found.elems)} weights changed",
        "modes": modes,
        "from": found.from_digest,
        "to": found.to_digest,
    }
    if not found.changed:
        facts |= {"limit": "", "density": "nothing changed", "modes": ""}
    times = found.times
    if times.encode_s:
        facts["time"] = _times({"diff": times.diff_s, "encode": times.encode_s, "write": times.write_s})
    return {name: value for name, value in facts.items() if value}


def _steps(steps: Sequence[int], width: int) -> Grid:
    most, total = max(steps), sum(steps)
    rows = [(_octave(i), n) for i, n in enumerate(steps) if n]
    shares = [n / total for _, n in rows]
    columns = (
        Cells("steps", [label for label, _ in rows], 0),
        Cells("changes", [count(n) for _, n in rows], 1),
        Cells("share", [_share(share) for share in shares], 0),
        Cells("", [_bar(n / most, max(8, width - 44)) for _, n in rows], 2, True),
    )
    return fitted_table(columns, width, [""] * len(rows))


def _layers(layers: Sequence[LayerChange], width: int) -> Grid:
    most = max((row.density_frac for row in layers), default=0.0) or 1.0
    name_width = max(len(row.layer) for row in layers)
    columns = (
        Cells("layer", [row.layer for row in layers], 0, True),
        Cells("tensors", [str(row.tensors) for row in layers], 5),
        Cells("weights", [count(row.elems) for row in layers], 4),
        Cells("changed", [count(row.changed) for row in layers], 1),
        Cells("density", [_share(row.density_frac) for row in layers], 0),
        Cells("bytes", [size(row.bytes) for row in layers], 3),
        Cells("", [_bar(row.density_frac / most, max(8, width - name_width - 54)) for row in layers], 2, True),
    )
    return fitted_table(columns, width, ["" if row.changed else "dim" for row in layers])


def _octave(i: int) -> str:
    """Which steps an entry of the histogram counts."""
    if i == 0:
        return "1"
    return f"{2**i} - {2 ** (i + 1) - 1}" if i < 16 else f"2^{i} and more"


def _bar(share: float, width: int) -> str:
    halves = round(2 * width * share)
    return (BAR * (halves // 2) + HALF * (halves % 2)) or (HALF if share > 0 else "")


def _share(share: float) -> str:
    """A share that may be small: three digits from 0.01 % on."""
    return "0 %" if share == 0 else f"{100 * share:.3g} %" if share >= 1e-4 else "< 0.01 %"


def _ratio(ratio: float) -> str:
    return f"{ratio:.3g}x smaller" if ratio < 999.5 else f"{count(ratio)}x smaller"


def _times(parts: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())


def _pairs(facts: Mapping[str, str]) -> Text:
    """Names in a column, values beside it; lines are never cut, so digests can be copied."""
    indent = max(map(len, facts)) + 2
    lines = (Text.assemble((name.ljust(indent), "dim"), value) for name, value in facts.items())
    return Text("\n").join(lines)


def _refused(message: str) -> None:
    err().print(Text(message, style="red"), soft_wrap=True)


def _difference_json(difference: Difference | None) -> dict[str, Any]:
    return {"first_difference": None if difference is None else dataclasses.asdict(difference)}


def _report_json(report: SyncReport | None) -> dict[str, Any]:
    if report is None:
        return {"report": None}
    about = dataclasses.asdict(report) | {"body_bytes": report.body_bytes, "ratio": report.ratio}
    return {"report": about | {"ratio_to_limit": report.ratio_to_limit}}
