"""Ids to text, and stop strings that may span tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headrace.errors import DataError, boundary

_SLACK_TOK = 8
"""Tokens without text (special ones, parts of a character) that may lie between the characters of a stop string."""


class Detokenizer:
    """Decodes completions with the tokenizer of a model folder; without one, text is empty."""

    def __init__(self, model_dir: str) -> None:
        self._tokenizer: Any = None
        if any((Path(model_dir) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            with boundary(DataError, f"loading the tokenizer in {model_dir}"):
                self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def stops(self, ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the text of `ids` ends in the token that completes one of the stop strings.

        Looks at the last tokens only: each token but a few has at least one byte, a character at most four.
        """
        reach = 4 * max(len(s) for s in stop) + _SLACK_TOK
        tail = self.decode(ids[-reach:])
        return any(s in tail for s in stop)

    def text(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """Text without special tokens, cut before the first stop string."""
        text = self.decode(ids)
        cuts = [at for at in (text.find(s) for s in stop if s) if at >= 0]
        return text[: min(cuts)] if cuts else text
