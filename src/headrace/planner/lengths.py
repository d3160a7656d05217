"""Laws of response lengths: what a group's rollouts cost, and how long the longest takes.

Members of a group answer the same prompt, so their lengths go together. Every law has one standard normal variable
per rollout, made from a part that its group shares and a part of its own:

    x = sqrt(tie) * prompt + sqrt(1 - tie) * member        tie = correlation between members of a group

and turns x into tokens, a rising function, cut at the cap. Moments come in closed form; the longest of a group or a
batch from a grid over both parts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import PlanError
from headrace.planner import normal
from headrace.planner.length_file import read_lengths, tie_of
from headrace.planner.normal import Floats
from headrace.planner.spec import ResponseConfig

_MOST_CUT_FRAC = 0.99
"""A mean that needs more responses than this at the cap is refused: it says nothing of what lies below."""
_NO_SPREAD = 1e-9
"""A smaller sigma moves no length by a token; it counts as 0."""


class LengthLaw(Protocol):
    """Response lengths in tokens, after the cap."""

    @property
    def mean_tok(self) -> float:
        """E[L]."""

    @property
    def cap_tok(self) -> int:
        """Longest possible response."""

    @property
    def note(self) -> str:
        """Where the law comes from and what it assumes, for people."""

    def draw(
        self,
        rng: np.random.Generator,
        groups: int,
        members: int,
        member_rng: np.random.Generator | None = None,
    ) -> NDArray[np.int64]:
        """(groups, members) lengths, 1 to cap; each group is another prompt.

        With `member_rng`, `rng` draws only what belongs to the prompts: further members of the same prompts come from
        the same `rng` state and another `member_rng`.
        """

    def survival(self, at_tok: Floats) -> Floats:
        """P(L > t) for each t."""

    def second_moment(self) -> float:
        """E[L^2], tokens squared."""

    def quantile(self, q: float) -> float:
        """Smallest length that at least a share q of responses does not exceed."""

    def max_of_members(self, members: int) -> float:
        """E[longest of a group], tokens."""

    def max_of(self, groups: int, members: int) -> float:
        """E[longest of a batch of groups], tokens."""

    def scaled(self, factor: float) -> LengthLaw:
        """All lengths times `factor` before the cap, which stays."""


class _TiedLaw(ABC):
    """What the laws share: the longest, from weighted points of a group's longest."""

    @abstractmethod
    def _points(self, members: int) -> tuple[Floats, Floats]:
        """Values (tokens) and weights of the longest of a group; any order, weights sum to 1."""

    def max_of_members(self, members: int) -> float:
        return self.max_of(1, members)

    def max_of(self, groups: int, members: int) -> float:
        if groups < 1 or members < 1:
            raise PlanError(f"the longest of {groups} groups with {members} members: both must be at least 1")
        values, below = _longest(self, members)
        beyond = 1.0 - below**groups
        return float(min(values[0] + np.diff(values) @ beyond[:-1], values[-1]))


_EVEN_STEPS, _TAIL_STEPS, _TINY = 2000, 400, 1e-15


@lru_cache(maxsize=64)
def _longest(law: _TiedLaw, members: int) -> tuple[Floats, Floats]:
    """Ascending values of a group's longest, and the probability to lie at or below each."""
    values, weights = law._points(members)
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order] / weights.sum()
    below = np.cumsum(weights)
    # A few thousand steps say as much as the whole grid: even ones of the probability, and in the tail of its log.
    with np.errstate(divide="ignore"):
        tail = np.floor(-_TAIL_STEPS * np.log10(np.maximum(1.0 - below, _TINY)))
    stairs = np.floor(_EVEN_STEPS * below) + tail
    first = np.flatnonzero(np.diff(stairs, prepend=-1.0))
    mass = np.add.reduceat(weights, first)
    mean = np.add.reduceat(values * weights, first) / mass
    return np.clip(mean, values[first], np.maximum.reduceat(values, first)), np.cumsum(mass)


