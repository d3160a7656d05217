"""The audit shows every token once, and which stretches are trained."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.envs.env import Step
from headrace.errors import DataError
from headrace.records import Completion, Message, Outcome, Prompt, Rollout, Span, Turn
from headrace.rollout.audit import audit, rehearse
from headrace.rollout.codec import ByteCodec
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


class Twice:
    """Asks a second time, then is done; or fails at once."""

    def __init__(self, fails=False):
        self.fails, self.asked = fails, 0

    async def reset(self, prompt):
        return list(prompt.messages)

    async def step(self, action):
        if self.fails:
            raise RuntimeError("no board")
        self.asked += 1
        return Step(done=self.asked == 2, messages=(Message(role="user", content="sure?"),))

    async def close(self):
        return None


PROMPT = Prompt(id="p", messages=(Message(role="user", content="1+1"),), answer="2")


def test_rehearsal_trains_what_the_policy_says_and_nothing_else():
    playing = rehearse(Twice(), PROMPT, ByteCodec(), says="2", max_turns=4, max_context_tok=100)
    (pieces,) = audit(asyncio.run(playing), ByteCodec())
    assert pieces == [("user: 1+1\n", False), ("2", True), ("\nuser: sure?\n", False), ("2", True)]


def test_rehearsal_names_what_failed():
    playing = rehearse(Twice(fails=True), PROMPT, ByteCodec(), says="2", max_turns=1, max_context_tok=100)
    with pytest.raises(DataError, match="no board"):
        asyncio.run(playing)
