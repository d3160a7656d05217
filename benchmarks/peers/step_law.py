"""The cost law and the requests that both simulators are given, as benchmarks/planner.py writes them.

The arguments file of vidur_sim.py and sched_sim_fcfs.py is one JSON object:

    response_tok       list; tokens that each request samples, in the order of arrival (all arrive at once)
    prompt_tok         tokens of every prompt
    prefill_s          seconds that a prompt costs, on average over the requests
    max_running        sequences decoded at once at most
    kv_capacity_tok    context tokens that fit
    decode             mem_s, flop_s, other_s (lists by running sequences), mem_s_per_tok, flop_s_per_tok, p:
                       a step of b sequences with S context tokens takes
                       smoothmax_p(mem_s[b] + S * mem_s_per_tok, flop_s[b] + S * flop_s_per_tok) + other_s[b]
    kv_bytes_per_tok   bytes of a context token's KV entries

Only the standard library: this runs in an environment without Headrace.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = ("response_tok", "prompt_tok", "prefill_s", "max_running", "kv_capacity_tok", "decode", "kv_bytes_per_tok")


@dataclass(frozen=True)
class StepLaw:
    """Seconds of a decode step, one formula per call: no dearer than the table look-ups that it replaces."""

    mem_s: list[float]
    flop_s: list[float]
    other_s: list[float]
    mem_s_per_tok: float
    flop_s_per_tok: float
    p: float

    def decode_s(self, running: int, context_tok: int) -> float:
        """One decode step of `running` sequences with `context_tok` tokens of context in all."""
        high = self.mem_s[running] + context_tok * self.mem_s_per_tok
        low = self.flop_s[running] + context_tok * self.flop_s_per_tok
        if low > high:
            high, low = low, high
        return float(high * (1.0 + (low / high) ** self.p) ** (1.0 / self.p)) + self.other_s[running]


def read_arguments() -> tuple[dict[str, Any], StepLaw]:
    """Of the command line; exits with a sentence on a wrong key."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {Path(sys.argv[0]).name} arguments.json")
    path = Path(sys.argv[1])
    given = json.loads(path.read_text())
    unknown = sorted(set(given) - set(KEYS))
    missing = [key for key in KEYS if key not in given]
    if unknown or missing:
        sys.exit(f"{path}: unknown keys {unknown}, missing keys {missing}")
    return given, StepLaw(**given["decode"])


def report(peer: str, version: str, args: dict[str, Any], *, sim_s: float, makespan_s: float, preemptions: int) -> None:
    """Print the last line: `sim_s` is what the simulation took, `makespan_s` what it found."""
    result = {
        "peer": peer,
        "version": version,
        "sim_s": round(sim_s, 4),
        "sequences_per_s": len(args["response_tok"]) / sim_s,
        "makespan_s": makespan_s,
        "preemptions": preemptions,
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")
