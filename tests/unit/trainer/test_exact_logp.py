"""Exact old log-probs against the engine itself: weights that swap under running requests, tiny real models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tiny import batch_of, tiny_model

from headrace.config.schema import EngineConfig
from headrace.errors import SyncError
from headrace.numerics.diagnostics import log_ratio
from headrace.records import Batch, Completion, GenRequest, Outcome, Rollout, Sample, SamplingParams, Turn
from headrace.rollout.native.core import build
from headrace.rollout.stitch import samples as samples_of
from headrace.sync.manifest import StoreManifest
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.store import Store
from headrace.trainer.arrays import to_array
from headrace.trainer.batching import micro_batches
from headrace.trainer.exact_logp import ExactScorer
from headrace.trainer.model import Policy

RUN = "run-1"
TEMPERATURE = 0.7
PROMPT = (3, 14, 15, 9, 26)
Kv = Literal["keep", "recompute", "flush"]
Arrays = dict[str, NDArray[Any]]


class World:
    """A model that jumps from version to version, its store, and an engine that is given each of them."""

    def __init__(self, folder: Path, *, family: str = "llama", dtype: str = "float32", kv: Kv = "keep") -> None:
        torch.set_num_threads(1)
        self.folder, self.dtype, self.kv = folder, dtype, kv
        self.model = tiny_model(folder / "model", family, dtype)
        self.store = Store(str(folder / "store"), durable=False)
        self.rng = np.random.default_rng(1)
        self.arrays = {n: to_array(t) for n, t in load_file(self.model / "model.safetensors").items()}
        self.publisher = DeltaPublisher(self.store, run_id=RUN, with_limit=False)
        self.publisher.start(self.arrays, version=0)
        self.version = 0
        engine = EngineConfig(max_batch=8, max_context_tok=96).model_dump()
        self.core = build(
            model_dir=str(self.model), engine=engine, dtype=dtype, device="cpu", run_id=RUN, ignore_end=True
        )
        self.done: dict[str, Completion] = {}

    def jump(self) -> None:
        """Train and swap: far enough that every log-prob moves."""
        for name, old in self.arrays.items():
            noise = self.rng.standard_normal(old.shape).astype(np.float32) * 0.1
            self.arrays[name] = (old.astype(np.float32) + noise).astype(old.dtype)
        self.version += 1
        report = self.publisher.publish(self.arrays, version=self.version)
        manifest = StoreManifest(
            run_id=RUN, version=self.version, digest=report.digest, store=self.store.url, report=report
        )
        self.core.stage(manifest)
        self.core.swap(self.version, self.kv)

    def ask(self, name: str, prompt: tuple[int, ...], tokens: int, seed: int = 0) -> None:
        sampling = SamplingParams(temperature=TEMPERATURE, max_new_tok=tokens, seed=seed)
        self.core.add([GenRequest(id=name, prompt_ids=prompt, sampling=sampling, group_id="g")])

    def step(self, count: int) -> None:
        for _ in range(count):
            self.done |= {completion.request_id: completion for completion in self.core.step()}

    def sample(self, member: int, *turns: tuple[tuple[int, ...], str], group: str = "g") -> Sample:
        """What stitching makes of (prompt, request) pairs."""
        rollout = Rollout(
            group_id=group, member=member, attempt=0, outcome=Outcome.OK, reward=float(member % 2), messages=(),
            turns=tuple(Turn(prompt_ids=p, completion=self.done[name], env_version=0) for p, name in turns),
        )  # fmt: skip
        (found,) = samples_of(rollout)
        return found

    def policy(self) -> Policy:
        kind = getattr(torch, self.dtype)
        return Policy(str(self.model), dtype=kind, device=torch.device("cpu"), head_chunk_tok=64)

    def scorer(self, **options: Any) -> ExactScorer:
        return ExactScorer(self.policy(), self.store, run_id=RUN, **{"micro_batch_tok": 64, **options})

    def trainer(self) -> Policy:
        """The trainer's model now."""
        policy = self.policy()
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.copy_(torch.from_numpy(self.arrays[name].astype(np.float32)))
        return policy


