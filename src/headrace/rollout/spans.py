"""From the versions of single tokens to spans."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.records import Span


def spans_of(versions: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
    """Runs of equal (policy_version, kv_version), one pair for each token, as spans that cover [0, N).

    >>> [(s.start, s.stop, s.policy_version, s.kv_version) for s in spans_of([(1, 1), (1, 1), (2, 1)])]
    [(0, 2, 1, 1), (2, 3, 2, 1)]
    """
    spans: list[Span] = []
    start = 0
    for stop in range(1, len(versions) + 1):
        if stop == len(versions) or versions[stop] != versions[start]:
            policy, kv = versions[start]
            spans.append(Span(start=start, stop=stop, policy_version=policy, kv_version=kv))
            start = stop
    return tuple(spans)
