"""Constants of the cost formulas: built-in seeds, fitted sets per (chip, engine, precision), measured laws of a run.

Every number is a Fact, so a prediction can say what it rests on. A calibration is a JSON file of this shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import ValidationError, field_validator, model_validator

from headrace.config.schema import Section
from headrace.errors import PlanError, did_you_mean
from headrace.planner.facts import Fact, Grade

_GRADES: tuple[Grade, ...] = ("measured", "fitted", "spec", "guess")
BUILTIN = "builtin"


def _seed(value: float, unit: str, source: str, grade: Grade, date: str = "2026-11-29") -> Fact:
    return Fact(value=value, unit=unit, source=source, date=date, grade=grade)


_SERVING = "fit to public vLLM, SGLang and TensorRT-LLM serving rows (aiconfigurator silicon_sample.csv)"
_STEPS = "fit to 54 published RL steps (NeMo RL v0.4 to v0.6, verl V1)"


class ServingSet(Section):
    """Constants that replace the general ones for one chip, engine and precision."""

    chip: str
    engine: str = ""
    """vllm, sglang, trtllm, headrace; empty fits any."""
    precision: str = ""
    """Of the weights; empty fits any."""
    facts: dict[str, Fact]
    """Names of Constants' own fields."""

    @field_validator("facts")
    @classmethod
    def _known(cls, facts: dict[str, Fact]) -> dict[str, Fact]:
        for name in facts:
            if name not in SERVING_NAMES:
                raise ValueError(f"no serving constant {name!r}; {did_you_mean(name, SERVING_NAMES)}")
        return facts


class MeasuredLaw(Section):
    """What one run showed of (model, chip). Replaces the formulas where it has a number.

    Decode step: base_s + per_request_s * running + per_context_tok_s * context tokens. Unset = the formula.
    """

    model: str
    chip: str
    gen_tp: int = 1
    """Chips of the engine that was measured; another width uses the formula."""
    train_gpus: int = 1
    """Chips of the trainer that was measured; s per token scales inversely with chips."""
    base_s: Fact | None = None
    per_request_s: Fact | None = None
    per_context_tok_s: Fact | None = None
    prefill_s_per_tok: Fact | None = None
    train_fixed_s: Fact | None = None
    train_s_per_tok: Fact | None = None
    publish_s: Fact | None = None
    land_s: Fact | None = None
    """From published to ready to swap."""
    pause_s: Fact | None = None

    @model_validator(mode="after")
    def _decode_whole(self) -> Self:
        given = [self.base_s is None, self.per_request_s is None, self.per_context_tok_s is None]
        if any(given) and not all(given):
            raise ValueError("a decode law needs base_s, per_request_s and per_context_tok_s together")
        return self


class Basis(NamedTuple):
    """What a term rests on."""

    name: str
    grade: Grade


