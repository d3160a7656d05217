"""Faults 36 to 38 of weight delivery, on the native engine: what is in flight, in the prefix cache, or cancelled.

Numbers of named faults as in `tests/unit/sync/test_faults_*.py`. Tokens are compared with transformers, whose cache is
filled by the old model and read by the new one exactly as each KV policy says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import Trainer, core_of, land
from transformers import LlamaForCausalLM

from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.native.core import NativeCore
from headrace.rollout.stitch import token_versions

PROMPT, OTHER = (5, 6, 7, 8, 9), (11, 12, 13)
KV = ("keep", "recompute", "flush")
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""Renamed in transformers 5.x."""


def request(
    name: str, prompt: Sequence[int] = PROMPT, *, new_tok: int = 16, temperature: float = 0.0, **more: Any
) -> GenRequest:
    seed = int.from_bytes(name.encode(), "little") % 2**31
    sampling = SamplingParams(max_new_tok=new_tok, temperature=temperature, seed=seed)
    return GenRequest(id=name, prompt_ids=tuple(prompt), sampling=sampling, **more)


def steps(core: NativeCore, count: int) -> dict[str, Completion]:
    return {c.request_id: c for _ in range(count) for c in core.step()}


def to_the_end(core: NativeCore) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while core.busy:
        done |= steps(core, 1)
    return done


def exact(done: Mapping[str, Completion]) -> dict[str, tuple[object, ...]]:
    return {name: (c.ids_N.tobytes(), c.logp_N.tobytes(), c.spans, c.finish) for name, c in done.items()}


def spans(completion: Completion) -> list[tuple[int, int, int, int]]:
    return [(s.start, s.stop, s.policy_version, s.kv_version) for s in completion.spans]


def snapshot(trainer: Trainer, folder: Path) -> Any:
    """The trainer's weights as a transformers model."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    missing, unexpected = model.load_state_dict({n: t.clone() for n, t in trainer.served.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied, if at all
    return model.eval()


@torch.inference_mode()
def greedy(
    old: Any, new: Any, prompt: Sequence[int], *, before: int, total: int, keep: bool
) -> tuple[list[int], list[float]]:
    """`before` tokens of the old model, then the new one's, on the old cache (`keep`) or on one of its own."""
    ids, logps, cache = list(prompt), [], None
    for i in range(total):
        if i == before and not keep:
            cache = None
        fed = ids if cache is None else ids[-1:]
        out = (old if i < before else new)(torch.tensor([fed]), **{CACHE: cache}, use_cache=True)
        cache = out.past_key_values
        logp_V = torch.log_softmax(out.logits[0, -1].float(), -1)
        ids.append(int(logp_V.argmax()))
        logps.append(float(logp_V.max()))
    return ids[len(prompt) :], logps


