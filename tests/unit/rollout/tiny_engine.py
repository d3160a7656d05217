"""Tiny random models in the native engine, and a trainer that publishes small random steps of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.native.core import NativeCore, build
from headrace.rollout.native.loading import named_tensors, to_array
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
    "sharp": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)),
    "fallback": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None)),
}


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
