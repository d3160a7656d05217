"""The command line as users see it: exit codes, messages, output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli.dry_run import derived, warnings
from headrace.cli.evaluate import interval
from headrace.config.load import config_from_overrides
from headrace.errors import ConfigError

ROOT = Path(__file__).parents[3]

TASK = """
steps = 3
[env]
kind = "jsonl"
eval_prompts = 5
[env.options]
file = "questions.jsonl"
[flow]
batch_groups = 4
[engine]
kind = "scripted"
[trainer]
kind = "scripted"
"""


SUMMARY = {
    "kind": "summary",
    "run_dir": "runs/a",
    "reason": "steps done",
    "steps": 7,
    "version": 7,
    "train_s": 10.0,
    "total_s": 12.0,
    "accuracy_before": 0.25,
    "accuracy_after": 0.5,
    "eval_prompts": 20,
    "reward_first": 0.1,
    "reward_last": 0.4,
    "generated_tok": 90,
    "trained_tok": 80,
    "masked_tok": 0,
    "wasted_tok": {"filtered_zero_signal": 10},
    "groups": {"trained": 8, "filtered_zero_signal": 1},
    "admitted": 9,
    "balanced": True,
    "lag_hist": {"0": 50, "1": 30},
    "accept_by_length": [],
    "trainer_shares": {"busy": 1.0},
    "generator_shares": {"decode": 1.0},
    "model_dir": None,
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A recipe without a model, beside twenty questions."""
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TASK, encoding="utf-8")
    return recipe


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command, in this process."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    captured = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else 0, captured.out, captured.err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys)[:2] == (0, "headrace 0.1.0\n")
    code, out, _ = run("train", "--help", capsys=capsys)
    assert code == 0
    assert "headrace train recipes/quickstart.toml --dry-run" in out