def close(completion: Completion, ids: Sequence[int], logps: Sequence[float], upto: int | None = None) -> bool:
    """Same ids; log-probs equal but for the order of sums."""
    stop = completion.ids_N.size if upto is None else upto
    return completion.ids_N.tolist()[:stop] == list(ids)[:stop] and np.allclose(
        completion.logp_N[:stop], np.asarray(logps)[:stop], atol=2e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", KV)
def test_fault_36_update_during_an_in_flight_request(
    kv: Any, dtype: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, before, total = folders("sharp"), 6, 16
    trainer = Trainer(folder, dtype, tmp_path)
    core, loaded = (core_of(folder, dtype) for _ in range(2))
    first = trainer.publish()
    models = [snapshot(trainer, folder)]
    second = trainer.publish(3e-3)
    models.append(snapshot(trainer, folder))
    done: list[dict[str, Completion]] = []
    for engine, (v0, v1) in zip((core, loaded), zip(first, second, strict=True), strict=True):
        land(engine, v0)
        engine.add([
            request("a", group_id="g"), request("b", group_id="g", temperature=1.0), request("c", OTHER, group_id="h"),
        ])  # fmt: skip
        ended = steps(engine, before - 1)
        engine.stage(v1)
        ended |= steps(engine, 1)  # what is staged is not served
        shared_tok = engine.stats().shared_tok
        report = engine.swap(1, kv)
        assert (report.version, report.digest, report.running) == (1, v1.digest, 3)
        in_rows_tok = sum(len(prompt) + before - 1 for prompt in (PROMPT, PROMPT, OTHER))
        assert report.recomputed_tok == (0 if kv == "keep" else in_rows_tok)
        engine.add([request("late", group_id="g")])
        done.append(ended | to_the_end(engine))
        # Only KV of the new version may be copied, and after a flush none of what was running.
        assert engine.stats().shared_tok - shared_tok == (len(PROMPT) - 1 if kv == "recompute" else 0)
    assert exact(done[0]) == exact(done[1])
    for name in "abc":
        assert spans(done[0][name]) == [(0, before, 0, 0), (before, total, 1, 0 if kv == "keep" else 1)]
    assert spans(done[0]["late"]) == [(0, total, 1, 1)]
    if dtype == "float32":
        for name, prompt in (("a", PROMPT), ("c", OTHER)):
            history = {keep: greedy(*models, prompt, before=before, total=total, keep=keep) for keep in (True, False)}
            assert close(done[0][name], *history[kv == "keep"])
            assert not close(done[0][name], *history[kv != "keep"])
        assert close(done[0]["late"], *greedy(*models, PROMPT, before=0, total=total, keep=False))


def test_fault_37_no_prefix_hit_across_versions(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Of one group and one prompt, in each version: some that ran, some that waited, some that came after."""
    folder = folders("sharp")
    trainer = Trainer(folder, "float32", tmp_path)
    core = core_of(folder, "float32")
    done: dict[str, Completion] = {}
    cold: dict[int, dict[str, Completion]] = {}
    for version in range(3):
        delta, _ = trainer.publish(3e-3)
        core.stage(delta)
        core.swap(version, "keep")
        mine = [request(f"v{version}-{i}", group_id="g", temperature=1.0, new_tok=30 if i else 4) for i in range(4)]
        core.add(mine)  # the rows of the version before are in use: these wait until one is free
        if version:
            core.cancel(f"v{version - 1}-1")
            done |= steps(core, 2)
            assert core.stats().waiting == 2
            core.cancel(f"v{version - 1}-2")
            core.cancel(f"v{version - 1}-3")
        done |= steps(core, 3)
        model = tmp_path / f"cold-{version}"
        snapshot(trainer, folder).save_pretrained(model)
        engine = core_of(model, "float32", version=version)
        engine.add(mine)
        cold[version] = to_the_end(engine)
    done |= to_the_end(core)
    prefix_tok = len(PROMPT) - 1
    for version, all_of_it in cold.items():
        for name, alone in all_of_it.items():
            upto = int((token_versions(done[name])[0] == version).sum())
            assert upto > 0
            assert spans(done[name])[0][2:] == (version, version)
            assert close(done[name], alone.ids_N.tolist(), alone.logp_N.tolist(), upto)
    # In each version one computed the prompt and three copied it.
    assert core.stats().prefill_tok == 3 * prefix_tok
    assert core.stats().shared_tok == 3 * 3 * prefix_tok


def test_fault_38_abort_storm_returns_usable_partials(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Requests that run, wait, have ended or never were are cancelled before, beside and after a swap."""
    folder = folders("sharp")
    trainer = Trainer(folder, "float32", tmp_path)
    v0, v1 = (trainer.publish(3e-3) for _ in range(2))
    wanted = [
        request(f"r{i}", (5 + i // 4, 6, 7), new_tok=3 + i % 11, temperature=1.0, group_id=f"g{i // 4}")
        for i in range(48)
    ]
    whole: list[dict[str, Completion]] = []
    for version in (v0, v1):
        engine = core_of(folder, "float32")
        land(engine, version[1])
        engine.add(wanted)
        whole.append(to_the_end(engine))
    core = core_of(folder, "float32")
    land(core, v0[0])
    core.add(wanted)
    random = np.random.default_rng(0)
    ended: list[Completion] = []
    for tick in range(24):
        for i in random.integers(0, len(wanted) + 4, 3):
            core.cancel(f"r{i}")
        if tick == 8:
            core.stage(v1[0])
        if tick == 10:
            running = sorted(core._running(), key=lambda r: r.request.sampling.max_new_tok - r.sampled)
            core.cancel(running[0].request.id)
            core.swap(1, "keep")
            core.cancel(running[1].request.id)
        if tick == 11:
            core.cancel(running[-1].request.id)  # after one token of the new version
        ended += core.step()
    for one in wanted:
        core.cancel(one.id)
    ended += to_the_end(core).values()
    assert sorted(c.request_id for c in ended) == sorted(r.id for r in wanted)
    kinds = set()
    for completion in ended:
        size, versions = completion.ids_N.size, [s.policy_version for s in completion.spans]
        policy_N, kv_N = token_versions(completion)
        assert completion.logp_N.size == size
        assert np.isfinite(completion.logp_N).all()
        assert completion.finish in ("cancelled", "length")
        assert completion.error == ""
        of_v0 = int((policy_N == 0).sum())
        assert (kv_N == (0 if of_v0 else 1)).all()  # kept across the swap, fresh after it
        same = whole[0 if of_v0 else 1][completion.request_id]
        assert close(completion, same.ids_N.tolist(), same.logp_N.tolist(), of_v0 or size)
        kinds.add((completion.finish, tuple(versions)))
    assert kinds >= {("cancelled", v) for v in ((), (0,), (0, 1), (1,))} | {("length", v) for v in ((0,), (1,))}
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_used_frac, stats.version) == (0, 0, 0.0, 1)
    core.add(wanted)
    again = to_the_end(core)
    assert all(close(again[r.id], whole[1][r.id].ids_N, whole[1][r.id].logp_N) for r in wanted)