def episode(world: World) -> Batch:
    """Four members over versions 0 to 3: two that share a prompt, one with two turns, one that starts late."""
    world.ask("a", PROMPT, 12, seed=1)
    world.ask("b", PROMPT, 9, seed=2)
    world.ask("c1", PROMPT, 3, seed=3)
    world.step(2)
    world.jump()
    world.step(2)
    second = (*PROMPT, *world.done["c1"].ids_N.tolist(), 40, 41)
    world.ask("c2", second, 8, seed=4)
    world.ask("d", PROMPT, 3, seed=5)
    world.step(3)
    world.jump()
    world.step(4)
    world.jump()
    world.ask("e", PROMPT, 4, seed=6)
    world.step(20)
    return batch_of(
        [
            world.sample(0, (PROMPT, "a")),
            world.sample(1, (PROMPT, "b")),
            world.sample(2, (PROMPT, "c1"), (second, "c2")),
            world.sample(3, (PROMPT, "d")),
        ],
        [world.sample(0, (PROMPT, "e"), group="h"), world.sample(1, (PROMPT, "d"), group="h")],
        version=world.version,
        temperature=TEMPERATURE,
    )


def logp_of(policy: Policy, batch: Batch) -> NDArray[np.float32]:
    """The trainer's ordinary pass, flat [K]."""
    rows = [np.zeros(len(s.ids_T), np.float32) for s in batch.samples]
    with torch.no_grad():
        for micro in micro_batches(batch, budget_tok=64, share_prompts=True):
            for s, t, value in zip(
                micro.sample_K, micro.place_K, policy.logp(micro, batch.temperature)[0].numpy(), strict=True
            ):
                rows[int(s)][int(t)] = value
    return np.concatenate([row[s.loss_mask_T] for row, s in zip(rows, batch.samples, strict=True)])


@pytest.fixture
def world_of(tmp_path: Path) -> Callable[..., World]:
    return lambda **options: World(tmp_path, **options)


