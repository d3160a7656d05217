"""Rewards to copy from. Use one as `env.reward = "rewards:short_and_right"` in a recipe beside this file.

A reward gets the finished rollout and its prompt, and returns a number, a bool, or a dict of numbers whose "reward"
(or else the sum) counts; the other entries appear in reports. It runs in a process of its own, with a deadline. An
exception, a missing number or a crash is a failure that is retried, never a reward of 0.
"""

from __future__ import annotations

import json

from headrace.envs.rewards import numeric
from headrace.records import Prompt, Rollout

SHORT_CHARS = 40


def short_and_right(rollout: Rollout, prompt: Prompt) -> dict[str, float]:
    """The right number, and up to 0.1 more for saying it briefly."""
    right = numeric(rollout, prompt)
    brief = min(1.0, SHORT_CHARS / max(1, len(rollout.text)))
    return {"reward": right + 0.1 * right * brief, "right": right, "brief": brief}


def valid_json(rollout: Rollout, prompt: Prompt) -> float:
    """1.0 for a JSON object whose "answer" is the gold answer."""
    try:
        said = json.loads(rollout.text)
    except ValueError:
        return 0.0
    return float(isinstance(said, dict) and str(said.get("answer")) == prompt.answer)


async def graded_by_a_service(rollout: Rollout, prompt: Prompt) -> float:
    """Async rewards work too: await your own service here. This one compares the first word."""
    words = rollout.text.split()
    return float(bool(words) and words[0] == prompt.answer)