class Constants(Section):
    """One consistent set. Efficiencies are shares of the chip's peak (facts/*.toml)."""

    name: str = BUILTIN
    date: str = "2026-11-29"

    mem_eff: Fact = _seed(0.85, "frac", _SERVING, "fitted")
    """Of memory bandwidth, in decode."""
    flop_eff: Fact = _seed(0.6, "frac", "matrix products of some hundred rows; serving rows do not decide it", "guess")
    """Of the dense peak, in decode."""
    prefill_eff: Fact = _seed(0.7, "frac", _SERVING, "fitted")
    """Of the dense peak, in prefill."""
    net_eff: Fact = _seed(0.47, "frac", _SERVING, "fitted")
    """Of link bandwidth, in decode and prefill collectives."""
    layer_s: Fact = _seed(25e-6, "s", _SERVING, "fitted")
    """Launches and small kernels, per layer and step."""
    allreduce_s: Fact = _seed(22e-6, "s", _SERVING, "fitted")
    """Latency of one all-reduce inside the scale-up domain (two a layer)."""
    a2a_s: Fact = _seed(22e-6, "s", _SERVING, "fitted")
    """Latency of one all-to-all of experts (two a layer) where attention is data-parallel."""
    scale_out_s: Fact = _seed(30e-6, "s", "usual latency of a collective over InfiniBand", "guess")
    """Further latency of a collective that leaves the scale-up domain."""
    step_s: Fact = _seed(1e-3, "s", _SERVING, "fitted")
    """Scheduler, sampling and detokenizing, per decode step."""
    moe_decode_factor: Fact = _seed(1.25, "factor", _SERVING, "fitted")
    """Mixture-of-experts decode over its roofline: uneven experts, grouped kernels."""
    rollout_factor_dense: Fact = _seed(1.63, "factor", _STEPS, "fitted")
    """Decode steps of RL rollouts over those of serving rows, dense models: on top of the serving constants."""
    rollout_factor_moe: Fact = _seed(1.4, "factor", _STEPS, "fitted")
    """The same, mixture of experts."""
    smooth_p: Fact = _seed(6.0, "exponent", "middle of 4 to 8", "guess")
    """Of the smooth maximum of memory and compute time."""
    kv_reserve_frac: Fact = _seed(0.02, "frac", "fragmentation and workspaces", "guess")
    """Share of memory inside mem_frac that never holds KV entries."""
    engine_reserve_bytes: Fact = _seed(2e9, "bytes", "context, graphs and communication buffers of one chip", "guess")

    train_eff: Fact = _seed(0.6, "frac", "matrix products of some hundred rows, as in decode", "guess")
    """Of the dense peak that the trainer's matrix products reach."""
    train_rate_dense: Fact = _seed(1.8e15, "FLOP/s", _STEPS, "fitted")
    """FLOPs per second and chip at which all that is no matrix product holds up training, dense models. The same
    on chips of any peak."""
    train_rate_moe: Fact = _seed(147e12, "FLOP/s", _STEPS, "fitted")
    """The same, mixture of experts."""
    mfu_logprob_factor: Fact = _seed(1.0, "factor", "published RL steps were fitted with both alike", "guess")
    """MFU of a forward-only pass over that of the update."""
    tp_loss_per_doubling: Fact = _seed(0.04, "frac", "usual cost of tensor parallelism in training", "guess")
    fixed_s: Fact = _seed(1.3, "s", _STEPS, "fitted")
    """Per batch, whatever its size."""
    fixed_s_per_gb: Fact = _seed(0.037, "s/GB", _STEPS, "fitted")
    """Per batch and GB of bf16 weights: optimizer, gradient exchange."""
    fixed_knee_gb: Fact = _seed(1400.0, "GB", "largest model of the NeMo RL rows (DeepSeek-V3)", "guess")
    """Beyond it the overhead grows with the square root only."""
    train_mem_frac: Fact = _seed(0.92, "frac", "allocator and communication buffers", "guess")
    """Of a trainer chip's memory that tensors may use."""

    hand_off_s: Fact = _seed(0.5, "s", "checkpoint-engine rows, intercept", "fitted")
    """Of a transfer of no bytes."""
    hand_off_eff: Fact = _seed(
        0.4, "frac", "checkpoint-engine and verl rows: 14-20 GB/s per NIC, 70 in a node", "fitted"
    )
    """Of one chip's link: pipelined broadcasts do not grow with the number of engines."""
    colocated_eff: Fact = _seed(
        1.05, "factor", "checkpoint-engine rows: 59 to 75 GB/s on H800 and H20, whose scale-up links differ", "fitted"
    )
    """Of one chip's host link, from trainer to engine on the same chips: the next chip loads while one broadcasts."""
    host_eff: Fact = _seed(0.7, "frac", "pinned copies over PCIe", "guess")
    """Of the host link."""
    apply_s: Fact = _seed(0.2, "s", "reloading references, clearing prefix caches", "guess")
    """Engine stands still at least so long in a swap."""
    switch_s: Fact = _seed(1.0, "s", "sleep and wake of a colocated engine, without the copies", "guess")
    delta_frac: Fact = _seed(
        0.025, "frac", "share of bytes that changed bf16 weights need at RL learning rates", "guess"
    )
    """Bytes of a delta over bytes of the weights."""
    delta_bytes_per_s: Fact = _seed(5e9, "bytes/s", "comparing and packing, per trainer chip", "guess")
    lora_frac: Fact = _seed(0.01, "frac", "adapters of rank 32 on all linear layers", "guess")
    """Adapter parameters over the model's."""

    serving: tuple[ServingSet, ...] = ()
    laws: tuple[MeasuredLaw, ...] = ()

    @model_validator(mode="after")
    def _finite(self) -> Self:
        for owner, name, fact in self._all_facts():
            if not (math.isfinite(fact.value) and fact.value >= 0):
                raise ValueError(f"{owner}{name} = {fact.value} must be a finite number >= 0")
            if name in _POSITIVE and fact.value <= 0:
                raise ValueError(f"{owner}{name} = {fact.value} divides; it must be above 0")
        return self

    def _all_facts(self) -> Iterable[tuple[str, str, Fact]]:
        for owner, section in [("", self)] + [(f"laws[{i}].", law) for i, law in enumerate(self.laws)]:
            for name in type(section).model_fields:
                fact = getattr(section, name)
                if isinstance(fact, Fact):
                    yield owner, name, fact
        for i, chosen in enumerate(self.serving):
            for name, fact in chosen.facts.items():
                yield f"serving[{i}].", name, fact

    def for_serving(self, chip: str, precision: str, engine: str = "") -> Constants:
        """The same with the best fitting serving set applied.

        An exact engine and precision win over a set that fits any; without an engine, the first set of the chip and
        precision counts.
        """
        best, best_score = None, -1
        for chosen in self.serving:
            if chosen.chip != chip or chosen.precision not in ("", precision):
                continue
            if engine and chosen.engine not in ("", engine):
                continue
            score = 2 * (chosen.precision != "") + (chosen.engine == engine)
            if score > best_score:
                best, best_score = chosen, score
        return self if best is None else self.model_copy(update=best.facts)

    def law(self, model: str, chip: str, *, gen_tp: int = 0, train_gpus: int = 0) -> MeasuredLaw | None:
        """The run's law of this model on this chip; of several the last one wins.

        gen_tp: only one of exactly this engine width. train_gpus: one of this width before any other.
        """
        laws = [law for law in self.laws if law.model == model and law.chip == chip and gen_tp in (0, law.gen_tp)]
        same = [law for law in laws if law.train_gpus == train_gpus]
        found = same or laws
        return found[-1] if found else None

    def basis(self, *, model: str, gen_chip: str, train_chip: str, precision: str) -> dict[str, Basis]:
        """What decode, prefill, training and hand-off rest on: the weakest grade among the constants of each."""
        nothing = MeasuredLaw(model=model, chip="")
        gen, train = self.law(model, gen_chip) or nothing, self.law(model, train_chip) or nothing
        fitted = self.for_serving(gen_chip, precision)
        terms: dict[str, tuple[Fact | None, Iterable[Fact]]] = {
            "decode": (gen.base_s, (fitted.mem_eff, fitted.layer_s, fitted.step_s)),
            "prefill": (gen.prefill_s_per_tok, (fitted.prefill_eff,)),
            "training": (train.train_s_per_tok, (self.train_rate_dense, self.train_rate_moe, self.fixed_s)),
            "hand_off": (train.publish_s, (self.hand_off_s, self.hand_off_eff)),
        }
        return {
            term: Basis(self.name, measured.grade if measured else weakest(facts))
            for term, (measured, facts) in terms.items()
        }


