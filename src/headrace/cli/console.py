"""Printing: one console for results (stdout), one for errors and progress (stderr)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headrace.errors import HeadraceError


def out() -> Console:
    """Results. Made per call, so that a redirected stdout is honoured."""
    return Console(highlight=False)


def err() -> Console:
    """Errors, warnings, progress."""
    return Console(stderr=True, highlight=False)


def show_error(error: HeadraceError) -> None:
    """`ErrorName: message` in red; several problems one per line."""
    name, lines = type(error).__name__, str(error).splitlines() or [""]
    head = [f"{name}: {lines[0]}"] if len(lines) == 1 else [f"{name}:", *(f"  {line}" for line in lines)]
    err().print(Text("\n".join(head), style="red"), soft_wrap=True)


class _Warnings(logging.Handler):
    """What the library logs, as warnings of the command line."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def show_log() -> None:
    """Print warnings that the library logs; a library by itself is silent. Idempotent."""
    logger = logging.getLogger("headrace")
    if not any(isinstance(h, _Warnings) for h in logger.handlers):
        logger.addHandler(_Warnings(logging.WARNING))
        logger.propagate = False


def warn(message: str) -> None:
    """A warning in yellow."""
    err().print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file that a user named, whole or not at all. OSError as it comes."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def byte_progress(title: str, *, transient: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress line on stderr, fed with (stage, bytes done, bytes in all); silent until the first call.

    `transient`: it is gone at the end.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    hidden = transient and not err().is_terminal
    with Progress(*columns, console=err(), transient=transient, disable=hidden) as bars:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, total=1, completed=1, visible=False)  # type: ignore[arg-type]
                tasks[stage] = bars.add_task(f"{title}: {stage}", total=total or None)
            bars.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        yield report
