"""What would be trained, in colour: the loss masks of rehearsed samples (headrace train --dry-run)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.text import Text

from headrace.cli.console import out, warn
from headrace.config.schema import RunConfig
from headrace.envs.env import Task
from headrace.errors import DataError
from headrace.loop.setup import codec as codec_of
from headrace.rollout.audit import Piece, audit, rehearse

SHOWN_PROMPTS = 2
OPEN, CLOSE = "\u00ab", "\u00bb"
"""Around what is trained where there is no colour."""


def show_masks(config: RunConfig, task: Task, model_dir: Path | None) -> None:
    """Play the first prompts with their gold answers as the policy's words and print what the trainer would train."""
    codec = codec_of(config, model_dir)
    prompts = [p for p in (task.train[i] for i in range(min(len(task.train), 50))) if p.answer][:SHOWN_PROMPTS]
    if not prompts:
        return
    console = out()
    plain = console.color_system is None
    console.print(f"\nwhat is trained ({OPEN}so{CLOSE})" if plain else "\nwhat is trained ([bold green]so[/])", end="")
    console.print(" if the policy says the gold answer:")
    for prompt in prompts:
        playing = rehearse(
            task.make_env(),
            prompt,
            codec,
            says=prompt.answer,
            max_turns=config.env.max_turns,
            max_context_tok=config.engine.max_context_tok,
        )
        try:
            found = asyncio.run(playing)
        except DataError as error:
            warn(f"no loss mask to show: {error}")
            return
        for pieces in audit(found, codec):
            console.print(Text("\n  ").append(_coloured(pieces, plain=plain)), soft_wrap=True)


def _coloured(pieces: list[Piece], *, plain: bool) -> Text:
    text = Text()
    for piece in pieces:
        shown = piece.text.replace("\n", "\n  ")
        if piece.is_trained:
            text.append(f"{OPEN}{shown}{CLOSE}" if plain else shown, style="bold green")
        else:
            text.append(shown, style="bright_black")
    return text
