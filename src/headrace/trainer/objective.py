"""From a batch to the loss of each micro-batch: advantages, weights, correction, KL, and what was seen on the way.

Dimension letters: K trained tokens of the whole batch (flat, in order of samples and places), S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import plugins
from headrace.config.schema import LossConfig
from headrace.errors import DataError, LearnerError, NonFiniteError, boundary
from headrace.numerics import diagnostics
from headrace.records import Batch, Sample
from headrace.trainer.advantages import compute_advantages
from headrace.trainer.batching import MicroBatch, check_sample
from headrace.trainer.losses import (
    LOSSES,
    LossContext,
    LossFunction,
    check_loss,
    correction_factor,
    kl_to_reference,
    token_weights,
)

_NONFINITE_LIMIT = 0.05
"""Share of trained tokens without a finite engine log-prob at which the batch is refused."""


def find_loss(config: LossConfig, recipe_dir: Path) -> LossFunction:
    """The loss function behind `loss.kind`; ConfigError or PluginError when there is none."""
    check_loss(config.kind, config.correction)
    if ":" in config.kind:
        return cast(LossFunction, plugins.resolve(config.kind, what="loss.kind", search=recipe_dir))
    return LOSSES[config.kind]


@dataclass
class Targets:
    """Trained tokens of a batch as flat arrays, and where each micro-batch's tokens lie in them."""

    samples: tuple[Sample, ...]
    first_S: NDArray[np.int64]
    """Flat index of each sample's first trained token."""
    rank_ST: list[NDArray[np.int64]]
    """Per sample: number of trained tokens before place t."""
    sample_K: NDArray[np.int64]
    logp_m_K: NDArray[np.float32]
    lag_K: NDArray[np.int64]
    advantage_K: NDArray[np.float32]
    weight_K: NDArray[np.float32]
    nonfinite_tok: int

    def index(self, micro: MicroBatch) -> NDArray[np.int64]:
        """Flat index of each of the micro-batch's targets."""
        return np.asarray(
            [self.first_S[s] + self.rank_ST[s][t] for s, t in zip(micro.sample_K, micro.place_K, strict=True)],
            dtype=np.int64,
        )


def make_targets(batch: Batch, config: LossConfig) -> Targets:
    """Advantages, weights and engine log-probs of every trained token.

    Tokens without a finite engine log-prob have been taken out of the mask by `drop_nonfinite` before.
    """
    samples = batch.samples
    advantage_S = compute_advantages(
        config.advantage,
        group_id_S=[s.group_id for s in samples],
        member_S=[s.member for s in samples],
        reward_S=[s.reward for s in samples],
    )
    group_of = {g.group_id: i for i, g in enumerate(batch.groups)}
    masks = [s.loss_mask_T for s in samples]
    counts_S = np.asarray([int(m.sum()) for m in masks], dtype=np.int64)
    sample_K = np.repeat(np.arange(len(samples)), counts_S)
    group_S = np.asarray([group_of[s.group_id] for s in samples], dtype=np.int64)
    version_K = _flat([s.policy_version_T[m] for s, m in zip(samples, masks, strict=True)], np.int64)
    return Targets(
        samples=samples,
        first_S=np.concatenate([[0], np.cumsum(counts_S)[:-1]]).astype(np.int64),
        rank_ST=[np.cumsum(m) - 1 for m in masks],
        sample_K=sample_K,
        logp_m_K=_flat([s.logp_T[m] for s, m in zip(samples, masks, strict=True)], np.float32),
        lag_K=batch.version - version_K,
        advantage_K=advantage_S[sample_K].astype(np.float32),
        weight_K=token_weights(config.aggregate, sample_K=sample_K, group_K=group_S[sample_K]).astype(np.float32),
        nonfinite_tok=0,
    )


