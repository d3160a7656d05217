"""Your own reward and loss in the library's loop: asynchronous, bounded lag, resumable, the books kept.

    python examples/02_custom_loop.py --steps 20

01_loop.py shows the same idea with everything inline.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

import headrace as hr

RECIPE = Path(__file__).with_name("custom.toml")


def reward(rollout: hr.Rollout, prompt: hr.Prompt) -> dict[str, float]:
    """The last number must be right; a short answer is worth a little more. Extra entries appear in reports."""
    numbers = re.findall(r"-?\d+", rollout.text)
    right = float(bool(numbers) and numbers[-1] == prompt.answer)
    brief = 1.0 if len(rollout.text) < 40 else 0.0
    return {"reward": right * (0.9 + 0.1 * brief), "right": right, "brief": brief}


async def main(steps: int, out: str) -> None:
    run = hr.open(RECIPE, reward=reward, overrides=[f"steps={steps}", f"out={out}"])
    async with run:
        async for batch in run.batches():  # flow decides what and when
            report = await run.forward_backward(batch)  # custom.toml names the loss: example_loss.py
            step = await run.optim_step()
            await run.publish()  # running rollouts take it up at their next token
            rewards = [s.reward for s in batch.samples]
            print(
                f"step {run.version:3d}  reward {sum(rewards) / len(rewards):.3f}  loss {report.loss:+.4f}  "
                f"grad {step.grad_norm:.2f}  tokens {report.trained_tok}",
                flush=True,
            )
    assert run.summary is not None
    print(
        f"{run.summary.reason}: {run.summary.accuracy_before} -> {run.summary.accuracy_after} in {run.summary.run_dir}"
    )


if __name__ == "__main__":  # roles are processes of their own
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()
    asyncio.run(main(args.steps, args.out))