def _grid(tie: float, members: int) -> tuple[Floats, Floats]:
    """Points x and weights of the longest member of a group."""
    own, own_weight = normal.largest_of(members)
    if tie == 0.0:
        return own, own_weight
    shared, shared_weight = normal.largest_of(1)
    if tie == 1.0:
        return shared, shared_weight
    x = math.sqrt(tie) * shared[:, None] + math.sqrt(1.0 - tie) * own[None, :]
    return x.ravel(), (shared_weight[:, None] * own_weight[None, :]).ravel()


def _tied_normals(
    tie: float, rng: np.random.Generator, groups: int, members: int, member_rng: np.random.Generator | None
) -> Floats:
    """(groups, members) standard normal variables with correlation `tie` inside a group."""
    shared = rng.standard_normal((groups, 1))
    own = (member_rng or rng).standard_normal((groups, members))
    return math.sqrt(tie) * shared + math.sqrt(1.0 - tie) * own


@dataclass(frozen=True, kw_only=True)
class LognormalLaw(_TiedLaw):
    """ln L normal; with several medians, each prompt has one of them (a mixture of easy and hard prompts).

    L = round(X) with X lognormal, held between 1 and the cap. sigma = 0 is a constant.
    """

    medians_tok: tuple[float, ...]
    """Of X, before the cap; one for each kind of prompt."""
    shares: tuple[float, ...] = (1.0,)
    """Of the kinds of prompt; sum 1."""
    sigma: float
    """Of ln X, for one kind of prompt."""
    tie: float = 0.0
    """Correlation of ln X between members of a group of one kind: 1 - (within / all)^2."""
    cap_tok: int
    note: str = ""

    def draw(
        self, rng: np.random.Generator, groups: int, members: int, member_rng: np.random.Generator | None = None
    ) -> NDArray[np.int64]:
        kind = rng.random(groups)
        x = _tied_normals(self.tie, rng, groups, members, member_rng)
        of_kind = np.searchsorted(np.cumsum(self.shares)[:-1], kind, side="right")
        tokens = np.asarray(self.medians_tok)[of_kind, None] * np.exp(self.sigma * x)
        out: NDArray[np.int64] = np.rint(np.clip(tokens, 1.0, self.cap_tok)).astype(np.int64)
        return out

    def survival(self, at_tok: Floats) -> Floats:
        at = np.floor(np.asarray(at_tok, dtype=np.float64))
        edge = np.log(np.maximum(at, 0.0) + 0.5)
        out = np.zeros_like(edge)
        for share, median in zip(self.shares, self.medians_tok, strict=True):
            if self.sigma > 0.0:
                out += share * normal.above((edge - math.log(median)) / self.sigma)
            else:
                out += share * (np.rint(min(max(median, 1.0), self.cap_tok)) > at)
        return np.where(at < 1.0, 1.0, np.where(at >= self.cap_tok, 0.0, out))

    @cached_property
    def mean_tok(self) -> float:
        return self._moment(1)

    def second_moment(self) -> float:
        return self._moment(2)

    def _moment(self, power: int) -> float:
        parts = zip(self.shares, self.medians_tok, strict=True)
        return sum(share * held_moment(power, median, self.sigma, self.cap_tok) for share, median in parts)

    def quantile(self, q: float) -> float:
        low, high = 1, self.cap_tok
        while low < high:
            middle = (low + high) // 2
            if float(self.survival(np.array([float(middle)]))[0]) <= 1.0 - q:
                high = middle
            else:
                low = middle + 1
        return float(low)

    def scaled(self, factor: float) -> LognormalLaw:
        _check_factor(factor)
        return replace(self, medians_tok=tuple(m * factor for m in self.medians_tok))

    def _points(self, members: int) -> tuple[Floats, Floats]:
        x, weight = _grid(self.tie, members)
        growth = np.exp(self.sigma * x)
        values = [np.clip(median * growth, 1.0, self.cap_tok) for median in self.medians_tok]
        if self.sigma == 0.0:
            values = [np.rint(v) for v in values]
        return np.concatenate(values), np.concatenate([share * weight for share in self.shares])


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolLaw(_TiedLaw):
    """Any law that is given as its sorted values, all as likely: histograms, and the uniform law.

    Members of a group take values at correlated ranks (a Gaussian copula), so the law of one response is exactly that
    of the pool whatever the tie.
    """

    sorted_tok: Floats
    """Ascending lengths before the cap, at least 1."""
    tie: float = 0.0
    """Correlation of the ranks' normal scores between members of a group."""
    cap_tok: int
    note: str = ""

    def draw(
        self, rng: np.random.Generator, groups: int, members: int, member_rng: np.random.Generator | None = None
    ) -> NDArray[np.int64]:
        return self._held[self._ranks(_tied_normals(self.tie, rng, groups, members, member_rng))].astype(np.int64)

    def survival(self, at_tok: Floats) -> Floats:
        at_most = np.searchsorted(self._held, np.asarray(at_tok, dtype=np.float64), side="right")
        return 1.0 - at_most / self._held.size

    @cached_property
    def mean_tok(self) -> float:
        return float(self._held.mean())

    def second_moment(self) -> float:
        return float(np.square(self._held).mean())

    def quantile(self, q: float) -> float:
        rank = math.ceil(q * self._held.size) - 1
        return float(self._held[min(max(rank, 0), self._held.size - 1)])

    def scaled(self, factor: float) -> PoolLaw:
        _check_factor(factor)
        return replace(self, sorted_tok=self.sorted_tok * factor)

    @cached_property
    def _held(self) -> Floats:
        return np.rint(np.clip(self.sorted_tok, 1.0, self.cap_tok))

    def _ranks(self, x: Floats) -> NDArray[np.int64]:
        size = self.sorted_tok.size
        return np.minimum((normal.below(x) * size).astype(np.int64), size - 1)

    def _points(self, members: int) -> tuple[Floats, Floats]:
        x, weight = _grid(self.tie, members)
        return self._held[self._ranks(x)], weight


