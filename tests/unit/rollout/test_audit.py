"""The audit shows every token once, and which stretches are trained."""

from __future__ import annotations

import numpy as np

from headrace.records import Completion, Outcome, Rollout, Span, Turn
from headrace.rollout.audit import audit
from headrace.rollout.stitch import samples


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def turn(prompt, ids):
    said = Completion(
        request_id="r", ids_N=np.array(ids, np.int32), logp_N=np.zeros(len(ids), np.float32),
        spans=(Span(start=0, stop=len(ids), policy_version=0, kv_version=0),), finish="stop", text="",
    )  # fmt: skip
    return Turn(prompt_ids=tuple(prompt), completion=said, env_version=0)


def test_pieces_alternate_and_cover_everything():
    turns = (turn([0, 1], [2, 3]), turn([0, 1, 2, 3, 4], [5]))
    rollout = Rollout(group_id="g", member=0, attempt=0, outcome=Outcome.OK, reward=1.0, turns=turns, messages=())
    (pieces,) = audit(samples(rollout), Letters())
    assert pieces == [("ab", False), ("cd", True), ("e", False), ("f", True)]
