"""Sampling: frequencies, truncation, log-probs, independence of company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.records import SamplingParams
from headrace.rollout.counter_rng import seed_bits, uniform
from headrace.rollout.native.head import head_weight, logits_fp32
from headrace.rollout.native.sampling import draw


def draws(logits_V: torch.Tensor, count: int, **sampling: float) -> tuple[np.ndarray, np.ndarray]:
    """`count` independent draws from one distribution: seeds 0..count-1."""
    params = [SamplingParams(seed=i, **sampling) for i in range(count)]  # type: ignore[arg-type]
    return draw(logits_V.repeat(count, 1), params, [0] * count)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Statistic divided by its degrees of freedom; about 1 for a right sampler. Rare outcomes are pooled."""
    expected = probs * counts.sum()
    common = expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    want = np.append(expected[common], expected[~common].sum())
    keep = want > 0
    assert (seen[~keep] == 0).all()
    return float((((seen - want)[keep]) ** 2 / want[keep]).sum() / (keep.sum() - 1))


@pytest.mark.parametrize("vocab", [7, 256, 700, 1024])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_match_softmax(vocab: int, temperature: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    ids, logp = draws(logits, 20_000, temperature=temperature)
    probs = torch.softmax(logits.double() / temperature, -1).numpy()
    degrees = min(vocab - 1, 200)
    assert chi_square(np.bincount(ids, minlength=vocab), probs) < 1 + 4 * np.sqrt(2 / degrees)
    np.testing.assert_allclose(logp, np.log(probs[ids]), atol=1e-5)


def test_top_k_keeps_the_largest_and_renormalises() -> None:
    logits = torch.randn(600, generator=torch.Generator().manual_seed(0)) * 2
    ids, logp = draws(logits, 5_000, top_k=5)
    kept = torch.topk(logits, 5).indices.numpy()
    probs = np.zeros(600)
    probs[kept] = torch.softmax(logits[kept].double(), -1).numpy()
    assert set(ids) == set(kept)
    assert chi_square(np.bincount(ids, minlength=600), probs) < 4
    np.testing.assert_allclose(logp, np.log(probs[ids]), atol=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probs = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
    ids, logp = draws(torch.tensor(np.log(probs), dtype=torch.float32), 4_000, top_p=0.75)
    kept = np.array([0.0, 0.4, 0.0, 0.3, 0.15]) / 0.85
    assert set(ids) == {1, 3, 4}
    assert chi_square(np.bincount(ids, minlength=5), kept) < 4
    np.testing.assert_allclose(logp, np.log(kept[ids]), atol=1e-5)
    assert set(draws(torch.tensor(np.log(probs), dtype=torch.float32), 50, top_p=0.01)[0]) == {1}


def test_greedy_takes_the_largest_and_reports_temperature_one() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3))
    expected = torch.log_softmax(logits.double(), -1)
    params = [SamplingParams(temperature=0.0)] * 3 + [SamplingParams(temperature=1.0, seed=1)]
    ids, logp = draw(logits.clone(), params, [0, 1, 2, 3])
    assert ids[:3].tolist() == logits[:3].argmax(-1).tolist()
    np.testing.assert_allclose(logp, expected[torch.arange(4), torch.tensor(ids)].numpy(), atol=1e-5)


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((900,), -torch.inf)
    logits[[3, 255, 256, 899]] = 0.0
    ids, logp = draws(logits, 3_000)
    assert set(ids) == {3, 255, 256, 899}
    np.testing.assert_allclose(logp, np.log(0.25), atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 5000), st.integers(1, 6), st.integers(0, 5), st.floats(0.2, 3.0))
def test_a_row_does_not_depend_on_its_company(
    seed: int, position: int, rows: int, place: int, temperature: float
) -> None:
    place = min(place, rows - 1)
    generator = torch.Generator().manual_seed(position)
    logits = torch.randn(rows, 300, generator=generator)
    params = [SamplingParams(seed=i + 100, top_k=i) for i in range(rows)]
    params[place] = SamplingParams(seed=seed, temperature=temperature)
    positions = [i + 3 for i in range(rows)]
    positions[place] = position
    ids, logp = draw(logits.clone(), params, positions)
    alone_id, alone_logp = draw(logits[place : place + 1].clone(), [params[place]], [position])
    assert ids[place] == alone_id[0]
    assert abs(logp[place] - alone_logp[0]) < 1e-5


def test_counter_numbers_are_uniform_and_uncorrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64), indexing="ij")
    u = uniform(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert ((u > 0) & (u < 1)).all()
    assert len(np.unique(u)) > 39_990
    assert chi_square(np.histogram(u, 100, (0, 1))[0], np.full(100, 0.01)) < 1.6
    for shifted in (u[1:, :-1], u[:-1, 1:], u[1:, 1:]):  # neighbours in seed, position, both
        assert abs(np.corrcoef(u[:-1, :-1].ravel(), shifted.ravel())[0, 1]) < 0.02
    assert seed_bits(-1) == np.uint64(2**64 - 1)


def test_head_sums_in_float32() -> None:
    """Exact to float32 rounding of the sum, where a bfloat16 result would be off by 2^-9 of its size."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 192, generator=generator).to(torch.bfloat16)
    weight = torch.randn(400, 192, generator=generator).to(torch.bfloat16)
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    got = logits_fp32(hidden, head_weight(weight), exact_inputs=True)
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), (hidden.double() @ weight.double().T).numpy(), atol=1e-4)
    wide = torch.randn(5, 192, generator=generator)
    got = logits_fp32(wide, head_weight(wide), exact_inputs=False)
    np.testing.assert_allclose(got.numpy(), (wide.double() @ wide.double().T).numpy(), atol=1e-4)
