"""One rollout: an environment against an engine, then a grade. A failed rollout is a record, never an exception.

env.reset -> prompt ids -> engine.generate -> env.step -> ... -> grade -> Rollout

what went wrong                                   outcome       trains
the environment, engine or reward broke           infra_fail    no, retried
over rollout_deadline_s, or the grade's deadline  timeout       no, retried
the engine was told to cancel the request         cancelled     no
the policy broke a rule, ran out of turns or of   policy_fail   yes, scored
context
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

import numpy as np

from headrace.clock import Clock, WallClock
from headrace.envs.env import Env, Step
from headrace.envs.grading import Grade
from headrace.errors import DataError, DeadlineError, EngineError
from headrace.records import Completion, GenRequest, Message, Outcome, Prompt, Rollout, SamplingParams, Turn
from headrace.rollout.codec import Codec
from headrace.rollout.engine import Engine
from headrace.rollout.stitch import token_versions

CANCEL_GRACE_S: Final = 5.0
"""How long an engine may take to hand over the tokens of a request that was cancelled at its deadline."""
CLOSE_DEADLINE_S: Final = 30.0
T = TypeVar("T")
log = logging.getLogger(__name__)


class Grader(Protocol):
    """What scores a rollout: envs.grading.GraderPool."""

    async def grade(self, rollout: Rollout, prompt: Prompt) -> Grade: ...


def turn_seed(seed: int, turn: int) -> int:
    """Seed of a turn: the rollout's own for turn 0, then the first 4 bytes (big-endian) of blake2b("SEED:TURN")."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=4).digest(), "big")


@dataclass(slots=True, kw_only=True)
class _Episode:
    """Mutable state of one rollout in progress."""

    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome = Outcome.OK
    error: str = ""
    gen_s: float = 0.0
    env_s: float = 0.0

    def end(self, outcome: Outcome, error: str) -> None:
        self.outcome, self.error = outcome, error


async def run_rollout(
    *,
    engine: Engine,
    codec: Codec,
    env: Env,
    grader: Grader,
    prompt: Prompt,
    sampling: SamplingParams,
    group_id: str,
    member: int,
    attempt: int,
    max_turns: int,
    rollout_deadline_s: float,
    max_context_tok: int,
    min_version: int = 0,
    clock: Clock | None = None,
) -> Rollout:
    """Run one episode and grade it. Raises only CancelledError (after env.close()).

    `sampling.seed` is the rollout's seed; see turn_seed. `rollout_deadline_s` covers everything but grading, which has
    its own limit. Tokens sampled before a failure or deadline stay in `turns`.
    """
    clock = clock or WallClock()
    state = _Episode(prompt=prompt)
    run = _Run(
        engine=engine, codec=codec, env=env, sampling=sampling, group_id=group_id, min_version=min_version,
        request=f"{group_id}/{member}/{attempt}", max_turns=max_turns, max_context_tok=max_context_tok,
        clock=clock, ends_s=clock.now() + rollout_deadline_s, deadline_s=rollout_deadline_s, state=state,
    )  # fmt: skip
    try:
        try:
            await run.play()
        finally:
            await _close(env, run.request)
    except DeadlineError as exc:
        state.end(Outcome.TIMEOUT, str(exc))
    except EngineError as exc:
        state.end(Outcome.INFRA_FAIL, f"engine: {exc}")
    except DataError as exc:
        state.end(Outcome.INFRA_FAIL, str(exc))
    except Exception:  # noqa: BLE001  a foreign environment may raise anything; a failed rollout is data
        state.end(Outcome.INFRA_FAIL, traceback.format_exc())
    rollout = Rollout(
        group_id=group_id, member=member, attempt=attempt, outcome=state.outcome, reward=None,
        turns=tuple(state.turns), messages=tuple(state.messages), error=state.error,
        gen_s=state.gen_s, env_s=state.env_s,
    )  # fmt: skip
    return await _graded(rollout, prompt, grader) if rollout.outcome.trains else rollout


async def _close(env: Env, request: str) -> None:
    """Close, also while being cancelled. What fails here cannot spoil an episode that is over; it is logged."""
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await env.close()
    except Exception:  # a foreign environment may raise anything, and must not hide a cancellation
        log.warning("env.close of rollout %s failed", request, exc_info=True)


