"""The native engine against transformers: tokens, log-probs, batching, sharing, swaps. Tiny random models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.config.schema import EngineConfig
from headrace.errors import ConfigError, DataError, EngineError, SyncError
from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.native.core import NativeCore, build
from headrace.rollout.native.decoder import Decoder
from headrace.rollout.native.fallback import Fallback
from headrace.rollout.native.loading import named_tensors, to_array
from headrace.sync.manifest import FullManifest, chain_digest
from headrace.sync.publish import tensor_info, write_version

RUN = "run-1"
VOCAB = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama_untied_biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True)
    ),
    "llama3_rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "linear_rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=128,
            n_embd=48,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.3,
        )
    ),
}
FAMILY = [name for name in MODELS if name not in ("gpt2", "mistral_window")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model, made once."""
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(1)
            model = MODELS[name]()
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases that matter
                    parameter.data += 0.3 * torch.randn_like(parameter)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


def core_of(folder: Path, *, dtype: str = "float32", **engine: Any) -> NativeCore:
    config = EngineConfig(**({"max_batch": 8, "max_context_tok": 96} | engine))
    return build(model_dir=str(folder), engine=config.model_dump(), dtype=dtype, device="cpu", run_id=RUN)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length))


def ask(name: str, ids: tuple[int, ...], *, group: str = "", min_version: int = 0, **sampling: Any) -> GenRequest:
    params = SamplingParams(**({"max_new_tok": 10} | sampling))
    return GenRequest(id=name, prompt_ids=ids, sampling=params, group_id=group, min_version=min_version)


def run(core: NativeCore, requests: Iterable[GenRequest] = ()) -> dict[str, Completion]:
    core.add(list(requests))
    done: dict[str, Completion] = {}
    while core.busy:
        done |= {c.request_id: c for c in core.step()}
    return done


def reference_logp(folder: Path, request: GenRequest, done: Completion, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """transformers' log_softmax(logits / temperature) of the completion's tokens, in one forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.tensor([[*request.prompt_ids, *done.ids_N.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    logp = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
    return logp.gather(-1, torch.tensor(done.ids_N.tolist())[:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str, folders: Any) -> None:
    folder = folders(name)
    core = core_of(folder)
    assert isinstance(core._backend, Decoder if name in FAMILY else Fallback)
    requests = [ask(f"r{n}", prompt(n, n), temperature=0.0, max_new_tok=12) for n in (1, 2, 9, 30)]
    done = run(core, requests)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert done[request.id].ids_N.tolist() == expected[0, ids.shape[1] :].tolist()
        np.testing.assert_allclose(
            done[request.id].logp_N, reference_logp(folder, request, done[request.id], torch.float32), atol=1e-4
        )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logp_is_that_of_the_sampled_distribution(name: str, temperature: float, folders: Any) -> None:
    requests = [ask(f"r{n}", prompt(n, n), temperature=temperature, seed=n) for n in (1, 4, 20)]
    done = run(core_of(folders(name)), requests)
    for request in requests:
        expected = reference_logp(folders(name), request, done[request.id], torch.float32)
        np.testing.assert_allclose(done[request.id].logp_N, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_transformers_own(name: str, folders: Any) -> None:
    """Tolerance: 1.5 x transformers' own mean distance between bfloat16 and float32 on the same tokens."""
    requests = [ask(f"r{n}", prompt(n, 10), seed=n, max_new_tok=40) for n in range(6)]
    core = core_of(folders(name), dtype="bfloat16")
    done = run(core, requests)
    ours, theirs = [], []
    for request in requests:
        exact = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.bfloat16).float()
        ids = torch.tensor([[*request.prompt_ids, *done[request.id].ids_N.tolist()]])
        with torch.no_grad():
            logp = torch.log_softmax(exact(ids).logits[0, len(request.prompt_ids) - 1 : -1], -1)
        want = logp.gather(-1, ids[0, len(request.prompt_ids) :, None])[:, 0].numpy()
        ours.append(np.abs(done[request.id].logp_N - want))
        theirs.append(np.abs(reference_logp(folders(name), request, done[request.id], torch.bfloat16) - want))
    assert np.mean(ours) <= 1.5 * np.mean(theirs)


