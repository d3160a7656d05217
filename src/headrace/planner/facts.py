"""Numbers with an origin: `Fact`, quantities as text ("80 GiB", "450 GB/s one way"), the tables of facts/, names.

The tables keep what a source printed, with its unit, direction and density; `quantity` turns that into base units.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, cast

from headrace.errors import PlanError, did_you_mean

Grade = Literal["measured", "fitted", "spec", "guess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number and where it comes from."""

    value: float
    """In `unit`, which is a base unit: bytes, bytes/s, FLOP/s, usd/h."""
    unit: str
    """What a figure means that is easily misread is part of it: "FLOP/s dense", "bytes/s one way"."""
    source: str
    date: str
    """Year, month or day, as known."""
    grade: Grade
    note: str = ""
    """What the source printed, or why a guess is what it is."""


_SCALES: Mapping[str, tuple[float, str]] = {
    "GiB": (2.0**30, "bytes"),
    "MiB": (2.0**20, "bytes"),
    "GB": (1e9, "bytes"),
    "TB/s": (1e12, "bytes/s"),
    "GB/s": (1e9, "bytes/s"),
    "TFLOP/s": (1e12, "FLOP/s"),
    "GFLOP/s": (1e9, "FLOP/s"),
}
_QUALIFIERS: Mapping[str, tuple[float, str]] = {
    "": (1.0, ""),
    "dense": (1.0, " dense"),
    "sparse": (0.5, " dense"),  # 2:4 sparsity doubles the printed peak, not what a model sees
    "one way": (1.0, " one way"),
    "both ways": (0.5, " one way"),
}


def quantity(text: str, *, where: str) -> tuple[float, str]:
    """Value in base units and the base unit of a printed figure.

    Raises PlanError for an unknown unit or qualifier, naming `where` it stands.

    >>> quantity("400 GB/s both ways", where="tpu-v5e")
    (200000000000.0, 'bytes/s one way')
    """
    words = text.split()
    number, unit, qualifier = (words[0] if words else ""), (words[1] if len(words) > 1 else ""), " ".join(words[2:])
    try:
        value = float(number)
    except ValueError:
        raise PlanError(f"{where}: {text!r} does not begin with a number") from None
    if unit not in _SCALES:
        raise PlanError(f"{where}: unit {unit!r} of {text!r} is unknown; {did_you_mean(unit, _SCALES)}")
    if qualifier not in _QUALIFIERS:
        raise PlanError(f"{where}: {qualifier!r} of {text!r} is unknown; {did_you_mean(qualifier, _QUALIFIERS)}")
    scale, base = _SCALES[unit]
    factor, suffix = _QUALIFIERS[qualifier]
    return value * scale * factor, base + suffix


@cache
def table(name: str) -> Mapping[str, Any]:
    """One parsed file of planner/facts/. Read once, when first asked for."""
    text = files("headrace.planner").joinpath("facts", name).read_text(encoding="utf-8")
    return tomllib.loads(text)


def graded(text: str, *, where: str) -> Grade:
    """A grade of a table. Raises PlanError for any other word."""
    if text not in ("measured", "fitted", "spec", "guess"):
        raise PlanError(f"{where}: grade = {text!r} must be measured, fitted, spec or guess")
    return cast(Grade, text)


def find_name(
    name: str, known: Iterable[str], *, what: str, drop: tuple[str, ...] = (), aliases: Mapping[str, str] | None = None
) -> str:
    """The key of `known` that `name` means.

    Case, an organisation before '/', '_' or ' ' for '-', and the prefixes ("nvidia-") and suffixes ("-sxm") of `drop`
    do not matter. Raises PlanError with the nearest valid names.
    """
    keys = {plain_name(key): key for key in known}
    keys.update({plain_name(alias): key for alias, key in (aliases or {}).items()})
    wanted = plain_name(name)
    while wanted not in keys:
        shorter = _shorten(wanted, drop)
        if shorter == wanted:
            raise PlanError(f"unknown {what} {name!r}; {did_you_mean(wanted, keys)}")
        wanted = shorter
    return keys[wanted]


def plain_name(name: str) -> str:
    """Lower case, without organisation, with '-' between words."""
    words = name.strip().rstrip("/").rsplit("/", 1)[-1].lower()
    return "-".join(words.replace("_", " ").replace("-", " ").split())


def _shorten(name: str, drop: tuple[str, ...]) -> str:
    for part in drop:
        if part.startswith("-") and name.endswith(part):
            return name.removesuffix(part)
        if part.endswith("-") and name.startswith(part):
            return name.removeprefix(part)
    return name