async def _graded(rollout: Rollout, prompt: Prompt, grader: Grader) -> Rollout:
    try:
        grade = await grader.grade(rollout, prompt)
    except Exception:  # noqa: BLE001  a grader of one's own may raise anything; a failed grade is data
        return replace(rollout, outcome=Outcome.INFRA_FAIL, error=traceback.format_exc())
    if grade.outcome is Outcome.OK:  # the policy's own fault stays its fault, and is scored
        return replace(rollout, reward=grade.reward, reward_parts=dict(grade.parts), grade_s=grade.grade_s)
    return replace(rollout, outcome=grade.outcome, error=grade.error, grade_s=grade.grade_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What an episode needs, and its turns."""

    engine: Engine
    codec: Codec
    env: Env
    sampling: SamplingParams
    group_id: str
    min_version: int
    request: str
    max_turns: int
    max_context_tok: int
    clock: Clock
    ends_s: float
    deadline_s: float
    state: _Episode

    async def play(self) -> None:
        """Turns until the environment is done or something ends the rollout."""
        state = self.state
        state.messages += await self._env(self.env.reset(state.prompt), "env.reset")
        prompt_ids = self.codec.first(state.messages)
        if not self._fits(prompt_ids):
            raise DataError(f"prompt {state.prompt.id!r} is too long: {self._room(prompt_ids)}")
        for number in range(self.max_turns):
            completion = await self._generate(number, prompt_ids)
            if state.outcome is not Outcome.OK:
                return
            history = list(state.messages)
            state.messages.append(Message(role="assistant", content=completion.text))
            step: Step = await self._env(self.env.step(completion.text), "env.step")
            state.messages += step.messages
            if step.policy_fail:
                return state.end(Outcome.POLICY_FAIL, step.policy_fail)
            if step.done:
                return
            if number + 1 == self.max_turns:
                break
            prompt_ids = self.codec.extend(prompt_ids, completion, history, step.messages).ids
            if not self._fits(prompt_ids):
                return state.end(
                    Outcome.POLICY_FAIL, f"out of context after {number + 1} turns: {self._room(prompt_ids)}"
                )
        state.end(Outcome.POLICY_FAIL, f"max_turns = {self.max_turns} used up before the environment was done")

    async def _generate(self, number: int, prompt_ids: tuple[int, ...]) -> Completion:
        """One model call, recorded as a turn; ends the episode if the engine did not finish it."""
        state, start_s = self.state, self.clock.now()
        request = GenRequest(
            id=f"{self.request}/{number}",
            prompt_ids=prompt_ids,
            sampling=replace(self.sampling, seed=turn_seed(self.sampling.seed, number)),
            group_id=self.group_id,
            min_version=self.min_version,
        )
        try:
            completion, in_time = await self._within_deadline(request)
        finally:
            state.gen_s += self.clock.now() - start_s
        if completion.finish == "error":
            raise EngineError(f"request {request.id}: {completion.error or 'no reason given'}")
        _check(completion)
        if len(completion.ids_N):
            own = completion.spans[0].policy_version
            earlier = [s.policy_version for t in state.turns for s in t.completion.spans]
            state.turns.append(
                Turn(prompt_ids=prompt_ids, completion=completion, env_version=min(earlier, default=own))
            )
        if not in_time:
            raise DeadlineError(self._late("engine.generate"))
        if completion.finish == "cancelled":
            state.end(Outcome.CANCELLED, f"request {request.id} was cancelled in the engine")
        elif not len(completion.ids_N):
            raise EngineError(f"request {request.id} came back with no tokens and finish = {completion.finish!r}")
        return completion

    async def _within_deadline(self, request: GenRequest) -> tuple[Completion, bool]:
        """The completion, and whether it ended by itself; at the deadline the tokens so far are asked for."""
        task = asyncio.ensure_future(self.engine.generate(request))
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, self.ends_s - self.clock.now()))
            if done:
                return await task, True
            await self.engine.cancel(request.id)
            done, _ = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            if done:
                return await task, False
            raise DeadlineError(self._late("engine.generate"))
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_GRACE_S)

    async def _env(self, call: Awaitable[T], doing: str) -> T:
        start_s = self.clock.now()
        try:
            async with asyncio.timeout(max(0.0, self.ends_s - start_s)) as limit:
                return await call
        except TimeoutError:
            if limit.expired():
                raise DeadlineError(self._late(doing)) from None
            raise
        finally:
            self.state.env_s += self.clock.now() - start_s

    def _late(self, doing: str) -> str:
        where = f"in {doing} after {len(self.state.turns)} turns"
        return f"rollout {self.request} was {where} at env.rollout_deadline_s = {self.deadline_s:g} s"

    def _fits(self, prompt_ids: tuple[int, ...]) -> bool:
        return len(prompt_ids) + self.sampling.max_new_tok <= self.max_context_tok

    def _room(self, prompt_ids: tuple[int, ...]) -> str:
        return (
            f"{len(prompt_ids)} tokens + sampling.max_new_tok = {self.sampling.max_new_tok} "
            f"> engine.max_context_tok = {self.max_context_tok}"
        )


def _check(completion: Completion) -> None:
    """EngineError unless every sampled id has a finite log-prob and a version."""
    n = len(completion.ids_N)
    if len(completion.logp_N) != n:
        raise EngineError(f"request {completion.request_id}: {len(completion.logp_N)} log-probs for {n} tokens")
    bad = np.flatnonzero(~np.isfinite(completion.logp_N))
    if len(bad):
        raise EngineError(
            f"request {completion.request_id}: log-prob of token {bad[0]} is {completion.logp_N[bad[0]]} "
            f"({len(bad)} of {n} are not finite)"
        )
    token_versions(completion)
