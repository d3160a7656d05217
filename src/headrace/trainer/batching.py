"""From a batch of samples to micro-batches. Pure NumPy; which tokens go through the model, and in which order.

Dimension letters: N tokens of a micro-batch (flat, no padding), K target tokens (trained ones), S segments.

**Segments.** A micro-batch is one flat row of tokens cut into segments. A segment attends to itself causally and, if it
has a parent, to all of its parent. Positions go on from the parent:

    share_prompts, group of 3:   [prompt][completion 0][completion 1][completion 2]
                                   ^ parent of the three; computed once
    not shared:                  [prompt+completion 0][prompt+completion 1] ...      no parents

**Targets.** The log-prob of a token comes from the hidden state of the token *before* it in its own sequence. That is
one place to the left in the flat row, except for the first token of a completion with a parent: its source is the
parent's last token, the same for all members. `source_K` says which, so nothing is ever shifted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.records import Batch, Group, Sample

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, start + length) of the flat row."""

    start: int
    length: int
    parent: int
    """Index of the segment whose tokens it sees besides its own; -1 if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward pass computes."""

    ids_N: Int64Array
    position_N: Int64Array
    """Position in the sample (rotary)."""
    segments: tuple[Segment, ...]
    source_K: Int64Array
    """Flat index of the hidden state that predicts the target."""
    target_K: Int64Array
    """Token id."""
    sample_K: Int64Array
    """Index into the batch's samples."""
    place_K: Int64Array
    """The target's index t in its sample."""

    @property
    def tokens(self) -> int:
        return len(self.ids_N)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples that are laid out together: (index in the batch, sample), with `shared` common first tokens."""

    members: tuple[tuple[int, Sample], ...]
    shared: int

    @property
    def tokens(self) -> int:
        return self.shared + sum(len(s.ids_T) - self.shared for _, s in self.members)


def micro_batches(batch: Batch, *, budget_tok: int, share_prompts: bool) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `budget_tok` tokens, in order.

    Whole groups stay together while they fit; a larger group is cut between members (its prompt is then computed once
    per micro-batch); a longer sample goes alone. Samples without a trained token are left out.
    Raises DataError for arrays of unequal length or a trained token without a predecessor.
    """
    made: list[MicroBatch] = []
    pending: list[_Unit] = []
    pending_tok = 0
    for unit in _units(batch, budget_tok, share_prompts):
        if pending and pending_tok + unit.tokens > budget_tok:
            made.append(_lay_out(pending))
            pending, pending_tok = [], 0
        pending.append(unit)
        pending_tok += unit.tokens
    if pending:
        made.append(_lay_out(pending))
    return made


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into `parts` batches of whole groups, in order, sizes differing by at most one group.

    Each is then one optimizer step (trainer.updates_per_batch). DataError if there are fewer groups than parts.
    """
    groups = len(batch.groups)
    if not 1 <= parts <= groups:
        raise DataError(f"a batch of {groups} groups cannot be split into {parts} updates; allowed are 1 to {groups}")
    bounds = [groups * i // parts for i in range(parts + 1)]
    return [
        Batch(version=batch.version, groups=batch.groups[low:high], temperature=batch.temperature)
        for low, high in pairwise(bounds)
    ]


def check_sample(sample: Sample) -> None:
    """Raise DataError, naming the sample, unless its arrays fit together and every trained token has a predecessor."""
    tokens = len(sample.ids_T)
    where = f"sample {sample.group_id!r}/{sample.member}"
    for name in ("loss_mask_T", "logp_T", "policy_version_T"):
        length = len(getattr(sample, name))
        if length != tokens:
            raise DataError(f"{where}: {name} has length {length}, ids_T has {tokens}; they must be equal")
    if tokens and sample.loss_mask_T[0]:
        raise DataError(f"{where}: the first token is under the loss mask, but nothing predicts it (off-by-one mask?)")
    if not 0 <= sample.prompt_tok <= tokens:
        raise DataError(f"{where}: prompt_tok = {sample.prompt_tok} must lie in 0 .. {tokens}")


def _units(batch: Batch, budget_tok: int, share_prompts: bool) -> Iterator[_Unit]:
    """Samples grouped by what they share, cut to the budget where a group is larger."""
    index = 0
    for group in batch.groups:
        numbered = list(enumerate(group.samples, start=index))
        index += len(numbered)
        for unit in _shared(group, numbered, share_prompts):
            members: list[tuple[int, Sample]] = []
            for member in unit.members:
                trial = _Unit((*members, member), unit.shared)
                if members and trial.tokens > budget_tok:
                    yield _Unit(tuple(members), unit.shared)
                    members = []
                members.append(member)
            yield _Unit(tuple(members), unit.shared)


def _shared(group: Group, numbered: Sequence[tuple[int, Sample]], share_prompts: bool) -> list[_Unit]:
    """Samples of one group by common prompt. A prompt is shared by its exact ids, never by assumption."""
    alone: list[_Unit] = []
    by_prompt: dict[bytes, list[tuple[int, Sample]]] = {}
    for index, sample in numbered:
        check_sample(sample)
        if not sample.loss_mask_T.any():
            continue
        prompt = sample.prompt_tok
        sharable = share_prompts and 0 < prompt < len(sample.ids_T) and not sample.loss_mask_T[:prompt].any()
        if sharable:
            by_prompt.setdefault(sample.ids_T[:prompt].astype(np.int64).tobytes(), []).append((index, sample))
        else:
            alone.append(_Unit(((index, sample),), 0))
    for members in by_prompt.values():
        shared = members[0][1].prompt_tok if len(members) > 1 else 0
        alone.append(_Unit(tuple(members), shared))
    return sorted(alone, key=lambda unit: unit.members[0][0])


def _lay_out(units: Sequence[_Unit]) -> MicroBatch:
    """Write units one after another into a flat row."""
    ids: list[Int64Array] = []
    positions: list[Int64Array] = []
    segments: list[Segment] = []
    sources: list[Int64Array] = []
    targets: list[Int64Array] = []
    samples: list[Int64Array] = []
    places: list[Int64Array] = []
    at = 0

    def put(tokens: NDArray[np.int32], first_position: int, parent: int) -> int:
        nonlocal at
        start, at = at, at + len(tokens)
        ids.append(tokens.astype(np.int64))
        positions.append(np.arange(first_position, first_position + len(tokens)))
        segments.append(Segment(start, len(tokens), parent))
        return start

    for unit in units:
        shared, parent, prompt_start = unit.shared, -1, -1
        if shared:
            prompt_start = put(unit.members[0][1].ids_T[:shared], 0, -1)
            parent = len(segments) - 1
        for index, sample in unit.members:
            start = put(sample.ids_T[shared:], shared, parent)
            place_K = np.flatnonzero(sample.loss_mask_T).astype(np.int64)
            before_K = place_K - 1
            sources.append(np.where(before_K < shared, prompt_start + before_K, start + before_K - shared))
            targets.append(sample.ids_T[place_K].astype(np.int64))
            samples.append(np.full(len(place_K), index, dtype=np.int64))
            places.append(place_K)
    return MicroBatch(
        ids_N=np.concatenate(ids),
        position_N=np.concatenate(positions),
        segments=tuple(segments),
        source_K=np.concatenate(sources),
        target_K=np.concatenate(targets),
        sample_K=np.concatenate(samples),
        place_K=np.concatenate(places),
    )
