"""Learning-rate schedules. Pure."""

from __future__ import annotations

import math

from headrace.config.schema import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`.

    Linear warm-up over `warmup_steps` (the first step gets lr / warmup_steps, not 0), then constant, or linear or
    cosine decay that reaches min_lr_frac * lr at the last step; beyond the last step it stays there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    left = max(total_steps - 1 - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / left, 1.0)
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_frac + (1.0 - config.min_lr_frac) * share)
