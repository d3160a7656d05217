"""The whole loop with the real engine and the real learner in their own processes, on a tiny random model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs
import torch
from in_process import InProcessLauncher
from peft import PeftModel
from run_tools import (
    assert_nothing_trained_twice,
    only_run,
    role_pid,
    roles_of,
    steps_of,
    summary_of,
    train,
    trained,
    wait_until,
)
from tiny_runs import tiny_recipe, tokens_of, trained_rollouts
from transformers import AutoModelForCausalLM

from headrace.api import resumed_recipe
from headrace.config.schema import RunConfig
from headrace.envs.registry import build_task
from headrace.errors import RoleDiedError
from headrace.launch.local import LocalLauncher
from headrace.loop.assembly import MakeLauncher
from headrace.loop.evaluate import evaluate_model
from headrace.loop.run import Run
from headrace.records import Batch
from headrace.telemetry.silent import SilentView

TOLERANCE = 1e-4
"""Log-prob difference that float32 leaves between two ways to compute the same thing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.build_model(tmp_path_factory.mktemp("endless"), ends=False)


def six_steps(model: Path, out: Path) -> RunConfig:
    return tiny_recipe(model, out, steps=6, checkpoint={"every_steps": 2}, eval={"before": True, "after": True})


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run of six steps."""
    run = train(six_steps(model, tmp_path_factory.mktemp("whole")))
    assert summary_of(run).balanced
    return Path(summary_of(run).run_dir)


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


# --- resume --------------------------------------------------------------------------------------------------------


def assert_same_run(resumed: Path, whole: Path) -> None:
    assert trained(resumed) == trained(whole)
    assert tokens_of(resumed) == tokens_of(whole)
    assert_nothing_trained_twice(resumed)
    assert weights_of(resumed) == weights_of(whole)


@pytest.mark.slow
def test_training_changes_the_model(whole: Path, model: Path) -> None:
    assert weights_of(whole) != (model / "model.safetensors").read_bytes()
    assert max(s.grad_norm for s in steps_of(whole)) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resume_after_a_killed_trainer_is_bit_for_bit_the_same_run(model: Path, whole: Path, tmp_path: Path) -> None:
    def kill(run: Run, version: int) -> None:
        if version == 4:
            os.kill(role_pid(run, "trainer"), signal.SIGKILL)

    with pytest.raises(RoleDiedError, match="SIGKILL"):
        train(six_steps(model, tmp_path), during=kill)
    path = only_run(tmp_path)
    run = train(resumed_recipe(path), resume=path)
    assert summary_of(run).balanced
    assert_same_run(path, whole)


DIES_IN_STEP_6 = """
import asyncio, os, pathlib, signal, sys
import headrace.api as hr
from headrace.config.schema import RunConfig

async def body():
    run = hr.open(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_text()))
    async for batch in run.batches():
        if batch.version == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        await run.train_on(batch)
        await run.publish()

asyncio.run(body())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resume_after_a_killed_controller_is_bit_for_bit_the_same_run(model: Path, whole: Path, tmp_path: Path) -> None:
    """Killed in step 6: step 5, trained after the checkpoint, is lost too, and so is what its weights sampled."""
    config = tmp_path / "config.json"
    config.write_text(six_steps(model, tmp_path).model_dump_json())
    done = subprocess.run([sys.executable, "-c", DIES_IN_STEP_6, str(config)], check=False, timeout=200)
    assert done.returncode == -signal.SIGKILL
    path = only_run(tmp_path)
    wait_until(lambda: not roles_of(path))
    run = train(resumed_recipe(path), resume=path)
    assert summary_of(run).balanced
    assert summary_of(run).wasted_tok["wasted_restart"] > 0
    assert_same_run(path, whole)


# --- engine, learner and transformers agree ------------------------------------------------------------------------


