"""Deltas in the native engine: what is served afterwards equals a full load bit for bit, or is what it was before."""

from __future__ import annotations

from collections.abc import Callable
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
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.config.schema import EngineConfig, SyncConfig
from headrace.errors import EngineError, SyncError
from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.native import packing
from headrace.rollout.native.core import NativeCore, build
from headrace.rollout.native.loading import named_tensors, to_array
from headrace.rollout.native.weights import can_pack
from headrace.sync.manifest import FullManifest, Manifest, StoreManifest
from headrace.trainer.publishing import Publishing

RUN = "run-1"
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 300, "n_positions": 128, "n_embd": 48, "n_layer": 2, "n_head": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "biased": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "normed": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "fallback": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(1)
            made[name] = tmp_path_factory.mktemp(name)
            MODELS[name]().save_pretrained(made[name])
        return made[name]

    return folder


class Trainer:
    """Float32 masters that take small random steps, published in both ways."""

    def __init__(self, folder: Path, dtype: str, out: Path, **sync: Any) -> None:
        self.served = named_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)))
        self.master = {name: tensor.float().clone() for name, tensor in self.served.items()}
        self.out = out
        self.deltas = Publishing(SyncConfig(**sync), threads=1)
        self.full = Publishing(SyncConfig(mode="full"), threads=1)
        self.version = -1
        self.random = torch.Generator().manual_seed(0)

    def publish(self, size: float = 1e-4) -> tuple[StoreManifest, FullManifest]:
        """The next version; 0 is the model as it is."""
        self.version += 1
        for name, master in self.master.items() if self.version else ():
            master += size * torch.randn(master.shape, generator=self.random)
            self.served[name].copy_(master)
        both: list[Manifest] = []
        for way, where in ((self.deltas, "deltas"), (self.full, "full")):
            arrays = [(name, to_array(tensor)) for name, tensor in self.served.items()]
            both.append(way.publish(arrays, folder=str(self.out / where), run_id=RUN, version=self.version))
        delta, full = both
        assert isinstance(delta, StoreManifest)
        assert isinstance(full, FullManifest)
        return delta, full


def core_of(folder: Path, dtype: str, **more: Any) -> NativeCore:
    engine = EngineConfig(max_batch=4, max_context_tok=64).model_dump()
    return build(model_dir=str(folder), engine=engine, dtype=dtype, device="cpu", run_id=RUN, **more)


def sampled(core: NativeCore) -> tuple[bytes, bytes]:
    """Ids and log-probs of two requests, exactly."""
    core.add([GenRequest(id=f"r{i}", prompt_ids=(5, 6, 7 + i), sampling=SamplingParams(max_new_tok=12, seed=i))
              for i in range(2)])  # fmt: skip
    done: dict[str, Completion] = {}
    while core.busy:
        done |= {c.request_id: c for c in core.step()}
    return tuple(b"".join(getattr(done[f"r{i}"], kind).tobytes() for i in range(2)) for kind in ("ids_N", "logp_N"))  # type: ignore[return-value]


def land(core: NativeCore, manifest: Manifest) -> None:
    core.stage(manifest)
    assert core.swap(manifest.version, "keep").digest == manifest.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_version_by_deltas_is_the_full_load_bit_for_bit(
    name: str, dtype: str, folders: Any, tmp_path: Path
) -> None:
    trainer = Trainer(folders(name), dtype, tmp_path)
    core, loaded = (core_of(folders(name), dtype, verify_every=2) for _ in range(2))
    before = sampled(core)
    for size in (0.0, 1e-4, 3e-3, 0.3):  # from few elements to all of them
        delta, full = trainer.publish(size)
        land(core, delta)
        land(loaded, full)
        assert sampled(core) == sampled(loaded)
    assert sampled(core) != before


def test_one_delta_over_several_versions_and_a_late_start_arrive_at_the_same(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path, keyframe_every=2)
    core = core_of(folders("tied"), "bfloat16")
    land(core, trainer.publish()[0])
    skipped = [trainer.publish() for _ in range(3)]
    land(core, skipped[2][0])
    late, full = (core_of(folders("tied"), "bfloat16") for _ in range(2))
    land(late, skipped[1][0])  # as after kill -9: what was served, then what was staged
    land(late, skipped[2][0])
    land(full, skipped[2][1])
    assert sampled(core) == sampled(late) == sampled(full)


