"""Prompt sets: fingerprints, and a split by content that cannot leak."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from headrace.records import Message, Prompt


def fingerprint(train: Iterable[Prompt], held_out: Iterable[Prompt]) -> str:
    """Content hash (hex) of both prompt sets: ids, messages and gold answers, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, prompts in (("train", train), ("eval", held_out)):
        digest.update(f"\x00{name}\x00".encode())
        for prompt in prompts:
            for text in (prompt.id, prompt.answer, *(f"{m.role}\x00{m.content}" for m in prompt.messages)):
                digest.update(len(text).to_bytes(8, "big") + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def question_key(prompt: Prompt) -> str:
    """Equal for prompts that ask the same thing: case and white space aside."""
    return "\x00".join(" ".join(m.content.split()).casefold() for m in prompt.messages)


def derived_seed(*parts: object) -> int:
    """A seed in [0, 2**31) from any values: blake2b of their text. Streams of seed and seed + 1 would overlap."""
    text = "\x00".join(str(p) for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 2**31


def split_by_content(prompts: Sequence[Prompt], *, held_out: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, eval): `held_out` distinct questions, chosen by hash of their content, and everything that asks
    something else. Adding prompts to a data set moves few others between the sets."""
    by_key: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_key.setdefault(question_key(prompt), []).append(prompt)
    chosen = set(sorted(by_key, key=lambda key: (derived_seed(seed, "split", key), key))[:held_out])
    train = [p for p in prompts if question_key(p) not in chosen]
    return train, [by_key[key][0] for key in by_key if key in chosen]


def with_system(system: str, content: str) -> tuple[Message, ...]:
    """A user message, after a system message if `system` is not empty."""
    head = (Message(role="system", content=system),) if system else ()
    return (*head, Message(role="user", content=content))
