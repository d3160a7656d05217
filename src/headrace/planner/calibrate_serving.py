"""Fit decode constants to measured serving rows, per (chip, engine, precision), and say how good they are.

The rows are a CSV in the layout of aiconfigurator's `silicon_sample.csv` (ai-dynamo/aiconfigurator); the caller gives
its path. A row is a closed loop of `concurrency` requests on one engine; what it measured is TPOT.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import PlanError
from headrace.planner.constants import Constants, ServingSet
from headrace.planner.engine_cost import decode_parts, kv_room, prefill_parts
from headrace.planner.facts import Fact
from headrace.planner.hardware import Chip
from headrace.planner.hardware import chip as chip_named
from headrace.planner.models import ModelShape
from headrace.planner.models import model as model_named

FloatArray = NDArray[np.float64]

FITTED: Mapping[str, tuple[float, float]] = {
    "mem_eff": (0.2, 0.95),
    "prefill_eff": (0.1, 0.9),
    "layer_s": (1e-6, 120e-6),
    "allreduce_s": (1e-6, 60e-6),
    "step_s": (0.2e-3, 8e-3),
}
"""The five constants of a fit and their bounds; outside them a fit has explained something else."""
PULL = 0.02
"""Weight of (log(value / seed))^2 of each constant against the mean robust error: decides only what rows do not."""
MEM_FRAC = 0.9
"""Share of memory that serving engines take by default."""
MIN_ROWS = 8
"""Smaller groups keep the seeds."""
_COLUMNS = (
    *("id", "silicon_data_source", "backend", "model_path", "system", "precision", "mode", "isl", "osl"),
    *("batch_size", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_tpot_ms"),
)
_WIDTHS = {"int4": "fp4", "": "bf16"}
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")


class Group(NamedTuple):
    """What shares one set of constants."""

    chip: str
    engine: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One measurement."""

    id: str
    group: Group
    model: str
    """As the file spells it."""
    gpus: int
    attention_dp: int
    concurrency: int
    prompt_tok: int
    response_tok: int
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """Mean absolute percentage errors of one group, as shares."""

    group: Group
    rows: int
    untuned: float
    fitted: float
    """On the half that the fit did not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """Accuracy over all rows."""

    rows: int
    skipped: Mapping[str, int]
    """Rows that could not be used, by reason."""
    untuned: float
    """MAPE with the constants given."""
    untuned_median: float
    fitted: float
    """MAPE on held-out rows, every group's fit together; without a group that is large enough, as untuned."""
    fitted_median: float
    groups: tuple[GroupScore, ...]


