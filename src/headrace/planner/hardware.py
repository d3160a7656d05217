"""Chips: peaks, memory, links and prices of facts/hardware.toml and facts/prices.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.errors import PlanError
from headrace.planner.facts import Fact, find_name, graded, quantity, table

_DROP = ("nvidia-", "amd-", "google-", "geforce-", "instinct-", "-sxm", "-sxm4", "-sxm5", "-sxm6", "-80gb", "-hgx")
_FORMATS = ("bf16", "fp8", "fp4", "fp32")
_UNITS: Mapping[str, str] = {
    "hbm": "bytes",
    "hbm_rate": "bytes/s",
    "scale_up": "bytes/s one way",
    "scale_out": "bytes/s one way",
    "host": "bytes/s one way",
    **dict.fromkeys(_FORMATS, "FLOP/s dense"),
}
"""Keys of a chip that hold quantities, and the base unit that each must have: a figure without direction or density
is refused, because both are the usual factor of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator (or one core of a CPU)."""

    name: str
    title: str
    flops_per_s: Mapping[str, float]
    """Dense matrix peak by number format (bf16, fp8, fp4, fp32). A format that the chip lacks is absent."""
    hbm_bytes: float
    hbm_bytes_per_s: float
    scale_up_bytes_per_s: float
    """Per chip, one direction, within the domain (NVLink, ICI, or PCIe where there is nothing better)."""
    scale_up_chips: int
    """Chips in that domain."""
    scale_out_bytes_per_s: float
    """Per chip, one direction, between domains."""
    host_bytes_per_s: float
    """Chip to host memory, one direction."""
    usd_per_h: Fact
    """Price of one chip-hour; override it with your own."""
    facts: Mapping[str, Fact]
    """Each number with unit, source, date and grade; keys as in the table, and scale_up_chips, usd_per_h."""

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in a number format. Raises PlanError where the chip has none, naming those that it has."""
        if precision not in self.flops_per_s:
            has = ", ".join(self.flops_per_s)
            raise PlanError(f"{self.name} has no peak for precision {precision!r} (facts/hardware.toml); it has {has}")
        return self.flops_per_s[precision]


def chip(name: str) -> Chip:
    """A chip by name. Case, '-sxm' and 'nvidia-' do not matter. Raises PlanError with the nearest names."""
    rows = table("hardware.toml")
    return _chip(find_name(name, rows["chips"], what="chip", drop=_DROP, aliases=rows["aliases"]))


def chips() -> tuple[Chip, ...]:
    """Every chip of the table, in its order."""
    return tuple(_chip(name) for name in table("hardware.toml")["chips"])


@cache
def _chip(name: str) -> Chip:
    rows = table("hardware.toml")
    row = rows["chips"][name]
    facts = {key: _fact(name, key, row, rows["sources"]) for key in (*_UNITS, "scale_up_chips") if key in row}
    facts["usd_per_h"] = usd_per_h = price(name)
    return Chip(
        name=name,
        title=row["title"],
        flops_per_s={key: facts[key].value for key in _FORMATS if key in facts},
        hbm_bytes=facts["hbm"].value,
        hbm_bytes_per_s=facts["hbm_rate"].value,
        scale_up_bytes_per_s=facts["scale_up"].value,
        scale_up_chips=int(facts["scale_up_chips"].value),
        scale_out_bytes_per_s=facts["scale_out"].value,
        host_bytes_per_s=facts["host"].value,
        usd_per_h=usd_per_h,
        facts=facts,
    )


def _fact(name: str, key: str, row: Mapping[str, Any], sources: Mapping[str, Any]) -> Fact:
    where = f"facts/hardware.toml: {name}.{key}"
    source = sources[row.get("by", {}).get(key, row["source"])]
    note = row.get("notes", {}).get(key, "")
    if key == "scale_up_chips":
        value, unit, printed = float(row[key]), "chips", ""
    else:
        value, unit = quantity(row[key], where=where)
        printed = row[key]
        if unit != _UNITS[key]:
            raise PlanError(f"{where} = {row[key]!r} is in {unit!r} but must say {_UNITS[key]!r}")
    return Fact(
        value=value,
        unit=unit,
        source=source["text"],
        date=source["date"],
        grade=graded(source["grade"], where=where),
        note="; ".join(part for part in (printed, note) if part),
    )


def price(name: str) -> Fact:
    """Dollars of one hour of a chip of the table. Raises KeyError for a name that is not in it."""
    row = table("prices.toml")["chips"][name]
    return Fact(
        value=float(row["usd_per_h"]),
        unit="usd/h",
        source=row["source"],
        date=row["date"],
        grade=graded(row["grade"], where=f"facts/prices.toml: {name}"),
        note=row.get("note", ""),
    )
