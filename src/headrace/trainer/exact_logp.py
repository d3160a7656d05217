"""Exact old log-probs: every token scored by the weights of its own version, and by the current ones.

A second copy of the model walks through the versions that the batch's tokens were sampled under (`sync.walk`) and
computes, with the trainer's own forward pass, what the engine computed: where a request's keys and values were kept
over a swap, its tokens are computed piece by piece, each piece by its version's weights on the KV of the pieces before
(`numerics.version_plan` has the definition). Then trainer-at-v / engine is numeric mismatch and nothing else, and
trainer-now / trainer-at-v is lag and nothing else (`numerics.factors`).

Memory: one copy of the model in compute precision, the walker's undo steps, and the KV of the replays of one wave.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.numerics.factors import factors
from headrace.numerics.version_plan import Block, Places, Replay, VersionPlan, plan_versions
from headrace.records import Batch, Sample
from headrace.sync.store import Store
from headrace.sync.walk import Walker
from headrace.trainer.arrays import to_array, to_tensor
from headrace.trainer.batching import MicroBatch, check_sample, micro_batches
from headrace.trainer.model import Policy
from headrace.trainer.past import Cache, Past

Rows = list[NDArray[np.float32]]
"""Per sample [T], NaN where not scored."""

_log = logging.getLogger(__name__)
_KV_LIMIT_BYTES = 1 << 30
_UNDO_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probs of one batch's tokens, flat over its trained tokens [K]; NaN where not scored."""

    logp_m_K: NDArray[np.float32]
    """Engine, when it sampled the token."""
    logp_v_K: NDArray[np.float32]
    """Trainer's forward pass with the token's own version, on the KV that the engine had."""
    logp_c_K: NDArray[np.float32]
    """Trainer now."""
    plan: VersionPlan
    total_tok: int
    """Positions of the batch's samples: what the bound on the cost is a share of."""

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Tokens that have all three, [K]."""
        return np.isfinite(self.logp_v_K) & np.isfinite(self.logp_c_K)

    def metrics(self) -> dict[str, float]:
        """Both factors and what they cost, by their documented names."""
        tokens = max(len(self.logp_m_K), 1)
        return factors(self.logp_m_K, self.logp_v_K, self.logp_c_K) | {
            "exact/scored_frac": float(self.scored.sum()) / tokens,
            "exact/unknown_tok": float(self.plan.unknown_tok),
            "exact/forward_frac": self.plan.forward_tok / max(self.total_tok, 1),
            "exact/versions": float(len({version for visits in self.plan.passes for version in visits})),
        }


class ExactScorer:
    """Scores batches of one run. Calls come from one thread."""

    def __init__(
        self,
        policy: Policy,
        store: Store,
        *,
        run_id: str,
        micro_batch_tok: int,
        share_prompts: bool = True,
        frac: float | None = None,
        seed: int = 0,
        kv_limit_bytes: int = _KV_LIMIT_BYTES,
        undo_limit_bytes: int = _UNDO_LIMIT_BYTES,
        threads: int = 1,
    ) -> None:
        """`policy` is a copy of the model that nobody else uses; its weights are overwritten.

        `frac`: positions computed, as a share of the batch's, at most; None scores every sample.
        """
        self.store_url = store.url
        self._policy = policy
        policy.module.requires_grad_(False)
        self._parameters = dict(policy.named_parameters())
        self._arrays = {name: to_array(parameter) for name, parameter in self._parameters.items()}
        self._apart = {n for n, p in self._parameters.items() if self._arrays[n].ctypes.data != p.data_ptr()}
        """Weights that lie elsewhere than their array: on a device."""
        self.walker = Walker(
            store,
            self._arrays,
            run_id=run_id,
            undo_limit_bytes=undo_limit_bytes,
            threads=threads,
            changed=self._to_device,
        )
        self._micro_batch_tok, self._share_prompts = micro_batch_tok, share_prompts
        self._frac, self._seed, self._kv_limit_bytes = frac, seed, kv_limit_bytes

    def metrics(self, batch: Batch, logp_now_K: NDArray[np.float32] | None = None) -> dict[str, float]:
        """`score(...).metrics()` for a dashboard: a version that cannot be rebuilt is logged, and costs the numbers of
        this batch, not the run."""
        try:
            return self.score(batch, logp_now_K).metrics()
        except SyncError as exc:
            _log.warning("exact log-probs of the batch of version %d are left out: %s", batch.version, exc)
            return {"exact/scored_frac": 0.0}

    @torch.no_grad()
    def score(self, batch: Batch, logp_now_K: NDArray[np.float32] | None = None) -> Scores:
        """Score a batch, or as many of its samples as the bound allows.

        `logp_now_K`: log-probs of the batch's trained tokens under `batch.version`, where the trainer has them: tokens
        of lag 0 then cost nothing. Raises SyncError for a version that cannot be rebuilt.
        """
        samples = batch.samples
        for sample in samples:
            check_sample(sample)
        total_tok = sum(len(s.ids_T) for s in samples if s.loss_mask_T.any())
        plan = plan_versions(
            samples,
            current=batch.version,
            now_known=logp_now_K is not None,
            limit_tok=None if self._frac is None else int(self._frac * total_tok),
            kv_limit_tok=max(1, self._kv_limit_bytes // self._kv_bytes_per_tok()),
            seed=self._seed + batch.version,
            replays=self._policy.flat,
        )
        at_version: Rows = [np.full(len(s.ids_T), np.nan, np.float32) for s in samples]
        now: Rows = [row.copy() for row in at_version]
        self._walk(plan, batch, at_version, now)
        m_K, v_K, c_K = (
            np.concatenate(
                [np.zeros(0, np.float32), *(row[s.loss_mask_T] for row, s in zip(rows, samples, strict=True))]
            )
            for rows in ([s.logp_T for s in samples], at_version, now)
        )
        if logp_now_K is not None:
            c_K = np.asarray(logp_now_K, np.float32)
            v_K = np.where(_free(plan, samples), c_K, v_K)
        return Scores(logp_m_K=m_K, logp_v_K=v_K, logp_c_K=c_K, plan=plan, total_tok=total_tok)

    def _walk(self, plan: VersionPlan, batch: Batch, at_version: Rows, now: Rows) -> None:
        """Visit the versions in the plan's order and compute at each what needs it."""
        waves = plan.waves or ((),)
        for number, (wave, visits) in enumerate(zip(waves, plan.passes, strict=True)):
            caches: dict[Replay, Cache] = {replay: [] for replay in wave}
            for version in visits:
                self.walker.go_to(version)
                if number == 0:
                    self._fresh(plan, batch, version, at_version, now)
                self._replay(version, caches, batch, at_version)

    def _fresh(self, plan: VersionPlan, batch: Batch, version: int, at_version: Rows, now: Rows) -> None:
        """Tokens that one pass with this version scores."""
        own = {n.sample: n.fresh[version] for n in plan.needs if version in n.fresh}
        current = {n.sample: n.now for n in plan.needs if n.now and version == plan.current}
        both = {s: tuple(sorted({*own.get(s, ()), *current.get(s, ())})) for s in own.keys() | current.keys()}
        for sample, logp_T in self._forward(batch, both).items():
            for rows, places in ((at_version, own), (now, current)):
                chosen = list(places.get(sample, ()))
                rows[sample][chosen] = logp_T[chosen]

    def _forward(self, batch: Batch, places: Mapping[int, Places]) -> dict[int, NDArray[np.float32]]:
        """Log-probs of these tokens by sample, [T], under the weights held now."""
        part, origin = _restricted(batch, places)
        found = {index: np.full(len(batch.samples[index].ids_T), np.nan, np.float32) for index in origin}
        for micro in micro_batches(part, budget_tok=self._micro_batch_tok, share_prompts=self._share_prompts):
            logp_K = self._policy.logp(micro, batch.temperature)[0].cpu().numpy()
            for index, place, logp in zip(micro.sample_K, micro.place_K, logp_K, strict=True):
                found[origin[int(index)]][int(place)] = logp
        return found

    def _replay(self, version: int, caches: dict[Replay, Cache], batch: Batch, at_version: Rows) -> None:
        """Blocks that this version computes, on the KV of the blocks before."""
        due = [(replay, block) for replay in caches for block in replay.blocks if block.version == version]
        for part in _packed(due, self._micro_batch_tok):
            micro, past = _lay_out(part, caches, batch.samples)
            logp_K = self._policy.logp(micro, batch.temperature, past)[0].cpu().numpy()
            for index, place, logp in zip(micro.sample_K, micro.place_K, logp_K, strict=True):
                at_version[int(index)][int(place)] = logp
        for replay, block in due:
            if block is replay.blocks[-1]:
                del caches[replay]

    def _kv_bytes_per_tok(self) -> int:
        config = self._policy.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * width * torch.finfo(self._policy.dtype).bits // 8)

    def _to_device(self, names: frozenset[str]) -> None:
        """On a CPU the arrays *are* the weights."""
        for name in names & self._apart:
            weight = self._parameters[name]
            weight.copy_(to_tensor(self._arrays[name]).view_as(weight))