def read_rows(path: Path) -> list[ServingRow]:
    """Rows of aggregated serving (prefill and decode on the same chips). Raises PlanError for another file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise PlanError(f"{path} is no serving table: it has no column {', '.join(missing)}")
            return [_row(raw, path) for raw in reader if raw["mode"] == "agg"]
    except (OSError, UnicodeDecodeError) as exc:
        raise PlanError(f"{path} cannot be read as a serving table: {exc}") from exc


def _row(raw: Mapping[str, str], path: Path) -> ServingRow:
    def whole(name: str) -> int:
        return max(1, int(raw[name] or 1))

    try:
        tp, dp, moe_tp, moe_ep = (whole(n) for n in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"))
        gpus, dp = _engine_size(tp, dp, moe_tp, moe_ep)
        tagged = _CONCURRENCY.search(raw["silicon_data_source"])
        concurrency = int(tagged[1]) if tagged else whole("batch_size") * dp
        tpot_s = float(raw["silicon_tpot_ms"]) / 1e3
        prompt_tok, response_tok = int(raw["isl"]), int(raw["osl"])
    except ValueError as exc:
        raise PlanError(f"{path}: row {raw['id']!r}: {exc}") from exc
    if not (math.isfinite(tpot_s) and tpot_s > 0):
        raise PlanError(f"{path}: row {raw['id']!r}: silicon_tpot_ms = {raw['silicon_tpot_ms']} must be above 0")
    chip = raw["system"].removesuffix("_sxm")
    group = Group(chip, raw["backend"], _WIDTHS.get(raw["precision"], raw["precision"]))
    return ServingRow(
        id=raw["id"], group=group, model=raw["model_path"], gpus=gpus, attention_dp=dp, concurrency=concurrency,
        prompt_tok=prompt_tok, response_tok=response_tok, tpot_s=tpot_s,
    )  # fmt: skip


def _engine_size(tp: int, dp: int, moe_tp: int, moe_ep: int) -> tuple[int, int]:
    """Chips of the engine and copies of attention.

    Some rows were written with the product of two widths of the same n chips: n x n attention chips with experts
    n x n or 1 x n^2. Those are engines of n chips.
    """
    chips = tp * dp
    side = math.isqrt(chips)
    doubled = side * side == chips > 1 and moe_tp * moe_ep == chips and moe_ep > 1
    if doubled and (moe_tp == moe_ep or tp == dp):
        return side, side if dp > 1 else 1
    return max(chips, moe_tp * moe_ep), dp


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """Rows of one group as arrays: TPOT for any constants is a few array operations."""

    mem_s: FloatArray
    flop_s: FloatArray
    wire_s: FloatArray
    allreduces: FloatArray
    a2as: FloatArray
    layers: FloatArray
    prefill_flop_s: FloatArray
    prefill_wire_s: FloatArray
    prefill_mem_s: FloatArray
    prefills: FloatArray
    """Prefills of other requests per decode step."""
    moe: FloatArray
    tpot_s: FloatArray

    def predict(self, values: Mapping[str, float]) -> FloatArray:
        """Seconds per output token: the decode step, and its share of others' prefills."""
        v, p = values, values["smooth_p"]
        factor = np.where(self.moe > 0, v["moe_decode_factor"], 1.0)
        mem, flop = self.mem_s * factor / v["mem_eff"], self.flop_s * factor / v["flop_eff"]
        high, low = np.maximum(mem, flop), np.minimum(mem, flop)
        roof = high * (1.0 + (low / high) ** p) ** (1.0 / p)
        latency = self.allreduces * v["allreduce_s"] + self.a2as * v["a2a_s"] + self.layers * v["layer_s"]
        decode = roof + self.wire_s / v["net_eff"] + latency + v["step_s"]
        compute = self.prefill_flop_s / v["prefill_eff"] + self.prefill_wire_s / v["net_eff"]
        prefill = np.maximum(compute, self.prefill_mem_s / v["mem_eff"])
        return np.asarray(decode + self.prefills * prefill, dtype=np.float64)

    def take(self, mask: NDArray[np.bool_]) -> _Design:
        return _Design(**{name: getattr(self, name)[mask] for name in _Design.__slots__})


def _design(rows: Sequence[ServingRow], shapes: Mapping[str, ModelShape], constants: Constants) -> _Design:
    columns: dict[str, list[float]] = {name: [] for name in _Design.__slots__}
    for row in rows:
        shape, chip = shapes[row.model], chip_named(row.group.chip)
        for name, value in _features(row, shape, chip, constants).items():
            columns[name].append(value)
    return _Design(**{name: np.array(values) for name, values in columns.items()})


def _running(row: ServingRow, shape: ModelShape, chip: Chip, context_tok: float, constants: Constants) -> float:
    """Sequences that decode at once: the rest of the closed loop waits for KV memory, which TPOT does not show."""
    room_tok, _ = kv_room(
        shape, chip, tp=row.gpus, precision=row.group.precision, mem_frac=MEM_FRAC, max_seqs=row.concurrency,
        context_tok=context_tok, constants=constants,
    )  # fmt: skip
    fitting = row.attention_dp * room_tok / context_tok
    return max(1.0, min(float(row.concurrency), fitting)) if room_tok else float(row.concurrency)


