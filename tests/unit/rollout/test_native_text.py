"""Detokenising and stop strings that span tokens, with a byte-level tokenizer made here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.config.schema import EngineConfig
from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.native.core import build
from headrace.rollout.native.text import Detokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are single bytes (0..255) and one special token (256)."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def encode(model_dir: Path, text: str) -> list[int]:
    ids: list[int] = PreTrainedTokenizerFast.from_pretrained(model_dir)(text)["input_ids"]
    return ids


def generate(model_dir: Path, **sampling: object) -> Completion:
    engine = EngineConfig(max_context_tok=256).model_dump()
    core = build(model_dir=str(model_dir), engine=engine, dtype="float32", device="cpu", run_id="r")
    core.add([GenRequest(id="r", prompt_ids=(1, 2), sampling=SamplingParams(**sampling))])  # type: ignore[arg-type]
    while core.busy:
        for completion in core.step():
            return completion
    raise AssertionError("the request never ended")


def test_text_is_cut_before_the_first_stop_string(model_dir: Path) -> None:
    detokenizer = Detokenizer(str(model_dir))
    ids = encode(model_dir, "one stop two END")
    assert detokenizer.text([*ids, 256], ()) == "one stop two END"
    assert detokenizer.text(ids, ("END", "stop")) == "one "
    assert detokenizer.text([], ("END",)) == ""


@pytest.mark.parametrize("stop", ["</answer>", "ü", "a", "日本"])
def test_a_stop_string_is_seen_with_the_token_that_completes_it(model_dir: Path, stop: str) -> None:
    detokenizer = Detokenizer(str(model_dir))
    ids = encode(model_dir, "x" * 300 + "日b" + stop)
    seen = [n for n in range(1, len(ids) + 1) if detokenizer.stops(ids[:n], ("never", stop))]
    assert seen == [len(ids)]


def test_generation_ends_at_a_stop_string_that_spans_tokens(model_dir: Path) -> None:
    free = generate(model_dir, max_new_tok=100, seed=5)
    text = free.text
    start = next(i for i in range(20, 90) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[start : start + 2]
    done = generate(model_dir, max_new_tok=100, seed=5, stop=(stop,))
    assert done.finish == "stop"
    assert done.text == text[:start]
    assert done.ids_N.tolist() == free.ids_N[: len(done.ids_N)].tolist()
    kept = Detokenizer(str(model_dir)).decode(done.ids_N.tolist())
    assert kept == text[: start + 2]


def test_a_folder_without_tokenizer_gives_no_text(tmp_path: Path) -> None:
    detokenizer = Detokenizer(str(tmp_path))
    assert not detokenizer.available
    assert detokenizer.text([1, 2], ()) == ""
