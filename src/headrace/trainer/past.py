"""Sequences that go on from keys and values of earlier forward passes, possibly those of other weights.

Dimension letters: N new tokens of the flat row, M all tokens (old and new), P tokens of one sequence so far, A heads,
E key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.trainer.attention import AttentionPlan, attend
from headrace.trainer.batching import Segment

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values [P, E, D] of one sequence, layer by layer; empty before its first pass."""


class Past:
    """What one forward pass goes on from. The row of the pass holds the new tokens of each sequence in turn.

    Afterwards each cache holds the new tokens, too. The arithmetic is that of training: `attention.attend`, with the
    old tokens as a parent segment.
    """

    def __init__(self, caches: Sequence[Cache], new_tok: Sequence[int]) -> None:
        """`caches` are extended in place; `new_tok` says how many tokens each sequence gets."""
        self._caches = caches
        self._old_tok = [len(cache[0][0]) if cache else 0 for cache in caches]
        self._new_tok = list(new_tok)
        segments: list[Segment] = []
        places = []
        at = 0
        for old, new in zip(self._old_tok, self._new_tok, strict=True):
            if old:
                segments.append(Segment(at, old, -1))
            segments.append(Segment(at + old, new, len(segments) - 1 if old else -1))
            places.append(np.arange(at + old, at + old + new))
            at += old + new
        self.segments = tuple(segments)
        """Of old and new tokens together."""
        self._tokens = at
        self._new_N = torch.from_numpy(np.concatenate(places))
        self._plan: AttentionPlan | None = None

    def attend(
        self, layer: int, q_NAD: Tensor, k_NED: Tensor, v_NED: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        """Attention of the new tokens to old and new ones, [N, A, D].

        `plan` is that of `segments`. What it has for queries of old tokens alone is left out, the rest of them dropped.
        """
        new_N = self._new_N.to(q_NAD.device)
        q_MAD, k_MED, v_MED = (self._spread(x, new_N) for x in (q_NAD, k_NED, v_NED))
        at = 0
        for cache, old, new in zip(self._caches, self._old_tok, self._new_tok, strict=True):
            here = slice(at, at + old)
            if old:
                k_MED[here], v_MED[here] = cache[layer]
            whole = slice(at, at + old + new)
            entry = (k_MED[whole].clone(), v_MED[whole].clone())
            if layer < len(cache):
                cache[layer] = entry
            else:
                cache.append(entry)
            at = whole.stop
        if self._plan is None:
            wanted = (c for c in plan.chunks if bool(torch.isin(c.query_SL, new_N).any()))
            self._plan = AttentionPlan(tuple(wanted), keep=plan.keep)
        return attend(q_MAD, k_MED, v_MED, self._plan, scale).index_select(0, new_N)

    def _spread(self, x: Tensor, new_N: Tensor) -> Tensor:
        full = x.new_zeros(self._tokens, *x.shape[1:])
        full[new_N] = x
        return full
