"""Seconds and bytes of handing one version from the trainer to the engines. Sources: docs/planner.md."""

from __future__ import annotations

from headrace.errors import PlanError, did_you_mean
from headrace.planner.constants import Constants
from headrace.planner.cost import HandOffCost
from headrace.planner.hardware import Chip
from headrace.planner.models import ModelShape

POLICIES = ("stop", "in_flight", "delta")
STATE_BYTES = 14.0
"""Per parameter that a colocated trainer moves off its chips: float32 master and two moments, bf16 weights."""


def hand_off_cost(
    shape: ModelShape,
    train_chip: Chip,
    gen_chip: Chip,
    *,
    policy: str,
    train_gpus: int,
    gen_gpus: int,
    gen_tp: int,
    precision: str,
    lora: bool,
    constants: Constants,
    colocated: bool,
) -> HandOffCost:
    """One version from `train_gpus` chips to the engines on `gen_gpus`.

    publish: each trainer chip copies its shard out over its host link (a delta also has to be found). transfer:
    t0 + bytes / (eff * link), independent of the number of engines, as pipelined broadcasts are; the link is the
    scale-up link where both sides share one domain, else the slower side's scale-out link. pause: the engine writes
    the new weights; with stop the caller holds the engines during the transfer as well, with delta only what changed
    is scattered. Colocated: one chip after the other loads and broadcasts, at about the pace of its host link whatever
    the scale-up link, and trainer state moves to the host and back (switch_s).
    Raises PlanError for an unknown policy.
    """
    if policy not in POLICIES:
        raise PlanError(f"no hand-off policy {policy!r}; {did_you_mean(policy, POLICIES)}")
    c = constants
    weight_bytes = shape.weight_bytes(precision)
    sent_bytes = shape.params * c.lora_frac.value * 2.0 if lora else weight_bytes
    host_bytes_per_s = c.host_eff.value * train_chip.host_bytes_per_s
    publish_s = sent_bytes / train_gpus / host_bytes_per_s
    if policy == "delta" and not lora:
        publish_s = weight_bytes / train_gpus / c.delta_bytes_per_s.value
        sent_bytes *= c.delta_frac.value
    if colocated:
        link_bytes_per_s, transfer_s = c.colocated_eff.value * gen_chip.host_bytes_per_s, 0.0
        publish_s = 0.0
    else:
        link_bytes_per_s = c.hand_off_eff.value * _link(train_chip, gen_chip, train_gpus + gen_gpus)
        transfer_s = c.hand_off_s.value
    transfer_s += sent_bytes / link_bytes_per_s
    # written once and read once on each chip of the engine
    pause_s = c.apply_s.value + 2.0 * sent_bytes / gen_tp / (c.mem_eff.value * gen_chip.hbm_bytes_per_s)
    switch_s = _switch_s(shape, train_chip, train_gpus, gen_tp, weight_bytes, lora, c) if colocated else 0.0
    law = constants.law(shape.name, train_chip.name, train_gpus=train_gpus)
    if law is not None:
        publish_s = law.publish_s.value if law.publish_s else publish_s
        transfer_s = law.land_s.value if law.land_s else transfer_s
        pause_s = law.pause_s.value if law.pause_s else pause_s
        switch_s = 0.0 if law.publish_s else switch_s  # roles that were measured keep their state where it is
    return HandOffCost(publish_s=publish_s, transfer_s=transfer_s, pause_s=pause_s, bytes=sent_bytes, switch_s=switch_s)


def _link(train_chip: Chip, gen_chip: Chip, gpus: int) -> float:
    """Bytes per second of one chip's link between the two sides."""
    if train_chip.name == gen_chip.name and gpus <= train_chip.scale_up_chips:
        return train_chip.scale_up_bytes_per_s
    return min(train_chip.scale_out_bytes_per_s, gen_chip.scale_out_bytes_per_s)


def _switch_s(
    shape: ModelShape, chip: Chip, gpus: int, gen_tp: int, weight_bytes: float, lora: bool, c: Constants
) -> float:
    """From training to generating or back: trainer state out or in, the engine's weights in or out, and a constant."""
    state_bytes = STATE_BYTES * shape.params * (c.lora_frac.value if lora else 1.0) / gpus
    moved_bytes = max(state_bytes, weight_bytes / gen_tp if lora else 0.0)
    return c.switch_s.value + moved_bytes / (c.host_eff.value * chip.host_bytes_per_s)
