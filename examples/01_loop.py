"""RL on a language model with everything in sight: sample, score, learn, hand the weights back. One process, in turns.

    python examples/01_loop.py --steps 20

02_custom_loop.py is the same on the library: asynchronous, resumable, with the books kept.
Dimension letters: B samples, T tokens of a padded sequence.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config.schema import EngineConfig
from headrace.hub.fetch import ensure_model
from headrace.records import Completion, GenRequest, SamplingParams
from headrace.rollout.native.core import NativeCore, build
from headrace.sync.publish import write_version

GROUPS, GROUP_SIZE, MAX_NEW_TOK, LR = 4, 8, 32, 1e-5


def question(rng: np.random.Generator) -> tuple[str, int]:
    """A task: a question and its answer."""
    a, b = (int(x) for x in rng.integers(1, 30, 2))
    return f"What is {a} + {b}?", a + b


def reward(text: str, answer: int) -> float:
    """1 if the last number in the text is the answer."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def sample(engine: NativeCore, prompts: list[list[int]], step: int) -> list[list[Completion]]:
    """GROUP_SIZE completions for each prompt."""
    requests = [
        GenRequest(
            id=f"{g}/{member}",
            prompt_ids=tuple(ids),
            group_id=f"g{g}",
            sampling=SamplingParams(max_new_tok=MAX_NEW_TOK, seed=(step * GROUPS + g) * GROUP_SIZE + member),
        )
        for g, ids in enumerate(prompts)
        for member in range(GROUP_SIZE)
    ]
    engine.add(requests)
    done: dict[str, Completion] = {}
    while engine.busy:
        done |= {c.request_id: c for c in engine.step()}
    return [[done[f"{g}/{member}"] for member in range(GROUP_SIZE)] for g in range(len(prompts))]


def loss_of(
    model: torch.nn.Module, prompts: list[list[int]], groups: list[list[Completion]], adv: np.ndarray
) -> torch.Tensor:
    """Policy gradient with a truncated importance weight, mean over the sampled tokens."""
    rows = [(prompts[g], c, adv[g, m]) for g, group in enumerate(groups) for m, c in enumerate(group)]
    longest = max(len(p) + len(c.ids_N) for p, c, _ in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    logp_engine_BT, adv_BT = torch.zeros(len(rows), longest), torch.zeros(len(rows), longest)
    for b, (prompt, completion, advantage) in enumerate(rows):
        start, stop = len(prompt), len(prompt) + len(completion.ids_N)
        ids_BT[b, :stop] = torch.tensor([*prompt, *completion.ids_N.tolist()])
        mask_BT[b, start:stop] = True
        logp_engine_BT[b, start:stop] = torch.from_numpy(completion.logp_N)
        adv_BT[b, start:stop] = float(advantage)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids_BT).logits[:, :-1].float()
    logp_BT = logits.log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
    mask_BT = mask_BT[:, 1:]
    ratio = (logp_BT.detach() - logp_engine_BT[:, 1:])[mask_BT].exp().clamp(max=2.0)
    return -(ratio * adv_BT[:, 1:][mask_BT] * logp_BT[mask_BT]).sum() / mask_BT.sum()


def hand_over(model: torch.nn.Module, engine: NativeCore, version: int, folder: Path) -> None:
    """Publish the weights as bfloat16 and let the engine serve them."""
    arrays = (
        (name, p.detach().to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        for name, p in model.named_parameters()
    )
    manifest = write_version(folder, run_id="example", version=version, arrays=arrays)
    engine.stage(manifest)
    engine.swap(version, "keep")
    Path(manifest.path).unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()

    model_dir = ensure_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)  # master weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    engine_config = EngineConfig(max_batch=GROUPS * GROUP_SIZE, max_context_tok=256).model_dump()
    engine = build(model_dir=str(model_dir), engine=engine_config, dtype="bfloat16", device="cpu", run_id="example")
    rng = np.random.default_rng(0)

    with tempfile.TemporaryDirectory() as folder:
        for step in range(args.steps):
            tasks = [question(rng) for _ in range(GROUPS)]
            prompts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
                )["input_ids"]
                for text, _ in tasks
            ]
            groups = sample(engine, prompts, step)
            scores = np.array([[reward(c.text, tasks[g][1]) for c in group] for g, group in enumerate(groups)])
            advantages = scores - scores.mean(axis=1, keepdims=True)  # group-relative, Dr. GRPO
            loss = loss_of(model, prompts, groups, advantages)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            hand_over(model, engine, step + 1, Path(folder))
            print(f"step {step + 1:3d}  reward {scores.mean():.3f}  loss {loss.item():+.4f}", flush=True)


if __name__ == "__main__":
    main()
