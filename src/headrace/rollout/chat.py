"""Token-exact conversations: ids from the engine are the only truth and are never decoded and encoded again.

    turn 1   first(messages)                  the chat template's rendering, encoded once
    turn t   previous prompt ids + sampled ids + ONE encoding of what the template puts between
             (end of turn, the environment's messages, generation prompt)

What goes between is found by rendering the conversation with a dummy in place of the sampled text and splitting at it.
If a template rewrites history (strips earlier thinking, inserts blocks), the next prompt is no extension of what was
sampled: the codec then *branches*, i.e. encodes a fresh rendering and says so; stitching starts a new sample there.
White space that a template trims or adds in assistant messages is no reason to branch: the sampled ids stand.

Without a chat template a conversation is its messages' contents joined by blank lines, after the tokenizer's own
begin token if it adds one.

A codec belongs to one thread (fast tokenizers cannot be shared by threads); headrace uses it from the asyncio thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from transformers import AutoTokenizer

from headrace.errors import DataError, boundary
from headrace.records import Completion, Message
from headrace.rollout.codec import Extended

DUMMY: Final = "Zq7dummyq7Z"
SEPARATOR: Final = "\n\n"


class ChatCodec:
    """Messages to prompt ids, for one model and one system prompt."""

    def __init__(self, model_dir: Path | str, *, system_prompt: str | None = None) -> None:
        """Load the tokenizer of a model folder in Hugging Face layout; DataError if there is none.

        `system_prompt` is used where a conversation has no system message of its own; "" removes the default one that
        the template would insert; None leaves everything to the template.
        """
        with boundary(DataError, f"loading the tokenizer of {model_dir}"):
            tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        self._init(tokenizer, system_prompt)

    @classmethod
    def of(cls, tokenizer: Any, *, system_prompt: str | None = None) -> Self:
        """A codec over a tokenizer that is loaded already (transformers fast tokenizer)."""
        codec = cls.__new__(cls)
        codec._init(tokenizer, system_prompt)
        return codec

    def _init(self, tokenizer: Any, system_prompt: str | None) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self.branches = 0
        """How often a template rewrote history since the start."""

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt ids of a conversation, with the generation prompt. DataError if the template refuses it."""
        ids = self._encode(self.render(messages), begin=not self._has_template)
        if not ids:
            raise DataError(
                f"a conversation of {len(messages)} messages renders to no tokens: nothing to generate from"
            )
        return ids

    def extend(
        self,
        prev_prompt_ids: Sequence[int],
        completion: Completion,
        history_messages: Sequence[Message],
        new_messages: Sequence[Message],
    ) -> Extended:
        """Prompt ids of the next turn.

        `history_messages` is the conversation that `prev_prompt_ids` came from (without the completion);
        `new_messages` is what the environment answered. DataError if the template refuses the conversation.
        """
        history, new = list(history_messages), list(new_messages)
        said = [*history, Message(role="assistant", content=completion.text), *new]
        between = self._between(history, new, completion.text)
        if between is None:
            self.branches += 1
            return Extended(ids=self.first(said), branched=True)
        suffix = self._encode_after_text(between)
        sampled = tuple(int(i) for i in completion.ids_N)
        if sampled and suffix and sampled[-1] == suffix[0] and suffix[0] in self._special_ids:
            suffix = suffix[1:]  # the policy sampled the end of its turn itself
        return Extended(ids=(*prev_prompt_ids, *sampled, *suffix), branched=False)

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        """The text behind prompt ids; ends with the template's generation prompt if `generate`."""
        chat = [{"role": m.role, "content": m.content} for m in messages]
        if not self._has_template:
            if self._system_prompt and not (chat and chat[0]["role"] == "system"):
                chat.insert(0, {"role": "system", "content": self._system_prompt})
            return SEPARATOR.join(m["content"] for m in chat) + (SEPARATOR if generate else "")
        if self._system_prompt is None or (chat and chat[0]["role"] == "system"):
            return self._apply(chat, generate)
        if self._system_prompt:
            return self._apply([{"role": "system", "content": self._system_prompt}, *chat], generate)
        return self._without_system(chat, generate)

    def said(self, text: str) -> tuple[int, ...]:
        """Ids of `text` and the tokenizer's end token, as a policy would sample them."""
        end = self._tokenizer.eos_token_id
        return (*self._encode_after_text(text), *(() if end is None else (int(end),)))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included: for people, never to be encoded again."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _between(self, history: list[Message], new: list[Message], text: str) -> str | None:
        """What the template puts after the assistant's text, or None if it rewrites history."""
        before = self.render(history)
        dummy = self.render([*history, Message(role="assistant", content=DUMMY), *new])
        if not dummy.startswith(before):
            return None
        space, found, between = dummy[len(before) :].partition(DUMMY)
        if not found or space.strip():
            return None
        real = self.render([*history, Message(role="assistant", content=text), *new])
        if len(real) < len(before) + len(between) or not real.startswith(before) or not real.endswith(between):
            return None
        kept = real[len(before) : len(real) - len(between)]
        return between if "".join(kept.split()) == "".join(text.split()) else None

    def _apply(self, chat: list[dict[str, str]], generate: bool) -> str:
        roles = ", ".join(m["role"] for m in chat)
        with boundary(DataError, f"the chat template refuses a conversation with roles {roles}"):
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate))

    def _without_system(self, chat: list[dict[str, str]], generate: bool) -> str:
        """Render without any system block: an empty one is rendered and cut, so that no default takes its place."""
        empty = {"role": "system", "content": ""}
        try:
            block, text = self._apply([empty], False), self._apply([empty, *chat], generate)
        except DataError:  # the template knows no system role, so it has no default either
            return self._apply(chat, generate)
        if not text.startswith(block):
            return self._apply(chat, generate)
        rest, begin = text[len(block) :], str(self._tokenizer.bos_token or "")
        return begin + rest if begin and block.startswith(begin) and not rest.startswith(begin) else rest

    def _encode(self, text: str, *, begin: bool = False) -> tuple[int, ...]:
        """Special tokens written in `text` are recognised; only `begin` adds the tokenizer's own."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=begin))

    def _encode_after_text(self, suffix: str) -> tuple[int, ...]:
        """Encode `suffix` as the continuation of text: what some tokenizers do to the start of a text (a space in
        front) must not happen. A suffix that begins with a special token is free of its context anyway."""
        ids = self._encode(suffix)
        if not suffix or (ids and ids[0] in self._special_ids):
            return ids
        anchor = self._encode(DUMMY)
        joined = self._encode(DUMMY + suffix)
        return joined[len(anchor) :] if joined[: len(anchor)] == anchor else ids
