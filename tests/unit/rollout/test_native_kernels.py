"""The numba kernels against PyTorch's operators, in float32 arithmetic and with the same rounding."""

from __future__ import annotations

import pytest
import torch

from headrace.rollout.native import kernels

pytestmark = pytest.mark.skipif(kernels.numba is None, reason="numba is an optional speed-up")


def test_norm_rounds_where_transformers_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 96, generator=generator).to(torch.bfloat16)
    weight = torch.randn(96, generator=generator).to(torch.bfloat16)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)
    got = kernels.rms_norm(x, kernels.bits(weight), 1e-5)
    assert (got == expected).float().mean() > 0.99  # the order of the sum may move a last bit
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


def test_rotate_store() -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, 4 + 2 + 2, 16, generator=generator).to(torch.bfloat16)
    angle = torch.rand(32, 8, generator=generator)
    row, position = torch.tensor([2, 0, 1, 2, 0]), torch.tensor([7, 3, 31, 0, 0])
    kv = torch.zeros(3, 4, 32, 16, dtype=torch.bfloat16)
    before = qkv.clone()
    kernels.rotate_store(qkv, angle.cos().numpy(), angle.sin().numpy(), row.numpy(), position.numpy(), kernels.bits(kv))
    cos, sin = angle.cos()[position][:, None], angle.sin()[position][:, None]
    one, two = before.float()[..., :8], before.float()[..., 8:]
    rotated = torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(torch.bfloat16)
    torch.testing.assert_close(qkv[:, :6], rotated[:, :6], rtol=2**-7, atol=2**-9)
    assert torch.equal(qkv[:, 6:], before[:, 6:])
    assert torch.equal(kv[row, :, position], qkv[:, 4:])
    assert int((kv != 0).any(-1).sum()) == 5 * 4


def test_not_finite_stays_not_finite() -> None:
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    x[1, 3] = torch.nan
    got = kernels.rms_norm(x, kernels.bits(torch.ones(32, dtype=torch.bfloat16)), 1e-5)
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1]).all()