def held_moment(power: int, median: float, sigma: float, cap: float) -> float:
    """E[max(1, min(X, cap))^power] of a lognormal X: limited expected value, closed form.

    With k = power, m = ln median: E[X^k; X <= c] = exp(k m + k^2 s^2 / 2) * Phi((ln c - m - k s^2) / s), and what
    lies outside 1 to cap counts as the nearer end (Klugman, Panjer, Willmot, Loss Models, appendix A).
    """
    if sigma == 0.0:
        return float(round(min(max(median, 1.0), cap)) ** power)
    m = math.log(median)

    def partial(limit: float) -> float:
        reach = (math.log(limit) - m - power * sigma**2) / sigma
        return math.exp(power * m + (power * sigma) ** 2 / 2.0) * float(normal.below(reach))

    at_floor = float(normal.below(-m / sigma))
    at_cap = cap**power * float(normal.above((math.log(cap) - m) / sigma))
    return at_floor + partial(cap) - partial(1.0) + at_cap


def length_law(config: ResponseConfig) -> LengthLaw:
    """The law of a spec. PlanError: a mean that the cap does not allow, or a file without lengths."""
    match config.law:
        case "file":
            return _file_law(config)
        case "uniform":
            return _uniform_law(config)
        case "constant":
            _check_mean(config, 0.0)
            return LognormalLaw(medians_tok=(float(round(config.mean_tok)),), sigma=0.0, cap_tok=config.cap_tok)
        case "lognormal":
            return _lognormal_law(config, (1.0,), (1.0,))
        case "mixture":
            return _lognormal_law(config, (1.0, config.long_factor), (1.0 - config.long_frac, config.long_frac))