def _features(row: ServingRow, shape: ModelShape, chip: Chip, constants: Constants) -> dict[str, float]:
    context_tok = row.prompt_tok + row.response_tok / 2
    running = _running(row, shape, chip, context_tok, constants)
    width = {"tp": row.gpus, "precision": row.group.precision, "attention_dp": row.attention_dp}
    decode = decode_parts(shape, chip, np.array([running]), context_tok=context_tok, **width)  # type: ignore[arg-type]
    prefill = prefill_parts(shape, chip, context_tok=float(row.prompt_tok), **width)  # type: ignore[arg-type]
    total_tok = context_tok * running
    pairs = row.prompt_tok**2 / 2
    return {
        "mem_s": float(decode.mem_s[0]) + total_tok * decode.mem_s_per_tok,
        "flop_s": float(decode.flop_s[0]) + total_tok * decode.flop_s_per_tok,
        "wire_s": float(decode.wire_s[0]),
        "allreduces": decode.allreduces,
        "a2as": decode.a2as,
        "layers": decode.layers,
        "prefill_flop_s": row.prompt_tok * prefill.flop_s_per_tok + pairs * prefill.flop_s_per_pair,
        "prefill_wire_s": row.prompt_tok * prefill.wire_s_per_tok,
        "prefill_mem_s": prefill.mem_s,
        "prefills": (running - 1.0) / row.response_tok,
        "moe": float(shape.is_moe),
        "tpot_s": row.tpot_s,
    }


def fit_serving(
    rows: Sequence[ServingRow], constants: Constants, *, name: str, date: str, hold_out: bool = True
) -> tuple[Constants, ServingReport]:
    """Constants with a ServingSet for each group of at least MIN_ROWS rows, and their accuracy.

    Accuracy is always that of a fit to half of the configurations (by a hash) on the other half. The returned sets
    come from that half too, or from all rows with hold_out=False. Raises PlanError if no row can be used.
    """
    usable, shapes, skipped = _usable(rows)
    if not usable:
        raise PlanError(f"none of {len(rows)} serving rows can be used: {skipped or 'the table is empty'}")
    seeds = {field: getattr(constants, field).value for field in SEEDED}
    by_group: dict[Group, list[ServingRow]] = {}
    for row in usable:
        by_group.setdefault(row.group, []).append(row)
    scores, sets, plain, held = [], [], [], []
    for group, members in sorted(by_group.items(), key=lambda item: (-len(item[1]), item[0])):
        design = _design(members, shapes, constants)
        seen = np.array([_first_half(row, shapes[row.model]) for row in members])
        untuned = _errors(design, seeds)
        plain.append(untuned)
        if min(seen.sum(), (~seen).sum()) < MIN_ROWS // 2:
            continue
        values = fit_group(design.take(seen), seeds)
        errors = _errors(design.take(~seen), values)
        held.append(errors)
        scores.append(
            GroupScore(group=group, rows=len(members), untuned=float(untuned.mean()), fitted=float(errors.mean()))
        )
        final = values if hold_out else fit_group(design, seeds)
        sets.append(_serving_set(group, final, len(members), name, date))
    every = np.concatenate(plain)
    fitted = np.concatenate(held) if held else every
    report = ServingReport(
        rows=len(usable), skipped=skipped, untuned=float(every.mean()), untuned_median=float(np.median(every)),
        fitted=float(fitted.mean()), fitted_median=float(np.median(fitted)), groups=tuple(scores),
    )  # fmt: skip
    return constants.model_copy(update={"name": name, "date": date, "serving": (*sets, *constants.serving)}), report


def predict_s(rows: Sequence[ServingRow], constants: Constants) -> FloatArray:
    """Seconds per output token of each row, with these constants as they are (no serving set is looked up).

    Raises PlanError for a row of an unknown model or chip.
    """
    shapes = {row.model: model_named(row.model) for row in rows}
    values = {field: getattr(constants, field).value for field in SEEDED}
    return _design(rows, shapes, constants).predict(values)


