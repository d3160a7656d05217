"""The codec's promises: sampled ids stay as they are, one suffix encoding, no doubled tokens, branches are noticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.records import Message
from headrace.rollout.chat import ChatCodec

_spec = importlib.util.spec_from_file_location("tiny_chat", Path(__file__).with_name("tiny_chat.py"))
assert _spec is not None
assert _spec.loader is not None
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def make(name: str, system_prompt: str | None = None):
    template, begin, end = tiny.TEMPLATES[name]
    tok = tiny.tokenizer(template, begin, end)
    return ChatCodec.of(tok, system_prompt=system_prompt), tok, end


@pytest.mark.parametrize("name", tiny.TEMPLATES)
def test_every_turn_extends_exactly_what_was_sampled(name):
    codec, tok, end = make(name)
    history = [user("What is 3 + 4?")]
    prompt = codec.first(history)
    for turn, reply in enumerate(["7", "The answer is 7.", "Now 12"]):
        said = tiny.completion(tok, reply + end)
        new = [user(f"Next number? {turn}")]
        extended = codec.extend(prompt, said, history, new)
        assert not extended.branched
        kept = prompt + tuple(said.ids_N.tolist())
        assert extended.ids[: len(kept)] == kept
        history = [*history, Message(role="assistant", content=said.text), *new]
        # Nothing was trimmed here, so the text equals the template's own rendering up to the space that mistral adds.
        assert codec.decode(extended.ids).replace(" ", "") == codec.render(history).replace(" ", "")
        prompt = extended.ids
    assert codec.branches == 0


@pytest.mark.parametrize("name", tiny.TEMPLATES)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_end_of_turn_occurs_once_whether_sampled_or_not(name, finish):
    codec, tok, end = make(name)
    history = [user("What is 3 + 4?")]
    prompt = codec.first(history)
    said = tiny.completion(tok, "7" + (end if finish == "stop" else ""), finish=finish)
    ids = codec.extend(prompt, said, history, [user("again")]).ids
    end_id = tok.convert_tokens_to_ids(end)
    between = ids[len(prompt) :]
    assert between.count(end_id) == codec.render([*history, Message(role="assistant", content="7"), user("again")])[
        len(codec.render(history)) :
    ].count(end)
    assert end_id in between[: len(tok.encode("7")) + 1]


@pytest.mark.parametrize("name", tiny.TEMPLATES)
@pytest.mark.parametrize("said", ["  7  \n", "\n\n7", "7\n", "   "])
def test_white_space_that_a_template_strips_stays_as_sampled(name, said):
    codec, tok, end = make(name)
    history = [user("What is 3 + 4?")]
    prompt = codec.first(history)
    completion = tiny.completion(tok, said + end)
    extended = codec.extend(prompt, completion, history, [user("again")])
    assert not extended.branched
    assert extended.ids[len(prompt) : len(prompt) + len(completion.ids_N)] == tuple(completion.ids_N.tolist())


def test_template_that_strips_thinking_branches_and_counts():
    codec, tok, end = make("qwen3")
    history = [user("What is 3 + 4?")]
    prompt = codec.first(history)
    said = tiny.completion(tok, "<think>\nlet me think\n</think>\n\n7" + end)
    new = [user("again")]
    extended = codec.extend(prompt, said, history, new)
    assert extended.branched
    assert codec.branches == 1
    assert extended.ids == codec.first([*history, Message(role="assistant", content=said.text), *new])
    assert "think" not in codec.decode(extended.ids)
    # the next turn extends the branch
    later = [*history, Message(role="assistant", content=said.text), *new]
    more = codec.extend(extended.ids, tiny.completion(tok, "8" + end), later, [user("more")])
    assert not more.branched
    assert more.ids[: len(extended.ids)] == extended.ids


def test_thinking_survives_a_tool_message():
    codec, tok, end = make("qwen3")
    history = [user("What is 3 + 4?")]
    said = tiny.completion(tok, "<think>\nlet me think\n</think>\n\n7" + end)
    extended = codec.extend(codec.first(history), said, history, [Message(role="tool", content="12")])
    assert not extended.branched


@pytest.mark.parametrize("name", [n for n in tiny.TEMPLATES if tiny.TEMPLATES[n][1]])
@pytest.mark.parametrize("system_prompt", [None, "", "Be brief."])
def test_no_doubled_begin_token(name, system_prompt):
    if name == "mistral" and system_prompt:
        pytest.skip("that template refuses system messages")
    codec, tok, end = make(name, system_prompt)
    history = [user("What is 3 + 4?")]
    prompt = codec.first(history)
    begin = tok.convert_tokens_to_ids(tiny.TEMPLATES[name][1])
    if name != "zephyr":  # its template writes no begin token
        assert prompt[0] == begin
    assert prompt[1] != begin
    more = codec.extend(prompt, tiny.completion(tok, "7" + end), history, [user("again")]).ids[len(prompt) :]
    expected = 2 if name == "chatml" else 0  # there the begin token opens each message
    assert more.count(begin) == expected


def test_system_prompt_replaces_adds_or_removes():
    default, *_ = make("chatml")
    brief, *_ = make("chatml", "Be brief.")
    none, *_ = make("chatml", "")
    q = [user("hi")]
    assert "helpful assistant" in default.render(q)
    assert brief.render(q).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert none.render(q) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    own = [Message(role="system", content="Mine."), *q]
    assert brief.render(own) == default.render(own) == none.render(own)
    llama, *_ = make("llama3", "")
    assert llama.render(q).startswith("<|begin_of_text|><|start_header_id|>user")
    mistral, *_ = make("mistral", "")
    assert mistral.render(q) == "<s>[INST] hi [/INST]"


def test_refused_conversation_names_the_roles():
    codec, *_ = make("mistral")
    with pytest.raises(DataError, match=r"roles system, user.*Only user and assistant"):
        codec.first([Message(role="system", content="x"), user("hi")])


def test_without_template_contents_are_joined():
    tok = tiny.tokenizer(None, "<s>", "</s>")
    codec = ChatCodec.of(tok, system_prompt="Rules.")
    history = [user("3 + 4 =")]
    assert codec.render(history) == "Rules.\n\n3 + 4 =\n\n"
    prompt = codec.first(history)
    said = tiny.completion(tok, "7", finish="length")
    extended = codec.extend(prompt, said, history, [user("again")])
    assert not extended.branched
    assert codec.decode(extended.ids).endswith("7\n\nagain\n\n")


def test_missing_model_folder_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="loading the tokenizer"):
        ChatCodec(tmp_path)


@pytest.mark.parametrize("name", tiny.TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(replies=st.lists(st.text(alphabet="ab 7\n\t.é漢", max_size=12), min_size=1, max_size=3), cut=st.booleans())
def test_prefix_property_for_any_text(name, replies, cut):
    codec, tok, end = make(name)
    history = [user("q")]
    prompt = codec.first(history)
    for reply in replies:
        said = tiny.completion(tok, reply if cut else reply + end, finish="length" if cut else "stop")
        extended = codec.extend(prompt, said, history, [user("next")])
        assert not extended.branched
        kept = prompt + tuple(said.ids_N.tolist())
        assert extended.ids[: len(kept)] == kept
        assert len(extended.ids) > len(kept)
        history = [*history, Message(role="assistant", content=said.text), user("next")]
        prompt = extended.ids
