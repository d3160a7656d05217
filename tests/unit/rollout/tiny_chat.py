"""A small real tokenizer (byte-level BPE with merges, trained on the spot) and chat templates of five families."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.records import Completion, Span

SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<s>", "</s>", "[INST]", "[/INST]", "<pad>",
)  # fmt: skip
CORPUS = [
    "You are a helpful assistant. What is 3 + 4? The answer is 7.\n\n",
    "<think>\nlet me think\n</think>\n\nanswer\nuser\nassistant\nsystem\n<|user|>\n<|assistant|>\n<|system|>\n",
    "Now 12. Target is higher. Next number?\n  spaces   and\ttabs\n",
] * 20

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{ '<|begin_of_text|>' }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

QWEN3 = """{% set ns = namespace(last_user=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}\
{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}\
{% set content = message['content'] %}\
{% if message['role'] == 'assistant' and loop.index0 < ns.last_user and '</think>' in content %}\
{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MISTRAL = """{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' ' + message['content'] | trim + '</s>' }}{% else %}\
{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

ZEPHYR = """{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '</s>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

TEMPLATES: dict[str, tuple[str | None, str, str]] = {
    "chatml": (CHATML, "<|im_start|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen3": (QWEN3, "", "<|im_end|>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "zephyr": (ZEPHYR, "<s>", "</s>"),
}
"""Template, begin token, end-of-turn token."""


@cache
def _backend() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return str(backend.to_str())


def tokenizer(template: str | None, begin: str = "", end: str = "</s>") -> Any:
    """A fast tokenizer with that chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), chat_template=template, bos_token=begin or None, eos_token=end,
        pad_token="<pad>", additional_special_tokens=[s for s in SPECIALS if s not in (begin, end, "<pad>")],
    )  # fmt: skip


def completion(
    tok: Any, sampled: str, *, text: str | None = None, finish: str = "stop", version: int = 1
) -> Completion:
    """What an engine would return for `sampled` (special tokens spelled out)."""
    ids = np.array(tok.encode(sampled, add_special_tokens=False), np.int32)
    spans = (Span(start=0, stop=len(ids), policy_version=version, kv_version=version),) if len(ids) else ()
    return Completion(
        request_id="r", ids_N=ids, logp_N=np.full(len(ids), -0.5, np.float32), spans=spans,
        finish=finish,  # type: ignore[arg-type]
        text=tok.decode(ids.tolist(), skip_special_tokens=True) if text is None else text,
    )  # fmt: skip
