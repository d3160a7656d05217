"""Procedural tasks from the reasoning-gym package: any of its families, alone or mixed.

Train and held-out prompts are drawn from streams with unrelated seeds (reasoning-gym draws entry i from seed + i, so
neighbouring seeds repeat each other). Held-out questions are distinct and never occur in `train`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from headrace.envs.env import Task
from headrace.envs.options import EnvOptions
from headrace.envs.prompts import derived_seed, fingerprint, question_key, with_system
from headrace.envs.rewards import final_answer, last_number, same_number
from headrace.envs.single_turn import SingleTurnEnv
from headrace.errors import ConfigError, DataError, EnvError, boundary, did_you_mean
from headrace.records import Prompt, Rollout

log = logging.getLogger(__name__)
Score = Literal["auto", "numeric", "verifier"]
STREAM_LEN: Final = 1_000_000
MISSES_MIN: Final = 500
DRAWS_PER_PROMPT: Final = 3
"""Enough to see 95 % of a family with as many questions as are wanted; the last few would take very long."""


class Family(EnvOptions):
    """One family in a mix."""

    name: str
    """A reasoning-gym data set name."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its own parameters."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of prompts, relative to the other families' weights."""


class ReasoningGymOptions(EnvOptions):
    """Options of env.kind = "reasoning_gym"."""

    family: str = ""
    """Name of the one family; or use `families`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of `family`."""
    families: tuple[Family, ...] = ()
    """A mix: tables with name, params, weight."""
    size: Annotated[int, Field(ge=1)] = 10_000
    """Distinct training prompts at most; small families have fewer."""
    template: str = "{question}"
    """Text of the user message; {question} is replaced. Most families already say how to answer, and a further
    instruction lowered the pass rate of a 135M model (chain_sum, one digit: 0.25 without, 0.13 with "Answer with a
    number only.")."""
    system: str = ""
    """System message; empty leaves it to the model's chat template."""
    score: Score = "auto"
    """numeric: last number in the text. verifier: the family's own checker on the stated answer.
    auto: numeric where the gold answer is a number and the family has no checker of its own, else verifier."""
    allow_repeats: bool = False
    """Accept that held-out prompts repeat training questions when a family has too few distinct ones.
    Accuracy then measures fitting, not generalisation, and the report says so."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.family) == bool(self.families):
            raise ValueError("give either family (with params) or families, a list of {name, params, weight}")
        if self.params and not self.family:
            raise ValueError("params belongs to family; in families each entry has its own params")
        if "{question}" not in self.template:
            raise ValueError(f"template = {self.template!r} must contain {{question}}")
        names = [f.name for f in self.mix]
        if len(set(names)) < len(names):
            raise ValueError(f"families names one family twice: {', '.join(names)}")
        return self

    @property
    def mix(self) -> tuple[Family, ...]:
        return self.families or (Family(name=self.family, params=self.params),)


class ReasoningGymReward:
    """Scores against the gold answer or by the family's own checker.

    Workers import reasoning-gym (a second or two) only if a checker is needed, and then before the first grade.
    """

    def __init__(self, families: dict[str, dict[str, Any]], score: Score, checked: frozenset[str]) -> None:
        """`families`: parameters by name; `checked`: families that override reasoning-gym's string equality."""
        self._families, self._score, self._checked = families, score, checked
        self._verifiers: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_families": self._families, "_score": self._score, "_checked": self._checked, "_verifiers": {}}

    def warm(self) -> None:
        """Called by a grading worker before it reports ready."""
        for family in self._families:
            if self._score == "verifier" or (self._score == "auto" and family in self._checked):
                self._verifier(family)

    def __call__(self, rollout: Rollout, prompt: Prompt) -> float:
        gold_is_number = same_number(prompt.answer, prompt.answer)
        said = last_number(rollout.text) if gold_is_number else final_answer(rollout.text)
        if self._score == "numeric" and not gold_is_number:
            raise EnvError(
                f"env.options.score = 'numeric': gold answer {prompt.answer!r} of {prompt.id!r} is not a number"
            )
        if gold_is_number and (
            self._score == "numeric" or (self._score == "auto" and prompt.task not in self._checked)
        ):
            return float(said is not None and same_number(said, prompt.answer))
        return float(self._verifier(prompt.task).score_answer(said, entry=dict(prompt.row)))

    def _verifier(self, family: str) -> Any:
        """The family's data set object, whose score_answer checks."""
        if family not in self._verifiers:
            self._verifiers[family] = _dataset(family, self._families[family], seed=0, size=1)
        return self._verifiers[family]


def _checks_itself(family: str) -> bool:
    """The family overrides reasoning-gym's default check (string equality)."""
    factory = _gym().factory
    return factory.DATASETS[family][0].score_answer is not factory.ProceduralDataset.score_answer


@cache
def _gym() -> Any:
    with boundary(ConfigError, "env.kind = 'reasoning_gym' needs the package reasoning-gym"):
        import reasoning_gym  # noqa: PLC0415  takes a second and draws in matplotlib; only this kind needs it

        return reasoning_gym


