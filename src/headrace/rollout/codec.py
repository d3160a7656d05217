"""The seam between conversations and token ids, and the codec of runs without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.records import Completion, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """The prompt of a later turn."""

    ids: tuple[int, ...]
    branched: bool
    """The template rewrote history: `ids` is a fresh rendering and does not begin with what was sampled."""


class Codec(Protocol):
    """Messages to prompt ids. `rollout/chat.py` has the one for real tokenizers."""

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt ids of a conversation, ready for the policy to answer."""
        ...

    def extend(
        self,
        prev_prompt_ids: Sequence[int],
        completion: Completion,
        history_messages: Sequence[Message],
        new_messages: Sequence[Message],
    ) -> Extended:
        """Prompt ids of the next turn: the previous prompt, the sampled ids exactly, then `new_messages`."""
        ...

    def said(self, text: str) -> tuple[int, ...]:
        """Ids that a policy would sample if it said `text` and ended its turn: for rehearsals, never for training."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included: for people, never to be encoded again."""
        ...


class ByteCodec:
    """UTF-8 bytes as ids, one line per message: for scripted engines, which have no tokenizer."""

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple("".join(f"{m.role}: {m.content}\n" for m in messages).encode())

    def extend(
        self,
        prev_prompt_ids: Sequence[int],
        completion: Completion,
        history_messages: Sequence[Message],
        new_messages: Sequence[Message],
    ) -> Extended:
        ids = (*prev_prompt_ids, *completion.ids_N.tolist(), *b"\n", *self.first(new_messages))
        return Extended(ids=ids, branched=False)

    def said(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")
