from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import VOCAB, random_batch, tiny_model
from transformers import AutoModelForCausalLM

from headrace.errors import DataError
from headrace.trainer import attention
from headrace.trainer.batching import micro_batches
from headrace.trainer.head import token_logp
from headrace.trainer.model import Policy


def load(folder: Path, chunk: int = 5) -> Policy:
    return Policy(str(folder), dtype=torch.float32, device=torch.device("cpu"), head_chunk_tok=chunk)


def policy_logp(policy: Policy, budget: int, share: bool, temperature: float) -> np.ndarray:
    batch = random_batch(3)
    places = {}
    for micro in micro_batches(batch, budget_tok=budget, share_prompts=share):
        logp_K, _ = policy.logp(micro, temperature)
        for k in range(len(logp_K)):
            places[(int(micro.sample_K[k]), int(micro.place_K[k]))] = float(logp_K[k].detach())
    return np.array([places[key] for key in sorted(places)])


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_log_probs_equal_transformers_whatever_the_layout(tmp_path: Path, family: str, tied: bool) -> None:
    tiny_model(tmp_path, family, tied=tied)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = []
    for s in random_batch(3).samples:
        ids = torch.from_numpy(s.ids_T.astype(np.int64))
        with torch.no_grad():
            logp_TV = torch.log_softmax(reference(ids[None]).logits[0] / 0.7, -1)
        expected += [float(logp_TV[t - 1, ids[t]]) for t in np.flatnonzero(s.loss_mask_T)]
    policy = load(tmp_path)
    assert policy.flat
    for budget, share in ((1000, True), (1000, False), (20, True), (1, False)):
        assert policy_logp(policy, budget, share, 0.7) == pytest.approx(np.array(expected), abs=2e-5)
    policy.flat = False
    for share in (True, False):
        assert policy_logp(policy, 60, share, 0.7) == pytest.approx(np.array(expected), abs=2e-5)


@pytest.mark.parametrize("chunk_scores", [1 << 25, 64])
@pytest.mark.parametrize("keep_bytes", [1 << 30, 0])
def test_gradients_equal_transformers(
    tmp_path: Path, chunk_scores: int, keep_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_CHUNK_SCORES", chunk_scores)
    monkeypatch.setattr(attention, "_KEEP_BYTES", keep_bytes)
    tiny_model(tmp_path, "qwen3", tied=False)
    batch = random_batch(5)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    total = torch.zeros(())
    for s in batch.samples:
        ids = torch.from_numpy(s.ids_T.astype(np.int64))
        logp_TV = torch.log_softmax(reference(ids[None]).logits[0], -1)
        total = total + sum(logp_TV[t - 1, ids[t]] * (1 + t % 3) for t in np.flatnonzero(s.loss_mask_T))
    total.backward()
    policy = load(tmp_path)
    policy.embedding_grad_VH = torch.zeros(VOCAB, 32)
    policy.head_grad_VH = torch.zeros(VOCAB, 32)
    for micro in micro_batches(batch, budget_tok=40, share_prompts=True):
        logp_K, _ = policy.logp(micro, 1.0)
        (logp_K * torch.from_numpy(1 + micro.place_K % 3)).sum().backward()
    for name, parameter in policy.named_parameters():
        got = parameter.grad
        if name == policy.embedding_name:
            got = policy.embedding_grad_VH
        if name == policy.head_name:
            got = policy.head_grad_VH
        wanted = dict(reference.named_parameters())[name].grad
        assert got is not None
        assert wanted is not None
        assert torch.allclose(got, wanted, atol=2e-4, rtol=2e-4), (name, (got - wanted).abs().max())


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("keep", [True, False])
def test_head_equals_log_softmax(chunk: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.trainer.head._KEEP_BYTES", 1 << 29 if keep else 0)
    torch.manual_seed(0)
    h, w = torch.randn(7, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    target, up = torch.randint(0, 11, (7,)), torch.randn(7)
    full = torch.log_softmax(h @ w.t() / 0.6, -1)
    dh, dw = torch.autograd.grad((full.gather(1, target[:, None])[:, 0] * up).sum(), (h, w))
    accumulator = torch.zeros(11, 6)
    logp, entropy = token_logp(h, w, target, temperature=0.6, chunk_tok=chunk, grad_VH=accumulator)
    assert torch.allclose(logp, full.gather(1, target[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), atol=1e-5)
    assert not entropy.requires_grad
    (got,) = torch.autograd.grad((logp * up).sum(), h)
    assert torch.allclose(got, dh, atol=1e-5)
    assert torch.allclose(accumulator, dw, atol=1e-5)


def test_bfloat16_log_probs_are_near_float32(tmp_path: Path) -> None:
    tiny_model(tmp_path, dtype="bfloat16")
    exact = policy_logp(load(tmp_path), 1000, True, 1.0)
    rough = Policy(str(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"), head_chunk_tok=64)
    assert policy_logp(rough, 1000, True, 1.0) == pytest.approx(exact, abs=0.2)
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"  # type: ignore[attr-defined]


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        load(tmp_path)
