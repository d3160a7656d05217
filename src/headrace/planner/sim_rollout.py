"""What the simulator moves about: groups and their rollouts, and the protocol of everything random about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

from headrace.errors import PlanError
from headrace.flow.events import MemberEnded
from headrace.records import Outcome

if TYPE_CHECKING:
    from headrace.planner.sim_engine import Engine

_new = object.__new__
(
    _set_time_s,
    _set_group_id,
    _set_member,
    _set_attempt,
    _set_outcome,
    _set_reward,
    _set_generated_tok,
    _set_oldest_version,
    _set_newest_version,
    _set_pairs,
) = [getattr(MemberEnded, slot.name).__set__ for slot in fields(MemberEnded)]

Pairs = tuple[tuple[int, int], ...]
"""(policy_version, tokens), ascending."""


class EpisodeLike(Protocol):
    """One rollout with tools, a sandbox or a failure."""

    @property
    def turn_tok(self) -> Sequence[int]:
        """Sampled tokens of each model call."""
        ...

    @property
    def tool_tok(self) -> Sequence[int]:
        """Tokens that the tool after each call but the last adds to the context."""
        ...

    @property
    def tool_s(self) -> Sequence[float]: ...
    @property
    def start_s(self) -> float:
        """From having a sandbox to the first model call."""
        ...

    @property
    def grade_s(self) -> float: ...
    @property
    def fails(self) -> bool:
        """Infrastructure loses it half-way."""
        ...


class DrawsLike(Protocol):
    """Everything random about rollouts, a function of (ordinal, attempt) and not of the order of calls."""

    def lengths(self, ordinal: int, attempt: int = 0) -> Sequence[int]:
        """Sampled tokens of each member, at least 1."""
        ...

    def prompt_tok(self, ordinal: int) -> int: ...

    def rewards(self, ordinal: int, attempt: int = 0) -> Sequence[float]: ...

    def episode(self, ordinal: int, member: int, attempt: int = 0) -> EpisodeLike | None:
        """None for every member of every group when rollouts are single calls without environment."""
        ...


class SimGroup:
    """A group from its admission until it was trained or ended otherwise."""

    __slots__ = (
        "ended_s",
        "group_id",
        "ordinal",
        "plain",
        "prefill_cost",
        "prefill_s",
        "prompt_tok",
        "rewards",
        "rollouts",
        "started_s",
        "tok",
        "tok2",
        "versions",
    )

    def __init__(
        self, *, group_id: str, ordinal: int, prompt_tok: int, rewards: Sequence[float], started_s: float
    ) -> None:
        self.group_id = group_id
        self.ordinal = ordinal
        self.prompt_tok = prompt_tok
        self.rewards = rewards
        self.started_s = started_s
        self.ended_s = started_s
        """When its newest member ended."""
        self.rollouts: list[SimRollout] = []
        """Running attempt of each member."""
        self.tok = 0
        """Context tokens of scored members, prompts included."""
        self.tok2 = 0
        """Sum of their squares."""
        self.versions: list[tuple[int, int]] = []
        """(oldest, newest) version of each scored member."""
        self.plain = False
        """No member has an episode."""
        self.prefill_cost: object = None
        self.prefill_s = 0.0
        """Seconds of its prompt on engines with that cost: asked for once per member, computed once."""


class SimRollout:
    """One attempt of one member."""

    __slots__ = (
        "attempt",
        "context_tok",
        "engine",
        "episode",
        "from_tok",
        "group",
        "left_tok",
        "member",
        "pairs",
        "parked",
        "place",
        "sampled_tok",
        "serial",
        "started_s",
        "turn",
        "uncached_tok",
    )

    def __init__(self, group: SimGroup, member: int, attempt: int, left_tok: int, started_s: float) -> None:
        self.group = group
        self.member = member
        self.attempt = attempt
        self.started_s = started_s
        self.left_tok = left_tok
        """Still to be sampled in this turn, as of the last time that it joined or left an engine."""
        self.context_tok = group.prompt_tok
        """Prompt, tool and sampled tokens, as of then."""
        self.uncached_tok = 0
        """Context besides the prompt that no engine holds KV entries for."""
        self.engine: Engine | None = None
        """Where it runs, queues or has parked its KV entries."""
        self.serial = -1
        """Number of its seat in the engine; the newest is the highest."""
        self.from_tok = 0
        """The engine's token counter when it joined."""
        self.pairs: Pairs = ()
        """Sampled before it joined."""
        self.sampled_tok = 0
        """Sum of `pairs`."""
        self.episode: EpisodeLike | None = None
        self.turn = 0
        self.place = "outside"
        """running or queued in `engine`, outside (in a tool, grading, not started), or ended."""
        self.parked = False
        """`engine` keeps its KV entries while it is outside or queued."""

    @property
    def has_more_turns(self) -> bool:
        """Another model call follows the one of `turn`."""
        return self.episode is not None and self.turn + 1 < len(self.episode.turn_tok)


def add_pairs(left: Pairs, right: Pairs) -> Pairs:
    """Tokens by version of two parts of a rollout."""
    if not left:
        return right
    tok = dict(left)
    for version, count in right:
        tok[version] = tok.get(version, 0) + count
    return tuple(sorted(tok.items()))


def member_ended(
    time_s: float, rollout: SimRollout, outcome: Outcome, reward: float | None, generated_tok: int
) -> MemberEnded:
    """What loop/pipeline.py would report of it.

    The slots are set one by one: the constructor of a frozen dataclass alone takes a fifth of a simulation's time.
    """
    pairs = rollout.pairs
    oldest, newest = (pairs[0][0], pairs[-1][0]) if pairs else (None, None)
    event = _new(MemberEnded)
    _set_time_s(event, time_s)
    _set_group_id(event, rollout.group.group_id)
    _set_member(event, rollout.member)
    _set_attempt(event, rollout.attempt)
    _set_outcome(event, outcome)
    _set_reward(event, reward)
    _set_generated_tok(event, generated_tok)
    _set_oldest_version(event, oldest)
    _set_newest_version(event, newest)
    _set_pairs(event, pairs)
    return event


class Cut:
    """The part of an episode that was played when its infrastructure failed: half of its tokens."""

    __slots__ = ("fails", "grade_s", "start_s", "tool_s", "tool_tok", "turn_tok")

    def __init__(self, episode: EpisodeLike) -> None:
        left_tok = max(1, sum(episode.turn_tok) // 2)
        turn_tok: list[int] = []
        for tok in episode.turn_tok:
            turn_tok.append(min(tok, left_tok))
            left_tok -= turn_tok[-1]
            if left_tok == 0:
                break
        self.turn_tok: Sequence[int] = tuple(turn_tok)
        self.tool_tok = episode.tool_tok
        self.tool_s = episode.tool_s
        self.start_s = episode.start_s
        self.grade_s = 0.0
        self.fails = True


def check_fits(group: SimGroup, sampled_tok: int, tool_tok: int, capacity_tok: int) -> None:
    """PlanError when not even an empty engine could hold this rollout to its end."""
    need_tok = group.prompt_tok + sampled_tok + tool_tok
    if need_tok > capacity_tok:
        raise PlanError(
            f"a rollout of {need_tok:,} tokens (prompt {group.prompt_tok:,}, sampled {sampled_tok:,}, tools "
            f"{tool_tok:,}) does not fit into the {capacity_tok:,} KV tokens of one engine: raise gen_tp or "
            "cluster.mem_frac, or lower response.cap_tok"
        )
