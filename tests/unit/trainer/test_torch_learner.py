from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from tiny import batch_of, random_batch, recipe, sample, tiny_model
from transformers import AutoModelForCausalLM

from headrace.errors import ConfigError, DataError, NonFiniteError
from headrace.trainer.torch_learner import TorchLearner, build

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))
from learner_contract import arrays_of, check_learner, same


def learner(folder: Path, **sections: Any) -> TorchLearner:
    return build(config=recipe(**sections).model_dump(), model_dir=str(folder))


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4}}, {"loss": {"kind": "decoupled_ppo", "kl_coef": 0.1}}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contract(tmp_path: Path, sections: dict[str, Any], dtype: str) -> None:
    model = tiny_model(tmp_path / "model", dtype=dtype)
    common = {"model": {"dtype": dtype, "device": "cpu"}, "optim": {"lr": 1e-2}}
    check_learner(lambda: learner(model, **common, **sections), random_batch(1), tmp_path)


@pytest.mark.parametrize("kind", ["pg", "gspo", "decoupled_ppo"])
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "prompt_mean"])
def test_loss_and_gradient_do_not_depend_on_the_layout(tmp_path: Path, kind: str, aggregate: str) -> None:
    model = tiny_model(tmp_path)
    batch = random_batch(2)
    results = []
    for budget, share, chunk in ((4096, True, 1024), (4096, False, 3), (25, True, 7), (16, False, 1)):
        trainer = {"micro_batch_tok": budget, "share_prompts": share, "head_chunk_tok": chunk}
        one = learner(model, trainer=trainer, loss={"kind": kind, "aggregate": aggregate, "correction": "none"})
        report = one.forward_backward(batch)
        results.append((report, one.masters.grad.clone()))
    first, gradient = results[0]
    assert gradient.abs().sum() > 0
    assert {r.micro_batches for r, _ in results} != {1}
    for report, other in results[1:]:
        assert report.loss == pytest.approx(first.loss, abs=1e-5)
        assert torch.allclose(gradient, other, atol=1e-5)
        for name, value in first.metrics.items():
            assert report.metrics[name] == pytest.approx(value, abs=1e-3, rel=1e-3), name


