"""Frozen carriers that cross seams. Keyword-only, slotted, no behaviour beyond derived numbers.

Dimension letters: T tokens of one sequence, N tokens of one completion.
Token arrays are NumPy so that they travel between processes without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Outcome(StrEnum):
    """How one rollout ended. Only `ok` and `policy_fail` train; the others are never scored as 0."""

    OK = "ok"
    POLICY_FAIL = "policy_fail"
    INFRA_FAIL = "infra_fail"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def trains(self) -> bool:
        return self in (Outcome.OK, Outcome.POLICY_FAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task instance."""

    id: str
    """Stable over runs and resumes; unique in its data set."""
    messages: tuple[Message, ...]
    answer: str = ""
    """Gold answer as text, for rewards that compare; empty if there is none."""
    task: str = ""
    """Which task source or family it came from (for reports by task)."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data set's own row, passed to the user's reward untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One definition of the sampled distribution, shared by engine and trainer.

    Log-probs are those of the distribution actually sampled: logits / temperature, softmax over the full
    vocabulary. With top_p < 1 or top_k > 0 the kept set is renormalised and ratios are biased by the kept mass;
    training refuses that (`config`), evaluation may use it.
    """

    temperature: float = 1.0
    """0 means greedy; then log-probs are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    max_new_tok: int = 64
    stop: tuple[str, ...] = ()
    """Stop strings; the completion ends with the token that completes one (it is kept)."""
    stop_ids: tuple[int, ...] = ()
    """Stop token ids, beside the model's own end ids; the stop token is kept."""
    seed: int = 0
    """With the same weights, prompt and seed the same tokens come out, whatever else runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of completion tokens [start, stop) that were sampled under the same versions."""

    start: int
    stop: int
    policy_version: int
    """Version whose weights computed the distribution these tokens were sampled from."""
    kv_version: int
    """Oldest version with which any KV entry that these tokens attended to was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRequest:
    """One model call."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    group_id: str = ""
    """Requests of one group share the KV of their common prompt."""
    min_version: int = 0
    """The engine refuses to start the request under older weights."""
    exact_version: int | None = None
    """The engine refuses to start the request under any other weights. Only the start is pinned: see the spans."""

    def refusal(self, served: int) -> str:
        """Why an engine that serves this version must not start the request, or empty."""
        if served < self.min_version:
            return f"the engine serves v{served}, the request wants >= v{self.min_version}"
        if self.exact_version is not None and served != self.exact_version:
            return f"the engine serves v{served}, the request wants exactly v{self.exact_version}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine returns for one request. Ids are the only truth; text is for people and rewards."""

    request_id: str
    ids_N: IntArray
    logp_N: FloatArray
    """Natural-log probability of each sampled id under the distribution it was sampled from."""
    spans: tuple[Span, ...]
    """Cover [0, N) without gaps, versions never go down; empty if N = 0."""
    finish: FinishReason
    text: str
    """Decoded ids without special tokens and without the stop string."""
    error: str = ""
    queue_s: float = 0.0
    """Seconds between arrival at the engine and the first decode step."""
    gen_s: float = 0.0
    """Seconds between the first decode step and the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call inside a rollout: exact ids in, exact ids out."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    env_version: int
    """Oldest policy_version among the actions that made the state this turn saw (own start if none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode of one prompt."""

    group_id: str
    member: int
    attempt: int
    outcome: Outcome
    reward: float | None
    """None exactly when the outcome does not train."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """The conversation as people read it."""
    error: str = ""
    """Traceback or reason when the outcome does not train (or why the policy failed)."""
    gen_s: float = 0.0
    env_s: float = 0.0
    grade_s: float = 0.0

    @property
    def text(self) -> str:
        """Text of the last completion: what most rewards look at."""
        return self.turns[-1].completion.text if self.turns else ""

    @property
    def generated_tok(self) -> int:
        return sum(len(t.completion.ids_N) for t in self.turns)

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy_version of any sampled token; None if no token was sampled."""
        versions = [s.policy_version for t in self.turns for s in t.completion.spans]
        return min(versions) if versions else None

    @property
    def newest_version(self) -> int | None:
        versions = [s.policy_version for t in self.turns for s in t.completion.spans]
        return max(versions) if versions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable token sequence. All arrays have length T; entries outside the loss mask are meaningless."""

    group_id: str
    member: int
    ids_T: IntArray
    loss_mask_T: BoolArray
    """True on tokens that the policy sampled (and that are not masked as stale)."""
    logp_T: FloatArray
    """logp_T[t] is the engine's log-prob of ids_T[t] (NOT shifted)."""
    policy_version_T: IntArray
    kv_version_T: IntArray
    env_version_T: IntArray
    reward: float
    prompt_tok: int
    """Length of the first prompt: tokens that all members of a group share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All scored rollouts of one prompt attempt, as samples ready for the trainer."""

    group_id: str
    prompt: Prompt
    samples: tuple[Sample, ...]
    """Scored members only, ordered by member; a multi-turn rollout may give more than one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the trainer takes for one optimizer step."""

    version: int
    """Trainer's version when the batch was taken; training it makes version + 1."""
    groups: tuple[Group, ...]
    """Exactly flow.batch_groups of them, oldest admission first."""
    temperature: float
    """Temperature of the sampled distribution; the trainer divides logits by the same number."""
    masked_stale_tok: int = 0

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(s for g in self.groups for s in g.samples)

    @property
    def trained_tok(self) -> int:
        return int(sum(int(s.loss_mask_T.sum()) for s in self.samples))