def _dataset(family: str, params: dict[str, Any], *, seed: int, size: int) -> Any:
    gym = _gym()
    if family not in gym.factory.DATASETS:
        raise ConfigError(f"env.options family = {family!r} is not in reasoning-gym; "
                          + did_you_mean(family, gym.factory.DATASETS))  # fmt: skip
    known = set(gym.factory.DATASETS[family][1].__dataclass_fields__) - {"seed", "size"}
    for name in params:
        if name not in known:
            raise ConfigError(f"env.options params of family {family!r}: {name!r} is unknown; "
                              + did_you_mean(name, known))  # fmt: skip
    with boundary(ConfigError, f"env.options params = {params!r} of family {family!r}"):
        return gym.create_dataset(family, seed=seed, size=size, **params)


def build(options: ReasoningGymOptions, *, seed: int, eval_prompts: int) -> Task:
    """Draw both prompt sets. Same options and seed, same prompts.

    Raises ConfigError for unknown families or parameters, DataError when strict holding out is impossible.
    """
    held_out = _draw(options, "eval", eval_prompts, seed=seed, taken=set())
    train = _draw(options, "train", options.size, seed=seed, taken={question_key(p) for p in held_out})
    notes: tuple[str, ...] = ()
    need_train = min(options.size, eval_prompts)
    if len(held_out) < eval_prompts or len(train) < need_train:
        found, names = len(held_out) + len(train), ", ".join(f.name for f in options.mix)
        if not options.allow_repeats:
            raise DataError(
                f"{names}: only {found} distinct questions exist with these parameters, but env.eval_prompts = "
                f"{eval_prompts} must be held out and at least {need_train} are left to train on. Widen the "
                f"parameters, set env.eval_prompts to at most {max(1, found // 2)}, or set "
                "env.options.allow_repeats = true (evaluation then repeats training questions)"
            )
        train = _draw(options, "train", options.size, seed=seed, taken=set())
        held_out = [held_out[i % len(held_out)] for i in range(eval_prompts)]
        held_out = [_renamed(p, f"eval-{i}") for i, p in enumerate(held_out)]
        notes = (f"evaluation repeats training questions: {names} has only {found} distinct ones",)
        log.warning("%s", notes[0])
    elif len(train) < options.size:
        log.info("%d distinct training prompts exist, fewer than env.options.size = %d", len(train), options.size)
    return Task(
        train=train,
        eval=held_out,
        make_env=SingleTurnEnv,
        reward=ReasoningGymReward(
            {f.name: f.params for f in options.mix},
            options.score,
            frozenset(f.name for f in options.mix if _checks_itself(f.name)),
        ),
        fingerprint=fingerprint(train, held_out),
        families=tuple(f.name for f in options.mix),
        notes=notes,
    )


def _renamed(prompt: Prompt, new_id: str) -> Prompt:
    return Prompt(id=new_id, messages=prompt.messages, answer=prompt.answer, task=prompt.task, row=prompt.row)


def _draw(options: ReasoningGymOptions, name: str, count: int, *, seed: int, taken: set[str]) -> list[Prompt]:
    """Up to `count` prompts with distinct questions outside `taken`; fewer when the families seem exhausted."""
    rng = random.Random(derived_seed(seed, name, "mix"))
    streams = {f.name: _stream(f, options, derived_seed(seed, name, f.name)) for f in options.mix}
    weights = {f.name: f.weight for f in options.mix}
    misses = dict.fromkeys(streams, 0)
    found = dict.fromkeys(streams, 0)
    seen = set(taken)
    prompts: list[Prompt] = []
    for _ in range(DRAWS_PER_PROMPT * count + 4 * MISSES_MIN):
        if len(prompts) == count or not weights:
            break
        family = rng.choices(tuple(weights), tuple(weights.values()))[0]
        prompt = next(streams[family])(f"{name}-{len(prompts)}")
        key = question_key(prompt)
        if key not in seen:
            seen.add(key)
            prompts.append(prompt)
            found[family] += 1
            misses[family] = 0
            continue
        misses[family] += 1
        if misses[family] > max(MISSES_MIN, 5 * (found[family] + len(taken))):
            del weights[family]  # a run of repeats this long: (almost) every question was seen
    return prompts


def _stream(family: Family, options: ReasoningGymOptions, seed: int) -> Iterator[Callable[[str], Prompt]]:
    """Endless entries of a family, each as a function from an id to its prompt."""
    data = _dataset(family.name, family.params, seed=seed, size=STREAM_LEN)
    for index in range(STREAM_LEN):
        with boundary(EnvError, f"reasoning-gym family {family.name!r}, entry {index} of seed {seed}"):
            entry = data[index]

        def make(prompt_id: str, entry: dict[str, Any] = entry) -> Prompt:
            return Prompt(
                id=prompt_id,
                messages=with_system(options.system, options.template.replace("{question}", entry["question"])),
                answer=str(entry["answer"]),
                task=family.name,
                row=entry,
            )

        yield make
