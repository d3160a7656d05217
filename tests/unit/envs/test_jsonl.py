"""JSON Lines: newline-only framing, errors with file and line, splits that cannot leak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.config.schema import EnvConfig
from headrace.envs.prompts import question_key
from headrace.envs.registry import build_task
from headrace.errors import ConfigError, DataError

EXAMPLES = Path(__file__).parents[3] / "examples" / "data"


def build(folder, eval_prompts=2, reward=None, **options):
    env = EnvConfig(kind="jsonl", options={"file": "data.jsonl", **options}, eval_prompts=eval_prompts)
    return build_task(env, seed=0, recipe_dir=folder, reward=reward)


def write(folder, rows, name="data.jsonl"):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / name).write_bytes("\n".join(lines).encode())


def rows(n, **extra):
    return [{"prompt": f"q {i}", "answer": i, **extra} for i in range(n)]


def test_split_by_content_hash_does_not_leak(tmp_path):
    write(tmp_path, [*rows(10), *rows(10)])  # every question twice
    task = build(tmp_path, eval_prompts=3)
    asked = {question_key(p) for p in task.eval}
    assert (len(task.eval), len(asked), len(task.train)) == (3, 3, 14)
    assert not asked & {question_key(p) for p in task.train}
    assert task.eval[0].answer == task.eval[0].messages[0].content.removeprefix("q ")


def test_odd_separators_inside_text_do_not_end_a_line(tmp_path):
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    write(tmp_path, [{"prompt": odd, "answer": "1"}, "", *rows(5)])
    task = build(tmp_path)
    texts = [p.messages[0].content for p in [*task.train, *task.eval]]
    assert odd in texts
    assert len(texts) == 6
    assert {p.id for p in [*task.train, *task.eval]} == {"1", "3", "4", "5", "6", "7"}  # line numbers


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(r).encode() for r in rows(6)) + b"\r\n"
    )
    assert len(build(tmp_path).train) == 4


def test_messages_columns_template_and_row(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    write(tmp_path, [{"messages": chat, "answer": "1", "difficulty": 3}, *rows(5)])
    task = build(tmp_path, template="Q: {prompt}", system="Be brief.")
    by_id = {p.id: p for p in [*task.train, *task.eval]}
    assert [m.role for m in by_id["1"].messages] == ["system", "user"]
    assert by_id["1"].row["difficulty"] == 3
    assert [m.content for m in by_id["2"].messages] == ["Be brief.", "Q: q 0"]


def test_eval_file_and_overlap(tmp_path):
    write(tmp_path, rows(5))
    write(tmp_path, [{"prompt": "Q   0", "answer": 0}, {"prompt": "other", "answer": 1}], "held.jsonl")
    task = build(tmp_path, eval_file="held.jsonl")
    assert [p.messages[0].content for p in task.train] == ["q 1", "q 2", "q 3", "q 4"]
    assert [p.id for p in task.eval] == ["eval-1", "eval-2"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{bad"], "line 1: not JSON"),
        (["[1]"], "line 1: list where an object"),
        ([{"answer": "1"}], "line 1: column 'prompt' must be non-empty text"),
        ([{"promt": "x"}], "did you mean 'promt'"),
        ([{"prompt": "  "}], "line 1: column 'prompt' must be"),
        ([{"prompt": "x", "answer": [1]}], "line 1: answer = [1] must be text or a number"),
        ([{"messages": []}], "non-empty list"),
        ([{"messages": [{"role": "boss", "content": "x"}]}], "messages[0]"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "last message is the assistant's"),
        ([{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}], "line 2: id 'a' is already that of line 1"),
        ([""], "holds no prompts"),
        (rows(3), "3 distinct prompts cannot be split"),
    ],
)
def test_errors_name_the_line(tmp_path, lines, says):
    write(tmp_path, lines)
    with pytest.raises(DataError) as caught:
        build(tmp_path)
    assert says in str(caught.value)


def test_bytes_that_are_no_utf8(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "ok"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        build(tmp_path)


def test_missing_file_and_missing_answers(tmp_path):
    with pytest.raises(DataError, match=r"data\.jsonl cannot be read: No such file"):
        build(tmp_path)
    write(tmp_path, [{"prompt": f"q {i}"} for i in range(6)])
    with pytest.raises(ConfigError, match="6 of 6 prompts have no gold answer"):
        build(tmp_path)
    assert len(build(tmp_path, reward=lambda r, p: 1.0).train) == 4


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.jsonl")), ids=lambda p: p.name)
def test_example_files_load(path):
    env = EnvConfig(kind="jsonl", options={"file": path.name}, eval_prompts=8)
    task = build_task(env, seed=0, recipe_dir=path.parent)
    assert len(task.train) >= 8
    assert len(task.eval) == 8
