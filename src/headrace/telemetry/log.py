"""metrics.jsonl: one record a line, appended and flushed, readable while the run goes on and after a kill.

A line counts only with its newline. What a crash left of the last line is cut off when the file is opened again.
Nothing is ever rewritten: a resumed run appends a `resumed` line that names the version it goes on from, and readers
drop the records of later versions that were written before it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from headrace.errors import DataError, did_you_mean
from headrace.telemetry.records import EvalRecord, ProfileRecord, Record, RunSummary, StepRecord

FILE_NAME = "metrics.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRecord:
    """The run went on from a checkpoint: earlier records of versions above `version` no longer count."""

    kind: str = "resumed"
    version: int


_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {
    "step": TypeAdapter(StepRecord),
    "eval": TypeAdapter(EvalRecord),
    "profile": TypeAdapter(ProfileRecord),
    "summary": TypeAdapter(RunSummary),
    "resumed": TypeAdapter(ResumedRecord),
}


class RunLog:
    """Appends records to FOLDER/metrics.jsonl. One writer at a time."""

    def __init__(self, folder: Path) -> None:
        """Open for appending; creates the folder and cuts off a torn last line."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        cut_torn_line(self.path)
        self._file = self.path.open("ab")

    def append(self, record: Record) -> None:
        """Write one record and hand it to the operating system: it survives a kill of this process."""
        self._write(record)

    def resumed(self, version: int) -> None:
        """Note that the run goes on from `version`: readers drop earlier records of later versions."""
        self._write(ResumedRecord(version=version))

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write(self, record: Record | ResumedRecord) -> None:
        self._file.write(encode_line(dataclasses.asdict(record)))
        self._file.flush()


def read_log(folder: Path) -> list[Record]:
    """The records that count, in the order written.

    Dropped are: a last line without newline, step and eval records that a resume made void, and summaries of runs
    that went on. Raises DataError when there is no log, or with file and line number for a line that is no record.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(f"{folder} is no run folder: it has no {FILE_NAME}")
    kept: list[Record] = []
    for number, row in complete_lines(path):
        record = _decode(row, f"{path}, line {number}")
        if isinstance(record, ResumedRecord):
            kept = [r for r in kept if not isinstance(r, RunSummary) and r.version <= record.version]
        else:
            kept.append(record)
    return kept


def cut_torn_line(path: Path) -> None:
    """Truncate a file of lines after its last newline; a missing file is left missing."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep != end:
            file.truncate(keep)


def encode_line(row: Mapping[str, Any]) -> bytes:
    """One JSON line with its newline. Non-finite numbers become the strings "NaN", "Infinity", "-Infinity"."""
    return json.dumps(_finite(row), allow_nan=False, separators=(",", ":"), default=_plain).encode() + b"\n"


def complete_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that has its newline; DataError names a line that is no object."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise DataError(f"{path}, line {number}: not JSON: {exc}") from exc
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {type(row).__name__} instead of an object")
        rows.append((number, row))
    return rows


def _decode(row: Mapping[str, Any], where: str) -> Record | ResumedRecord:
    kind = str(row.get("kind", ""))
    if kind not in _ADAPTERS:
        raise DataError(f"{where}: kind = {kind!r}; {did_you_mean(kind, _ADAPTERS)}")
    try:
        record: Record | ResumedRecord = _ADAPTERS[kind].validate_python(row)
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise DataError(f"{where}: {kind} record: {problems}") from exc
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _plain(value: Any) -> Any:
    """NumPy scalars, which json does not know."""
    if hasattr(value, "item"):
        return _finite(value.item())
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