def test_requests_that_arrive_while_others_run_get_the_tokens_they_get_alone(folders: Any) -> None:
    requests = [ask(f"r{n}", prompt(n, 3 + 5 * n), seed=n, max_new_tok=5 + 3 * (n % 4)) for n in range(9)]
    alone = {r.id: run(core_of(folders("llama")), [r])[r.id] for r in requests}
    core = core_of(folders("llama"), max_batch=4)
    together: dict[str, Completion] = {}
    for request in requests:
        core.add([request])
        together |= {c.request_id: c for c in core.step()}
        together |= {c.request_id: c for c in core.step()}
    together |= run(core)
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        assert together[name].ids_N.tolist() == expected.ids_N.tolist()
        np.testing.assert_allclose(together[name].logp_N, expected.logp_N, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
def test_a_shared_prefix_changes_nothing_but_the_work(late: bool, folders: Any) -> None:
    ids = prompt(5, 17)
    plain = run(core_of(folders("llama")), [ask(f"r{i}", ids, seed=i) for i in range(5)])
    core = core_of(folders("llama"))
    requests = [ask(f"r{i}", ids, seed=i, group="g") for i in range(5)]
    core.add(requests[: 2 if late else 5])
    done = {c.request_id: c for c in core.step()}
    done |= run(core, requests[2:] if late else [])
    stats = core.stats()
    assert (stats.prefill_tok, stats.shared_tok) == (16, 4 * 16)
    for name, expected in plain.items():
        assert done[name].ids_N.tolist() == expected.ids_N.tolist()
        np.testing.assert_allclose(done[name].logp_N, expected.logp_N, atol=1e-5)


def publish(folder: Path, out: Path, version: int, scale: float, run_id: str = RUN) -> FullManifest:
    named = named_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    arrays = [(n, to_array(t * scale)) for n, t in named.items()]
    return write_version(out, run_id=run_id, version=version, arrays=arrays)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("kv", ["keep", "recompute", "flush"])
def test_swap_in_flight(name: str, kv: Any, folders: Any, tmp_path: Path) -> None:
    """Tokens after the swap come from the new weights, with KV as the policy says."""
    manifest = publish(folders(name), tmp_path, 3, 1.1)
    requests = [ask(f"r{n}", prompt(n, 4 + n), seed=n, max_new_tok=12, group="g") for n in range(3)]
    core = core_of(folders(name))
    core.add(requests)
    for _ in range(5):
        core.step()
    core.stage(manifest)
    report = core.swap(3, kv)
    assert (report.version, report.digest, report.running) == (3, manifest.digest, 3)
    assert report.recomputed_tok == (0 if kv == "keep" else sum(4 + n + 5 - 1 for n in range(3)))
    done = run(core)
    new_dir = tmp_path / "new"
    model = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32)
    for tensor in named_tensors(model).values():
        tensor.mul_(1.1)
    model.save_pretrained(new_dir)
    for request in requests:
        got = done[request.id]
        spans = [(s.start, s.stop, s.policy_version, s.kv_version) for s in got.spans]
        assert spans == [(0, 5, 0, 0), (5, 12, 3, 0 if kv == "keep" else 3)]
        old = reference_logp(folders(name), request, got, torch.float32)
        new = reference_logp(new_dir, request, got, torch.float32)
        np.testing.assert_allclose(got.logp_N[:5], old[:5], atol=1e-4)
        assert not np.allclose(got.logp_N[5:], old[5:], atol=1e-3)
        if kv == "keep":  # new weights on old KV: neither version's own log-probs
            assert not np.allclose(got.logp_N[5:], new[5:], atol=1e-3)
        else:
            np.testing.assert_allclose(got.logp_N[5:], new[5:], atol=1e-4)


