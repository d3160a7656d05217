"""Which weights have to score which tokens, in which order, at which cost. Pure.

**What is exact.** A token's behaviour policy is not its version's weights alone: with weights that swap under a running
request and keys and values (KV) that are kept, it saw a prefix that older weights computed. Its log-prob is
reproduced by doing the same again:

    index                 0  1  2  3  4  5  6  7
    token                 p  p  p  a  b  c  d  e      policy_version of a b c: 4, of d e: 5; kv_version 4
    position computed by  4  4  4  4  4  5  5         d is predicted at position 5, by 5 on the KV of 0 to 4 under 4

An *era* is a run of tokens between two moments at which the whole prefix was computed anew: the start of a request, or
a swap that recomputes. `kv_version` names the weights that did it. A token whose era began under its own version needs
one ordinary forward pass with that version, whatever happened to its neighbours.

Where an era's beginning is masked (stale tokens that carry no loss), nothing says which versions computed its prefix:
its tokens are counted as *unknown* and not scored, rather than scored by something else.

Dimension letters: T tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.records import Sample

Places = tuple[int, ...]
"""Tokens of one sample by index, in order."""


@dataclass(frozen=True, slots=True)
class Block:
    """Positions [start, stop) of a sample, computed by one version."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Tokens [start, stop) of a sample that saw KV of several versions: blocks from position 0 to stop - 1."""

    sample: int
    blocks: tuple[Block, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What it takes to score one sample."""

    sample: int
    fresh: Mapping[int, Places]
    """Tokens that their version's weights score in one ordinary pass, by version."""
    replays: tuple[Replay, ...]
    now: Places
    """Tokens that the current weights have to score, too; none when their log-probs are known."""
    free: Places
    """Tokens whose version is the current one, when its log-probs are known: nothing to compute."""
    unknown_tok: int

    def forward_tok(self, current: int) -> int:
        """Positions that have to be computed."""
        last = {version: places[-1] for version, places in self.fresh.items()}
        if self.now:
            last[current] = max(last.get(current, 0), self.now[-1])
        return sum(last.values()) + sum(replay.stop - 1 for replay in self.replays)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPlan:
    """What is scored, and the order of versions."""

    needs: tuple[Needs, ...]
    """Of the samples chosen."""
    waves: tuple[tuple[Replay, ...], ...]
    """Replays whose KV exist at the same time. Each wave goes through its versions once, upwards."""
    forward_tok: int
    """Positions computed in all."""
    all_forward_tok: int
    """The same if every sample was scored."""
    current: int

    @property
    def passes(self) -> tuple[tuple[int, ...], ...]:
        """Versions to visit, wave by wave; what needs one version only is done in the first."""
        alone = {version for needs in self.needs for version in needs.fresh}
        alone |= {self.current for needs in self.needs if needs.now}
        found = []
        for number, wave in enumerate(self.waves or ((),)):
            versions = {block.version for replay in wave for block in replay.blocks}
            found.append(tuple(sorted(versions | alone if number == 0 else versions)))
        return tuple(found)

    @property
    def unknown_tok(self) -> int:
        return sum(needs.unknown_tok for needs in self.needs)


def plan_versions(
    samples: Sequence[Sample],
    *,
    current: int,
    now_known: bool,
    limit_tok: int | None,
    kv_limit_tok: int,
    seed: int,
    replays: bool = True,
) -> VersionPlan:
    """Choose samples and order versions.

    `limit_tok` bounds the positions computed (None: score all samples): samples are taken in a random order, the same
    for the same seed, until the next one would exceed it; only before the first is taken are larger ones passed over.
    `now_known`: the current weights' log-probs are there already, so that tokens of lag 0 cost nothing.
    `kv_limit_tok` bounds the positions whose KV wait for a later version (one longer replay goes alone).
    `replays = False` counts tokens that need one as unknown.
    """
    needs = [_needs(i, s, current, now_known, replays) for i, s in enumerate(samples) if s.loss_mask_T.any()]
    cost = {n.sample: n.forward_tok(current) for n in needs}
    chosen = needs
    if limit_tok is not None:
        chosen, used_tok = [], 0
        for index in np.random.default_rng(seed).permutation(len(needs)):
            need = needs[int(index)]
            if used_tok + cost[need.sample] > limit_tok:
                if chosen:
                    break
                continue
            chosen.append(need)
            used_tok += cost[need.sample]
        chosen.sort(key=lambda n: n.sample)
    return VersionPlan(
        needs=tuple(chosen),
        waves=_waves([replay for need in chosen for replay in need.replays], kv_limit_tok),
        forward_tok=sum(cost[n.sample] for n in chosen),
        all_forward_tok=sum(cost.values()),
        current=current,
    )


def _needs(index: int, sample: Sample, current: int, now_known: bool, may_replay: bool) -> Needs:
    policy_T, kv_T = sample.policy_version_T, sample.kv_version_T
    fresh: dict[int, list[int]] = {}
    replays: list[Replay] = []
    unknown_tok = 0
    for start, stop in _eras(sample.loss_mask_T, kv_T):
        kv, policy = int(kv_T[start]), policy_T[start:stop]
        if policy[0] != kv or kv < 0 or bool((np.diff(policy) < 0).any()):
            unknown_tok += stop - start
        elif policy[-1] == kv:
            fresh.setdefault(kv, []).extend(range(start, stop))
        elif may_replay:
            replays.append(Replay(index, _blocks(policy, start, stop), start, stop))
        else:
            unknown_tok += stop - start
    scored = sorted(
        [t for places in fresh.values() for t in places] + [t for r in replays for t in range(r.start, r.stop)]
    )
    free = fresh.pop(current, []) if now_known else []
    return Needs(
        sample=index,
        fresh={version: tuple(places) for version, places in sorted(fresh.items())},
        replays=tuple(replays),
        now=() if now_known else tuple(scored),
        free=tuple(free),
        unknown_tok=unknown_tok,
    )


def _eras(mask_T: NDArray[np.bool_], kv_T: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Runs of trained tokens side by side with the same kv_version."""
    places = np.flatnonzero(mask_T)
    cut = np.flatnonzero((np.diff(places) != 1) | (np.diff(kv_T[places]) != 0)) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(places, cut) if len(part)]


def _blocks(policy: NDArray[np.int32], start: int, stop: int) -> tuple[Block, ...]:
    """Which version computed which positions, for the tokens [start, stop) of one era."""
    swaps = [start + int(i) + 1 for i in np.flatnonzero(np.diff(policy))]
    blocks = []
    # The token at a swap is predicted at the position before it, which the new weights compute.
    for first, low, high in zip(
        [start, *swaps], [0, *(s - 1 for s in swaps)], [*(s - 1 for s in swaps), stop - 1], strict=True
    ):
        blocks.append(Block(int(policy[first - start]), low, high))
    return tuple(blocks)


def _waves(replays: Sequence[Replay], kv_limit_tok: int) -> tuple[tuple[Replay, ...], ...]:
    waves: list[tuple[Replay, ...]] = []
    wave: list[Replay] = []
    held_tok = 0
    for replay in replays:
        if wave and held_tok + replay.stop > kv_limit_tok:
            waves.append(tuple(wave))
            wave, held_tok = [], 0
        wave.append(replay)
        held_tok += replay.stop
    return (*waves, tuple(wave)) if wave else tuple(waves)
