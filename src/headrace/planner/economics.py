"""Money: an owned chip-hour from its purchase, dollars per million trained tokens, hosted list prices, break-even.

A trained token here is any token of a trained sequence, prompt included: public figures per million tokens count so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.errors import PlanError, did_you_mean
from headrace.planner.facts import Grade, graded, plain_name, table

HOURS_PER_YEAR = 8760.0


def capital_usd_per_gpu_h(
    *, capex_usd: float, years: float, utilisation: float = 1.0, capital_rate: float = 0.0, residual_frac: float = 0.0
) -> float:
    """Capital share of one sold or used GPU-hour: `capex_usd` per GPU, paid off monthly over `years`.

    `capital_rate` is the yearly cost of capital (an annuity; 0 = straight line), `residual_frac` the share of the
    purchase that resale returns at the end, `utilisation` the share of hours that bear the cost. Raises PlanError.
    """
    _positive(capex_usd=capex_usd, years=years, utilisation=utilisation)
    _share(utilisation=utilisation, capital_rate=capital_rate, residual_frac=residual_frac)
    months, rate = years * 12.0, capital_rate / 12.0
    discount = months * math.log1p(rate)
    worth_now = capex_usd * (1.0 - residual_frac * math.exp(-discount))
    per_month = worth_now / months if rate == 0.0 else worth_now * rate / -math.expm1(-discount)
    return per_month * 12.0 / HOURS_PER_YEAR / utilisation


def usd_per_gpu_h_from_capex(
    *,
    capex_usd: float,
    years: float,
    utilisation: float = 1.0,
    power_w: float = 0.0,
    usd_per_kwh: float = 0.0,
    pue: float = 1.0,
    other_usd_per_h: float = 0.0,
    capital_rate: float = 0.0,
    residual_frac: float = 0.0,
) -> float:
    """Dollars of one GPU-hour of an owned machine; everything per GPU (divide a node's figures by its GPUs).

    Power is paid for all hours at `power_w` watts times `pue` (facility over machine power); `other_usd_per_h` is the
    rest (space, network, people, repairs) per owned hour. Both are spread over the `utilisation` share of hours, as
    capital is. Raises PlanError for impossible values.
    """
    for name, value in (("power_w", power_w), ("usd_per_kwh", usd_per_kwh), ("other_usd_per_h", other_usd_per_h)):
        if not (math.isfinite(value) and value >= 0):
            raise PlanError(f"{name} = {value} must be a finite number >= 0")
    if not (math.isfinite(pue) and pue >= 1.0):
        raise PlanError(f"pue = {pue} must be >= 1: the facility draws at least what its machines draw")
    capital = capital_usd_per_gpu_h(
        capex_usd=capex_usd,
        years=years,
        utilisation=utilisation,
        capital_rate=capital_rate,
        residual_frac=residual_frac,
    )
    running = power_w / 1000.0 * pue * usd_per_kwh + other_usd_per_h
    return capital + running / utilisation


def usd_per_mtok(gpus: float, usd_per_gpu_h: float, wall_s: float, trained_tok: float) -> float:
    """Dollars per million trained tokens of `gpus` chips held for `wall_s` seconds that trained `trained_tok` tokens.

    `wall_s` is time on the clock between optimizer steps. Seconds of one rollout are not: engines overlap rollouts, so
    they overstate the cost (Prime RL's published 6.90 against 3.17 on the clock). Raises PlanError for no tokens.
    """
    for name, value in (("gpus", gpus), ("usd_per_gpu_h", usd_per_gpu_h), ("wall_s", wall_s)):
        if not (math.isfinite(value) and value >= 0):
            raise PlanError(f"{name} = {value} must be a finite number >= 0")
    _positive(trained_tok=trained_tok)
    return gpus * usd_per_gpu_h * wall_s / 3600.0 / trained_tok * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedPrice:
    """List prices of one hosted model, in dollars per million tokens."""

    provider: str
    model: str
    prefill_usd: float
    sample_usd: float
    train_usd: float | None
    """None where the source lists none."""
    cached_frac: float
    """Price of a cached prompt token as a share of prefill_usd."""
    source: str
    date: str
    grade: Grade
    note: str = ""


@cache
def hosted_prices() -> tuple[HostedPrice, ...]:
    """Every hosted price of facts/prices.toml."""
    return tuple(_hosted(row) for row in table("prices.toml")["hosted"])


def _hosted(row: dict[str, Any]) -> HostedPrice:
    train = row.get("train")
    return HostedPrice(
        provider=row["provider"],
        model=row["model"],
        prefill_usd=float(row["prefill"]),
        sample_usd=float(row["sample"]),
        train_usd=None if train is None else float(train),
        cached_frac=float(row["cached_frac"]),
        source=row["source"],
        date=row["date"],
        grade=graded(row["grade"], where=f"facts/prices.toml: {row['provider']} {row['model']}"),
        note=row.get("note", ""),
    )


def hosted_price(provider: str, model: str) -> HostedPrice:
    """List price of a model at a provider. Raises PlanError naming what the provider has."""
    prices = {price.model: price for price in hosted_prices() if price.provider == provider.lower()}
    if not prices:
        known = {price.provider for price in hosted_prices()}
        raise PlanError(f"unknown provider {provider!r}; {did_you_mean(provider.lower(), known)}")
    wanted = plain_name(model)
    if wanted not in prices:
        raise PlanError(f"{provider} has no price for {model!r}; {did_you_mean(wanted, prices)}")
    return prices[wanted]


def hosted_for(model: str) -> tuple[HostedPrice, ...]:
    """All complete prices (train included) for a model, for a break-even line; empty where nobody lists it."""
    wanted = plain_name(model)
    return tuple(price for price in hosted_prices() if price.model == wanted and price.train_usd is not None)


def hosted_usd_per_mtok(
    price: HostedPrice, *, prompt_tok: float, response_tok: float, group_size: int = 1, cached: bool = True
) -> float:
    """Dollars per million trained tokens at list price: each sequence is prefilled, sampled and trained once.

    With `cached`, a group's prompt is prefilled at full price once and at the cached price for its other members.
    Turns of multi-turn episodes are not modelled: give all tool and prompt tokens as `prompt_tok`.
    Raises PlanError where the list has no train price.
    """
    _positive(prompt_tok=prompt_tok, response_tok=response_tok, group_size=float(group_size))
    if price.train_usd is None:
        raise PlanError(f"{price.provider} {price.model}: no train price is known ({price.source}, {price.date})")
    full = 1.0 / group_size if cached else 1.0
    prefill_usd = price.prefill_usd * (full + (1.0 - full) * price.cached_frac)
    sequence_tok = prompt_tok + response_tok
    return (prompt_tok * prefill_usd + response_tok * price.sample_usd) / sequence_tok + price.train_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Own chips against a hosted price, for the same trained tokens."""

    own_usd_per_mtok: float
    hosted_usd_per_mtok: float
    gpu_usd_per_h: float
    """Chip-hours cheaper than this make the own run the cheaper one."""
    wall_s: float
    """So does a step shorter than this, at the given price."""
    busy_frac: float
    """Share of paid chip time that must do such work for both to cost the same; above 1: hosted is always cheaper."""

    @property
    def own_is_cheaper(self) -> bool:
        return self.own_usd_per_mtok < self.hosted_usd_per_mtok


def break_even(
    *, gpus: float, usd_per_gpu_h: float, wall_s: float, trained_tok: float, hosted_usd_per_mtok: float
) -> BreakEven:
    """Where an own run of `gpus` chips over `wall_s` seconds costs what `hosted_usd_per_mtok` does.

    Raises PlanError unless all are positive.
    """
    _positive(gpus=gpus, usd_per_gpu_h=usd_per_gpu_h, wall_s=wall_s, hosted_usd_per_mtok=hosted_usd_per_mtok)
    own = usd_per_mtok(gpus, usd_per_gpu_h, wall_s, trained_tok)
    ratio = hosted_usd_per_mtok / own
    return BreakEven(
        own_usd_per_mtok=own,
        hosted_usd_per_mtok=hosted_usd_per_mtok,
        gpu_usd_per_h=usd_per_gpu_h * ratio,
        wall_s=wall_s * ratio,
        busy_frac=1.0 / ratio,
    )


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise PlanError(f"{name} = {value} must be a finite number above 0")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise PlanError(f"{name} = {value} must lie between 0 and 1")
