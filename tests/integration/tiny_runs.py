"""Recipes and models for runs with the real engine and the real learner on a model that is built in a moment."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import tiny_chat
import torch
from run_tools import SERVANTS
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config.schema import RunConfig
from headrace.loop.journal import rollout_from_json
from headrace.records import Rollout

CONTEXT_TOK = 320


def build_model(folder: Path, *, ends: bool = True) -> Path:
    """A random two-layer Llama with a chat tokenizer; `ends` = False never ends a completion by itself."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = tiny_chat.tokenizer(*tiny_chat.TEMPLATES["chatml"])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOK,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>") if ends else None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_recipe(model: Path, out: Path, /, **sections: Any) -> RunConfig:
    """Synchronous, float32, deterministic, few tokens; sections override."""
    data: dict[str, Any] = {
        "name": "tiny",
        "out": str(out),
        "steps": 2,
        "recipe_dir": str(SERVANTS),
        "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
        "env": {"kind": "tiny_task:build", "eval_prompts": 4},
        "sampling": {"max_new_tok": 12},
        "flow": {"mode": "sync", "batch_groups": 2, "group_size": 4, "zero_signal": "keep"},
        "engine": {"max_batch": 16, "max_context_tok": CONTEXT_TOK, "deterministic": True, "threads": 1},
        "trainer": {"threads": 1},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every_steps": 0},
        "eval": {"before": False, "after": False},
        "launch": {"start_deadline_s": 100, "call_deadline_s": 60, "step_deadline_s": 60},
    }
    for name, values in sections.items():
        data[name] = data[name] | values if isinstance(values, dict) and name in data else values
    return RunConfig.model_validate(data)


def trained_rollouts(run_dir: str | Path) -> dict[tuple[int, int, int], Rollout]:
    """Rollouts that were trained on, by (trainer's version, ordinal, member)."""
    with sqlite3.connect(Path(run_dir) / "ledger.sqlite") as db:
        found = db.execute(
            "SELECT a.taken_version, a.ordinal, r.member, r.data FROM attempts a JOIN rollouts r USING (group_id) "
            "WHERE a.bucket = 'trained' ORDER BY 1, 2, 3, r.attempt"
        ).fetchall()
    return {(version, ordinal, member): rollout_from_json(data) for version, ordinal, member, data in found}


def tokens_of(run_dir: str | Path) -> str:
    """Every trained token with its log-prob and reward, as text that is equal exactly when they are."""
    rows = []
    for key, rollout in trained_rollouts(run_dir).items():
        turns = [(t.prompt_ids, t.completion.ids_N.tolist(), t.completion.logp_N.tolist()) for t in rollout.turns]
        rows.append((key, rollout.reward, turns))
    return json.dumps(rows)
