"""Seconds and bytes: decode step, prefill, training step, hand-off. The equations are in docs/planner.md.

A decode law is a table over the number of running sequences b, so that the simulator's inner loop is arithmetic:

    step_s(b, S) = smoothmax_p( mem_s[b] + S * mem_s_per_tok,  flop_s[b] + S * flop_s_per_tok ) + other_s[b]

S is the sum of context tokens of the running sequences.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTable:
    """One engine's decode step. Tuples have b_max + 1 entries, index = running sequences (0 is unused)."""

    mem_s: tuple[float, ...]
    """Reading weights (and constant state of recurrent layers), seconds."""
    mem_s_per_tok: float
    """Reading KV entries, seconds per context token."""
    flop_s: tuple[float, ...]
    flop_s_per_tok: float
    other_s: tuple[float, ...]
    """Communication, launches, constants."""
    p: float = 6.0
    """Exponent of the smooth maximum."""

    def step_s(self, running: int, context_tok: float) -> float:
        """Seconds of one decode step of `running` sequences with `context_tok` tokens of context in all."""
        mem_s = self.mem_s[running] + context_tok * self.mem_s_per_tok
        flop_s = self.flop_s[running] + context_tok * self.flop_s_per_tok
        return smoothmax(mem_s, flop_s, self.p) + self.other_s[running]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """One engine (gen_tp chips) of one model."""

    decode: DecodeTable
    prefill_s_per_tok: float
    """Compute-bound seconds per prompt token."""
    prefill_s_per_tok2: float
    """Attention: seconds per pair of (new token, earlier token); a prefill of n after m costs n*(m + n/2) pairs."""
    prefill_s_min: float
    """No prefill step is faster (weights are read once)."""
    kv_capacity_tok: int
    """Context tokens that fit. 0 = the weights alone do not fit."""
    max_running: int
    """Sequences at once at most: the length of the decode table less one."""
    accept_tok: float = 1.0
    """Tokens per step and sequence (speculative decoding)."""

    def prefill_s(self, new_tok: float, earlier_tok: float = 0.0) -> float:
        """Seconds to compute `new_tok` tokens after `earlier_tok` cached ones."""
        if new_tok <= 0:
            return 0.0
        pairs = new_tok * (earlier_tok + new_tok / 2)
        return max(self.prefill_s_min, new_tok * self.prefill_s_per_tok + pairs * self.prefill_s_per_tok2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCost:
    """One optimizer batch on the trainer's chips."""

    s_per_tok: float
    """Seconds per trained or prompt token of the batch (update and log-prob passes together), all chips working."""
    s_per_tok2: float
    """Seconds per pair of the causal attention; a sample of n tokens has n*n/2."""
    fixed_s: float
    """Optimizer, communication and overheads, per batch."""
    mfu: float
    """Model FLOPs utilisation that the above assumes."""

    def batch_s(self, tok: float, tok2: float) -> float:
        """Seconds of a batch with `tok` tokens and `tok2` = sum of squared sample lengths."""
        return tok * self.s_per_tok + 0.5 * tok2 * self.s_per_tok2 + self.fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffCost:
    """One version on its way from trainer to engines."""

    publish_s: float
    """The trainer is busy with it (not training)."""
    transfer_s: float
    """From published to ready to swap; engines go on meanwhile in policies in_flight and delta."""
    pause_s: float
    """Engines stand still for the swap."""
    bytes: float
    """That travel to one engine."""
    switch_s: float = 0.0
    """Colocated: from generating to training or back (offload, reload), each way."""


def smoothmax(a: float, b: float, p: float) -> float:
    """(a^p + b^p)^(1/p): a maximum without a corner, at most 2^(1/p) times the hard one."""
    high, low = (a, b) if a > b else (b, a)
    return float(high * (1.0 + (low / high) ** p) ** (1.0 / p)) if high > 0 else 0.0