@pytest.mark.slow
def test_learner_recomputes_the_log_probs_of_the_engine_after_every_swap(whole: Path) -> None:
    steps = steps_of(whole)
    assert [s.version for s in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step.lag_max == 0
        assert step.metrics["kl_infer_train/k3"] < TOLERANCE
        assert step.metrics["abs_dlogp/max"] < TOLERANCE


@pytest.mark.slow
def test_the_exported_model_is_what_the_engine_serves(whole: Path, tmp_path: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(whole / "model", dtype=torch.float32)
    config = tiny_recipe(whole / "model", whole.parent)
    evaluating = evaluate_model(
        config,
        task=build_task(config.env, seed=config.seed, recipe_dir=config.recipe_dir),
        model_dir=whole / "model",
        make_launcher=InProcessLauncher,
        logs=tmp_path,
        view=SilentView(),
    )
    _, rollouts = asyncio.run(evaluating)
    assert len(rollouts) == 4
    for rollout in rollouts:
        (turn,) = rollout.turns
        prompt = torch.tensor([turn.prompt_ids])
        said = exported.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
        assert said.tolist() == turn.completion.ids_N.tolist()


# --- weights swap under running requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "make_launcher"),
    [
        pytest.param("keep", LocalLauncher, marks=pytest.mark.slow),
        ("keep", InProcessLauncher),
        ("recompute", InProcessLauncher),
        ("flush", InProcessLauncher),
    ],
    ids=["keep-processes", "keep", "recompute", "flush"],
)
def test_weights_swap_while_completions_run(
    endless_model: Path, tmp_path: Path, kv: str, make_launcher: MakeLauncher
) -> None:
    config = tiny_recipe(
        endless_model,
        tmp_path,
        steps=8,
        sampling={"max_new_tok": 240},
        flow={"mode": "pipeline", "batch_groups": 1},
        engine={"kv_on_swap": kv, "deterministic": False},
        optim={"lr": 1e-3},
    )
    run = train(config, make_launcher=make_launcher)
    assert summary_of(run).balanced
    assert max(summary_of(run).lag_hist) <= 2
    mixed = 0
    for rollout in trained_rollouts(summary_of(run).run_dir).values():
        (turn,) = rollout.turns
        spans = turn.completion.spans
        versions = [s.policy_version for s in spans]
        assert versions == sorted(versions)
        assert all(s.kv_version <= s.policy_version for s in spans)
        assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
        if len(set(versions)) > 1:
            mixed += 1
            assert all((s.kv_version == s.policy_version) == (kv != "keep" or s.start == 0) for s in spans)
    assert mixed > 0


# --- LoRA ----------------------------------------------------------------------------------------------------------


def test_lora_trains_resumes_and_exports_model_and_adapter(model: Path, tmp_path: Path) -> None:
    def interrupt(run: Run, version: int) -> None:
        if version == 1:
            run.interrupt()

    def config(out: str) -> RunConfig:
        return tiny_recipe(model, tmp_path / out, steps=4, lora={"rank": 4})

    assert (
        summary_of(train(config("broken"), during=interrupt, make_launcher=InProcessLauncher)).reason == "interrupted"
    )
    path = only_run(tmp_path / "broken")
    summary = summary_of(train(resumed_recipe(path), resume=path, make_launcher=InProcessLauncher))
    assert summary.balanced
    assert summary.steps == 4
    assert all(s.metrics["abs_dlogp/max"] < TOLERANCE for s in steps_of(path))
    uninterrupted = train(config("whole"), make_launcher=InProcessLauncher)
    assert_same_run(path, Path(summary_of(uninterrupted).run_dir))
    merged = AutoModelForCausalLM.from_pretrained(path / "model")
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(path / "model" / "adapter"))(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - before).abs().max() > 1e-3


# --- many turns ----------------------------------------------------------------------------------------------------


def test_three_turns_become_one_sample_that_trains_on_sampled_tokens_only(model: Path, tmp_path: Path) -> None:
    config = tiny_recipe(model, tmp_path, env={"options": {"turns": 3}, "max_turns": 3}, sampling={"max_new_tok": 8})
    batches: list[Batch] = []
    run = train(config, batches=batches, make_launcher=InProcessLauncher)
    summary = summary_of(run)
    assert summary.balanced
    rollouts = trained_rollouts(summary.run_dir)
    assert len(rollouts) == 2 * 2 * 4
    sampled = sum(r.generated_tok for r in rollouts.values())
    assert summary.trained_tok == sampled == sum(b.trained_tok for b in batches)
    assert all(s.metrics["abs_dlogp/max"] < TOLERANCE for s in steps_of(summary.run_dir))
    by_member = {(r.group_id, r.member): r for r in rollouts.values()}
    for batch in batches:
        assert_samples_hold_what_was_sampled(batch, by_member)


