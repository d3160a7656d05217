"""Losses against an independent scalar computation in plain Python floats (no tensors, no shared code)."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.trainer.corrections import geometric, mis, tis
from headrace.trainer.losses import LOSSES, LossContext, correction_factor, kl_to_reference

C = [-0.9, -1.2, -0.3, -2.0, -0.05]
M = [-1.0, -0.2, -0.35, -3.4, -0.06]
Q = [-0.8, -1.1, -0.7, -2.1, -0.05]
R = [-1.1, -1.0, -0.2, -2.5, -0.10]
A = [1.5, 1.5, 1.5, -0.5, -0.5]
SEQUENCE = [0, 0, 0, 1, 1]
LOW, HIGH, CAP, WIDTH = 0.2, 0.28, 2.0, 0.3


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def scalar_pg(i: int, c: list[float]) -> float:
    return -min(math.exp(C[i] - M[i]), CAP) * A[i] * c[i]


def scalar_ppo(i: int, c: list[float]) -> float:
    r = math.exp(c[i] - Q[i])
    return -min(r * A[i], clip(r, 1 - LOW, 1 + HIGH) * A[i])


def scalar_cispo(i: int, c: list[float]) -> float:
    return -clip(math.exp(C[i] - M[i]), 1 - LOW, 1 + HIGH) * A[i] * c[i]


def scalar_gspo(i: int, c: list[float]) -> float:
    mine = [j for j in range(len(c)) if SEQUENCE[j] == SEQUENCE[i]]
    s = math.exp(sum(c[j] - Q[j] for j in mine) / len(mine))
    return -min(s * A[i], clip(s, 1 - LOW, 1 + HIGH) * A[i])


def scalar_decoupled(i: int, c: list[float]) -> float:
    return min(math.exp(Q[i] - M[i]), CAP) * scalar_ppo(i, c)


SCALAR = {
    "pg": scalar_pg,
    "ppo": scalar_ppo,
    "cispo": scalar_cispo,
    "gspo": scalar_gspo,
    "decoupled_ppo": scalar_decoupled,
}


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LossContext]:
    c = torch.tensor(C, dtype=torch.float64, requires_grad=True)
    m, a = torch.tensor(M, dtype=torch.float64), torch.tensor(A, dtype=torch.float64)
    ctx = LossContext(
        sequence_K=torch.tensor(SEQUENCE),
        sequences=2,
        logp_q_K=torch.tensor(Q, dtype=torch.float64),
        clip_low=LOW,
        clip_high=HIGH,
        is_cap=CAP,
    )
    return c, m, a, torch.ones(5, dtype=torch.bool), ctx


@pytest.mark.parametrize("kind", sorted(SCALAR))
def test_value_and_gradient(kind: str) -> None:
    c, m, a, mask, ctx = tensors()
    loss_K, _ = LOSSES[kind](c, m, a, mask, ctx)
    scalar = SCALAR[kind]
    assert loss_K.tolist() == pytest.approx([scalar(i, C) for i in range(5)])
    (gradient,) = torch.autograd.grad(loss_K.sum(), c)
    step = 1e-6
    for j in range(5):
        up = [x + step * (k == j) for k, x in enumerate(C)]
        down = [x - step * (k == j) for k, x in enumerate(C)]
        numeric = sum(scalar(i, up) - scalar(i, down) for i in range(5)) / (2 * step)
        assert gradient[j].item() == pytest.approx(numeric, abs=1e-6)


def test_pg_in_numbers_worked_by_hand() -> None:
    c, m, a, mask, ctx = tensors()
    loss_K, info = LOSSES["pg"](c, m, a, mask, ctx)
    # token 0: exp(0.1) = 1.105171, times 1.5, times 0.9; token 3: exp(1.4) = 4.0552 capped to 2, times -0.5, times 2.0
    assert loss_K[0].item() == pytest.approx(1.105171 * 1.5 * 0.9, rel=1e-6)
    assert loss_K[3].item() == pytest.approx(-2.0)
    assert info["clip_frac/high"].tolist() == [False, False, False, True, False]


def test_clip_marks_only_tokens_whose_gradient_it_took() -> None:
    c, m, a, mask, ctx = tensors()
    _, info = LOSSES["ppo"](c, m, a, mask, ctx)
    # ratios: e^-0.1, e^-0.1, e^0.4 = 1.49 > 1.28 with A > 0, e^0.1, 1
    assert info["clip_frac/high"].tolist() == [False, False, True, False, False]
    assert not info["clip_frac/low"].any()


def test_corrections() -> None:
    c, m, _, mask, ctx = tensors()
    q, sequence = ctx.logp_q_K, ctx.sequence_K
    assert q is not None
    d = [Q[i] - M[i] for i in range(5)]
    assert tis(q, m, mask, cap=CAP).tolist() == pytest.approx([min(math.exp(x), CAP) for x in d])
    # products: exp(0.2 - 0.9 - 0.35) = 0.35 outside [0.5, 2]; exp(1.3 + 0.01) = 3.7 outside
    assert mis(q, m, mask, sequence, 2, cap=CAP).tolist() == [0, 0, 0, 0, 0]
    assert mis(q, m, mask, sequence, 2, cap=3.0).tolist() == [1, 1, 1, 0, 0]
    # geometric means: exp(-0.35) = 0.705 inside [0.7, 1.3]; exp(0.655) = 1.93 outside
    assert geometric(q, m, mask, sequence, 2, width=WIDTH).tolist() == [1, 1, 1, 0, 0]
    for kind in ("none", "tis", "mis", "geometric"):
        assert not correction_factor(kind, c, m, mask, ctx, geo_width=WIDTH).requires_grad


def test_kl_to_reference_has_the_gradient_of_k2_with_a_detached_ratio() -> None:
    c, m, _, mask, _ = tensors()
    ref = torch.tensor(R, dtype=torch.float64)
    value = kl_to_reference(c, m, ref, mask, cap=CAP)
    w = [min(math.exp(C[i] - M[i]), CAP) for i in range(5)]
    assert value.tolist() == pytest.approx([w[i] * (C[i] - R[i]) ** 2 / 2 for i in range(5)])
    (gradient,) = torch.autograd.grad(value.sum(), c)
    assert gradient.tolist() == pytest.approx([w[i] * (C[i] - R[i]) for i in range(5)])
    assert gradient.abs().sum() > 0
