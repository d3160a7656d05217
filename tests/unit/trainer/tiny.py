"""Tiny models and batches for the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from headrace.config.schema import RunConfig
from headrace.records import Batch, Group, Prompt, Sample

VOCAB = 61


def tiny_model(folder: Path, family: str = "llama", dtype: str = "float32", tied: bool = True, seed: int = 0) -> Path:
    """Write a two-layer model with grouped key-value heads."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    kind: Any = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    config = kind(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def sample(group: str, member: int, prompt: list[int], completion: list[int], **changes: Any) -> Sample:
    """A single-turn sample; engine log-probs -3 unless changed."""
    ids = np.asarray(prompt + completion, dtype=np.int32)
    tokens = len(ids)
    zeros = np.zeros(tokens, dtype=np.int32)
    fields: dict[str, Any] = {
        "group_id": group,
        "member": member,
        "ids_T": ids,
        "loss_mask_T": np.arange(tokens) >= len(prompt),
        "logp_T": np.full(tokens, -3.0, dtype=np.float32),
        "policy_version_T": zeros,
        "kv_version_T": zeros,
        "env_version_T": zeros,
        "reward": float(member % 2),
        "prompt_tok": len(prompt),
    }
    return Sample(**{**fields, **changes})


def batch_of(*groups: list[Sample], version: int = 0, temperature: float = 1.0) -> Batch:
    """Groups by the samples' own ids."""
    return Batch(
        version=version,
        temperature=temperature,
        groups=tuple(
            Group(group_id=g[0].group_id, prompt=Prompt(id=g[0].group_id, messages=()), samples=tuple(g))
            for g in groups
        ),
    )


def random_batch(seed: int = 0, groups: int = 3, size: int = 4, version: int = 0, temperature: float = 1.0) -> Batch:
    """Ragged prompts and completions, random engine log-probs."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = rng.integers(0, VOCAB, int(rng.integers(2, 9))).tolist()
        members = []
        for m in range(size):
            completion = rng.integers(0, VOCAB, int(rng.integers(1, 8))).tolist()
            s = sample(f"g{g}", m, prompt, completion, reward=float(rng.integers(0, 2)) if m > 1 else float(m))
            s.logp_T[:] = rng.normal(-3.0, 1.0, len(s.ids_T))
            members.append(s)
        made.append(members)
    return batch_of(*made, version=version, temperature=temperature)


def recipe(**sections: dict[str, Any]) -> RunConfig:
    """A float32 CPU recipe; sections override."""
    base: dict[str, Any] = {"model": {"dtype": "float32", "device": "cpu"}, "steps": 10}
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(base)