@pytest.mark.parametrize("kv", ["keep", "recompute", "flush"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_token_gets_the_engines_own_log_prob(world_of: Callable[..., World], family: str, kv: Kv) -> None:
    world = world_of(family=family, kv=kv)
    batch = episode(world)
    assert len({int(v) for s in batch.samples for v in s.policy_version_T[s.loss_mask_T]}) == 4
    scores = world.scorer().score(batch)
    assert scores.scored.all()
    assert np.abs(scores.logp_v_K - scores.logp_m_K).max() < 1e-4
    np.testing.assert_allclose(scores.logp_c_K, logp_of(world.trainer(), batch), atol=1e-5)
    assert np.abs(scores.logp_c_K - scores.logp_m_K).mean() > 0.5, "the versions differ a lot"
    assert scores.plan.unknown_tok == 0


def test_kept_kv_is_what_makes_the_difference(world_of: Callable[..., World]) -> None:
    """Scoring such tokens on a prefix that their own version computed misses what the engine did."""
    world = world_of()
    batch = episode(world)
    claimed = [dataclasses.replace(s, kv_version_T=s.policy_version_T) for s in batch.samples]
    fresh = world.scorer().score(batch_of(claimed[:4], claimed[4:], version=3, temperature=TEMPERATURE))
    exact = world.scorer().score(batch)
    assert sum(len(need.replays) for need in exact.plan.needs) == 4
    assert np.abs(exact.logp_v_K - exact.logp_m_K).max() < 1e-4
    assert np.abs(fresh.logp_v_K - fresh.logp_m_K).max() > 0.1


def test_factors_multiply_to_the_total_ratio(world_of: Callable[..., World]) -> None:
    world = world_of()
    scores = world.scorer().score(episode(world))
    numeric, lag, total = (
        np.exp(log_ratio(top, bottom))
        for top, bottom in (
            (scores.logp_v_K, scores.logp_m_K),
            (scores.logp_c_K, scores.logp_v_K),
            (scores.logp_c_K, scores.logp_m_K),
        )
    )
    np.testing.assert_allclose(numeric * lag, total, rtol=1e-5)
    table = scores.metrics()
    assert table["numeric_ratio/kl_k3"] < 1e-8
    assert table["numeric_ratio/abs_max"] < 1e-4
    assert table["numeric_ratio/ess_token"] == pytest.approx(1.0, abs=1e-6)
    assert table["lag_ratio/kl_k3"] > 0.1
    assert table["lag_ratio/ess_token"] < 0.9
    assert table["exact/scored_frac"] == 1.0
    assert table["exact/versions"] == 4.0


def test_known_log_probs_save_work_and_change_nothing(world_of: Callable[..., World]) -> None:
    world = world_of()
    batch = episode(world)
    now_K = logp_of(world.trainer(), batch)
    alone, given = world.scorer().score(batch), world.scorer().score(batch, now_K)
    np.testing.assert_allclose(given.logp_v_K, alone.logp_v_K, atol=1e-5)
    np.testing.assert_array_equal(given.logp_c_K, now_K)
    assert given.plan.forward_tok < alone.plan.forward_tok / 1.5


def test_the_bound_on_the_cost_holds_and_the_choice_is_the_seeds(world_of: Callable[..., World]) -> None:
    world = world_of()
    batch = episode(world)
    seen = set()
    for seed in range(8):
        scores = world.scorer(frac=0.5, seed=seed).score(batch)
        assert 0 < scores.plan.forward_tok <= 0.5 * scores.total_tok
        assert 0 < scores.scored.sum() < len(scores.scored)
        assert np.abs(scores.logp_v_K - scores.logp_m_K)[scores.scored].max() < 1e-4
        again = world.scorer(frac=0.5, seed=seed).score(batch)
        np.testing.assert_array_equal(scores.logp_v_K, again.logp_v_K)
        seen.add(tuple(need.sample for need in scores.plan.needs))
    assert len(seen) > 1
    table = world.scorer(frac=0.0).score(batch).metrics()
    assert table["exact/scored_frac"] == 0.0
    assert table["lag_ratio/kl_k3"] == 0.0


def test_little_memory_takes_more_passes_and_gives_the_same(world_of: Callable[..., World]) -> None:
    world = world_of()
    batch = episode(world)
    wide, narrow = world.scorer(), world.scorer(kv_limit_bytes=1, micro_batch_tok=16)
    roomy, tight = wide.score(batch), narrow.score(batch)
    assert (len(roomy.plan.waves), len(tight.plan.waves)) == (1, 4)
    np.testing.assert_allclose(tight.logp_v_K, roomy.logp_v_K, atol=1e-5)
    assert narrow.walker.undone >= 4, "between waves it walks back"
    assert narrow.walker.rebuilt == 1
    again = narrow.score(batch)
    np.testing.assert_array_equal(again.logp_v_K, tight.logp_v_K)
    assert narrow.walker.rebuilt == 1, "the next batch starts from where this one ended"


def test_masked_tokens_are_ignored(world_of: Callable[..., World]) -> None:
    world = world_of()
    batch = episode(world)
    clean = world.scorer().score(batch)
    dirty = []
    for s in batch.samples:
        out = ~s.loss_mask_T
        row = s.logp_T.copy()
        row[out] = np.nan
        versions = [np.where(out, 77, v).astype(np.int32) for v in (s.policy_version_T, s.kv_version_T)]
        dirty.append(dataclasses.replace(s, logp_T=row, policy_version_T=versions[0], kv_version_T=versions[1]))
    again = world.scorer().score(batch_of(dirty[:4], dirty[4:], version=3, temperature=TEMPERATURE))
    np.testing.assert_array_equal(again.logp_v_K, clean.logp_v_K)
    np.testing.assert_array_equal(again.logp_m_K, clean.logp_m_K)


def test_an_unknown_version_is_named(world_of: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    world = world_of()
    batch = episode(world)
    for s in batch.samples:
        s.policy_version_T[s.loss_mask_T] += 40
        s.kv_version_T[s.loss_mask_T] += 40
    scorer = world.scorer()
    with pytest.raises(SyncError, match=r"version 40 cannot be rebuilt: .* has versions 0 to 3"):
        scorer.score(batch)
    assert scorer.metrics(batch) == {"exact/scored_frac": 0.0}
    assert "version 40 cannot be rebuilt" in caplog.text


def test_other_architectures_leave_replays_out(world_of: Callable[..., World]) -> None:
    world = world_of()
    batch = episode(world)
    scorer = world.scorer()
    scorer._policy.flat = False
    scores = scorer.score(batch)
    replayed = sum(r.stop - r.start for need in world.scorer().score(batch).plan.needs for r in need.replays)
    assert scores.plan.unknown_tok == replayed > 0
    assert (~scores.scored).sum() == replayed
    assert np.abs(scores.logp_v_K - scores.logp_m_K)[scores.scored].max() < 1e-4


def test_bfloat16_leaves_rounding_only(world_of: Callable[..., World]) -> None:
    world = world_of(dtype="bfloat16")
    assert world.arrays["model.norm.weight"].dtype == ml_dtypes.bfloat16
    table = world.scorer().score(episode(world)).metrics()
    assert table["exact/scored_frac"] == 1.0
    assert 0 < table["numeric_ratio/abs_mean"] < 0.1
    assert table["lag_ratio/abs_mean"] > 5 * table["numeric_ratio/abs_mean"]
