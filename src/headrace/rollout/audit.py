"""What is trained, for people to look at: pieces of each sample's text, with or without loss on them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from headrace.records import Sample


class Decoder(Protocol):
    """The part of ChatCodec that is needed."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Piece(NamedTuple):
    """A stretch of one sample's text."""

    text: str
    is_trained: bool


def audit(samples: Sequence[Sample], codec: Decoder) -> list[list[Piece]]:
    """One list of pieces per sample, in order; special tokens are spelled out. Joined texts show every token."""
    return [_pieces(sample, codec) for sample in samples]


def _pieces(sample: Sample, codec: Decoder) -> list[Piece]:
    mask_T = sample.loss_mask_T
    if not len(mask_T):
        return []
    cuts = [0, *(np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1).tolist(), len(mask_T)]
    return [
        Piece(codec.decode(sample.ids_T[start:stop].tolist()), bool(mask_T[start])) for start, stop in pairwise(cuts)
    ]
