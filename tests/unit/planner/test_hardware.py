"""Chips: units, directions and density come out right; names are forgiving; every number has an origin."""

from __future__ import annotations

import pytest

from headrace.errors import PlanError
from headrace.planner.facts import Fact, find_name, quantity, table
from headrace.planner.hardware import Chip, chip, chips, price


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("80 GiB", 85_899_345_920.0, "bytes"),  # 7 % more than 80 GB
        ("80 GB", 80_000_000_000.0, "bytes"),
        ("275040 MiB", 275_040 * 1_048_576.0, "bytes"),
        ("4.8 TB/s", 4.8e12, "bytes/s"),
        ("400 GB/s both ways", 2e11, "bytes/s one way"),
        ("450 GB/s one way", 4.5e11, "bytes/s one way"),
        ("3352 TFLOP/s sparse", 1.676e15, "FLOP/s dense"),
        ("989 TFLOP/s dense", 9.89e14, "FLOP/s dense"),
    ],
)
def test_printed_figures_become_base_units(text: str, value: float, unit: str) -> None:
    assert quantity(text, where="test") == (pytest.approx(value), unit)


@pytest.mark.parametrize("text", ["", "fast", "80 gib", "80 GiB sideways", "400 GB/s both way"])
def test_a_figure_that_cannot_be_read_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(PlanError, match="the place"):
        quantity(text, where="the place")


def test_all_chips_of_the_design_are_there() -> None:
    names = {c.name for c in chips()}
    assert names >= {"a100", "h100", "h200", "h800", "h20", "b200", "b300", "gb200", "gb300", "mi300x", "mi355x"}
    assert names >= {"tpu-v5e", "tpu-v6e", "tpu-7x", "l40s", "rtx-4090", "rtx-5090", "rtx-pro-6000", "cpu"}


def test_golden_chips() -> None:
    h100, gb200, v5e = chip("h100"), chip("gb200"), chip("tpu-v5e")
    assert (h100.peak("bf16"), h100.peak("fp8"), h100.hbm_bytes_per_s) == (989e12, 1978e12, 3.35e12)
    assert (h100.hbm_bytes, h100.scale_up_bytes_per_s, h100.scale_up_chips) == (80 * 2**30, 450e9, 8)
    assert (h100.scale_out_bytes_per_s, h100.host_bytes_per_s) == (50e9, 64e9)
    assert (gb200.hbm_bytes, gb200.scale_up_chips, gb200.peak("fp4")) == (189_471 * 2**20, 72, 1e16)
    assert (v5e.scale_up_bytes_per_s, v5e.hbm_bytes) == (200e9, 16e9)
    assert chip("h800").scale_up_bytes_per_s == 200e9
    assert chip("h20").peak("bf16") == 148e12


def test_a_format_that_a_chip_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(PlanError, match=r"a100 has no peak for precision 'fp8'.*it has bf16, fp32"):
        chip("a100").peak("fp8")


@pytest.mark.parametrize("one", chips(), ids=lambda c: c.name)
def test_every_number_has_unit_source_date_and_grade(one: Chip) -> None:
    needed = {"bf16", "hbm", "hbm_rate", "scale_up", "scale_out", "host", "scale_up_chips", "usd_per_h"}
    assert needed <= set(one.facts)
    for key, fact in one.facts.items():
        assert fact.value > 0, key
        assert fact.unit, key
        assert fact.source, key
        assert fact.date.startswith("20"), key
        assert fact.grade in ("measured", "fitted", "spec", "guess"), key
    assert one.flops_per_s["bf16"] == one.facts["bf16"].value
    assert one.facts["bf16"].unit == "FLOP/s dense"


def test_figures_are_physically_plausible() -> None:
    """Catches a sparse peak, a two-way link or a swapped unit in the table."""
    for one in chips():
        ridge = one.peak("bf16") / one.hbm_bytes_per_s
        assert 5 < ridge < 650, f"{one.name}: {ridge:.0f} FLOP per byte"
        assert one.scale_out_bytes_per_s <= one.scale_up_bytes_per_s <= one.hbm_bytes_per_s, one.name
        for low, high in (("bf16", "fp8"), ("fp8", "fp4")):
            if high in one.flops_per_s and low in one.flops_per_s:
                assert 1.9 < one.peak(high) / one.peak(low) < 4.1, f"{one.name} {high}"


def test_every_chip_has_one_price_and_a_guess_says_why() -> None:
    rows = table("prices.toml")["chips"]
    assert set(rows) == {c.name for c in chips()}
    for one in chips():
        fact: Fact = one.usd_per_h
        assert fact == price(one.name)
        assert fact.unit == "usd/h"
        if fact.source == "none found":
            assert fact.grade == "guess", one.name
            assert fact.note, one.name
    assert (chip("h200").usd_per_h.value, chip("h200").usd_per_h.grade) == (1.59, "spec")


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("H100", "h100"),
        ("h100-sxm", "h100"),
        ("h100_sxm", "h100"),
        ("nvidia-h200", "h200"),
        ("NVIDIA H200 SXM", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("TPU v5e", "tpu-v5e"),
        ("trillium", "tpu-v6e"),
        ("CPU", "cpu"),
    ],
)
def test_names_are_forgiving(spelled: str, name: str) -> None:
    assert chip(spelled).name == name


def test_an_unknown_chip_names_its_neighbours() -> None:
    with pytest.raises(PlanError, match=r"unknown chip 'h2000'.*'h200'"):
        chip("h2000")


def test_two_calls_give_the_same_object() -> None:
    assert chip("h100") is chip("H100-SXM")


def test_prefixes_and_suffixes_fall_in_any_order() -> None:
    assert find_name("b-x-a", ["x"], what="thing", drop=("b-", "-a")) == "x"
    with pytest.raises(PlanError, match="unknown thing 'b-y-a'"):
        find_name("b-y-a", ["x"], what="thing", drop=("b-", "-a"))


def test_aliases_point_at_chips() -> None:
    names = {c.name for c in chips()}
    assert set(table("hardware.toml")["aliases"].values()) <= names
