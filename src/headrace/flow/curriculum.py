"""Which prompt next. State is rebuilt from the ledger's rows on resume: nothing else has to be saved.

uniform   shuffled epochs; the n-th fresh pick depends on the seed and n only.
band      prefers prompts whose pass rate p makes p(1-p) large, where a group is likely to carry signal: one Thompson
          sample (Thompson 1933) of each candidate's Beta posterior, best of CANDIDATES random prompts, which keeps
          a pick cheap at any size of the data set. A share of picks ignores the estimates; prompts at or above
          `retire_at` rest for `revisit_steps` versions.

Both: a prompt whose attempt failed for lack of a working infrastructure is served first; one that fails
QUARANTINE_AFTER times in a row is never served again. A prompt that is already outstanding waits while others are free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from headrace.config.schema import CurriculumConfig
from headrace.flow.group import Row

QUARANTINE_AFTER = 3
"""Failed attempts of one prompt in a row."""
CANDIDATES = 64
"""Prompts that `band` looks at per pick."""
FORGET = 0.8
"""Weight of older evidence at each new visit of a prompt: the policy moves on."""
FAILED = ("failed_infra", "failed_timeout", "quarantined")


class _Strategy(Protocol):
    """How fresh prompts are chosen."""

    def fresh(self, ordinal: int, version: int) -> int:
        """A prompt for the next admission; the caller made sure that not all are quarantined."""
        ...

    def observed(self, prompt: int, rewards: Sequence[float], version: int) -> None:
        """A group of this prompt was scored; its newest token is of `version`."""
        ...

    def released(self, prompt: int) -> None:
        """A group of this prompt is final."""
        ...

    def resume(self, picked: Sequence[int]) -> None:
        """These fresh picks, in order of admission, were made by earlier processes."""
        ...


class Outstanding:
    """Which prompts have a group between admission and its bucket, and which are barred."""

    __slots__ = ("barred", "count", "prompts")

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts
        self.count: dict[int, int] = {}
        """prompt -> groups alive"""
        self.barred: dict[int, str] = {}
        """prompt -> why it is quarantined"""

    def free(self, prompt: int) -> bool:
        return prompt not in self.count and prompt not in self.barred

    @property
    def none_free(self) -> bool:
        overlap = sum(prompt in self.count for prompt in self.barred)
        return len(self.count) + len(self.barred) - overlap >= self.prompts


class Uniform:
    """Shuffled epochs. A prompt that is outstanding when its turn comes is served as soon as it is free."""

    def __init__(self, outstanding: Outstanding, *, seed: int) -> None:
        self._outstanding = outstanding
        self._prompts = outstanding.prompts
        self._seed = seed
        self._cursor = 0
        """Next position in the endless sequence of epochs."""
        self._epoch = -1
        self._order: list[int] = []
        self._deferred: Counter[int] = Counter()
        """Prompts passed over because they were outstanding -> how often."""
        self._due: deque[int] = deque()
        """Deferred prompts that became free."""

    def permutation(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng((self._seed, epoch)).permutation(self._prompts).tolist()
        return order

    def fresh(self, ordinal: int, version: int) -> int:
        outstanding = self._outstanding
        while self._due:
            prompt = self._due.popleft()
            if outstanding.free(prompt):
                return prompt
            self._deferred[prompt] += 1
        crowded = outstanding.none_free
        while True:
            epoch, position = divmod(self._cursor, self._prompts)
            if epoch != self._epoch:
                self._order, self._epoch = self.permutation(epoch), epoch
            self._cursor += 1
            prompt = self._order[position]
            if prompt in outstanding.barred:
                continue
            if crowded or prompt not in outstanding.count:
                return prompt
            self._deferred[prompt] += 1

    def observed(self, prompt: int, rewards: Sequence[float], version: int) -> None:
        """Uniform learns nothing."""

    def released(self, prompt: int) -> None:
        if self._deferred and self._outstanding.free(prompt) and self._deferred[prompt] > 0:
            self._deferred[prompt] -= 1
            self._due.append(prompt)

    def resume(self, picked: Sequence[int]) -> None:
        """The last position that was reached is the farthest one that was picked; gaps before it were deferred."""
        times = np.bincount(np.asarray(picked, dtype=np.int64), minlength=self._prompts)
        epochs = [np.asarray(self.permutation(epoch)) for epoch in range(int(times.max(initial=0)))]
        for epoch, order in enumerate(epochs):
            reached = np.flatnonzero(times[order] > epoch)
            self._cursor = epoch * self._prompts + int(reached[-1]) + 1
        for epoch, order in enumerate(epochs):
            passed = order[: max(0, self._cursor - epoch * self._prompts)]
            for prompt in passed[times[passed] <= epoch].tolist():
                if self._outstanding.free(prompt):
                    self._due.append(prompt)
                elif prompt not in self._outstanding.barred:
                    self._deferred[prompt] += 1


class Band:
    """Pass rates where a group is likely to carry signal."""

    def __init__(self, outstanding: Outstanding, config: CurriculumConfig, *, seed: int) -> None:
        self._outstanding = outstanding
        self._config = config
        self._seed = seed
        # Jeffreys prior: Beta(1/2, 1/2).
        self._passes = np.full(outstanding.prompts, 0.5)
        self._fails = np.full(outstanding.prompts, 0.5)
        self._rests_until = np.zeros(outstanding.prompts, dtype=np.int64)

    def pass_rate(self, prompt: int) -> float:
        """Posterior mean."""
        return float(self._passes[prompt] / (self._passes[prompt] + self._fails[prompt]))

    def fresh(self, ordinal: int, version: int) -> int:
        rng = np.random.default_rng((self._seed, ordinal))
        candidates = self._candidates(rng, version)
        if rng.random() < self._config.explore:
            return int(candidates[0])
        sampled_p = rng.beta(self._passes[candidates], self._fails[candidates])
        return int(candidates[np.argmax(sampled_p * (1.0 - sampled_p))])

    def _candidates(self, rng: np.random.Generator, version: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """A few prompts in random order that are free and awake; the best that there is when none is."""
        outstanding = self._outstanding
        drawn = rng.integers(outstanding.prompts, size=CANDIDATES)
        good = [p for p in drawn[self._rests_until[drawn] <= version].tolist() if outstanding.free(p)]
        if not good:  # Rare: look at every prompt.
            everyone = [p for p in rng.permutation(outstanding.prompts).tolist() if p not in outstanding.barred]
            free = [p for p in everyone if p not in outstanding.count]
            awake = [p for p in free if self._rests_until[p] <= version]
            good = (awake or free or everyone)[:CANDIDATES]
        return np.asarray(good, dtype=np.int64)

    def observed(self, prompt: int, rewards: Sequence[float], version: int) -> None:
        passes = sum(min(1.0, max(0.0, reward)) for reward in rewards)
        self._passes[prompt] = 0.5 + FORGET * (self._passes[prompt] - 0.5) + passes
        self._fails[prompt] = 0.5 + FORGET * (self._fails[prompt] - 0.5) + len(rewards) - passes
        if self.pass_rate(prompt) >= self._config.retire_at:
            self._rests_until[prompt] = version + self._config.revisit_steps

    def released(self, prompt: int) -> None:
        """Band looks at what is outstanding at each pick."""

    def resume(self, picked: Sequence[int]) -> None:
        """Picks depend on the ordinal and the posteriors only."""


class Curriculum:
    """Serves prompts to admission and learns from how their groups ended."""

    def __init__(self, config: CurriculumConfig, *, prompts: int, seed: int) -> None:
        if prompts < 1:
            raise ValueError(f"prompts = {prompts}: a run needs at least one training prompt")
        self._outstanding = Outstanding(prompts)
        self.strategy: _Strategy = (
            Uniform(self._outstanding, seed=seed)
            if config.kind == "uniform"
            else Band(self._outstanding, config, seed=seed)
        )
        self._retry: deque[int] = deque()
        """Prompts of failed attempts."""
        self._streak: Counter[int] = Counter()
        """prompt -> failed attempts in a row"""

    @property
    def quarantined(self) -> dict[int, str]:
        """prompt -> why it is never served again."""
        return self._outstanding.barred

    def pick(self, ordinal: int, version: int) -> int | None:
        """The prompt of admission number `ordinal`, now outstanding; None when every prompt is quarantined."""
        outstanding = self._outstanding
        if len(outstanding.barred) >= outstanding.prompts:
            return None
        while self._retry:
            prompt = self._retry.popleft()
            if prompt not in outstanding.barred:
                break
        else:
            prompt = self.strategy.fresh(ordinal, version)
        self.occupy(prompt)
        return prompt

    def occupy(self, prompt: int) -> None:
        """A group of this prompt is alive (picked or salvaged) or will be again (restarts)."""
        self._outstanding.count[prompt] = self._outstanding.count.get(prompt, 0) + 1

    def scored(self, prompt: int, rewards: Sequence[float], version: int) -> None:
        """A group was completed; its newest token is of `version`."""
        self._streak.pop(prompt, None)
        self.strategy.observed(prompt, rewards, version)

    def failed(self, prompt: int, reason: str) -> bool:
        """An attempt failed through no fault of the policy: it is served again, or (True) quarantined."""
        self._streak[prompt] += 1
        if self._streak[prompt] >= QUARANTINE_AFTER:
            self._outstanding.barred[prompt] = f"{self._streak[prompt]} attempts in a row failed; the last: {reason}"
            return True
        self._retry.append(prompt)
        return False

    def released(self, prompt: int) -> None:
        """A group of this prompt is final (call it after `failed`)."""
        count = self._outstanding.count
        if count[prompt] > 1:
            count[prompt] -= 1
        else:
            del count[prompt]
        self.strategy.released(prompt)

    def resume(self, latest: Iterable[tuple[Row, bool]]) -> None:
        """Rebuild what earlier processes knew.

        `latest`: the newest row of each ordinal as it was found, in order of ordinals, and whether that ordinal is
        started again (then its outcome counts for nothing, but it still was a pick). Occupy the prompts of salvaged
        and restarted groups first.
        """
        picked: list[int] = []
        owed: Counter[int] = Counter()
        for row, again in latest:
            prompt = row.prompt_index
            if owed[prompt] > 0:  # This admission was the retry of a failed one, not a fresh pick.
                owed[prompt] -= 1
                if prompt in self._retry:
                    self._retry.remove(prompt)
            else:
                picked.append(prompt)
            failed = row.bucket in FAILED
            if again:
                owed[prompt] += failed and row.bucket != "quarantined"
            elif failed:
                owed[prompt] += not self.failed(prompt, str(row.bucket))
            elif row.rewards:
                self.scored(prompt, row.rewards, row.sampled_version)
        self.strategy.resume(picked)
