"""What goes into the controller and what comes out. Plain data: a run's log of events replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.records import Outcome

Bucket = Literal[
    "trained",
    "filtered_zero_signal",
    "dropped_stale",
    "cancelled_oversample",
    "failed_infra",
    "failed_timeout",
    "quarantined",
    "unfinished",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened at `time_s` (seconds of the run's clock; never goes backwards)."""

    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """Weights of `version` are served and the trainer holds the same: admission may begin."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnded(Event):
    """One rollout of a group ended, graded."""

    group_id: str
    member: int
    attempt: int
    """Of this member: 0 first, +1 for each RetryMember."""
    outcome: Outcome
    reward: float | None
    generated_tok: int
    oldest_version: int | None
    newest_version: int | None
    stale_tok_by_version: tuple[tuple[int, int], ...] = ()
    """(policy_version, tokens) pairs of what was sampled, ascending; used to count masked tokens in `carry`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWanted(Event):
    """The trainer is idle and asks for a batch. Repeating it while one is wanted changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(Event):
    """The optimizer step on the taken batch is done and `version` is published (not yet landed)."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed(Event):
    """Every replica serves `version`."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnding(Event):
    """No more admissions; alive groups end as `unfinished`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """Start all members of a group on this prompt."""

    group_id: str
    ordinal: int
    """Number of the admission within the run, from 0; with the member it seeds sampling."""
    attempt: int
    """0, or how often this prompt attempt was restarted after a crash."""
    prompt_index: int
    version: int
    """Version that was landed at admission: no token of the group is older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryMember:
    """Start one member again on fresh resources."""

    group_id: str
    member: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelGroup:
    """Stop what still runs of it; its bucket is final. Late MemberEnded events of it are ignored (tokens counted)."""

    group_id: str
    bucket: Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBatch:
    """Train on exactly these groups, oldest admission first."""

    version: int
    """Trainer's version now; training makes version + 1."""
    group_ids: tuple[str, ...]
    mask_below_version: int
    """Tokens with an older policy_version are masked out of the loss (only `carry` makes any)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapWeights:
    """Replicas shall serve this published version now."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The controller cannot go on."""

    reason: str


Decision = StartGroup | RetryMember | CancelGroup | TakeBatch | SwapWeights | Stop