def _restricted(batch: Batch, places: Mapping[int, Places]) -> tuple[Batch, list[int]]:
    """The batch with loss on these tokens only, cut behind the last one, and which sample each of its samples was."""
    origin: list[int] = []
    groups = []
    index = 0
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            if index in places:
                samples.append(_cut(sample, places[index]))
                origin.append(index)
            index += 1
        if samples:
            groups.append(replace(group, samples=tuple(samples)))
    return replace(batch, groups=tuple(groups)), origin


def _cut(sample: Sample, places: Places) -> Sample:
    stop = places[-1] + 1
    mask_T = np.zeros(stop, np.bool_)
    mask_T[list(places)] = True
    return replace(
        sample,
        ids_T=sample.ids_T[:stop],
        loss_mask_T=mask_T,
        logp_T=sample.logp_T[:stop],
        policy_version_T=sample.policy_version_T[:stop],
        kv_version_T=sample.kv_version_T[:stop],
        env_version_T=sample.env_version_T[:stop],
        prompt_tok=min(sample.prompt_tok, stop),
    )


_Due = tuple[Replay, Block]


def _packed(due: Sequence[_Due], budget_tok: int) -> Iterator[list[_Due]]:
    """Blocks for one pass each, old tokens counted; one longer block goes alone."""
    part: list[_Due] = []
    used_tok = 0
    for replay, block in due:
        if part and used_tok + block.stop > budget_tok:
            yield part
            part, used_tok = [], 0
        part.append((replay, block))
        used_tok += block.stop
    if part:
        yield part


