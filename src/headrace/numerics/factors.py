"""The total ratio of a token in factors: numeric mismatch, and lag. Pure.

    now / engine  =  (trainer at v / engine)  *  (trainer now / trainer at v)
                      numeric                     lag

v is the token's own version, scored as the engine did (`version_plan`), so the first factor has nothing of training in
it and the second nothing of kernels. Dimension letters: K trained tokens (flat).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.numerics.diagnostics import ess, k1, k3, log_ratio

FACTORS = ("numeric_ratio", "lag_ratio")


def factors(logp_m_K: ArrayLike, logp_v_K: ArrayLike, logp_c_K: ArrayLike) -> dict[str, float]:
    """Table of both factors over the tokens whose three log-probs are finite; all 0 (ESS 1) when there are none.

    m: engine. v: trainer at the token's version. c: trainer now. Samples are the engine's: `kl_k1` and `kl_k3` of
    `numeric_ratio` estimate KL(m || v), those of `lag_ratio` KL(v || c) as far as m is v.
    """
    m, v, c = (np.asarray(x, np.float64) for x in (logp_m_K, logp_v_K, logp_c_K))
    seen = np.isfinite(m) & np.isfinite(v) & np.isfinite(c)
    m, v, c = m[seen], v[seen], c[seen]
    table: dict[str, float] = {}
    for name, x in zip(FACTORS, (log_ratio(v, m), log_ratio(c, v)), strict=True):
        table |= {
            f"{name}/kl_k1": k1(x),
            f"{name}/kl_k3": k3(x),
            f"{name}/abs_mean": _mean(np.abs(x)),
            f"{name}/abs_max": float(np.abs(x).max(initial=0.0)),
            f"{name}/ess_token": ess(np.exp(x)),
        }
    return table


def _mean(value: NDArray[np.float64]) -> float:
    return float(value.mean()) if value.size else 0.0
