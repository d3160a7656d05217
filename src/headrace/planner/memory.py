"""Will it fit? Bytes resident on one chip, per instant, on the generator's and the trainer's side.

A side needs the maximum over its instants, never their sum: a backward pass and an optimizer step do not coincide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.errors import PlanError
from headrace.planner.constants import Constants
from headrace.planner.hardware import Chip
from headrace.planner.models import ModelShape

Sharding = Literal["full", "optimizer"]

PREFILL_CHUNK_TOK = 8192
"""Tokens that an engine computes at once in prefill (the default budget of vLLM and SGLang on large chips)."""
LOGITS_TOK = 8192
"""Tokens whose logits a trainer holds at once; longer samples are computed in chunks."""
LAYER_ACTIVATIONS = 34
"""Bytes per token and hidden unit of one layer's saved activations in 16 bits, flash attention (Korthikanti et al.
2022, section 4, without the attention-score term)."""
MOST_CHIPS = 65536
"""Where the search for a number of chips that would do ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """One side of a plan."""

    side: str
    """generator or trainer."""
    instants: Mapping[str, float]
    """Bytes resident on each chip, by instant."""
    limit_bytes: float
    fits: bool
    worst: str
    """The instant with the most bytes."""

    @property
    def used_bytes(self) -> float:
        return self.instants[self.worst]


def _fit(side: str, instants: dict[str, float], limit_bytes: float) -> MemoryFit:
    worst = max(instants, key=instants.__getitem__)
    fits = instants[worst] <= limit_bytes
    return MemoryFit(side=side, instants=instants, limit_bytes=limit_bytes, fits=fits, worst=worst)


def divides(shape: ModelShape, chip: Chip, tp: int) -> bool:
    """Whether an engine can be `tp` chips wide: heads are dealt out whole, except to a CPU's threads."""
    return tp >= 1 and (shape.heads % tp == 0 or chip.name == "cpu")


def kv_split(shape: ModelShape, tp: int) -> int:
    """Over how many chips of an engine a KV entry is divided: MLA is replicated, GQA splits by KV heads."""
    return 1 if shape.mla else max(1, min(tp, shape.kv_heads))


def engine_fixed_bytes(shape: ModelShape, chip: Chip, *, tp: int, precision: str, max_seqs: int, c: Constants) -> float:
    """What an engine's chip holds besides KV entries: weights, a prefill chunk's activations, logits, reserve."""
    chunk_bytes = PREFILL_CHUNK_TOK * shape.hidden * 2 * 8
    logits_bytes = max_seqs * shape.vocab * 4 / tp
    reserve_bytes = c.engine_reserve_bytes.value + c.kv_reserve_frac.value * chip.hbm_bytes
    return shape.weight_bytes(precision) / tp + chunk_bytes + logits_bytes + reserve_bytes


def generator_memory(
    shape: ModelShape,
    chip: Chip,
    *,
    tp: int,
    precision: str,
    mem_frac: float,
    max_seqs: int,
    context_tok: float,
    constants: Constants,
    colocated_bytes: float = 0.0,
) -> MemoryFit:
    """Of one engine's chip. It fits if one sequence of `context_tok` tokens fits beside the weights.

    `colocated_bytes` stay with a sleeping trainer on the same chip.
    """
    fixed_bytes = engine_fixed_bytes(shape, chip, tp=tp, precision=precision, max_seqs=max_seqs, c=constants)
    one_seq_bytes = shape.kv_bytes(context_tok) / kv_split(shape, tp)
    instants = {"load": shape.weight_bytes(precision) / tp, "decode of one sequence": fixed_bytes + one_seq_bytes}
    return _fit("generator", instants, mem_frac * chip.hbm_bytes - colocated_bytes)


def trainer_memory(
    shape: ModelShape,
    chip: Chip,
    *,
    gpus: int,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    precision: str = "bf16",
    lora: bool = False,
    seq_tok: float,
    constants: Constants,
    sharding: Sharding = "full",
    reference: bool = False,
) -> MemoryFit:
    """Of one trainer's chip, with a micro-batch of one packed sequence of `seq_tok` tokens and full recomputation.

    sharding: "full" shards weights, gradients and optimizer over the data-parallel ranks (ZeRO-3, FSDP) and gathers
    one layer at a time; "optimizer" keeps whole weights and gradients on each rank (ZeRO-1, Megatron). The optimizer
    holds float32 master weights and two moments. Experts are divided over max(tp, ep) x pp chips.
    reference: a second, frozen copy of the weights for the KL term.
    """
    held, gathered = _held_params(shape, gpus=gpus, tp=tp, pp=pp, ep=ep, sharding=sharding)
    owned = _held_params(shape, gpus=gpus, tp=tp, pp=pp, ep=ep, sharding="full")[0]
    weight_elem = 4 if precision == "fp32" else 2
    trained = constants.lora_frac.value if lora else 1.0
    weights = weight_elem * held * (2.0 if reference else 1.0)
    layer_weights = weight_elem * gathered
    grads = weight_elem * held * trained
    optimizer = (8 if precision == "fp32" and not lora else 12) * owned * trained
    state = weights + optimizer
    tok = seq_tok / tp  # sequence parallelism goes with tensor parallelism
    saved = tok * shape.hidden * 2 * shape.layers  # pp stages hold layers / pp inputs of up to pp micro-batches
    layer = tok * shape.hidden * LAYER_ACTIVATIONS
    logits = min(seq_tok, LOGITS_TOK) * shape.vocab / tp * 4
    instants = {
        "log-prob pass": state + layer_weights + layer + logits,
        "forward": state + grads + layer_weights + saved + layer + logits,
        "backward": state + grads + 2 * layer_weights + saved + 2 * layer + 2 * logits,
        "optimizer step": state + grads + 4 * owned * trained,
    }
    return _fit("trainer", instants, constants.train_mem_frac.value * chip.hbm_bytes)


