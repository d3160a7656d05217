"""Train-versus-engine diagnostics on plain arrays: KL, ratio tails, effective sample size.

Notation: m = probability given by the ENGINE when it sampled the token, t = the TRAINER's for the same token.
Dimension letters: K trained tokens of a batch (flat), Q sequences.

With t computed before the step, log(t/m) holds numeric mismatch (lag 0) plus lag (lag > 0): the split by lag tells them
apart. Definitions and healthy ranges: docs/metrics.md. Sequence of every function: select, clamp in log space, exp.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]
LOG_RATIO_LIMIT = 20.0
LAG_BUCKETS: tuple[tuple[str, int, int], ...] = (("lag0", 0, 0), ("lag_pos", 1, 1 << 30))
"""Name, first and last lag of each split."""
QUANTILES: tuple[tuple[str, float], ...] = (
    ("p0.1", 0.001),
    ("p1", 0.01),
    ("p50", 0.5),
    ("p99", 0.99),
    ("p99.9", 0.999),
)


def log_ratio(logp_t_K: ArrayLike, logp_m_K: ArrayLike) -> F64:
    """log(t/m) in float64, clamped to +-20. Inputs must be finite (count the others first)."""
    return np.clip(
        np.asarray(logp_t_K, np.float64) - np.asarray(logp_m_K, np.float64), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


def k1(log_ratio_K: F64) -> float:
    """KL(m || t) estimated by mean log(m/t) on samples of m: unbiased, may be negative."""
    return _mean(-log_ratio_K)


def k3(log_ratio_K: F64) -> float:
    """KL(m || t) estimated by mean(t/m - 1 - log(t/m)): unbiased, never negative, heavy tail where t >> m."""
    return _mean(np.expm1(log_ratio_K) - log_ratio_K)


def ess(weight: F64) -> float:
    """Effective sample size as a share: (sum w)^2 / (n * sum w^2), in (0, 1]; 1 when there is nothing."""
    total_square = float(np.sum(weight**2))
    if len(weight) == 0 or total_square == 0.0:
        return 1.0
    return float(np.sum(weight)) ** 2 / (len(weight) * total_square)


def sequence_log_ratio(log_ratio_K: F64, sequence_K: NDArray[np.int64]) -> tuple[F64, NDArray[np.int64]]:
    """Sum of log-ratios (product estimator) and token count of each sequence that occurs, shapes [Q], [Q]."""
    _, index_K, count_Q = np.unique(sequence_K, return_inverse=True, return_counts=True)
    return np.bincount(index_K, weights=log_ratio_K, minlength=len(count_Q)).astype(np.float64), count_Q


def tail_frac(log_ratio_K: F64, tau: float = 2.0) -> float:
    """F(tau): share of tokens whose ratio is above tau or below 1/tau."""
    return _mean(np.abs(log_ratio_K) > np.log(tau))


def mismatch(
    logp_t_K: ArrayLike, logp_m_K: ArrayLike, *, sequence_K: NDArray[np.int64], lag_K: NDArray[np.int64]
) -> dict[str, float]:
    """Table of numeric and lag diagnostics under their documented names; all 0 (ESS 1) for an empty batch.

    `lag_K`: trainer's version minus the token's policy_version.
    """
    logp_m = np.asarray(logp_m_K, np.float64)
    logp_t = np.asarray(logp_t_K, np.float64)
    x_K = log_ratio(logp_t, logp_m)
    abs_K = np.abs(x_K)
    w_K = np.exp(x_K)
    sum_Q, count_Q = sequence_log_ratio(x_K, sequence_K)
    abs_Q, _ = sequence_log_ratio(abs_K, sequence_K)
    metrics = {
        "kl_infer_train/k1": k1(x_K),
        "kl_infer_train/k3": k3(x_K),
        "mult_prob_error": _mean(np.exp(abs_K)),
        "abs_dlogp/mean": _mean(abs_K),
        "abs_dlogp/max": float(abs_K.max(initial=0.0)),
        "prob_diff/max": float(np.abs(np.exp(np.minimum(logp_m, 0)) - np.exp(np.minimum(logp_t, 0))).max(initial=0.0)),
        "ppl_ratio": float(np.exp(_mean(-x_K))),
        "m2": _mean(x_K**2),
        "is_weight/mean": _mean(w_K),
        "is_weight/std": float(w_K.std()) if len(w_K) else 0.0,
        "chi2/token": _mean(w_K**2) - 1.0 if len(w_K) else 0.0,
        "ess/token_raw": ess(w_K),
        "ess/seq_raw": ess(np.exp(np.clip(sum_Q, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))),
        "seq_logprob_error": _mean(np.exp(abs_Q / np.maximum(count_Q, 1))),
        "ratio/tail2": tail_frac(x_K),
    }
    for name, q in QUANTILES:
        metrics[f"ratio/{name}"] = float(np.exp(np.quantile(x_K, q))) if len(x_K) else 1.0
    for name, low, high in LAG_BUCKETS:
        part_K = x_K[(lag_K >= low) & (lag_K <= high)]
        if len(part_K):
            metrics[f"kl_infer_train/k1_{name}"] = k1(part_K)
            metrics[f"kl_infer_train/k3_{name}"] = k3(part_K)
            metrics[f"abs_dlogp/mean_{name}"] = _mean(np.abs(part_K))
            metrics[f"ess/token_raw_{name}"] = ess(np.exp(part_K))
    return metrics


def weighted_mean(parts: list[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Mean of metric tables by weight (for several updates on one batch); names missing in a table are skipped."""
    total: dict[str, float] = {}
    weights: dict[str, float] = {}
    for weight, table in parts:
        for name, value in table.items():
            total[name] = total.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    return {name: total[name] / weights[name] if weights[name] else 0.0 for name in total}


def _mean(value: ArrayLike) -> float:
    array = np.asarray(value, np.float64)
    return float(array.mean()) if array.size else 0.0
