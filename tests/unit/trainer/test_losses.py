from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.trainer.corrections import geometric, mis, tis
from headrace.trainer.losses import LOSSES, LossContext, check_loss, kl_to_reference, token_weights

GARBAGE = st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30, -1e30])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(LOSSES)),
    st.lists(st.booleans(), min_size=3, max_size=8).filter(any),
    st.lists(GARBAGE, min_size=5, max_size=5),
)
def test_garbage_under_a_false_mask_changes_nothing(kind: str, mask: list[bool], garbage: list[float]) -> None:
    size = len(mask)
    mask_K = torch.tensor(mask)
    generator = torch.Generator().manual_seed(size)
    clean = [torch.randn(size, generator=generator) - 2 for _ in range(5)]
    dirty = [torch.where(mask_K, x, torch.full_like(x, g)) for x, g in zip(clean, garbage, strict=True)]
    results = []
    for c, m, q, ref, a in (clean, dirty):
        c = c.clone().requires_grad_()
        ctx = LossContext(
            sequence_K=torch.arange(size) % 2, sequences=2, logp_q_K=q, clip_low=0.2, clip_high=0.3, is_cap=2.0
        )
        loss, info = LOSSES[kind](c, m, a, mask_K, ctx)
        loss = loss * tis(q, m, mask_K, cap=2.0) * mis(q, m, mask_K, ctx.sequence_K, 2, cap=50.0)
        loss = loss * geometric(q, m, mask_K, ctx.sequence_K, 2, width=0.9)
        loss = loss + kl_to_reference(c, m, ref, mask_K, cap=2.0)
        (gradient,) = torch.autograd.grad(loss.sum(), c)
        results.append((loss.detach(), gradient, {n: v.float().sum() for n, v in info.items()}))
    (loss_1, gradient_1, info_1), (loss_2, gradient_2, info_2) = results
    assert torch.equal(loss_1, loss_2)
    assert torch.equal(gradient_1, gradient_2)
    assert info_1 == info_2
    assert (loss_1[~mask_K] == 0).all()


@pytest.mark.parametrize("kind", sorted(LOSSES))
@pytest.mark.parametrize("far", [100.0, 1e4])
def test_huge_log_ratios_do_not_overflow(kind: str, far: float) -> None:
    c = torch.tensor([-0.1, -far], requires_grad=True)
    m = torch.tensor([-far, -0.1])
    ctx = LossContext(sequence_K=torch.tensor([0, 1]), sequences=2, logp_q_K=m, clip_low=0.2, clip_high=0.3, is_cap=2.0)
    loss, _ = LOSSES[kind](c, m, torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool), ctx)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert c.grad is not None
    assert torch.isfinite(c.grad).all()


@pytest.mark.parametrize("kind", ["ppo", "gspo", "decoupled_ppo"])
def test_without_proximal_pass_the_ratio_is_one_and_its_gradient_is_the_policy_gradient(kind: str) -> None:
    c = torch.tensor([-1.0, -2.0], requires_grad=True)
    ctx = LossContext(
        sequence_K=torch.tensor([0, 1]), sequences=2, logp_q_K=None, clip_low=0.2, clip_high=0.3, is_cap=2.0
    )
    a = torch.tensor([1.0, -0.5])
    loss, info = LOSSES[kind](c, c.detach(), a, torch.ones(2, dtype=torch.bool), ctx)
    (gradient,) = torch.autograd.grad(loss.sum(), c)
    assert torch.allclose(gradient, -a)
    assert not any(v.any() for v in info.values())


def test_token_weights_have_documented_denominators() -> None:
    sample = np.array([0, 0, 0, 1, 3])
    group = np.array([0, 0, 0, 0, 1])
    w = token_weights("token_mean", sample_K=sample, group_K=group)
    assert w == pytest.approx([1 / 5] * 5)
    w = token_weights("sequence_mean", sample_K=sample, group_K=group)
    assert w == pytest.approx([1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 3])
    w = token_weights("prompt_mean", sample_K=sample, group_K=group)
    assert w == pytest.approx([1 / 8] * 4 + [1 / 2])
    assert len(token_weights("token_mean", sample_K=sample[:0], group_K=group[:0])) == 0
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        token_weights("tokenmean", sample_K=sample, group_K=group)


def test_pairs_that_apply_a_ratio_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        check_loss("decoupled_ppo", "tis")
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        check_loss("cipso", "none")
    check_loss("ppo", "tis")