def _lay_out(due: Sequence[_Due], caches: Mapping[Replay, Cache], samples: Sequence[Sample]) -> tuple[MicroBatch, Past]:
    """New tokens of some blocks one after another, and what they go on from. Each position predicts the next token."""
    ids, positions, sources, targets, owners, places = ([] for _ in range(6))
    at = 0
    for replay, block in due:
        sample = samples[replay.sample]
        ids.append(sample.ids_T[block.start : block.stop].astype(np.int64))
        positions.append(np.arange(block.start, block.stop))
        place_K = np.arange(max(replay.start, block.start + 1), block.stop + 1)
        sources.append(at + place_K - 1 - block.start)
        targets.append(sample.ids_T[place_K].astype(np.int64))
        owners.append(np.full(len(place_K), replay.sample))
        places.append(place_K)
        at += block.stop - block.start
    micro = MicroBatch(
        ids_N=np.concatenate(ids),
        position_N=np.concatenate(positions),
        segments=(),
        source_K=np.concatenate(sources),
        target_K=np.concatenate(targets),
        sample_K=np.concatenate(owners),
        place_K=np.concatenate(places),
    )
    past = Past([caches[replay] for replay, _ in due], [block.stop - block.start for _, block in due])
    return micro, past


def _free(plan: VersionPlan, samples: Sequence[Sample]) -> NDArray[np.bool_]:
    """Tokens, flat [K], whose version's log-probs are the current ones."""
    rows = [np.zeros(len(s.ids_T), np.bool_) for s in samples]
    for needs in plan.needs:
        rows[needs.sample][list(needs.free)] = True
    return np.concatenate([np.zeros(0, np.bool_), *(r[s.loss_mask_T] for r, s in zip(rows, samples, strict=True))])
