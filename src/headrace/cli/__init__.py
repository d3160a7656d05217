"""The command line: the only place that prints. One file per command; what a command needs is imported when it runs,
so that `headrace --help` is instant and knows no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.cli.app import app
from headrace.cli.console import show_error, show_log
from headrace.errors import HeadraceError

__all__ = ["app", "main"]

ERROR_EXIT = 2
"""Exit code for errors that Headrace raises on purpose, as for wrong usage; Ctrl-C gives 130."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit. `--debug` anywhere shows the traceback of an error."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    show_log()
    try:
        app([a for a in args if a != "--debug"], prog_name="headrace")
    except HeadraceError as error:
        if debug:
            raise
        show_error(error)
        sys.exit(ERROR_EXIT)
    except KeyboardInterrupt:
        sys.exit(130)
