"""Which mode of the codec, and on how many threads, for a given link. Pure: numbers in, a choice and its reason out.

    diff -> encode -> transfer (x replicas) -> decode -> apply

Cut into n equal chunks that stream, the five stages take

    T = max(stages) + (sum(stages) - max(stages)) / n

which is the slowest stage for many chunks and the sum for one, because the first chunk passes every stage before the
slowest one is busy without a break. Today's publisher names a version only when all of it is stored, so n = 1.

On a slow link the smallest body wins; on a fast one the cheapest encoder does, and in the end no delta at all.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from headrace.errors import SyncError
from headrace.sync.codec import MODES, Mode
from headrace.sync.report import SyncReport

STAGES = ("diff", "encode", "transfer", "decode", "apply")
_ITEM_BYTES = 2
"""Of an element where nothing else is said: bfloat16."""
_BITS_PER_CHANGE: Mapping[Mode, tuple[tuple[float, float], ...]] = {
    "ctx": ((0.0022, 9.76), (0.0164, 7.08), (0.0406, 6.30), (0.104, 5.51)),
    "xor": ((0.0022, 28.7), (0.0164, 20.9), (0.0406, 18.2), (0.104, 15.4)),
    "set": ((0.0022, 23.2), (0.0164, 19.0), (0.0406, 17.4), (0.104, 15.9)),
}
"""(density, bits per changed element), bfloat16 weights after Adam-like steps of lr 1e-7 to 1e-5; measured on 16.8
million synthetic weights (see docs of the codec). Between and beyond: linear in log density."""
_WHOLE_SHARE: Mapping[Mode, float] = {"dense": 1 / 1.463, "raw": 1.0}
"""Of the full size, whatever changed."""
_GOOD_ENOUGH = 1.05
"""Fewer threads are taken when the delivery gets at most so much longer: the trainer needs them, too."""
_BITS_PER_BYTE = 8
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes of *weights* (not of deltas) per second and core. Defaults: measured on one core of a 2-core test machine;
    `set`, `dense` and `raw` relative to `ctx` there. Running estimates replace them (`Estimates`)."""

    diff: float = 2.0e9
    """Comparing old and new, and hashing the new."""
    encode: Mapping[Mode, float] = field(
        default_factory=lambda: {"ctx": 0.57e9, "xor": 1.4e9, "set": 2.4e9, "dense": 0.3e9, "raw": 8e9}
    )
    """After the comparison."""
    decode: Mapping[Mode, float] = field(
        default_factory=lambda: {"ctx": 1.0e9, "xor": 1.0e9, "set": 1.6e9, "dense": 0.5e9, "raw": 4e9}
    )
    """Checking and staging while the old version is served."""
    apply: float = 7.5e9
    """Scattering and proving, in the pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a publisher knows before it publishes."""

    model_bytes: float
    """Of a whole version, uncompressed."""
    density: float
    """Elements expected to change, over all elements."""
    bandwidth_bytes_per_s: float
    """Of the narrowest link on the way."""
    replicas: int = 1
    """Copies that pass that link: all replicas where each pulls through the publisher's uplink, 1 where a store or a
    relay on the other side of it hands copies on."""
    threads: int = 1
    """The publisher may use."""
    receiver_threads: int = 1
    """Of one replica."""
    chunks: int = 1
    """Parts that stream through the stages; 1: a stage begins when the one before has ended."""
    item_bytes: int = _ITEM_BYTES
    """Of one element as served."""

    def __post_init__(self) -> None:
        for name in ("model_bytes", "bandwidth_bytes_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SyncError(f"{name} = {value} must be a finite number above 0")
        if not 0.0 <= self.density <= 1.0:
            raise SyncError(f"density = {self.density} must lie in 0 .. 1: changed elements over all elements")
        for name in ("replicas", "threads", "receiver_threads", "chunks", "item_bytes"):
            if getattr(self, name) < 1:
                raise SyncError(f"{name} = {getattr(self, name)} must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One mode under one situation."""

    mode: Mode
    threads: int
    body_bytes: float
    """One copy of the delta."""
    diff_s: float
    encode_s: float
    transfer_s: float
    """All copies."""
    decode_s: float
    apply_s: float
    total_s: float

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by name, in order."""
        return {name: getattr(self, f"{name}_s") for name in STAGES}

    @property
    def bottleneck(self) -> str:
        """The longest stage."""
        return max(self.stages, key=self.stages.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to publish with."""

    best: Predicted
    others: tuple[Predicted, ...]
    """The other modes with all threads, fastest first."""
    why: str
    """One sentence."""

    @property
    def allowed(self) -> tuple[Mode, ...]:
        """For `DeltaPublisher(allowed=...)`. `dense` comes along where the encoder only tries it when it may win."""
        return (self.best.mode, "dense") if self.best.mode in ("ctx", "set") else (self.best.mode,)

    @property
    def threads(self) -> int:
        return self.best.threads


def choose(situation: Situation, speeds: Speeds | None = None, sizes: Mapping[Mode, float] | None = None) -> Choice:
    """The mode with the least predicted time, with as few threads as give it within 5 %.

    `sizes` are factors on the predicted sizes, from what earlier deltas really took. Raises SyncError for a speed that
    is not above 0.
    """
    speeds = speeds or Speeds()
    sizes = sizes or {}
    all_threads = [predict(situation, mode, situation.threads, speeds, sizes.get(mode, 1.0)) for mode in MODES]
    ranked = sorted(all_threads, key=lambda p: (p.total_s, MODES.index(p.mode)))
    first = ranked[0]
    fewer = (
        predict(situation, first.mode, threads, speeds, sizes.get(first.mode, 1.0))
        for threads in range(1, situation.threads)
    )
    best = next((p for p in fewer if p.total_s <= _GOOD_ENOUGH * first.total_s), first)
    return Choice(best=best, others=tuple(ranked[1:]), why=_why(situation, first, best, ranked[1]))


def predict(
    situation: Situation, mode: Mode, threads: int, speeds: Speeds | None = None, size_factor: float = 1.0
) -> Predicted:
    """Seconds per stage and in all for one mode. `raw` needs no comparison: everything travels anyway."""
    speeds = speeds or Speeds()
    for what, value in (("diff", speeds.diff), ("apply", speeds.apply), (f"encode {mode}", speeds.encode[mode])):
        if not value > 0:
            raise SyncError(f"{what}: a speed of {value} bytes/s; it must be above 0")
    size = situation.model_bytes
    body = size_factor * body_bytes(mode, model_bytes=size, density=situation.density, item_bytes=situation.item_bytes)
    body = min(body, size)
    diff_s = 0.0 if mode == "raw" else size / (speeds.diff * threads)
    encode_s = size / (speeds.encode[mode] * threads)
    transfer_s = body * situation.replicas / situation.bandwidth_bytes_per_s
    decode_s = size / (speeds.decode[mode] * situation.receiver_threads)
    apply_s = size / (speeds.apply * situation.receiver_threads)
    return Predicted(
        mode=mode,
        threads=threads,
        body_bytes=body,
        diff_s=diff_s,
        encode_s=encode_s,
        transfer_s=transfer_s,
        decode_s=decode_s,
        apply_s=apply_s,
        total_s=streamed((diff_s, encode_s, transfer_s, decode_s, apply_s), situation.chunks),
    )


def streamed(stages_s: Sequence[float], chunks: int) -> float:
    """Seconds of a pipeline whose stages take `stages_s` over all of `chunks` equal chunks."""
    longest_s = max(stages_s)
    return longest_s + (sum(stages_s) - longest_s) / chunks


def body_bytes(mode: Mode, *, model_bytes: float, density: float, item_bytes: int = _ITEM_BYTES) -> float:
    """Predicted bytes of one delta; never more than the weights, and never less for a higher density."""
    if mode in _WHOLE_SHARE:
        return _WHOLE_SHARE[mode] * model_bytes
    if density <= 0.0:
        return 0.0
    changed = density * model_bytes / item_bytes
    return min(changed * _bits_per_change(mode, density) / _BITS_PER_BYTE, model_bytes)


def _bits_per_change(mode: Mode, density: float) -> float:
    """Linear in log density through the measured points; the outer pieces go on."""
    points = _BITS_PER_CHANGE[mode]
    pieces = list(pairwise(points))
    at = bisect_left([x for x, _ in points[1:-1]], density)
    (x0, y0), (x1, y1) = pieces[at]
    return y0 + (y1 - y0) * math.log(density / x0) / math.log(x1 / x0)


class Estimates:
    """What deliveries really cost, as medians of the last `window` reports: a single stall or a single spike of the
    density changes nothing. `situation` and `choose` use them before the next publish."""

    def __init__(self, *, window: int = 5, prior: Speeds | None = None) -> None:
        if window < 1:
            raise SyncError(f"window = {window} must be >= 1")
        self._window = window
        self._prior = prior or Speeds()
        self._seen: dict[tuple[str, Mode | None], deque[float]] = {}

    def published(self, report: SyncReport, *, threads: int, item_bytes: int = _ITEM_BYTES) -> None:
        """A delta was published: density, size, encoder and the link to the store. Keyframes and empty ones teach
        nothing. `encode_s` of a report includes the comparison."""
        mode = _main_mode(report)
        if mode is None or report.density >= 1.0:
            return
        self._note("density", None, report.density)
        guess = body_bytes(mode, model_bytes=report.full_bytes, density=report.density, item_bytes=item_bytes)
        if guess > 0:
            self._note("size", mode, report.body_bytes / guess)
        diff_s = 0.0 if mode == "raw" else report.full_bytes / (self._prior.diff * threads)
        # What the comparison leaves, but never nothing: the prior may be too slow for this machine.
        self._speed("encode", mode, report.full_bytes, max(report.encode_s - diff_s, report.encode_s / 10) * threads)
        self._speed("bandwidth", None, report.body_bytes, report.put_s)

    def landed(self, report: SyncReport, *, threads: int, copies: int = 1) -> None:
        """A replica took it: decoder, scatter, and the link from the store, which `copies` pulled from at once."""
        mode = _main_mode(report)
        if mode is None:
            return
        self._speed("bandwidth", None, report.body_bytes * copies, report.get_s)
        self._speed("decode", mode, report.full_bytes, report.decode_s * threads)
        self._speed("apply", None, report.full_bytes, (report.apply_s + report.verify_s) * threads)

    @property
    def density(self) -> float | None:
        """Of the next delta; None before the first one."""
        return self._median("density", None)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """None before the first delivery."""
        return self._median("bandwidth", None)

    @property
    def speeds(self) -> Speeds:
        """The prior, with what was measured in its place."""
        return Speeds(
            diff=self._prior.diff,
            encode={mode: self._median("encode", mode) or self._prior.encode[mode] for mode in MODES},
            decode={mode: self._median("decode", mode) or self._prior.decode[mode] for mode in MODES},
            apply=self._median("apply", None) or self._prior.apply,
        )

    @property
    def sizes(self) -> dict[Mode, float]:
        """Real over predicted size, for modes that were used."""
        return {mode: factor for mode in MODES if (factor := self._median("size", mode)) is not None}

    def choose(self, situation: Situation) -> Choice:
        """`choose` with what was learnt. The situation's own density and bandwidth count (see the properties)."""
        return choose(situation, self.speeds, self.sizes)

    def _speed(self, what: str, mode: Mode | None, size: float, seconds: float) -> None:
        if size > 0 and seconds > 0 and math.isfinite(size / seconds):
            self._note(what, mode, size / seconds)

    def _note(self, what: str, mode: Mode | None, value: float) -> None:
        self._seen.setdefault((what, mode), deque(maxlen=self._window)).append(value)

    def _median(self, what: str, mode: Mode | None) -> float | None:
        seen = self._seen.get((what, mode))
        return median(seen) if seen else None


def read_quantity(text: str, unit: str) -> float:
    """Bytes from "16GB", "750 MB" (unit "bytes"), or bytes per second from "1Gbit", "10Gbit/s", "2 GB/s" (unit
    "bytes/s"). Prefixes are powers of 1000. Raises SyncError."""
    per_second = unit == "bytes/s"
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(bit|B)(/s)?\s*", text)
    if found is None or (found[3] == "bit" and not per_second) or (found[4] and not per_second):
        allowed = "like 1Gbit, 25Gbit/s or 2GB/s" if per_second else "like 16GB or 750MB"
        raise SyncError(f"{text!r} is no number of {unit}; write it {allowed}")
    value = float(found[1]) * _SCALE[found[2]]
    if value <= 0:
        raise SyncError(f"{text!r} must be above 0")
    return value / _BITS_PER_BYTE if found[3] == "bit" else value


def _main_mode(report: SyncReport) -> Mode | None:
    """The mode that most bytes of a report have; None where nothing travelled or the mode is unknown here."""
    known = [mode for mode in MODES if report.bytes_by_mode.get(mode)]
    return max(known, key=lambda mode: report.bytes_by_mode.get(mode, 0), default=None)


def _why(situation: Situation, first: Predicted, best: Predicted, rival: Predicted) -> str:
    """`first` has all threads, `best` as few as do, `rival` is the next mode."""
    copies = "" if situation.replicas == 1 else f" to {situation.replicas} replicas"
    gbit = situation.bandwidth_bytes_per_s * _BITS_PER_BYTE / 1e9
    share = first.stages[first.bottleneck] / sum(first.stages.values())
    threads = f"{best.threads} thread{'s' if best.threads > 1 else ''}"
    return (
        f"{gbit:.3g} Gbit/s{copies}: {first.bottleneck} dominates ({share:.0%} of the work); {best.mode} takes "
        f"{seconds_text(best.total_s)} on {threads}, {rival.mode} {seconds_text(rival.total_s)} "
        f"(transfer {seconds_text(best.transfer_s)} against {seconds_text(rival.transfer_s)}, "
        f"encode {seconds_text(best.encode_s)} against {seconds_text(rival.encode_s)})"
    )


def seconds_text(value_s: float) -> str:
    """Seconds or milliseconds, three digits.

    >>> seconds_text(2.8), seconds_text(0.0281)
    ('2.80 s', '28.1 ms')
    """
    return f"{value_s:.2f} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"
