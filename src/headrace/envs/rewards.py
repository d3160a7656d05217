"""Built-in rewards: plain functions (rollout, prompt) -> float that travel to grading workers by name.

All look at the text of the last completion and the prompt's gold answer. They import nothing heavy.
"""

from __future__ import annotations

import math
import re
from typing import Final

from headrace.envs.env import RewardFn
from headrace.errors import ConfigError, did_you_mean
from headrace.records import Prompt, Rollout

NUMBER: Final = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")
_MARKED: Final = (
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"(?:final answer|answer)\s*(?:is)?\s*[:=]\s*([^\n]+)", re.IGNORECASE),
)
_WHOLE: Final = re.compile(r"[-+]?\d{1,4000}")
ABS_TOLERANCE: Final = 1e-6
REL_TOLERANCE: Final = 1e-6


def final_answer(text: str) -> str:
    r"""The part of `text` that states the answer: last <answer>..</answer>, else \boxed{..}, else what follows the
    last "answer:", else all of it; white space at the ends and one full stop removed.

    >>> final_answer("Let me see. The answer is: 42.")
    '42'
    """
    for pattern in _MARKED:
        found = pattern.findall(text)
        if found:
            text = str(found[-1])
            break
    return text.strip().removesuffix(".").strip()


def last_number(text: str) -> str | None:
    """The last number in `text` as digits, or None. Thousands separators go, a typographic minus becomes "-".

    >>> last_number("3 + 4 = 1,007.")
    '1007'
    """
    found = NUMBER.findall(text)
    return str(found[-1]).replace(",", "").replace("\u2212", "-").removeprefix("+") if found else None


def same_number(left: str, right: str) -> bool:
    """Whole numbers: equal. Others: close (ABS_TOLERANCE, REL_TOLERANCE). False unless both are finite numbers."""
    if _WHOLE.fullmatch(left) and _WHOLE.fullmatch(right):
        return int(left) == int(right)  # a relative tolerance would take 999999 for 1000000
    try:
        a, b = float(left), float(right)
    except ValueError:
        return False
    return math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=REL_TOLERANCE, abs_tol=ABS_TOLERANCE)


def exact(rollout: Rollout, prompt: Prompt) -> float:
    """1.0 if the stated answer equals the gold answer, white space at the ends aside."""
    return float(final_answer(rollout.text) == prompt.answer.strip())


def numeric(rollout: Rollout, prompt: Prompt) -> float:
    """1.0 if the last number in the text equals the (last number in the) gold answer, within tolerance."""
    gold, said = last_number(prompt.answer), last_number(rollout.text)
    if gold is None:
        raise ConfigError(f"reward 'numeric': the gold answer {prompt.answer!r} of prompt {prompt.id!r} has no number")
    return float(said is not None and same_number(said, gold))


def contains(rollout: Rollout, prompt: Prompt) -> float:
    """1.0 if the gold answer occurs in the text as whole words, upper and lower case alike."""
    gold = prompt.answer.strip()
    if not gold:
        raise ConfigError(f"reward 'contains': prompt {prompt.id!r} has no gold answer")
    return float(re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", rollout.text, re.IGNORECASE) is not None)


BUILT_IN: Final[dict[str, RewardFn]] = {"exact": exact, "numeric": numeric, "contains": contains}


def built_in(name: str) -> RewardFn:
    """The built-in reward of that name; ConfigError with the nearest names."""
    if name not in BUILT_IN:
        raise ConfigError(
            f"env.reward = {name!r} is neither 'module:function' nor built in; " + did_you_mean(name, BUILT_IN)
        )
    return BUILT_IN[name]