SERVING_NAMES = (
    *("mem_eff", "flop_eff", "prefill_eff", "net_eff", "moe_decode_factor", "smooth_p"),
    *("layer_s", "allreduce_s", "a2a_s", "scale_out_s", "step_s"),
)
"""What a ServingSet may replace."""
_POSITIVE = frozenset(
    {
        *("mem_eff", "flop_eff", "prefill_eff", "net_eff", "moe_decode_factor", "smooth_p"),
        *(
            "rollout_factor_dense",
            "rollout_factor_moe",
            "train_eff",
            "train_rate_dense",
            "train_rate_moe",
            "mfu_logprob_factor",
            "fixed_knee_gb",
            "train_mem_frac",
        ),
        *("hand_off_eff", "colocated_eff", "host_eff", "delta_bytes_per_s"),
    }
)


def weakest(facts: Iterable[Fact]) -> Grade:
    """The worst grade of all: measured, fitted, spec, guess."""
    return weakest_grade(fact.grade for fact in facts)


def weakest_grade(grades: Iterable[Grade]) -> Grade:
    """The worst of some grades; guess if there are none."""
    return max(grades, key=_GRADES.index, default="guess")


def builtin() -> Constants:
    """The seeds that ship with the package."""
    return Constants()


def save(constants: Constants, folder: Path) -> Path:
    """Write `folder/<name>.json`, whole or not at all.

    Raises PlanError for a name that is no plain file name, or the built-in one.
    """
    if constants.name == BUILTIN or not constants.name or Path(constants.name).name != constants.name:
        raise PlanError(f"a calibration needs a plain name of its own, not {constants.name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{constants.name}.json"
    half = path.with_suffix(".json.tmp")
    half.write_text(constants.model_dump_json(indent=1) + "\n", encoding="utf-8")
    half.replace(path)
    return path


def load(name_or_path: str, folder: Path | None = None) -> Constants:
    """A calibration by path, or by name from `folder`; "" or "builtin" gives the seeds.

    Raises PlanError naming the file and what is wrong in it, or the nearest names of `folder`.
    """
    if name_or_path in ("", BUILTIN):
        return builtin()
    path = Path(name_or_path)
    if not path.is_file() and folder is not None:
        path = folder / f"{name_or_path}.json"
    if not path.is_file():
        names = [BUILTIN, *(sorted(p.stem for p in folder.glob("*.json")) if folder else ())]
        raise PlanError(f"no calibration {name_or_path!r}; {did_you_mean(name_or_path, names)}")
    try:
        return Constants.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as exc:
        raise PlanError(f"{path} is no calibration: {_first_problem(exc)}") from exc


def _first_problem(exc: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(exc, UnicodeDecodeError):
        return "not UTF-8 text"
    first = exc.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
