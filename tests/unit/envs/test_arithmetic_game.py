"""The game: feedback, success, the policy's own faults, and a reward that replays the moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import EnvConfig
from headrace.envs.arithmetic_game import ArithmeticGameEnv, ArithmeticGameOptions, ArithmeticGameReward, legal_move
from headrace.envs.check import check_task, gold_rollout
from headrace.envs.prompts import question_key
from headrace.envs.registry import build_task
from headrace.errors import ConfigError, DataError, EnvError
from headrace.records import Prompt


def build(max_turns=4, eval_prompts=20, **options):
    env = EnvConfig(kind="arithmetic_game", options=options, eval_prompts=eval_prompts, max_turns=max_turns)
    return build_task(env, seed=0, recipe_dir=Path("."))


def game(start, target):
    return Prompt(id="p", messages=(), row={"start": start, "target": target})


def steps(env, prompt, *texts):
    async def run():
        await env.reset(prompt)
        return [await env.step(t) for t in texts]

    return asyncio.run(run())


def test_feedback_until_the_target():
    low, high, done = steps(ArithmeticGameEnv(9), game(3, 15), "9", "I say 5", "-2")
    assert low.messages[0].content == "That makes 12. 12 + ? = 15. Say one number."
    assert high.messages[0].content == "That makes 17. 17 + ? = 15. Say one number."
    assert (low.done, high.done, done.done, done.policy_fail) == (False, False, True, "")


@pytest.mark.parametrize("text", ["", "no idea", "10", "0", "2.5", "-10"])
def test_what_is_no_legal_move_wastes_the_turn_or_is_the_policys_fault(text):
    wasted, next_one = steps(ArithmeticGameEnv(9), game(3, 15), text, "9")
    assert wasted.messages[0].content == "Say only one number from -9 to 9."
    assert next_one.messages[0].content.startswith("That makes 12.")
    (step,) = steps(ArithmeticGameEnv(9, strict=True), game(3, 15), text)
    assert step.done
    assert "the answer is not one number from -9 to 9" in step.policy_fail


def test_a_prompt_of_another_task_is_the_environments_fault():
    with pytest.raises(EnvError, match="is no arithmetic game"):
        steps(ArithmeticGameEnv(9), Prompt(id="p", messages=()), "1")


@given(st.text(max_size=20))
def test_moves_are_legal_for_any_text(text):
    move = legal_move(text, 9)
    assert move is None or 0 < abs(move) <= 9


def test_reward_counts_turns():
    reward = ArithmeticGameReward(ArithmeticGameOptions(turn_cost=0.2, near_reward=0.5))
    prompt = game(3, 15)
    (won,) = [gold_rollout(ArithmeticGameEnv(9), prompt, ["9", "3"])]
    slow = gold_rollout(ArithmeticGameEnv(9), prompt, ["9", "5", "-2"])
    lost = gold_rollout(ArithmeticGameEnv(9), prompt, ["6"])
    won, slow, lost = (asyncio.run(r) for r in (won, slow, lost))
    assert reward(won, prompt) == {"reward": 1.0, "solved": 1.0, "turns": 2.0}
    assert reward(slow, prompt)["reward"] == pytest.approx(0.8)
    assert reward(lost, prompt) == {"reward": 0.25, "solved": 0.0, "turns": 1.0}
    assert reward(replace(won, turns=()), prompt)["reward"] == 0.0


def test_task_is_disjoint_and_its_gold_answers_win():
    task = build(size=100)
    assert (len(task.train), len(task.eval)) == (100, 20)
    assert not {question_key(p) for p in task.train} & {question_key(p) for p in task.eval}
    checks = check_task(task, 10)
    assert len(checks) == 10
    assert all(c.ok for c in checks)


def test_impossible_options():
    with pytest.raises(ConfigError, match="at least 2 turns are needed"):
        build(max_turns=1, max_gap=18)
    with pytest.raises(ConfigError, match="max_gap may be at most 27"):
        build(max_gap=28)
    with pytest.raises(DataError, match="distinct games exist"):
        build(max_start=1, max_gap=2, eval_prompts=50)