def test_errors_of_ours_are_one_line_and_exit_2(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("train", str(task), "--set", "flow.max_lag_steps=-1", capsys=capsys)
    assert (code, out) == (2, "")
    assert err == "ConfigError: flow.max_lag_steps = -1 must be >= 0 (--set)\n"


def test_several_problems_are_listed(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run("train", str(task), "--set", "steps=0", "--set", "flow.md=1", capsys=capsys)
    assert err.splitlines()[0] == "ConfigError:"
    assert [line[:2] for line in err.splitlines()[1:]] == ["  ", "  "]


def test_debug_anywhere_raises(task: Path) -> None:
    with pytest.raises(ConfigError):
        main(["train", str(task), "--set", "steps=0", "--debug"])


def test_train_needs_a_recipe_or_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("train", capsys=capsys)
    assert code == 2
    assert "give a recipe" in err


def test_dry_run_prints_settings_and_derived_numbers(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("train", str(task), "--dry-run", "--out", "/tmp/it's here", capsys=capsys)
    assert code == 0
    resolved, _ = json.JSONDecoder().raw_decode(out)
    assert (resolved["steps"], resolved["out"]) == (3, "/tmp/it's here")
    assert "12 groups between admission and landed weights" in out
    assert "15 to train on, 5 held out" in out
    assert "score 1.0" in out
    assert re.search(r"user: What is (\d+) \+ 1\?\n  «\d+»\n", out), "the loss mask, marked where there is no colour"


def test_dry_run_refuses_too_few_prompts(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("train", str(task), "--dry-run", "--set", "flow.batch_groups=16", capsys=capsys)
    assert code == 2
    assert "flow.batch_groups = 16 is more than the 15 prompts" in err


def test_dry_run_refuses_rewards_that_reject_the_gold_answer(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Say {i}", "answer": f"word{i}"} for i in range(20)]
    (task.parent / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    code, _, err = run("train", str(task), "--dry-run", "--set", "env.reward=numeric", capsys=capsys)
    assert code == 2
    assert "gold answers do not score 1.0; first: prompt" in err


def test_dry_run_only_warns_about_own_rewards(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task.parent / "picky_reward.py").write_text("def score(rollout, prompt):\n    return 0.5\n", encoding="utf-8")
    code, _, err = run("train", str(task), "--dry-run", "--set", "env.reward=picky_reward:score", capsys=capsys)
    assert code == 0
    assert "warning: " in err
    assert "do not score 1.0" in err


def test_dry_run_names_unknown_kinds(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("train", str(task), "--dry-run", "--set", "engine.kind=nativ", capsys=capsys)
    assert code == 2
    assert "'nativ'" in err
    assert "did you mean 'native'?" in err


def test_dry_run_measures_prompts_with_the_models_tokenizer(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - only this test needs it

    model = task.parent / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}", encoding="utf-8")
    rows = [{"prompt": "word " * 30 + str(i), "answer": str(i)} for i in range(20)]
    (task.parent / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sizes = ["--set", "engine.max_context_tok=64", "--set", f"model.name={model}", "--set", "engine.kind=native"]
    code, out, _ = run("train", str(task), "--dry-run", *sizes, "--set", "sampling.max_new_tok=33", capsys=capsys)
    assert code == 0
    assert "31 tokens" in out
    code, _, err = run("train", str(task), "--dry-run", *sizes, "--set", "sampling.max_new_tok=34", capsys=capsys)
    assert code == 2
    assert "the longest prompt has 31 tokens" in err


def test_derived_numbers_by_hand() -> None:
    config = config_from_overrides(["flow.max_lag_steps=3", "flow.batch_groups=4", "flow.group_size=2", "steps=10"])
    rows = derived(config)
    assert rows["slots"].startswith("16 groups")  # (3 + 1) * 4
    assert rows["samples per step"].startswith("8 rollouts")
    assert rows["tokens per step"].startswith("at most 384 sampled")  # 8 * 48
    assert rows["samples in all"] == "80 in 10 steps"
    assert warnings(config) == []


def test_warnings_name_what_is_wasted() -> None:
    config = config_from_overrides(["engine.max_batch=8", "flow.oversample=0.5"])
    assert any("engine.max_batch = 8" in w for w in warnings(config))
    assert any("counts their tokens as wasted" in w for w in warnings(config))


def test_models_list_and_get(headrace_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("models", "list", capsys=capsys)
    assert code == 0
    assert "smollm2-135m-instruct" in out
    assert "Apache-2.0" in out
    assert run("models", "get", str(tmp_path / "nothing"), capsys=capsys)[0] == 2


def test_runs_list_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no runs in" in run("runs", "list", str(tmp_path), capsys=capsys)[1]
    folder = tmp_path / "a-20260101-120000"
    folder.mkdir()
    recipe = config_from_overrides(["steps=7"])
    about = {"run_id": "x", "fingerprint": "y", "recipe": json.loads(recipe.model_dump_json())}
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    assert run("runs", "show", str(folder), capsys=capsys)[2].startswith("DataError")
    lines = [json.dumps(SUMMARY), '{"ki']
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert "50.0%" in run("runs", "list", str(tmp_path), capsys=capsys)[1]
    assert "50.0 %" in run("runs", "show", str(folder), capsys=capsys)[1]
    assert json.loads(run("runs", "show", str(folder), "--json", capsys=capsys)[1])["steps"] == 7
    assert json.loads(run("runs", "show", str(folder), "--recipe", capsys=capsys)[1])["steps"] == 7
    assert run("runs", "show", str(tmp_path), capsys=capsys)[0] == 2


def test_interval_against_published_numbers() -> None:
    """Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3: 81 of 263 and 0 of 20."""
    low, high = interval(81 / 263, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = interval(0.0, 20)
    assert (round(low, 4), round(high, 4)) == (0.0, 0.1611)


def test_eval_wants_to_know_what_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("eval", "smollm2-135m-instruct", capsys=capsys)
    assert code == 2
    assert "--env KIND" in err


def test_eval_says_what_is_wrong_with_a_run(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "a-20260101-120000"
    folder.mkdir(parents=True)
    recipe = json.loads(config_from_overrides([]).model_dump_json())
    about = {"run_id": "x", "fingerprint": "y", "recipe": recipe}
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    assert "has neither model nor checkpoint" in run("eval", str(folder), capsys=capsys)[2]
    checkpoint = folder / "checkpoints" / "step000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    assert f"headrace train --resume {folder} --set steps=4" in run("eval", str(folder), capsys=capsys)[2]
    near = str(folder.with_name("a-20260101-12000"))
    assert f"did you mean '{folder}'?" in run("eval", near, capsys=capsys)[2]


def test_no_permission_for_out_is_one_line(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task.parent / "file").touch()
    code, _, err = run("train", str(task), "--no-live", "--out", str(task.parent / "file" / "runs"), capsys=capsys)
    assert code == 2
    assert err.startswith("ConfigError: out = ")
    assert "(--out FOLDER)" in err


def test_report_of_a_scripted_run(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "flow.zero_signal=keep", "--out", str(task.parent / "runs")]
    code, shown, err = run("train", str(task), "--no-live", *changes, capsys=capsys)
    assert (code, err) == (0, "")
    assert "trainer: ready" in shown
    (folder,) = (task.parent / "runs").iterdir()
    assert f"report      {folder / 'report.html'}" in shown
    trace = task.parent / "trace.json"
    code, shown, _ = run("report", str(folder), "--trace", str(trace), capsys=capsys)
    assert code == 0
    assert shown.split() == [str(folder / "report.html"), str(folder / "timeline.png"), str(trace)]
    assert {e["name"] for e in json.loads(trace.read_text())["traceEvents"]} >= {"busy v1", "v3 landed"}
    assert run("report", str(folder.parent), capsys=capsys)[0] == 2


def test_installed_command_reports_errors_on_stderr(task: Path) -> None:
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "train", str(task), "--set", "stepz=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "ConfigError: stepz is not a setting; did you mean 'steps'? (--set)\n"