def test_a_swap_that_cannot_be_proven_is_taken_back_bit_for_bit(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path)
    core = core_of(folders("tied"), "bfloat16")
    land(core, trainer.publish()[0])
    before, digest = sampled(core), core.stats().digest
    delta, full = trainer.publish(1e-3)
    core.stage(delta)
    ready, staged = core._deliveries._staged[1]
    assert staged is not None
    wrong = [replace(staged.patches[-1], new_hash="0" * 32)]
    core._deliveries._staged[1] = (ready, replace(staged, patches=(*staged.patches[:-1], *wrong)))
    with pytest.raises(SyncError, match="after the scatter"):
        core.swap(1, "keep")
    assert (core.stats().version, core.stats().digest) == (0, digest)
    assert sampled(core) == before
    land(core, delta)
    loaded = core_of(folders("tied"), "bfloat16")
    land(loaded, full)
    assert sampled(core) == sampled(loaded)


def test_weights_that_are_no_version_are_never_decoded_with(folders: Any, tmp_path: Path) -> None:
    """Neither forward nor back: nothing is sampled until a keyframe has landed."""
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path)
    core = core_of(folders("tied"), "bfloat16")
    land(core, trainer.publish()[0])
    delta, full = trainer.publish(1e-3)
    core.stage(delta)
    assert core._deliveries._target is not None
    norm = core._deliveries._target.arrays()["model.norm.weight"].view(np.uint16)
    norm[3] ^= 1  # a bit flips between staging and scatter
    with pytest.raises(SyncError, match="after the scatter"):
        core.swap(1, "keep")
    with pytest.raises(EngineError, match="nothing can be decoded"):
        core.step()
    core.stage(delta)
    report = core.swap(1, "keep")
    assert report.digest == delta.digest
    assert report.sync is not None
    assert report.sync.resynced
    loaded = core_of(folders("tied"), "bfloat16")
    land(loaded, full)
    assert sampled(core) == sampled(loaded)


def test_damaged_packs_are_an_error_or_a_detour_never_weights(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "float32", tmp_path, keyframe_every=2)
    core = core_of(folders("tied"), "float32")
    land(core, trainer.publish()[0])
    before = sampled(core)
    known = {path.name for path in (tmp_path / "deltas" / "objects").glob("*.pack")}
    first, _ = trainer.publish()
    for pack in (tmp_path / "deltas" / "objects").glob("*.pack"):
        if pack.name not in known:
            pack.write_bytes(pack.read_bytes()[:-1] + b"\0")
    with pytest.raises(SyncError, match="its content"):
        core.stage(first)
    assert sampled(core) == before
    second, full = trainer.publish()  # the delta to it starts at the damaged one; its keyframe does not
    land(core, second)
    loaded = core_of(folders("tied"), "float32")
    land(loaded, full)
    assert sampled(core) == sampled(loaded)


def test_other_weights_under_the_served_number_are_refused(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path)
    trainer.served["model.norm.weight"].mul_(2)
    delta, _ = trainer.publish()
    core = core_of(folders("tied"), "bfloat16")
    with pytest.raises(SyncError, match="96 elements differ"):
        core.stage(delta)


# --- prepacked weights

SHAPES = [(96, 64), (300, 64), (10, 7), (64, 160)]
packs = pytest.mark.skipif(not can_pack(torch.bfloat16, "cpu"), reason="this CPU has no prepacked bfloat16 linear")


@packs
@pytest.mark.parametrize("shape", SHAPES)
def test_writing_into_packed_weights_equals_packing_again(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    dense = torch.from_numpy(rng.integers(0, 2**15, shape, np.int16)).view(torch.bfloat16)
    where = np.sort(rng.choice(dense.numel(), dense.numel() // 3, replace=False))
    bits = rng.integers(0, 2**16, where.size, np.uint16)  # NaNs and infinities among them
    packed = packing.pack(dense)
    assert packing.write_packed(packed, where, bits) is packed
    dense.view(-1).view(torch.int16).numpy().view(np.uint16)[where] = bits
    expected = packing.pack(dense).to_dense().view(torch.int16)
    assert torch.equal(packed.to_dense().view(torch.int16), expected)
    assert torch.equal(expected, dense.view(torch.int16))


@packs
def test_the_places_in_packed_weights_are_all_different() -> None:
    for shape in SHAPES:
        places = packing.places_of(*shape)
        assert places is not None
        assert np.unique(places).size == shape[0] * shape[1]
