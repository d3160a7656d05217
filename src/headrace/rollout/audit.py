"""What is trained, for people to look at: pieces of each sample's text, with or without loss on them.

`rehearse` makes samples without an engine: a real episode in which the policy says given texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

import numpy as np

from headrace.envs.env import Env
from headrace.envs.grading import Grade
from headrace.errors import DataError
from headrace.records import Completion, GenRequest, Outcome, Prompt, Rollout, Sample, SamplingParams, Span
from headrace.rollout.codec import Codec
from headrace.rollout.engine import Engine
from headrace.rollout.episode import run_rollout
from headrace.rollout.stitch import samples

REHEARSAL_DEADLINE_S = 30.0


class Decoder(Protocol):
    """The part of a codec that is needed."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Piece(NamedTuple):
    """A stretch of one sample's text."""

    text: str
    is_trained: bool


def audit(samples: Sequence[Sample], codec: Decoder) -> list[list[Piece]]:
    """One list of pieces per sample, in order; special tokens are spelled out. Joined texts show every token."""
    return [_pieces(sample, codec) for sample in samples]


async def rehearse(
    env: Env, prompt: Prompt, codec: Codec, *, says: str, max_turns: int, max_context_tok: int
) -> tuple[Sample, ...]:
    """The samples of an episode whose policy says `says` at each turn. DataError when the episode fails."""
    rollout = await run_rollout(
        engine=cast(Engine, _Saying(says, codec)),  # an episode only generates
        codec=codec,
        env=env,
        grader=_Pleased(),
        prompt=prompt,
        sampling=SamplingParams(),
        group_id="rehearsal",
        member=0,
        attempt=0,
        max_turns=max_turns,
        rollout_deadline_s=REHEARSAL_DEADLINE_S,
        max_context_tok=max_context_tok,
    )
    if not rollout.outcome.trains:
        raise DataError(
            f"prompt {prompt.id!r}: an episode that answers {says!r} ends as {rollout.outcome}: {rollout.error}"
        )
    return samples(rollout, 1.0)


class _Saying:
    """Generates one text, whatever it is asked."""

    def __init__(self, text: str, codec: Codec) -> None:
        self._text, self._ids = text, codec.said(text)

    async def generate(self, request: GenRequest) -> Completion:
        size = len(self._ids)
        return Completion(
            request_id=request.id,
            ids_N=np.array(self._ids, np.int32),
            logp_N=np.zeros(size, np.float32),
            spans=(Span(start=0, stop=size, policy_version=0, kv_version=0),) if size else (),
            finish="stop",
            text=self._text,
        )


class _Pleased:
    """Scores everything 1."""

    async def grade(self, rollout: Rollout, prompt: Prompt) -> Grade:
        return Grade(outcome=Outcome.OK, reward=1.0)


def _pieces(sample: Sample, codec: Decoder) -> list[Piece]:
    mask_T = sample.loss_mask_T
    if not len(mask_T):
        return []
    cuts = [0, *(np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1).tolist(), len(mask_T)]
    return [
        Piece(codec.decode(sample.ids_T[start:stop].tolist()), bool(mask_T[start])) for start, stop in pairwise(cuts)
    ]
