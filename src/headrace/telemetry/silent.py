"""A view that shows nothing: the default of the Python form. Libraries are silent."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headrace.telemetry.records import Record, RunSummary


class SilentView:
    """Implements telemetry.view.View."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def update(self, record: Record) -> None: ...

    def status(self, text: str) -> None: ...

    def message(self, text: str) -> None: ...

    def role(self, name: str, state: str, waits_for: str = "") -> None: ...

    def progress(self, what: str, done: float, total: float) -> None: ...

    def print_summary(self, summary: RunSummary) -> None: ...
