from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from headrace.trainer import blocks, fused

pytestmark = pytest.mark.skipif(fused.numba is None, reason="numba is not installed")


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within two bfloat16 steps."""
    return torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=2e-3)


def test_swiglu_forward_and_backward() -> None:
    gate, up, grad = (random(37, 19, seed=s) for s in range(3))
    assert near(fused.swiglu(gate, up), F.silu(gate) * up)
    exact = [t.float().requires_grad_() for t in (gate, up)]
    wanted = torch.autograd.grad(F.silu(exact[0]) * exact[1], exact, grad.float())
    for got, want in zip(fused.swiglu_backward(gate, up, grad), wanted, strict=True):
        assert near(got, want)


def test_norm_forward_and_backward() -> None:
    x, weight, grad = random(37, 24), random(24, seed=1), random(37, 24, seed=2)
    exact = [t.float().requires_grad_() for t in (x, weight)]
    want = F.rms_norm(exact[0], (24,), exact[1], 1e-5)
    wanted = torch.autograd.grad(want, exact, grad.float())
    out, scale_N = fused.rms_norm(x, weight, 1e-5)
    assert near(out, want)
    dx, dweight = fused.rms_norm_backward(x, weight, scale_N, grad)
    assert near(dx, wanted[0])
    assert torch.allclose(dweight, wanted[1], rtol=1e-3, atol=1e-3)


def test_rotation_and_its_transpose() -> None:
    x, angle = random(11, 3, 8), torch.randn(11, 4)
    cos, sin = angle.cos(), angle.sin()
    one, two = x.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    assert near(fused.rotate(x, cos, sin, back=False), torch.cat([one * c - two * s, two * c + one * s], -1))
    there_and_back = fused.rotate(fused.rotate(x, cos, sin, back=False), cos, sin, back=True)
    assert torch.allclose(there_and_back.float(), x.float(), atol=0.1)


def test_what_is_not_finite_stays_so() -> None:
    x = random(4, 6)
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    weight = torch.ones(6, dtype=torch.bfloat16)
    for out in (fused.swiglu(x, weight.expand(4, 6).contiguous()), fused.rms_norm(x, weight, 1e-5)[0]):
        assert torch.isfinite(out).all(-1).tolist() == [True, False, False, True]


def test_blocks_fall_back_outside_bfloat16() -> None:
    x = random(5, 6).float()
    assert not fused.usable(x)
    assert torch.allclose(blocks.swiglu(x, x), F.silu(x) * x)


def test_collected_gradients_equal_autograd() -> None:
    for inputs, outputs in ((6, 9), (9, 6), (7, 7)):
        module = torch.nn.Linear(inputs, outputs)
        x, grad = torch.randn(13, inputs, requires_grad=True), torch.randn(13, outputs)
        collected = torch.zeros(outputs, inputs)
        want = torch.autograd.grad(module(x), (x, module.weight, module.bias), grad)
        got = torch.autograd.grad(blocks.linear(x, module, collected), (x, module.bias), grad)
        assert torch.allclose(got[0], want[0], atol=1e-5)
        assert torch.allclose(got[1], want[2], atol=1e-5)
        assert torch.allclose(collected, want[1], atol=1e-5)
