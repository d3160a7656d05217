"""A multi-turn game: reach a target number with small steps, told the running value after each.

    environment: "3 + ? = 9. Say one number from -9 to 9."       policy: "4"
    environment: "That makes 7. 7 + ? = 9. Say one number."      policy: "2"      done, reward 0.9

The gold answer, target - start, wins in one turn when it is a legal number. Every turn more than the fewest possible
costs `turn_cost`. An answer without a legal number wastes its turn, or is a policy_fail at once if `strict`.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from headrace.envs.env import Step, Task
from headrace.envs.options import EnvOptions
from headrace.envs.prompts import derived_seed, fingerprint, question_key
from headrace.envs.rewards import last_number
from headrace.errors import ConfigError, DataError, EnvError
from headrace.records import Message, Prompt, Rollout

MISSES_MAX: Final = 2000


class ArithmeticGameOptions(EnvOptions):
    """Options of env.kind = "arithmetic_game"."""

    size: Annotated[int, Field(ge=1)] = 2000
    """Distinct training games at most."""
    max_start: Annotated[int, Field(ge=0)] = 60
    """Games start at 0 to max_start."""
    max_gap: Annotated[int, Field(ge=1)] = 9
    """The target is 1 to max_gap above the start; who oversteps must go back."""
    max_step: Annotated[int, Field(ge=1)] = 9
    """Largest number, in absolute value, that may be added in a turn."""
    turn_cost: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """Taken from the reward 1.0 for each turn after the fewest possible."""
    near_reward: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Reward for a lost game, times the share of the gap that was closed; 0 = success only."""
    strict: bool = False
    """An answer without a legal number ends the game as policy_fail instead of wasting the turn."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.max_gap > 3 * self.max_step:
            raise ValueError(
                f"max_gap = {self.max_gap} needs more than 3 turns of max_step = {self.max_step}; "
                f"max_gap may be at most {3 * self.max_step}"
            )
        return self


def legal_move(text: str, max_step: int) -> int | None:
    """The last number in the text if it is a whole number within [-max_step, max_step] and not 0, else None."""
    said = last_number(text)
    if said is None or float(said) != (value := int(float(said))):
        return None
    return value if 0 < abs(value) <= max_step else None


class ArithmeticGameEnv:
    """One game."""

    def __init__(self, max_step: int, strict: bool = False) -> None:
        self._max_step, self._strict = max_step, strict
        self._now = self._target = 0

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        try:
            self._now, self._target = int(prompt.row["start"]), int(prompt.row["target"])
        except (KeyError, TypeError, ValueError) as exc:
            raise EnvError(f"prompt {prompt.id!r} is no arithmetic game: row {dict(prompt.row)!r:.200}") from exc
        return prompt.messages

    async def step(self, completion_text: str) -> Step:
        move = legal_move(completion_text, self._max_step)
        legal = f"one number from -{self._max_step} to {self._max_step}"
        if move is None:
            if self._strict:
                return Step(policy_fail=f"the answer is not {legal}: {completion_text!r:.100}")
            return self._ask(f"Say only {legal}.")
        self._now += move
        if self._now == self._target:
            return Step(done=True)
        return self._ask(f"That makes {self._now}. {self._now} + ? = {self._target}. Say one number.")

    def _ask(self, text: str) -> Step:
        return Step(done=False, messages=(Message(role="user", content=text),))

    async def close(self) -> None:
        return None


class ArithmeticGameReward:
    """Replays the moves from the completions' texts: nothing but the rollout decides."""

    def __init__(self, options: ArithmeticGameOptions) -> None:
        self._options = options

    def __call__(self, rollout: Rollout, prompt: Prompt) -> dict[str, float]:
        """reward, solved (0 or 1) and turns."""
        opt = self._options
        now, target = int(prompt.row["start"]), int(prompt.row["target"])
        gap = abs(target - now)
        for turn in rollout.turns:
            move = legal_move(turn.completion.text, opt.max_step)
            now += move or 0
        turns, solved = len(rollout.turns), now == target
        fewest = -(-gap // opt.max_step)
        reward = max(0.0, 1.0 - opt.turn_cost * (turns - fewest)) if solved else 0.0
        if not solved and opt.near_reward:
            reward = opt.near_reward * max(0.0, 1.0 - abs(target - now) / gap)
        return {"reward": reward, "solved": float(solved), "turns": float(turns)}


def build(options: ArithmeticGameOptions, *, seed: int, eval_prompts: int, max_turns: int) -> Task:
    """Draw distinct games; held-out ones never occur in `train`. ConfigError if max_turns cannot reach a target."""
    fewest = -(-options.max_gap // options.max_step)
    if max_turns < fewest:
        raise ConfigError(
            f"env.max_turns = {max_turns} cannot reach targets env.options.max_gap = {options.max_gap} away with steps "
            f"of at most {options.max_step}: at least {fewest} turns are needed, 3 or more leave room to correct"
        )
    taken: set[str] = set()
    held_out = _games(options, "eval", eval_prompts, seed, taken)
    train = _games(options, "train", options.size, seed, taken)
    if len(held_out) < eval_prompts or len(train) < min(options.size, eval_prompts):
        found = len(held_out) + len(train)
        raise DataError(
            f"arithmetic_game: about {found} distinct games exist with these options, too few to hold out "
            f"env.eval_prompts = {eval_prompts}; raise env.options.max_start or max_gap, or hold out at most "
            f"{found // 2}"
        )
    return Task(
        train=train, eval=held_out, make_env=partial(ArithmeticGameEnv, options.max_step, options.strict),
        reward=ArithmeticGameReward(options), fingerprint=fingerprint(train, held_out), families=("arithmetic_game",),
    )  # fmt: skip


def _games(options: ArithmeticGameOptions, name: str, count: int, seed: int, taken: set[str]) -> list[Prompt]:
    rng = random.Random(derived_seed(seed, "arithmetic_game", name))
    games: list[Prompt] = []
    misses = 0
    while len(games) < count and misses < MISSES_MAX:
        start = rng.randint(0, options.max_start)
        target = start + rng.randint(1, options.max_gap)
        game = _game(f"{name}-{len(games)}", start, target, options.max_step)
        key = question_key(game)
        if key in taken:
            misses += 1
            continue
        taken.add(key)
        games.append(game)
        misses = 0
    return games


def _game(game_id: str, start: int, target: int, max_step: int) -> Prompt:
    rules = f"{start} + ? = {target}. Say one number from -{max_step} to {max_step}."
    gap = target - start
    return Prompt(
        id=game_id,
        messages=(Message(role="user", content=rules),),
        answer=str(gap) if abs(gap) <= max_step else "",  # the one move that wins at once
        task="arithmetic_game",
        row={"start": start, "target": target},
    )