@dataclass
class Seen:
    """What the micro-batches of one batch showed."""

    logp_c_K: NDArray[np.float32]
    entropy_K: NDArray[np.float32]
    factor_K: NDArray[np.float32]
    loss: float = 0.0
    kl: float = 0.0
    info_sums: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """The configured loss."""

    config: LossConfig
    function: LossFunction

    def micro_loss(
        self,
        micro: MicroBatch,
        targets: Targets,
        seen: Seen,
        logp_c_K: Tensor,
        entropy_K: Tensor,
        *,
        logp_q_K: NDArray[np.float32] | None,
        logp_ref_K: Tensor | None,
    ) -> Tensor:
        """Scalar to call backward on. Sums over all micro-batches to the batch's loss.

        NonFiniteError names the sample when a log-prob or a loss is not finite.
        """
        config, device = self.config, logp_c_K.device
        index = targets.index(micro)
        require_finite(logp_c_K, micro, targets, "log-prob")
        order, sequence = np.unique(micro.sample_K, return_inverse=True)
        ctx = LossContext(
            sequence_K=torch.from_numpy(sequence.astype(np.int64)).to(device),
            sequences=len(order),
            logp_q_K=None if logp_q_K is None else torch.from_numpy(logp_q_K[index]).to(device),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            is_cap=config.is_cap,
        )
        logp_m = torch.from_numpy(targets.logp_m_K[index]).to(device)
        advantage = torch.from_numpy(targets.advantage_K[index]).to(device)
        weight = torch.from_numpy(targets.weight_K[index]).to(device)
        mask = torch.ones_like(logp_m, dtype=torch.bool)
        with boundary(LearnerError, f"loss {config.kind!r}"):
            loss_K, info = self.function(logp_c_K, logp_m, advantage, mask, ctx)
        factor_K = correction_factor(config.correction, logp_c_K, logp_m, mask, ctx, geo_width=config.geo_width)
        total_K = loss_K * factor_K
        if logp_ref_K is not None:
            kl_K = kl_to_reference(logp_c_K, logp_m, logp_ref_K, mask, cap=config.is_cap)
            total_K = total_K + config.kl_coef * kl_K
            seen.kl += float((kl_K.detach() * weight).sum())
        require_finite(total_K, micro, targets, "loss")
        loss: Tensor = (total_K * weight).sum()
        seen.logp_c_K[index] = logp_c_K.detach().cpu().numpy()
        seen.entropy_K[index] = entropy_K.cpu().numpy()
        seen.factor_K[index] = factor_K.detach().cpu().numpy()
        seen.loss += float(loss.detach())
        for name, value in info.items():
            seen.info_sums[name] = seen.info_sums.get(name, 0.0) + float(value.detach().double().sum())
        return loss

    def start(self, targets: Targets) -> Seen:
        """Empty record for a batch."""
        size = len(targets.sample_K)
        zeros = [np.zeros(size, dtype=np.float32) for _ in range(3)]
        return Seen(logp_c_K=zeros[0], entropy_K=zeros[1], factor_K=zeros[2])

    def metrics(self, targets: Targets, seen: Seen) -> dict[str, float]:
        """All metrics that cost no extra pass, by their documented names."""
        tokens = max(len(targets.sample_K), 1)
        table = diagnostics.mismatch(seen.logp_c_K, targets.logp_m_K, sequence_K=targets.sample_K, lag_K=targets.lag_K)
        used_K = np.exp(diagnostics.log_ratio(seen.logp_c_K, targets.logp_m_K)).clip(max=self.config.is_cap)
        used_K = used_K * seen.factor_K if self.config.correction in ("mis", "geometric") else used_K
        dropped_K = seen.factor_K == 0
        dropped_S = {int(s) for s in targets.sample_K[dropped_K]}
        table |= {
            "entropy": float(seen.entropy_K.mean()) if len(seen.entropy_K) else 0.0,
            "ess/token_used": diagnostics.ess(used_K),
            "mask_frac/token": float(dropped_K.sum()) / tokens,
            "mask_frac/seq": len(dropped_S) / max(len(np.unique(targets.sample_K)), 1),
            "nonfinite/logp": float(targets.nonfinite_tok),
            "advantage/abs_mean": float(np.abs(targets.advantage_K).mean()) if len(targets.advantage_K) else 0.0,
            "empty_samples": float(len(targets.samples) - len(np.unique(targets.sample_K))),
        }
        if self.config.kl_coef > 0:
            table["kl_ref/k2"] = seen.kl
        return table | {name: total / tokens for name, total in seen.info_sums.items()}


def drop_nonfinite(batch: Batch) -> tuple[Batch, int]:
    """Take tokens without a finite engine log-prob out of the loss mask; (batch, how many).

    DataError when they are more than 5 % of the trained tokens: then the engine is broken, not a token.
    """
    bad = {i: s.loss_mask_T & ~np.isfinite(s.logp_T) for i, s in enumerate(batch.samples) if _checked(s)}
    count = int(sum(b.sum() for b in bad.values()))
    if not count:
        return batch, 0
    if count > _NONFINITE_LIMIT * batch.trained_tok:
        worst = max(bad, key=lambda i: int(bad[i].sum()))
        sample = batch.samples[worst]
        raise DataError(
            f"{count} of {batch.trained_tok} trained tokens have no finite engine log-prob (most in "
            f"{sample.group_id!r}/{sample.member}); at most {_NONFINITE_LIMIT:.0%} are masked and counted"
        )
    return replace_masks(batch, bad), count


def replace_masks(batch: Batch, bad: dict[int, NDArray[np.bool_]]) -> Batch:
    """The batch with the given tokens removed from the loss masks (by sample index)."""
    index = 0
    groups = []
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            samples.append(replace(sample, loss_mask_T=sample.loss_mask_T & ~bad[index]))
            index += 1
        groups.append(replace(group, samples=tuple(samples)))
    return replace(batch, groups=tuple(groups))


def require_finite(value_K: Tensor, micro: MicroBatch, targets: Targets, what: str) -> None:
    """Raise NonFiniteError that names the sample and place of the first value that is not finite."""
    value_K = value_K.detach()
    finite_K = torch.isfinite(value_K)
    if bool(finite_K.all()):
        return
    k = int((~finite_K).to(torch.int8).argmax())
    sample = targets.samples[int(micro.sample_K[k])]
    raise NonFiniteError(
        f"{what} of sample {sample.group_id!r}/{sample.member} at token {int(micro.place_K[k])} is "
        f"{float(value_K[k])}; weights and optimizer are unchanged"
    )


def _flat(parts: Sequence[NDArray[np.generic]], dtype: type) -> NDArray[Any]:
    return np.concatenate([*parts, np.zeros(0, dtype=dtype)]).astype(dtype)


def _checked(sample: Sample) -> bool:
    check_sample(sample)
    return True
