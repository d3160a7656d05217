"""Procedural tasks: strict holding out, repeatable draws, the right checker, errors with the nearest names."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.schema import EnvConfig
from headrace.envs.check import check_task
from headrace.envs.prompts import question_key
from headrace.envs.reasoning_gym import ReasoningGymOptions
from headrace.envs.registry import build_task
from headrace.errors import ConfigError, DataError

pytest.importorskip("reasoning_gym")
SUM = {"family": "chain_sum", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, "size": 300}


def slow(options):
    return pytest.param(options, marks=pytest.mark.slow)


def build(options, eval_prompts=20, seed=0, reward=None):
    return build_task(
        EnvConfig(options=options, eval_prompts=eval_prompts), seed=seed, recipe_dir=Path("."), reward=reward
    )


def test_held_out_questions_are_distinct_and_never_trained_on():
    task = build(SUM, eval_prompts=200)
    train, held_out = {question_key(p) for p in task.train}, {question_key(p) for p in task.eval}
    assert (len(task.train), len(task.eval)) == (300, 200)
    assert (len(train), len(held_out)) == (300, 200)
    assert not train & held_out
    assert len({p.id for p in [*task.train, *task.eval]}) == 500
    assert task.families == ("chain_sum",)
    assert task.notes == ()


def test_same_seed_same_prompts():
    assert build(SUM).fingerprint == build(SUM).fingerprint
    assert build(SUM).fingerprint != build(SUM, seed=1).fingerprint


def test_neighbouring_seeds_share_few_questions():
    big = {**SUM, "params": {"min_terms": 3, "max_terms": 3, "min_digits": 4, "max_digits": 4}}
    first, second = (({question_key(p) for p in build(big, seed=s).train}) for s in (0, 1))
    assert len(first & second) < 5


def test_too_few_distinct_questions_say_what_to_do():
    bits = {"family": "count_bits", "params": {"max_n": 15}, "size": 100}
    with pytest.raises(DataError, match=r"count_bits: only 15 distinct .*eval_prompts to at most 7.*allow_repeats"):
        build(bits)
    task = build({**bits, "allow_repeats": True})
    assert (len(task.train), len(task.eval)) == (15, 20)
    assert len({p.id for p in task.eval}) == 20
    assert task.notes == ("evaluation repeats training questions: count_bits has only 15 distinct ones",)
    small = build(bits, eval_prompts=7)
    assert (len(small.train), len(small.eval)) == (8, 7)


def test_mix_follows_weights_and_names_its_families():
    mix = {
        "size": 400,
        "families": [
            {"name": "chain_sum", "weight": 3.0},
            {"name": "gcd", "params": {"max_value": 1000}},
        ],
    }
    task = build(mix)
    share = sum(p.task == "chain_sum" for p in task.train) / len(task.train)
    assert 0.65 < share < 0.85
    assert task.families == ("chain_sum", "gcd")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"family": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"family": "chain_sum", "params": {"max_term": 3}}, "did you mean 'max_terms'"),
        ({"family": "chain_sum", "params": {"max_terms": 1}}, "max_terms"),
        ({"famly": "chain_sum"}, "env.options.famly = 'chain_sum' is unknown; did you mean 'family'"),
        ({}, "give either family"),
        ({"family": "gcd", "families": [{"name": "gcd"}]}, "give either family"),
        ({"families": [{"name": "gcd"}, {"name": "gcd"}]}, "names one family twice"),
        ({"families": [{"name": "gcd", "wait": 1}]}, "there is no such option"),
        ({"family": "gcd", "template": "no slot"}, "must contain {question}"),
        ({"family": "gcd", "size": 0}, "env.options.size = 0"),
    ],
)
def test_wrong_options(options, says):
    with pytest.raises(ConfigError) as caught:
        build(options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        SUM,
        {"family": "gcd", "size": 50},
        {"family": "decimal_arithmetic", "size": 20},  # numeric, with a checker of its own
        slow({"family": "number_sorting", "size": 20}),  # a list
        slow({"family": "spell_backward", "size": 20}),  # a word
        slow({"family": "countdown", "size": 20, "score": "verifier"}),  # many right answers
    ],
)
def test_gold_answers_score_one_through_the_whole_path(options):
    checks = check_task(build(options), 3)
    assert len(checks) == 3
    for check in checks:
        assert check.ok, check.grade


def test_own_reward_comes_first():
    task = build({**SUM, "template": "{question}"}, reward=lambda rollout, prompt: 0.5)
    assert [c.grade.reward for c in check_task(task, 2)] == [0.5, 0.5]


def test_schema_documents_every_option():
    for name, field in ReasoningGymOptions.model_fields.items():
        assert field.description, name