@pytest.mark.parametrize(("kv", "shared"), [("keep", 0), ("recompute", 8), ("flush", 0)])
def test_prefixes_are_not_shared_across_versions(kv: Any, shared: int, folders: Any, tmp_path: Path) -> None:
    core = core_of(folders("llama"))
    core.add([ask("old", prompt(0, 9), group="g", max_new_tok=20)])
    core.step()
    core.stage(publish(folders("llama"), tmp_path, 1, 1.1))
    core.swap(1, kv)
    core.add([ask("new", prompt(0, 9), group="g", seed=4)])
    done = run(core)
    assert core.stats().shared_tok == shared
    cold = core_of(folders("llama"))
    cold.stage(publish(folders("llama"), tmp_path, 1, 1.1))
    cold.swap(1, "keep")
    expected = run(cold, [ask("new", prompt(0, 9), seed=4)])["new"]
    assert done["new"].ids_N.tolist() == expected.ids_N.tolist()
    np.testing.assert_allclose(done["new"].logp_N, expected.logp_N, atol=1e-4)
    assert {(s.policy_version, s.kv_version) for s in done["new"].spans} == {(1, 1)}


def test_bfloat16_swap_serves_what_was_published(folders: Any, tmp_path: Path) -> None:
    core = core_of(folders("llama"), dtype="bfloat16")
    named = named_tensors(AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.bfloat16))
    assert core.stats().digest == chain_digest(tensor_info(n, to_array(t)) for n, t in named.items())
    assert "lm_head.weight" not in named
    before = run(core, [ask("a", prompt(0, 9), temperature=0.0)])["a"]
    scaled = [(n, to_array(t * 2 if t.ndim == 2 else t)) for n, t in named.items()]
    core.stage(write_version(tmp_path, run_id=RUN, version=1, arrays=scaled))
    core.swap(1, "keep")
    after = run(core, [ask("a", prompt(0, 9), temperature=0.0)])["a"]
    core.stage(write_version(tmp_path, run_id=RUN, version=2, arrays=[(n, to_array(t)) for n, t in named.items()]))
    core.swap(2, "keep")
    back = run(core, [ask("a", prompt(0, 9), temperature=0.0)])["a"]
    assert not np.allclose(before.logp_N, after.logp_N, atol=1e-3)
    assert back.ids_N.tolist() == before.ids_N.tolist()
    np.testing.assert_array_equal(back.logp_N, before.logp_N)


def test_versions_that_do_not_fit_are_refused_and_the_old_one_stays(folders: Any, tmp_path: Path) -> None:
    core = core_of(folders("llama"))
    digest = core.stats().digest
    tensors = named_tensors(AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.float32))
    arrays = {n: to_array(t) for n, t in tensors.items()}
    norm = "model.norm.weight"
    wrong = {
        "missing": {n: a for n, a in arrays.items() if n != norm},
        "extra": arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]},
        "shape": arrays | {norm: arrays[norm][:-1].copy()},
        "dtype": arrays | {norm: arrays[norm].astype(np.float16)},
    }
    for case, these in wrong.items():
        manifest = write_version(tmp_path / case, run_id=RUN, version=1, arrays=these.items())
        with pytest.raises(SyncError, match=r"norm\.weight|lm_head"):
            core.stage(manifest)
        with pytest.raises(SyncError, match="staged versions: none"):
            core.swap(1, "keep")
    good = write_version(tmp_path / "good", run_id=RUN, version=2, arrays=arrays.items())
    core.stage(good)
    core.stage(good)
    assert core.stats().digest == digest
    core.swap(2, "keep")
    assert core.swap(2, "flush").recomputed_tok == 0
    with pytest.raises(SyncError, match="never go down"):
        core.stage(replace(good, version=1))
    with pytest.raises(SyncError, match="serves v2"):
        core.swap(1, "keep")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_deterministic_results_do_not_depend_on_company_bit_for_bit(name: str, folders: Any) -> None:
    engine = {"deterministic": True, "max_batch": 8, "max_context_tok": 48}
    target = ask("target", prompt(3, 7), seed=11, max_new_tok=20)
    alone = run(core_of(folders(name), **engine), [target])["target"]
    for place in (0, 4, 7):
        others = [ask(f"o{i}", prompt(i, 2 + 4 * i), seed=i, max_new_tok=3 + i) for i in range(7)]
        among = run(core_of(folders(name), **engine), [*others[:place], target, *others[place:]])["target"]
        assert among.ids_N.tolist() == alone.ids_N.tolist()
        assert among.logp_N.tobytes() == alone.logp_N.tobytes()


