"""One rollout: every ending is a record with the right outcome, and nothing but cancellation is raised."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest

from headrace.envs.env import Step
from headrace.envs.grading import Grade
from headrace.errors import EngineError, EnvError
from headrace.records import Completion, Message, Outcome, Prompt, SamplingParams, Span
from headrace.rollout.chat import Extended
from headrace.rollout.episode import run_rollout, turn_seed


class WordCodec:
    """Words are tokens: word -> its length."""

    def first(self, messages):
        return tuple(len(w) for m in messages for w in m.content.split())

    def extend(self, prev, completion, history, new):
        return Extended(ids=(*prev, *completion.ids_N.tolist(), 99, *self.first(new)), branched=False)


def completion(request_id, n=3, version=1, finish="stop", logp=None, **kwargs):
    spans = (Span(start=0, stop=n, policy_version=version, kv_version=version),) if n else ()
    fields = {
        "request_id": request_id, "ids_N": np.arange(n, dtype=np.int32), "spans": spans, "finish": finish,
        "logp_N": np.full(n, -0.5, np.float32) if logp is None else np.array(logp, np.float32), "text": "said",
    }  # fmt: skip
    return Completion(**{**fields, **kwargs})


class Engine:
    """Answers by `script(request, number)`; a result that is an exception is raised."""

    def __init__(self, script=None):
        self.requests = []
        self.cancelled = []
        self._script = script or (lambda request, number: completion(request.id))

    async def generate(self, request):
        self.requests.append(request)
        result = self._script(request, len(self.requests) - 1)
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, Exception):
            raise result
        return result

    async def cancel(self, request_id):
        self.cancelled.append(request_id)


class StepEnv:
    """Gives the steps of a list; a step that is an exception is raised."""

    def __init__(self, *steps, on_reset=None, on_close=None):
        self._steps = list(steps)
        self._on_reset, self._on_close = on_reset, on_close
        self.closed = 0
        self.seen = []

    async def reset(self, prompt):
        if self._on_reset:
            raise self._on_reset
        return prompt.messages

    async def step(self, text):
        self.seen.append(text)
        step = self._steps.pop(0) if self._steps else Step()
        if isinstance(step, Exception):
            raise step
        if asyncio.iscoroutine(step):
            return await step
        return step

    async def close(self):
        self.closed += 1
        if self._on_close:
            raise self._on_close


class Grader:
    def __init__(self, grade=None):
        self.seen = []
        self._grade = grade or Grade(outcome=Outcome.OK, reward=0.75, parts={"a": 1.0}, grade_s=0.5)

    async def grade(self, rollout, prompt):
        self.seen.append(rollout)
        if isinstance(self._grade, Exception):
            raise self._grade
        return self._grade


PROMPT = Prompt(id="p1", messages=(Message(role="user", content="what is it"),))
MORE = Step(done=False, messages=(Message(role="user", content="go on"),))


def play(engine=None, env=None, grader=None, **kwargs):
    settings = {
        "sampling": SamplingParams(max_new_tok=4, seed=11), "group_id": "g7", "member": 2, "attempt": 1,
        "max_turns": 3, "rollout_deadline_s": 30.0, "max_context_tok": 100, "prompt": PROMPT, "codec": WordCodec(),
    } | kwargs  # fmt: skip
    return run_rollout(engine=engine or Engine(), env=env or StepEnv(), grader=grader or Grader(), **settings)


async def forever():
    await asyncio.Event().wait()


def test_single_turn():
    engine, env, grader = Engine(), StepEnv(), Grader()
    rollout = asyncio.run(play(engine, env, grader))
    assert (rollout.outcome, rollout.reward, rollout.reward_parts, rollout.grade_s) == (
        Outcome.OK,
        0.75,
        {"a": 1.0},
        0.5,
    )
    assert (rollout.group_id, rollout.member, rollout.attempt) == ("g7", 2, 1)
    assert [m.content for m in rollout.messages] == ["what is it", "said"]
    assert rollout.turns[0].prompt_ids == (4, 2, 2)
    (request,) = engine.requests
    assert (request.id, request.group_id, request.sampling.seed) == ("g7/2/1/0", "g7", 11)
    assert grader.seen[0].reward is None
    assert env.closed == 1


def test_turns_extend_and_have_own_ids_seeds_and_env_versions():
    versions = [5, 3, 6]
    engine = Engine(lambda request, number: completion(request.id, version=versions[number]))
    rollout = asyncio.run(play(engine, StepEnv(MORE, MORE, Step())))
    assert rollout.outcome is Outcome.OK
    assert [r.id for r in engine.requests] == ["g7/2/1/0", "g7/2/1/1", "g7/2/1/2"]
    assert [t.env_version for t in rollout.turns] == [5, 5, 3]
    assert rollout.turns[1].prompt_ids == (4, 2, 2, 0, 1, 2, 99, 2, 2)
    expected = int.from_bytes(hashlib.blake2b(b"11:2", digest_size=4).digest(), "big")
    assert engine.requests[2].sampling.seed == turn_seed(11, 2) == expected
    assert len({r.sampling.seed for r in engine.requests}) == 3
    assert [m.content for m in rollout.messages] == ["what is it", "said", "go on", "said", "go on", "said"]


def test_first_turns_env_version_is_its_first_spans():
    spans = (
        Span(start=0, stop=1, policy_version=4, kv_version=4),
        Span(start=1, stop=3, policy_version=9, kv_version=4),
    )
    rollout = asyncio.run(play(Engine(lambda r, n: completion(r.id, spans=spans))))
    assert rollout.turns[0].env_version == 4


@pytest.mark.parametrize(
    ("engine", "env", "outcome", "says", "turns"),
    [
        (Engine(lambda r, n: EngineError("no memory")), None, "infra_fail", "engine: no memory", 0),
        (Engine(lambda r, n: RuntimeError("odd")), None, "infra_fail", "RuntimeError: odd", 0),
        (Engine(lambda r, n: completion(r.id, finish="error", error="cuda died")), None, "infra_fail", "cuda died", 0),
        (Engine(lambda r, n: completion(r.id, n=0)), None, "infra_fail", "no tokens and finish = 'stop'", 0),
        (Engine(lambda r, n: completion(r.id, logp=[0, np.nan, 0])), None, "infra_fail", "token 1 is nan", 0),
        (Engine(lambda r, n: completion(r.id, logp=[0])), None, "infra_fail", "1 log-probs for 3 tokens", 0),
        (Engine(lambda r, n: completion(r.id, spans=())), None, "infra_fail", "spans of request", 0),
        (Engine(lambda r, n: completion(r.id, n=2, finish="cancelled")), None, "cancelled", "was cancelled", 1),
        (Engine(lambda r, n: completion(r.id, n=0, finish="cancelled")), None, "cancelled", "was cancelled", 0),
        (None, StepEnv(on_reset=EnvError("no sandbox")), "infra_fail", "no sandbox", 0),
        (None, StepEnv(EnvError("lost")), "infra_fail", "lost", 1),
        (None, StepEnv(ZeroDivisionError("bug")), "infra_fail", "ZeroDivisionError: bug", 1),
        (None, StepEnv(TimeoutError("its own")), "infra_fail", "TimeoutError: its own", 1),
    ],
)
def test_what_is_not_the_policys_fault_does_not_train(engine, env, outcome, says, turns):
    env, grader = env or StepEnv(), Grader()
    env.closed = 0
    rollout = asyncio.run(play(engine, env, grader))
    assert rollout.outcome == outcome
    assert rollout.reward is None
    assert says in rollout.error
    assert len(rollout.turns) == turns
    assert grader.seen == []
    assert env.closed == 1


@pytest.mark.parametrize(
    ("env", "says", "turns"),
    [
        (StepEnv(Step(policy_fail="illegal move")), "illegal move", 1),
        (StepEnv(MORE, MORE, MORE, MORE), "max_turns = 3 used up", 3),
        (
            StepEnv(MORE, Step(done=False, messages=(Message(role="user", content="word " * 90),))),
            "out of context after 2 turns: 103 tokens + sampling.max_new_tok = 4 > engine.max_context_tok = 100",
            2,
        ),
    ],
)
def test_the_policys_own_fault_is_scored(env, says, turns):
    rollout = asyncio.run(play(env=env))
    assert rollout.outcome is Outcome.POLICY_FAIL
    assert rollout.reward == 0.75
    assert says in rollout.error
    assert len(rollout.turns) == turns


def test_a_first_prompt_that_does_not_fit_is_nobodys_action():
    engine = Engine()
    rollout = asyncio.run(play(engine, max_context_tok=6))
    assert rollout.outcome is Outcome.INFRA_FAIL
    assert "prompt 'p1' is too long: 3 tokens + sampling.max_new_tok = 4 > engine.max_context_tok = 6" in rollout.error
    assert engine.requests == []


def test_deadline_in_the_engine_keeps_the_tokens_so_far():
    class Slow(Engine):
        async def generate(self, request):
            self.requests.append(request)
            self.event = asyncio.Event()
            if len(self.requests) == 2:
                await self.event.wait()
                return completion(request.id, n=2, finish="cancelled")
            return completion(request.id)

        async def cancel(self, request_id):
            await super().cancel(request_id)
            self.event.set()

    engine, env = Slow(), StepEnv(MORE)
    rollout = asyncio.run(play(engine, env, rollout_deadline_s=0.05))
    assert rollout.outcome is Outcome.TIMEOUT
    assert "engine.generate after 2 turns at env.rollout_deadline_s = 0.05 s" in rollout.error
    assert engine.cancelled == ["g7/2/1/1"]
    assert [len(t.completion.ids_N) for t in rollout.turns] == [3, 2]
    assert (rollout.reward, env.closed) == (None, 1)


def test_deadline_in_the_environment():
    env = StepEnv(MORE, forever())
    rollout = asyncio.run(play(env=env, rollout_deadline_s=0.05))
    assert rollout.outcome is Outcome.TIMEOUT
    assert "in env.step after 2 turns" in rollout.error
    assert (rollout.generated_tok, env.closed) == (6, 1)


@pytest.mark.parametrize("where", ["engine", "env"])
@pytest.mark.parametrize("on_close", [None, RuntimeError("close fails too")])
def test_cancellation_closes_the_environment_and_is_raised(where, on_close):
    async def run():
        reached = asyncio.Event()
        gone = []

        async def wait():
            reached.set()
            try:
                await forever()
            finally:
                gone.append(True)

        env = StepEnv(wait() if where == "env" else MORE, on_close=on_close)
        engine = Engine(lambda request, number: wait() if where == "engine" else completion(request.id))
        task = asyncio.create_task(play(engine, env))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert env.closed == 1
        assert gone == [True]
        if where == "engine":
            env._steps.clear()

    asyncio.run(run())


def test_a_failing_close_does_not_spoil_the_rollout():
    rollout = asyncio.run(play(env=StepEnv(on_close=RuntimeError("late"))))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.75)


@pytest.mark.parametrize(
    ("grade", "outcome", "says"),
    [
        (Grade(outcome=Outcome.TIMEOUT, reward=None, error="too slow", grade_s=2.0), "timeout", "too slow"),
        (Grade(outcome=Outcome.INFRA_FAIL, reward=None, error="crash"), "infra_fail", "crash"),
        (RuntimeError("own grader"), "infra_fail", "own grader"),
    ],
)
@pytest.mark.parametrize("fail", ["", "bad format"])
def test_a_failed_grade_is_never_a_zero(grade, outcome, says, fail):
    rollout = asyncio.run(play(env=StepEnv(Step(policy_fail=fail)), grader=Grader(grade)))
    assert rollout.outcome == outcome
    assert rollout.reward is None
    assert says in rollout.error
