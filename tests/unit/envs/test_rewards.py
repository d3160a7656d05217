"""Answers are found in chatty text; numbers compare within tolerance; nothing matches by accident."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.envs.rewards import built_in, contains, exact, final_answer, last_number, numeric, same_number
from headrace.errors import ConfigError
from headrace.records import Completion, Outcome, Prompt, Rollout, Turn


def said(text: str) -> Rollout:
    done = Completion(
        request_id="r", ids_N=np.zeros(0, np.int32), logp_N=np.zeros(0, np.float32), spans=(), finish="stop", text=text
    )
    turn = Turn(prompt_ids=(1,), completion=done, env_version=0)
    return Rollout(group_id="g", member=0, attempt=0, outcome=Outcome.OK, reward=None, turns=(turn,), messages=())


def gold(answer: str) -> Prompt:
    return Prompt(id="p", messages=(), answer=answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("The answer is 7.", "7"),
        ("is -7", "-7"),
        ("10 - 3", "3"),
        ("10-3", "3"),
        ("it is \u22127", "-7"),
        ("1,234,567 in all", "1234567"),
        ("1, 2, 3", "3"),
        ("12,34", "34"),
        ("3.50", "3.50"),
        ("1e3", "1e3"),
        ("+5", "5"),
        ("$5", "5"),
        ("**42**", "42"),
        ("x2", None),
        ("version v1", None),
        ("no number", None),
        ("", None),
        ("5%", "5"),
        ("(7)", "7"),
        ("a 7\nb 8\n", "8"),
        ("3.", "3"),
        ("1.2.3", "1.2"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@given(st.integers(-(10**12), 10**12))
def test_any_integer_is_found_however_it_is_written(value):
    assert numeric(said(f"I think that it is {value}."), gold(str(value))) == 1.0
    assert numeric(said(f"= {value:,}"), gold(str(value))) == 1.0
    assert numeric(said(f"= {value + 1}"), gold(str(value))) == 0.0


@given(st.text(max_size=60))
def test_any_text_is_scored_without_error(text):
    for reward in (exact, numeric, contains):
        assert reward(said(text), gold("7")) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Paris \n", "Paris"),
        ("I think. The answer is: Paris.", "Paris"),
        ("Answer: a\nanswer: Paris", "Paris"),
        (r"so \boxed{Paris} it is", "Paris"),
        ("x <answer> Paris </answer> y", "Paris"),
        ("Answer = Paris", "Paris"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer
    assert exact(said(text), gold(answer)) == 1.0


def test_exact_wants_all_of_it():
    assert exact(said("Paris, France"), gold("Paris")) == 0.0


def test_contains_wants_whole_words():
    assert contains(said("It is PARIS!"), gold("paris")) == 1.0
    assert contains(said("Parisian"), gold("Paris")) == 0.0
    assert contains(said("17"), gold("7")) == 0.0
    assert contains(said("c++ rules"), gold("c++")) == 1.0


def test_a_gold_answer_that_cannot_be_compared_is_an_error():
    with pytest.raises(ConfigError, match="'Paris' of prompt 'p' has no number"):
        numeric(said("7"), gold("Paris"))
    with pytest.raises(ConfigError, match="has no gold answer"):
        contains(said("7"), gold(" "))


def test_same_number_refuses_what_is_no_finite_number():
    assert same_number("7", "7.0")
    assert same_number("0.3333333", "0.33333333")
    assert not same_number("nan", "nan")
    assert not same_number("inf", "inf")
    assert not same_number("7", "seven")


def test_unknown_name_gives_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'contains'"):
        built_in("contain")


def test_example_rewards_run():
    path = Path(__file__).parents[3] / "examples" / "rewards.py"
    spec = importlib.util.spec_from_file_location("example_rewards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (
        module.short_and_right(said("7"), gold("7"))["reward"]
        > module.short_and_right(said("so 7 " * 30), gold("7"))["reward"]
    )
    assert module.valid_json(said('{"answer": 7}'), gold("7")) == 1.0
    assert module.valid_json(said("7"), gold("7")) == 0.0