def test_cancel_waiting_and_running(folders: Any) -> None:
    core = core_of(folders("llama"), max_batch=2)
    core.add([ask(f"r{i}", prompt(i, 5), seed=i, max_new_tok=9) for i in range(4)])
    core.step()
    core.step()
    core.cancel("r0")
    core.cancel("r3")
    core.cancel("r9")
    done = run(core)
    assert {n: (c.finish, len(c.ids_N)) for n, c in done.items()} == {
        "r0": ("cancelled", 2),
        "r1": ("length", 9),
        "r2": ("length", 9),
        "r3": ("cancelled", 0),
    }
    assert done["r3"].spans == ()
    assert not core.busy


def test_stop_ids_and_end_ids_are_kept(folders: Any, tmp_path: Path) -> None:
    free = run(core_of(folders("llama")), [ask("r", prompt(0, 5), seed=3)])["r"].ids_N.tolist()
    stop = next(i for i, t in enumerate(free) if i >= 2 and t not in free[:i])
    done = run(core_of(folders("llama")), [ask("r", prompt(0, 5), seed=3, stop_ids=(free[stop],))])["r"]
    assert (done.finish, done.ids_N.tolist()) == ("stop", free[: stop + 1])
    model = AutoModelForCausalLM.from_pretrained(folders("llama"))
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{free[stop]}, 299]}}')
    done = run(core_of(tmp_path), [ask("r", prompt(0, 5), seed=3)])["r"]
    assert (done.finish, done.ids_N.tolist()) == ("stop", free[: stop + 1])


def test_impossible_requests(folders: Any) -> None:
    core = core_of(folders("llama"))
    done = run(
        core,
        [
            ask("long", prompt(0, 90)),
            ask("none", ()),
            ask("zero", prompt(0, 3), max_new_tok=0),
            ask("wild", (1, VOCAB)),
            ask("newer", prompt(0, 3), min_version=5),
            ask("stop", prompt(0, 3), stop=("x",)),
        ],
    )
    assert {c.finish for c in done.values()} == {"error"}
    assert "100 tokens" in done["long"].error
    assert "max_context_tok = 96" in done["long"].error
    assert "[0, 300)" in done["wild"].error
    assert done["newer"].error == "the engine serves v0, the request wants >= v5"
    assert "tokenizer" in done["stop"].error
    core.add([ask("twice", prompt(0, 3))])
    with pytest.raises(EngineError, match="twice"):
        core.add([ask("twice", prompt(0, 3))])


def test_the_whole_context_can_be_used(folders: Any) -> None:
    request = ask("r", prompt(0, 46), max_new_tok=50, seed=2)
    done = run(core_of(folders("llama")), [request])["r"]
    assert len(done.ids_N) == 50
    expected = reference_logp(folders("llama"), request, done, torch.float32)
    np.testing.assert_allclose(done.logp_N, expected, atol=1e-4)


def test_builds_that_cannot_work_are_refused(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_position_embeddings = 128"):
        core_of(folders("llama"), max_context_tok=129)
    with pytest.raises(ConfigError, match="int8"):
        core_of(folders("llama"), dtype="int8")
    with pytest.raises(DataError, match=str(tmp_path)):
        core_of(tmp_path)