SEEDED = (*FITTED, "flop_eff", "net_eff", "a2a_s", "moe_decode_factor", "smooth_p")
"""Constants that TPOT depends on."""


def _usable(rows: Iterable[ServingRow]) -> tuple[list[ServingRow], dict[str, ModelShape], dict[str, int]]:
    shapes: dict[str, ModelShape] = {}
    skipped: dict[str, int] = {}
    usable = []
    for row in rows:
        try:
            if row.model not in shapes:
                shapes[row.model] = model_named(row.model)
            chip_named(row.group.chip)
            if shapes[row.model].heads % row.gpus:
                raise PlanError("no engine: several engines in one row")
        except PlanError as exc:
            reason = str(exc).split(";")[0]
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            usable.append(row)
    return usable, shapes, skipped


def _first_half(row: ServingRow, shape: ModelShape) -> bool:
    """A coin per configuration: all that was chosen. Repeated measurements, and names of one shape, share it."""
    chosen = (row.gpus, row.attention_dp, row.concurrency, row.prompt_tok, row.response_tok)
    configuration = "/".join(map(str, (*row.group, shape.name, *chosen)))
    return hashlib.sha256(configuration.encode()).digest()[0] % 2 == 0


def _errors(design: _Design, values: Mapping[str, float]) -> FloatArray:
    return np.abs(design.predict(values) / design.tpot_s - 1.0)


def fit_group(design: _Design, seeds: Mapping[str, float]) -> dict[str, float]:
    """The five constants of one group: least robust log error plus a pull to the seeds, inside the bounds."""
    names = tuple(FITTED)
    bounds = np.log(np.array([FITTED[name] for name in names]))
    start = np.clip(np.log(np.array([seeds[name] for name in names])), bounds[:, 0], bounds[:, 1])

    def values_at(point: FloatArray) -> dict[str, float]:
        return {**seeds, **dict(zip(names, np.exp(point).tolist(), strict=True))}

    def loss(point: FloatArray) -> float:
        log_error = np.log(design.predict(values_at(point)) / design.tpot_s)
        robust = np.sqrt(log_error**2 + 0.01**2).mean()
        return float(robust + PULL * ((point - start) ** 2).mean())

    return values_at(descend(loss, start, bounds))


def descend(loss: Callable[[FloatArray], float], start: FloatArray, bounds: FloatArray) -> FloatArray:
    """Pattern search (Hooke and Jeeves 1961) in a box: steps along each axis, halved when none helps.

    For a handful of parameters and a loss that is cheap but not smooth.
    """
    point, best, step = start.copy(), loss(start), 0.5
    while step > 1e-3:
        before = point.copy()
        for axis in range(len(point)):
            for sign in (1.0, -1.0):
                trial = point.copy()
                trial[axis] = np.clip(trial[axis] + sign * step, bounds[axis, 0], bounds[axis, 1])
                if (value := loss(trial)) < best:
                    point, best = trial, value
                    break
        ahead = np.clip(2 * point - before, bounds[:, 0], bounds[:, 1])
        if (value := loss(ahead)) < best:
            point, best = ahead, value
        if np.array_equal(point, before):
            step /= 2
    return point


def _serving_set(group: Group, values: Mapping[str, float], rows: int, name: str, date: str) -> ServingSet:
    units = {"layer_s": "s", "allreduce_s": "s", "step_s": "s"}
    facts = {
        key: Fact(
            value=values[key], unit=units.get(key, "frac"), source=f"{name}: fit to {rows} serving rows",
            date=date, grade="fitted",
        )
        for key in FITTED
    }  # fmt: skip
    return ServingSet(chip=group.chip, engine=group.engine, precision=group.precision, facts=facts)
