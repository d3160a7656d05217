"""KV cache in rows. Letters: R rows, C context, K key heads (as many value heads), D head width."""

from __future__ import annotations

import torch

_STEP = 64


class KvCache:
    """One tensor [R, 2K, C, D] a layer: keys in the first K heads, values in the others.

    R and C grow by doubling when needed, so short requests neither hold nor read memory for long ones. Unwritten
    entries are zero: a masked entry must not be NaN, because NaN times a weight of zero is NaN.
    """

    def __init__(
        self, *, layers: int, heads: int, width: int, dtype: torch.dtype, device: str, rows: int, context: int
    ):
        self._max_rows, self._max_context = rows, context
        self._heads, self._width = heads, width
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.layers = [self._like.new_zeros(0, 2 * heads, 0, width) for _ in range(layers)]

    @property
    def rows(self) -> int:
        return self.layers[0].shape[0]

    @property
    def context(self) -> int:
        return self.layers[0].shape[2]

    def ensure(self, rows: int, context: int) -> None:
        """Make room for rows 0..rows-1 with `context` entries each; contents stay."""
        if rows <= self.rows and context <= self.context:
            return
        rows = min(self._max_rows, _grown(self.rows, rows, 1))
        context = min(self._max_context, _grown(self.context, context, _STEP))
        for index, old in enumerate(self.layers):
            new = old.new_zeros(rows, old.shape[1], context, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            self.layers[index] = new

    def copy_row(self, src: int, dst: int, n_tok: int) -> None:
        """Make the first n_tok entries of row dst equal to those of row src."""
        if n_tok:
            self.ensure(dst + 1, n_tok)
            for layer in self.layers:
                layer[dst, :, :n_tok] = layer[src, :, :n_tok]


def _grown(have: int, need: int, least: int) -> int:
    size = max(have, least)
    while size < need:
        size *= 2
    return size