def assert_samples_hold_what_was_sampled(batch: Batch, rollouts: dict[tuple[str, int], Any]) -> None:
    assert len(batch.samples) == 2 * 4
    for sample in batch.samples:
        rollout = rollouts[sample.group_id, sample.member]
        assert len(rollout.turns) == 3
        mask_T = sample.loss_mask_T
        ids = np.concatenate([t.completion.ids_N for t in rollout.turns])
        logp = np.concatenate([t.completion.logp_N for t in rollout.turns])
        np.testing.assert_array_equal(sample.ids_T[mask_T], ids)
        np.testing.assert_array_equal(sample.logp_T[mask_T], logp)
        assert not mask_T[: len(rollout.turns[0].prompt_ids)].any()
        assert tuple(sample.ids_T) == (*rollout.turns[-1].prompt_ids, *rollout.turns[-1].completion.ids_N)


# --- losses and advantages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "updates", "advantage", "more"),
    [
        ("pg", 1, "dr_grpo", {"correction": "mis"}),
        ("ppo", 2, "grpo", {"kl_coef": 0.1}),
        ("cispo", 2, "leave_one_out", {"clip_high": 4.0}),
        ("gspo", 2, "batch_norm", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence_mean"}),
        ("decoupled_ppo", 2, "grpo", {"aggregate": "prompt_mean"}),
    ],
)
def test_every_loss_and_advantage_trains(
    model: Path, tmp_path: Path, kind: str, updates: int, advantage: str, more: dict[str, Any]
) -> None:
    loss = {"kind": kind, "advantage": advantage, **more}
    config = tiny_recipe(model, tmp_path, loss=loss, trainer={"updates_per_batch": updates})
    run = train(config, make_launcher=InProcessLauncher)
    assert summary_of(run).balanced
    steps = steps_of(summary_of(run).run_dir)
    assert len(steps) == 2
    assert all(np.isfinite(s.loss) for s in steps)
    assert max(s.grad_norm for s in steps) > 0
    assert weights_of(Path(summary_of(run).run_dir)) != (model / "model.safetensors").read_bytes()


# --- the command line ----------------------------------------------------------------------------------------------


def headrace(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("headrace")), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_command_line_trains_on_json_lines_with_an_own_reward_and_evaluates(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "What is {i} + 4?"}}\n' for i in range(16)))
    (tmp_path / "my_module.py").write_text(
        "import zlib\n\ndef reward(rollout, prompt):\n"
        '    return {"reward": zlib.crc32(rollout.text.encode()) % 2, "length": len(rollout.text)}\n'
    )
    (tmp_path / "recipe.toml").write_text(
        f'name = "own"\nsteps = 2\nmodel = {{name = "{model}", dtype = "float32", device = "cpu"}}\n'
        '[env]\nkind = "jsonl"\nreward = "my_module:reward"\neval_prompts = 4\noptions = {file = "data.jsonl"}\n'
        '[sampling]\nmax_new_tok = 8\n[flow]\nbatch_groups = 2\ngroup_size = 4\nzero_signal = "keep"\n'
        "[engine]\nmax_context_tok = 128\nmax_batch = 8\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = headrace("train", tmp_path / "recipe.toml", "--no-live", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    path = only_run(elsewhere / "runs")
    assert not roles_of(path)
    assert not (path / "weights").exists()
    assert [s.version for s in steps_of(path)] == [1, 2]
    evaluated = headrace("eval", path, "--json", cwd=elsewhere)
    assert evaluated.returncode == 0, evaluated.stderr
    assert '"prompts": 4' in evaluated.stdout
    assert {p.name for p in elsewhere.iterdir()} <= {"runs", "logs"}
    wrong = headrace("train", tmp_path / "recipe.toml", "--set", "env.reward=my_module:rewards", cwd=elsewhere)
    assert wrong.returncode == 2
    assert "reward" in wrong.stderr