def _held_params(shape: ModelShape, *, gpus: int, tp: int, pp: int, ep: int, sharding: Sharding) -> tuple[float, float]:
    """Parameters that a chip keeps, and those of one layer that it gathers for a moment."""
    experts = float(shape.moe_layers * shape.experts * shape.expert_params)
    dense = shape.params - experts
    dense_ways, expert_ways = tp * pp, max(tp, ep) * pp
    if sharding == "optimizer":
        return dense / dense_ways + experts / expert_ways, 0.0
    layer = dense / shape.layers / tp + (shape.experts * shape.expert_params if shape.is_moe else 0.0) / max(tp, ep)
    return dense / max(gpus, dense_ways) + experts / max(gpus, expert_ways), layer


def smallest_parallelism(
    shape: ModelShape,
    chip: Chip,
    gpus: int,
    *,
    precision: str = "bf16",
    lora: bool = False,
    seq_tok: float,
    constants: Constants,
    sharding: Sharding = "full",
    reference: bool = False,
) -> list[tuple[int, int, int]]:
    """Every (tp, pp, ep) with which the trainer fits `gpus` chips, fewest chips per replica first.

    tp divides heads and stays inside the scale-up domain, pp does not exceed layers, ep divides experts and the
    chips of a pipeline stage. Raises PlanError with the number of chips that would do.
    """

    def fit(n: int, layout: tuple[int, int, int]) -> MemoryFit:
        tp, pp, ep = layout
        return trainer_memory(
            shape, chip, gpus=n, tp=tp, pp=pp, ep=ep, precision=precision, lora=lora, seq_tok=seq_tok,
            constants=constants, sharding=sharding, reference=reference,
        )  # fmt: skip

    found = [layout for layout in _layouts(shape, chip, gpus) if fit(gpus, layout).fits]
    if found:
        return sorted(found, key=lambda layout: (layout[0] * layout[1], layout[1], layout[2]))
    least = min((fit(gpus, layout) for layout in _layouts(shape, chip, gpus)), key=lambda f: f.used_bytes)
    enough, n = 0, gpus + 1
    while not enough and n <= MOST_CHIPS:
        enough = n if any(fit(n, layout).fits for layout in _layouts(shape, chip, n)) else 0
        n = _next_size(n)
    raise PlanError(_too_small(shape, chip, gpus, least, enough, f"samples of {seq_tok:.0f} tokens"))


def generator_widths(
    shape: ModelShape,
    chip: Chip,
    gpus: int,
    *,
    precision: str,
    mem_frac: float,
    max_seqs: int,
    context_tok: float,
    constants: Constants,
    colocated_bytes: float = 0.0,
) -> list[int]:
    """Every engine width (a power of two that divides the heads, at most `gpus`) whose weights fit, ascending.

    Raises PlanError with the number of chips that would do.
    """

    def fit(tp: int) -> MemoryFit:
        return generator_memory(
            shape, chip, tp=tp, precision=precision, mem_frac=mem_frac, max_seqs=max_seqs, context_tok=context_tok,
            constants=constants, colocated_bytes=colocated_bytes,
        )  # fmt: skip

    widths = [tp for tp in _powers(None, max(shape.heads, gpus)) if divides(shape, chip, tp)]
    found = [tp for tp in widths if tp <= gpus and fit(tp).fits]
    if found:
        return found
    enough = next((tp for tp in widths if fit(tp).fits), 0)
    most = fit(max(tp for tp in widths if tp <= gpus))
    raise PlanError(_too_small(shape, chip, gpus, most, enough, f"a context of {context_tok:.0f} tokens"))


def _layouts(shape: ModelShape, chip: Chip, gpus: int) -> Iterator[tuple[int, int, int]]:
    for tp in _powers(shape.heads, min(gpus, chip.scale_up_chips)):
        for pp in _powers(None, min(shape.layers, gpus // tp)):
            if gpus % (tp * pp):
                continue
            for ep in _powers(shape.experts, gpus // pp) if shape.is_moe else (1,):
                if (gpus // pp) % ep == 0:
                    yield tp, pp, ep


def _powers(dividing: int | None, at_most: int) -> Iterator[int]:
    n = 1
    while n <= at_most:
        if dividing is None or dividing % n == 0:
            yield n
        n *= 2


def _next_size(n: int) -> int:
    """Chips as they are sold: any number in one node, whole nodes beyond it, then powers of two."""
    if n < 8:
        return n + 1
    return n // 8 * 8 + 8 if n < 64 else 1 << n.bit_length()


def _too_small(shape: ModelShape, chip: Chip, gpus: int, fit: MemoryFit, enough: int, what: str) -> str:
    need, have = fit.used_bytes / 1e9, fit.limit_bytes / 1e9
    fix = f"needs at least {enough} {chip.name}" if enough else f"no number of {chip.name} would do"
    return (
        f"{shape.name} with {what} does not fit the {fit.side}'s {gpus} {chip.name}: {fit.worst} takes {need:.1f} GB "
        f"a chip of {max(have, 0.0):.1f} GB; {fix}, a chip with more memory, lower precision, LoRA or shorter samples"
    )
