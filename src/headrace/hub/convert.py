"""GGUF to a trainable folder in Hugging Face layout: `python -m headrace.hub.convert FILE.gguf FOLDER`.

Runs in a process of its own, so that whoever asks for a model needs neither torch nor the memory of a conversion.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` to bfloat16 safetensors in `folder`, with tokenizer, chat template and end tokens.

    The model is the quantised one's exact values rounded to bfloat16. Raises ValueError when the file carries no
    chat template or no end token: an instruct model without them would train on prompts it has never seen.
    """
    # transformers' factories are annotated loosely and differently in each release.
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} carries no chat template")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{gguf.name} names no end token")
    if tokenizer.pad_token_id is None:
        # Padding is masked by length, never by id, so sharing the end token is safe.
        tokenizer.pad_token = tokenizer.eos_token
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    # What it was dequantised from is no property of the result; a trace of it would make a loader quantise again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
