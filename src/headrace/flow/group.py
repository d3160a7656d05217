"""One prompt attempt: `LiveGroup` while something can still happen to it; `Row`, its frozen picture for the journal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from headrace.errors import FlowError
from headrace.flow.events import Bucket, MemberEnded

State = Literal["running", "completed", "taken", "final"]
ENDED = -1
"""In `LiveGroup.running_attempt`: this member does not run any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt attempt, as the journal keeps it. Tokens: generated = trained + masked + wasted + alive."""

    group_id: str
    ordinal: int
    attempt: int
    prompt_index: int
    admitted_version: int
    """Version that was landed at admission: no token is older."""
    state: State
    bucket: Bucket | None
    """None exactly while the state is not final."""
    oldest_version: int | None
    """Of any token of a scored member; None while there is none."""
    newest_version: int | None
    taken_version: int | None
    """Trainer's version when the group was put into a batch."""
    rewards: tuple[float, ...]
    """Of the scored members, in order of members."""
    generated_tok: int
    trained_tok: int
    masked_tok: int
    wasted: tuple[tuple[str, int], ...]
    """(reason, tokens); one group can waste for several reasons."""
    tok_by_version: tuple[tuple[int, int], ...]
    """(policy_version, tokens) of the scored members, ascending."""
    mean_response_tok: float
    """Sampled tokens per scored member; 0 while there is none."""

    @property
    def wasted_tok(self) -> int:
        return sum(tok for _, tok in self.wasted)

    @property
    def wasted_reason(self) -> str:
        """The reason that wasted most; empty if nothing was wasted."""
        return max(self.wasted, key=lambda pair: pair[1])[0] if self.wasted else ""

    @property
    def alive_tok(self) -> int:
        """Tokens whose fate is open; 0 once the row is final."""
        return self.generated_tok - self.trained_tok - self.masked_tok - self.wasted_tok

    @property
    def sampled_version(self) -> int:
        """Newest version that can have taken part in this attempt."""
        return self.admitted_version if self.newest_version is None else self.newest_version

    @property
    def oldest_or_admitted(self) -> int:
        """Oldest version of any token; the admission's while there is none."""
        return self.admitted_version if self.oldest_version is None else self.oldest_version

    def voided(self) -> Row:
        """This attempt after a restart that lost it: whatever was not wasted before is wasted now."""
        lost_tok = self.generated_tok - self.wasted_tok
        wasted = dict(self.wasted)
        if lost_tok:
            wasted["wasted_restart"] = wasted.get("wasted_restart", 0) + lost_tok
        return replace(
            self, state="final", bucket="unfinished", trained_tok=0, masked_tok=0, wasted=tuple(wasted.items())
        )


class LiveGroup:
    """The mutable record of one prompt attempt. Only Ledger changes token counts, only Controller the rest."""

    __slots__ = (
        "admitted_version",
        "attempt",
        "bucket",
        "deadline",
        "generated_tok",
        "group_id",
        "infra_fails",
        "masked_tok",
        "newest_version",
        "oldest_version",
        "ordinal",
        "pending",
        "prompt_index",
        "rewards",
        "running_attempt",
        "scored_tok",
        "state",
        "taken_version",
        "timeouts",
        "tok_by_version",
        "trained_tok",
        "wasted",
    )

    def __init__(
        self, *, group_id: str, ordinal: int, attempt: int, prompt_index: int, version: int, deadline: int, members: int
    ) -> None:
        self.group_id = group_id
        self.ordinal = ordinal
        self.attempt = attempt
        self.prompt_index = prompt_index
        self.admitted_version = version
        self.deadline = deadline
        """Last trainer version at which a batch may still take this group within the lag bound."""
        self.state: State = "running"
        self.bucket: Bucket | None = None
        self.running_attempt = [0] * members
        """Per member: number of the attempt that runs, or ENDED."""
        self.pending = members
        """Members that still run."""
        self.rewards: list[float | None] = [None] * members
        self.infra_fails = 0
        self.timeouts = 0
        self.oldest_version: int | None = None
        self.newest_version: int | None = None
        self.taken_version: int | None = None
        self.generated_tok = 0
        self.scored_tok = 0
        """Tokens of scored members: alive until the group is final."""
        self.trained_tok = 0
        self.masked_tok = 0
        self.wasted: dict[str, int] = {}
        self.tok_by_version: dict[int, int] = {}

    @classmethod
    def from_row(cls, row: Row, *, deadline: int) -> LiveGroup:
        """A completed group from its row: what a restart salvages."""
        group = cls(
            group_id=row.group_id,
            ordinal=row.ordinal,
            attempt=row.attempt,
            prompt_index=row.prompt_index,
            version=row.admitted_version,
            deadline=deadline,
            members=0,
        )
        group.state = "completed"
        group.rewards = list(row.rewards)
        group.oldest_version = row.oldest_version
        group.newest_version = row.newest_version
        group.generated_tok = row.generated_tok
        group.scored_tok = row.generated_tok - row.wasted_tok
        group.wasted = dict(row.wasted)
        group.tok_by_version = dict(row.tok_by_version)
        return group

    @property
    def scored(self) -> tuple[float, ...]:
        """Rewards of the scored members, in order of members."""
        return tuple([r for r in self.rewards if r is not None])

    @property
    def oldest(self) -> int:
        """Oldest version of any token; the admission's while nothing says better."""
        return self.admitted_version if self.oldest_version is None else self.oldest_version

    @property
    def alive_tok(self) -> int:
        return 0 if self.state == "final" else self.scored_tok

    def only_older_than(self, version: int) -> bool:
        """There are scored tokens, and none of them is of `version` or newer."""
        return bool(self.tok_by_version) and max(self.tok_by_version) < version

    def row(self) -> Row:
        scored = self.scored
        return Row(
            group_id=self.group_id,
            ordinal=self.ordinal,
            attempt=self.attempt,
            prompt_index=self.prompt_index,
            admitted_version=self.admitted_version,
            state=self.state,
            bucket=self.bucket,
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            taken_version=self.taken_version,
            rewards=scored,
            generated_tok=self.generated_tok,
            trained_tok=self.trained_tok,
            masked_tok=self.masked_tok,
            wasted=tuple(self.wasted.items()),
            tok_by_version=tuple(sorted(self.tok_by_version.items())),
            mean_response_tok=self.scored_tok / len(scored) if scored else 0.0,
        )


def end_member(group: LiveGroup, event: MemberEnded) -> None:
    """Mark the member as ended. Raises FlowError unless exactly this attempt of it was running."""
    member = event.member
    if not 0 <= member < len(group.running_attempt):
        raise FlowError(f"{event}: group {group.group_id} has members 0 to {len(group.running_attempt) - 1}")
    attempt = group.running_attempt[member]
    if attempt != event.attempt:
        now = "has already ended" if attempt == ENDED else f"is at attempt {attempt}"
        raise FlowError(f"{event}: member {member} of group {group.group_id} {now}")
    group.running_attempt[member] = ENDED
    group.pending -= 1
