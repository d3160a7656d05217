"""The scripted engine: laws, virtual time, versions, spans."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clock import VirtualClock
from headrace.config.schema import EngineConfig
from headrace.errors import ConfigError, SyncError
from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.scripted import ScriptedCore, build
from headrace.rollout.spans import spans_of
from headrace.sync.manifest import FullManifest


def core_of(clock: VirtualClock | None = None, max_batch: int = 8, **options: Any) -> ScriptedCore:
    engine = EngineConfig(max_batch=max_batch, max_context_tok=512).model_dump()
    return build(options=options, engine=engine, run_id="run", clock=clock or VirtualClock())


def ask(
    name: str, *, new: int = 100, seed: int = 0, prompt: tuple[int, ...] = (1, 2, 3), group: str = ""
) -> GenRequest:
    return GenRequest(id=name, prompt_ids=prompt, sampling=SamplingParams(max_new_tok=new, seed=seed), group_id=group)


def run(core: ScriptedCore, *requests: GenRequest) -> dict[str, Completion]:
    core.add(requests)
    done: dict[str, Completion] = {}
    while core.busy:
        done |= {c.request_id: c for c in core.step()}
    return done


def manifest(version: int, run_id: str = "run") -> FullManifest:
    return FullManifest(run_id=run_id, version=version, digest=f"d{version}", path="", tensors=(), bytes=0)


def test_time_follows_the_law() -> None:
    clock = VirtualClock()
    core = core_of(clock, length_tok=4, base_s=1.0, per_request_s=0.25, prefill_s_per_tok=0.5)
    done = run(core, ask("a", group="g"), ask("b", group="g"))
    assert clock.now() == 2 * 0.5 + 4 * 1.5
    assert {c.gen_s for c in done.values()} == {6.0}
    assert {c.queue_s for c in done.values()} == {1.0}
    stats = core.stats()
    assert (stats.decode_s, stats.prefill_s, stats.decode_tok, stats.prefill_tok, stats.shared_tok) == (
        6.0,
        1.0,
        8,
        2,
        2,
    )


def test_lengths_follow_the_law_and_are_cut_at_the_limit() -> None:
    constant = run(core_of(length_tok=7), ask("a"), ask("b", new=5))
    assert (len(constant["a"].ids_N), constant["a"].finish, constant["a"].ids_N[-1]) == (7, "stop", 0)
    assert (len(constant["b"].ids_N), constant["b"].finish) == (5, "length")
    some = run(core_of(length="list", length_list=[2, 9]), *(ask(f"r{i}", seed=i) for i in range(40)))
    assert {len(c.ids_N) for c in some.values()} == {2, 9}
    many = run(core_of(length="lognormal", length_tok=20, max_batch=500), *(ask(f"r{i}", seed=i) for i in range(400)))
    lengths = np.array([len(c.ids_N) for c in many.values()])
    assert 17 < np.median(lengths) < 23
    assert 0.6 < np.std(np.log(lengths)) < 0.8


def test_a_request_is_the_same_whatever_else_runs() -> None:
    options = {"length": "lognormal", "right_p": 0.5}
    alone = run(core_of(**options), ask("x", seed=3))["x"]
    among = run(core_of(max_batch=2, **options), *(ask(f"r{i}", seed=i) for i in range(5)), ask("x", seed=3))["x"]
    other = run(core_of(**options), ask("x", seed=3, prompt=(4,)))["x"]
    assert among.ids_N.tolist() == alone.ids_N.tolist()
    assert among.text == alone.text
    assert other.ids_N.tolist() != alone.ids_N.tolist()


def test_answers_get_better_with_the_version() -> None:
    core = core_of(right_p=0.2, right_p_per_version=0.2, verify_weights=False, length_tok=2, max_batch=400)
    shares = []
    for version in range(4):
        if version:
            core.stage(manifest(version))
            core.swap(version, "keep")
        done = run(core, *(ask(f"r{i}", seed=i) for i in range(400)))
        assert {c.text for c in done.values()} == {"0", "1"}
        shares.append(np.mean([c.text == "1" for c in done.values()]))
    np.testing.assert_allclose(shares, [0.2, 0.4, 0.6, 0.8], atol=0.07)


@pytest.mark.parametrize(("kv", "oldest"), [("keep", 0), ("recompute", 2), ("flush", 2)])
def test_swap_in_flight(kv: Any, oldest: int) -> None:
    clock = VirtualClock()
    core = core_of(clock, length_tok=6, verify_weights=False, swap_s=3.0)
    core.add([ask("a")])
    core.step()
    core.step()
    core.stage(manifest(2))
    report = core.swap(2, kv)
    assert (report.version, report.digest, report.running, report.pause_s) == (2, "d2", 1, 3.0)
    assert report.recomputed_tok == (0 if kv == "keep" else 4)
    assert core.swap(2, kv).pause_s == 0.0
    spans = run(core)["a"].spans
    assert [(s.start, s.stop, s.policy_version, s.kv_version) for s in spans] == [(0, 2, 0, 0), (2, 6, 2, oldest)]
    assert clock.now() == 3.0


def test_versions_are_honoured() -> None:
    core = core_of(verify_weights=False)
    assert core.stats().digest == ""
    core.stage(manifest(0))
    assert core.swap(0, "keep").digest == "d0"
    with pytest.raises(SyncError, match="v0 is served, staged versions: none"):
        core.swap(1, "keep")
    with pytest.raises(SyncError, match="'other'"):
        core.stage(manifest(1, "other"))
    core.stage(manifest(2))
    core.swap(2, "keep")
    with pytest.raises(SyncError, match="never go down"):
        core.stage(manifest(1))
    with pytest.raises(SyncError, match="v2 is served"):
        core.swap(0, "keep")
    with pytest.raises(SyncError, match="v000003"):
        core_of().stage(FullManifest(run_id="run", version=3, digest="", path="v000003", tensors=(), bytes=0))


def test_options_are_strict() -> None:
    with pytest.raises(ConfigError, match="lenght_tok"):
        core_of(lenght_tok=3)
    with pytest.raises(ConfigError, match="length_list"):
        core_of(length="list")


def test_never_imports_torch() -> None:
    code = "import sys; from headrace.rollout import remote, scripted, worker; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_spans_cover_every_token_once_and_are_as_few_as_possible(versions: list[tuple[int, int]]) -> None:
    spans = spans_of(versions)
    again = [(s.policy_version, s.kv_version) for s in spans for _ in range(s.start, s.stop)]
    assert again == versions
    assert [s.start for s in spans[1:]] == [s.stop for s in spans[:-1]]
    assert all((a.policy_version, a.kv_version) != (b.policy_version, b.kv_version) for a, b in pairwise(spans))


@given(st.lists(st.sampled_from(["step", "add", "cancel", "keep", "recompute"]), min_size=1, max_size=40))
def test_whatever_happens_every_request_ends_with_right_spans(script: list[Any]) -> None:
    core = core_of(length="lognormal", length_tok=4, verify_weights=False, max_batch=3)
    done: list[Completion] = []
    asked, version = 0, 0
    for what in script:
        if what == "add":
            core.add([ask(f"r{asked}", seed=asked, new=20)])
            asked += 1
        elif what == "cancel":
            core.cancel(f"r{asked // 2}")
        elif what == "step":
            done += core.step()
        else:
            version += 1
            core.stage(manifest(version))
            core.swap(version, what)
    while core.busy:
        done += core.step()
    assert sorted(c.request_id for c in done) == sorted(f"r{i}" for i in range(asked))
    for completion in done:
        edges = [0, *(s.stop for s in completion.spans)]
        assert edges[-1] == len(completion.ids_N)
        policies = [s.policy_version for s in completion.spans]
        assert policies == sorted(policies)
        assert all(s.kv_version <= s.policy_version for s in completion.spans)
