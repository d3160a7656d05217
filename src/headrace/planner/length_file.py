"""Lengths that somebody measured: JSON lines, or the folder of an earlier run.

A line is a number, or an object with one of LENGTH_KEYS, and perhaps a `group_id` (any text or number) that members
of a group share. A run folder holds `stimulus-v*.jsonl`, the events of its controller: lengths of all rollouts that
ended by themselves are read from there, with their groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FlowError, PlanError, did_you_mean
from headrace.flow.events import MemberEnded
from headrace.flow.stimulus import read_log
from headrace.planner.normal import Floats

LENGTH_KEYS = ("response_tok", "generated_tok", "output_length")
_LOGS = "stimulus-v*.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Measured response lengths."""

    tok: Floats
    """One per response, at least 1."""
    group: NDArray[np.int64] | None
    """Number of each response's group, from 0; None when the file names no groups."""


def read_lengths(path: Path) -> Lengths:
    """All lengths at `path`. PlanError names what is missing, or the line that cannot be read."""
    if path.is_dir():
        logs = sorted(path.glob(_LOGS))
        if not logs:
            raise PlanError(f"response.path = {path} is a folder without {_LOGS}: not a run, or one that never started")
        return _of_run(logs)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise PlanError(f"response.path = {path} cannot be read: {exc}") from exc
    if lines and lines[0].lstrip().startswith('{"setup"'):
        return _of_run([path])
    found = [_of_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    return _lengths(found, path)


def _of_run(logs: Iterable[Path]) -> Lengths:
    """Lengths of rollouts that ended by themselves. A resumed run wrote several logs; the later one counts."""
    found: dict[tuple[str, int, int], float] = {}
    for log in logs:
        try:
            with log.open(encoding="utf-8") as lines:
                _, stimuli = read_log(lines)
        except (FlowError, OSError, ValueError) as exc:
            raise PlanError(f"response.path: {log} cannot be read: {exc}") from exc
        for event in (stimulus.event for stimulus in stimuli):
            if isinstance(event, MemberEnded) and event.outcome.trains and event.generated_tok > 0:
                found[event.group_id, event.member, event.attempt] = float(event.generated_tok)
        last = log
    return _lengths([(tok, group_id) for (group_id, _, _), tok in found.items()], last)


def _of_line(line: str, where: str) -> tuple[float, str | None]:
    """Length and group of a line."""
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as exc:
        raise PlanError(f"{where}: no JSON ({exc})") from exc
    group: Any = None
    if isinstance(data, dict):
        key = next((k for k in LENGTH_KEYS if k in data), None)
        if key is None:
            seen = next(iter(data), "")
            raise PlanError(f"{where}: no length among its keys; {did_you_mean(str(seen), LENGTH_KEYS)}")
        data, group = data[key], data.get("group_id")
    if isinstance(data, bool) or not isinstance(data, int | float) or not math.isfinite(data) or data < 1:
        raise PlanError(f"{where}: {data!r} is not a length; a number of at least 1 token is needed")
    return float(data), None if group is None else str(group)


def _lengths(found: list[tuple[float, str | None]], path: Path) -> Lengths:
    if not found:
        raise PlanError(f"response.path = {path} holds no lengths")
    tok = np.array([length for length, _ in found])
    if any(group is None for _, group in found):
        return Lengths(tok=tok, group=None)
    numbers: dict[str | None, int] = {}
    return Lengths(tok=tok, group=np.array([numbers.setdefault(group, len(numbers)) for _, group in found]))


def tie_of(lengths: Lengths) -> float | None:
    """Correlation of members of a group, 0 to 1; None where no two groups with two members each are known.

    Intraclass correlation of the ranks' normal scores, one-way analysis of variance with unequal group sizes
    (Donner 1986, "A review of inference procedures for the intraclass correlation coefficient", section 2).
    """
    if lengths.group is None:
        return None
    size_G = np.bincount(lengths.group)
    kept = size_G[lengths.group] >= 2
    size_G = size_G[size_G >= 2]
    if size_G.size < 2:
        return None
    score = _normal_scores(lengths.tok[kept])
    _, group = np.unique(lengths.group[kept], return_inverse=True)
    members, groups = score.size, size_G.size
    size_G = np.bincount(group)
    mean_G = np.bincount(group, weights=score) / size_G
    between = float((size_G * (mean_G - score.mean()) ** 2).sum()) / (groups - 1)
    within = float(((score - mean_G[group]) ** 2).sum()) / (members - groups)
    typical = (members - float((size_G**2).sum()) / members) / (groups - 1)
    spread = between + (typical - 1.0) * within
    return min(1.0, max(0.0, (between - within) / spread)) if spread > 0.0 else 0.0


def _normal_scores(values: Floats) -> Floats:
    """Standard normal quantile of each value's rank; equal values share their middle rank."""
    ordered = np.sort(values)
    middle = 0.5 * (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right"))
    inverse = NormalDist().inv_cdf
    return np.array([inverse(p) for p in (middle / values.size).tolist()])