def _lognormal_law(config: ResponseConfig, factors: tuple[float, ...], shares: tuple[float, ...]) -> LognormalLaw:
    """Solve the median so that the mean after the cap is the one asked for."""
    sigma = config.sigma if config.sigma > _NO_SPREAD else 0.0
    tie = _tie(config)

    def law(median: float) -> LognormalLaw:
        medians = tuple(median * factor for factor in factors)
        return LognormalLaw(medians_tok=medians, shares=shares, sigma=sigma, tie=tie, cap_tok=config.cap_tok)

    if config.mean_tok == 1.0 or config.cap_tok == 1:
        _check_mean(config, 0.0)
        return replace(law(1.0), medians_tok=(1.0,), shares=(1.0,), sigma=0.0)
    if sigma == 0.0 and len(set(factors)) == 1:
        _check_mean(config, sigma)
        return law(float(round(config.mean_tok)))
    most = config.cap_tok * math.exp(normal.quantile(_MOST_CUT_FRAC) * sigma)
    _check_mean(config, sigma, law(most).mean_tok)
    median = _bisect(lambda m: law(m).mean_tok, config.mean_tok, math.exp(-12.0 * sigma) / max(factors), most)
    return law(median)


def _tie(config: ResponseConfig) -> float:
    """Correlation between members that the spec's spreads say."""
    return 1.0 - (config.sigma_within / config.sigma) ** 2 if config.sigma > _NO_SPREAD else 0.0


def _check_mean(config: ResponseConfig, sigma: float, largest: float | None = None) -> None:
    if config.mean_tok < 1.0:
        raise PlanError(f"response.mean_tok = {config.mean_tok:g}: a response has at least 1 token")
    if largest is not None and config.mean_tok > largest:
        raise PlanError(
            f"response.mean_tok = {config.mean_tok:g} is too near cap_tok = {config.cap_tok}: with sigma = {sigma:g} "
            f"more than {_MOST_CUT_FRAC:.0%} of the responses would end at the cap. Possible: mean_tok up to "
            f"{math.floor(largest)}, a higher cap_tok, a smaller sigma, or law = 'constant'"
        )


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    """x between low and high (both positive) where a rising function reaches `target`; on a logarithmic scale."""
    for _ in range(100):
        middle = math.sqrt(low * high)
        if rising(middle) < target:
            low = middle
        else:
            high = middle
        if high / low - 1.0 < 1e-12:
            break
    return math.sqrt(low * high)


def _uniform_law(config: ResponseConfig) -> PoolLaw:
    """Uniform on 1..top, members independent. top = 2 mean - 1; more where the cap cuts, so that the mean holds.

    Mean of min(U, cap) for U uniform on 1..top, top > cap: cap - cap (cap - 1) / (2 top).
    """
    cap, mean = config.cap_tok, config.mean_tok
    _check_mean(config, 0.0)
    top = 2.0 * mean - 1.0
    if top > cap:
        largest = cap - (1.0 - _MOST_CUT_FRAC) * (cap - 1) / 2.0
        _check_mean(config, 0.0, largest)
        top = cap * (cap - 1) / (2.0 * (cap - mean))
    return PoolLaw(sorted_tok=np.arange(1.0, max(1, round(top)) + 1.0), cap_tok=cap, note="members independent")


def _file_law(config: ResponseConfig) -> PoolLaw:
    """Histogram of a file, cut at the cap; mean_tok of the spec is not used."""
    lengths = read_lengths(Path(config.path))
    tie = tie_of(lengths)
    seen = f"{lengths.tok.size} responses of {config.path}"
    if tie is None:
        tie = _tie(config)
        note = f"{seen}; it names no groups, so members correlate as sigma and sigma_within say: {tie:.2f}"
    else:
        note = f"{seen}; members of its groups correlate: {tie:.2f}"
    return PoolLaw(sorted_tok=np.sort(lengths.tok), tie=tie, cap_tok=config.cap_tok, note=note)


def _check_factor(factor: float) -> None:
    if not (factor > 0.0 and math.isfinite(factor)):
        raise PlanError(f"lengths cannot be scaled by {factor:g}: a positive number is needed")