def test_the_loss_is_the_one_computed_by_hand(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    batch = random_batch(4, temperature=0.8)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, tokens = 0.0, 0
    for group in batch.groups:
        mean = np.mean([s.reward for s in group.samples])
        for s in group.samples:
            ids = torch.from_numpy(s.ids_T.astype(np.int64))
            with torch.no_grad():
                logp_TV = torch.log_softmax(reference(ids[None]).logits[0] / 0.8, -1)
            for t in np.flatnonzero(s.loss_mask_T):
                c = float(logp_TV[t - 1, ids[t]])
                total -= min(np.exp(c - s.logp_T[t]), 2.0) * (s.reward - mean) * c
                tokens += 1
    assert learner(model).forward_backward(batch).loss == pytest.approx(total / tokens, rel=1e-4)


def test_reward_is_learned(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    one = learner(model, optim={"lr": 5e-3})
    group = [sample("a", m, [1, 2, 3], [10 + m, 7], reward=float(m == 2)) for m in range(4)]
    batch = batch_of(group)

    def current() -> np.ndarray:
        return one.logp(batch).reshape(4, 2)[:, 0]

    before = current()
    for _ in range(8):
        one.train(batch)
    change = current() - before
    assert change[2] > 0
    assert change[2] > change[[0, 1, 3]].max()


def test_padding_of_the_engine_logp_outside_the_mask_may_hold_anything(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    clean = random_batch(6)
    dirty_groups = []
    for group in clean.groups:
        samples = []
        for s in group.samples:
            logp = s.logp_T.copy()
            logp[~s.loss_mask_T] = np.nan
            version = s.policy_version_T.copy()
            version[~s.loss_mask_T] = -(10**6)
            samples.append(replace(s, logp_T=logp, policy_version_T=version))
        dirty_groups.append(samples)
    a, b = learner(model), learner(model)
    report_a, report_b = a.forward_backward(clean), b.forward_backward(batch_of(*dirty_groups))
    assert report_a.loss == report_b.loss
    assert dict(report_a.metrics) == dict(report_b.metrics)
    assert torch.equal(a.masters.grad, b.masters.grad)


def test_missing_engine_log_probs_are_masked_counted_and_limited(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    batch = random_batch(7, groups=4, size=8)
    s = batch.samples[3]
    t = int(np.flatnonzero(s.loss_mask_T)[0])
    s.logp_T[t] = np.nan
    report = learner(model).forward_backward(batch)
    assert report.metrics["nonfinite/logp"] == 1
    assert report.trained_tok == batch.trained_tok - 1
    assert np.isfinite(report.loss)
    for other in batch.samples:
        other.logp_T[:] = np.nan
    with pytest.raises(DataError, match="no finite engine log-prob"):
        learner(model).forward_backward(batch)


def test_non_finite_weights_are_caught_and_the_sample_is_named(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, tied=False)  # so that only the sample with the poisoned token is hit
    one = learner(model)
    poisoned = 60
    with torch.no_grad():
        dict(one.policy.named_parameters())[one.policy.embedding_name][poisoned] = float("nan")
    group = [sample("a", m, [1, 2], [3 + m, 4]) for m in range(3)] + [sample("a", 3, [1, poisoned], [3, 4])]
    before = arrays_of(one)
    with pytest.raises(NonFiniteError, match=r"log-prob of sample 'a'/3 at token 2 is nan"):
        one.forward_backward(batch_of(group))
    assert same(before, arrays_of(one))
    assert not one.masters.grad.any()


def exploding_loss(logp_c: Any, logp_m: Any, advantage: Any, mask: Any, ctx: Any) -> Any:
    """Finite value, NaN in the gradient where the advantage is positive."""
    return torch.where(advantage > 0, logp_c - logp_c.detach(), 1.0).abs().sqrt(), {}


def test_gradients_that_are_not_finite_name_the_sample(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    one = learner(model, loss={"kind": f"{Path(__file__).stem}:exploding_loss"}, recipe_dir=str(Path(__file__).parent))
    group = [sample("a", m, [1, 2], [3 + m, 4], reward=float(m == 1)) for m in range(3)]
    before = arrays_of(one)
    one.forward_backward(batch_of(group))
    with pytest.raises(NonFiniteError, match=r"gradient norm is .*sample 'a'/1 has gradients"):
        one.optim_step()
    assert same(before, arrays_of(one))
    assert one.step == 0
    assert not one.masters.grad.any()


def test_several_updates_use_proximal_log_probs_from_before_the_first(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    one = learner(
        model,
        optim={"lr": 3e-2},
        trainer={"updates_per_batch": 3},
        loss={"kind": "ppo", "clip_low": 0.01, "clip_high": 0.01},
    )
    group = [sample("x", m, [1, 2, 3], [10 + m, 7], reward=float(m)) for m in range(2)]
    twins = [[replace(s, group_id=f"g{i}") for s in group] for i in range(3)]
    forward, optim = one.train(batch_of(*twins))
    assert [o.step for o in optim] == [1, 2, 3]
    assert forward[0].metrics["clip_frac/high"] == 0  # ratio 1 everywhere
    # later parts hold the same tokens: the weights have moved from the proximal ones, so the clip acts
    assert forward[2].metrics["clip_frac/high"] + forward[2].metrics["clip_frac/low"] > 0


def test_masked_sequences_shrink_the_loss_and_are_reported(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    one = learner(model, loss={"kind": "ppo", "correction": "geometric", "geo_width": 1e-6})
    report = one.forward_backward(random_batch(8))
    assert report.metrics["mask_frac/seq"] == 1.0
    assert report.loss == 0.0
    assert one.masters.grad_norm() == 0.0


def test_fully_masked_batch_is_defined(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    quiet = [replace(s, loss_mask_T=np.zeros_like(s.loss_mask_T)) for s in random_batch(9).groups[0].samples]
    report = learner(model).forward_backward(batch_of(quiet))
    assert (report.loss, report.trained_tok, report.micro_batches) == (0.0, 0, 0)
    assert report.metrics["empty_samples"] == len(quiet)


def test_resume_after_two_of_four_steps_is_bit_exact(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    sections: dict[str, Any] = {"optim": {"lr": 1e-2, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 1}}
    straight, first, second = (learner(model, **sections) for _ in range(3))
    for i in range(4):
        straight.train(random_batch(i))
    for i in range(2):
        first.train(random_batch(i))
    folder = tmp_path / "saved"
    folder.mkdir()
    first.save(folder)
    second.load(folder)
    for i in range(2, 4):
        second.train(random_batch(i))
    assert torch.equal(straight.masters.master, second.masters.master)
    states = [x.masters.state() for x in (straight, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_checkpoint_of_another_model_is_refused_and_says_why(tmp_path: Path) -> None:
    one = learner(tiny_model(tmp_path / "a"))
    folder = tmp_path / "saved"
    folder.mkdir()
    one.save(folder)
    with pytest.raises(DataError, match=r"lora\.rank: checkpoint has 0, this learner 4"):
        learner(tmp_path / "a", lora={"rank": 4}).load(folder)
    with pytest.raises(DataError, match=r"model_type: checkpoint has 'llama', this learner 'qwen2'"):
        learner(tiny_model(tmp_path / "b", "qwen2")).load(folder)
    with pytest.raises(DataError, match=r"optim\.betas"):
        learner(tmp_path / "a", optim={"betas": (0.9, 0.99)}).load(folder)


def test_gradient_clipping_scales_to_the_limit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    batch = random_batch(1)
    free, tight = learner(model), learner(model, optim={"max_grad_norm": 1e-9})
    start = free.masters.master.clone()
    assert free.train(batch)[1][0].grad_norm == pytest.approx(tight.train(batch)[1][0].grad_norm)
    # AdamW's first step does not depend on the scale, unless eps dominates
    assert (tight.masters.master - start).abs().sum() < (free.masters.master - start).abs().sum()


def test_export_loads_in_transformers_and_peft(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", dtype="bfloat16")
    one = learner(
        model, model={"dtype": "bfloat16", "device": "cpu"}, lora={"rank": 4, "alpha": 64.0}, optim={"lr": 0.05}
    )
    for i in range(3):
        one.train(random_batch(i))
    one.export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    served = dict(one.named_arrays())
    for name, parameter in loaded.named_parameters():
        assert parameter.detach().view(torch.int16).numpy().tobytes() == served[name].tobytes(), name
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").merge_and_unload()
    for name, parameter in adapted.named_parameters():
        assert np.allclose(parameter.detach().numpy(), served[name].astype(np.float32), atol=2e-2, rtol=1e-2), name


def test_served_names_leave_out_a_tied_head(tmp_path: Path) -> None:
    tied = learner(tiny_model(tmp_path / "tied", dtype="bfloat16"), model={"dtype": "bfloat16", "device": "cpu"})
    names = dict(tied.named_arrays())
    assert "lm_head.weight" not in names
    assert names["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    free = learner(tiny_model(tmp_path / "free", tied=False))
    assert "lm_head.weight" in dict(free.named_arrays())


def test_kl_term_pulls_towards_the_initial_model(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    for sections in ({}, {"lora": {"rank": 4}}):
        one = learner(model, optim={"lr": 1e-2}, loss={"kl_coef": 5.0}, **sections)
        batch = random_batch(1)
        first = one.train(batch)[0][0]
        assert first.metrics["kl_ref/k2"] == pytest.approx(0.0, abs=1e-9)
        second = one.forward_backward(batch)
        assert second.metrics["kl_ref/k2"] > 0


def test_lag_is_split(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    report = learner(model).forward_backward(random_batch(1, version=2))
    assert "kl_infer_train/k3_lag_pos" in report.metrics
    assert "kl_infer_train/k3_lag0" not in report.metrics


def test_float16_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        learner(tiny_model(tmp_path), model={"dtype": "float16"})
    with pytest.raises(ConfigError, match=r"lora\.target names 'qq_proj'.*did you mean 'q_proj'"):
        learner(tmp_path, lora={"rank": 2, "target": ("qq_proj",)})
