"""Headrace: RL post-training in which generator and trainer run at matching rates.

    import headrace as hr
    plan = hr.plan({"model": "qwen3-8b", "cluster": {"gpu": "h100", "num_gpus": 16}})
    summary = hr.train("recipe.toml", reward=my_reward)

Names load on first use: roles and grading workers import this package too, and must start in milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.api import evaluate, open, train
    from headrace.config.load import load_recipe
    from headrace.config.schema import RunConfig
    from headrace.errors import HeadraceError
    from headrace.loop.run import Run
    from headrace.planner.plan import Plan, plan
    from headrace.planner.spec import PlanSpec
    from headrace.records import Batch, Message, Outcome, Prompt, Rollout, Sample
    from headrace.telemetry.records import EvalRecord, RunSummary, StepRecord

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "EvalRecord",
    "HeadraceError",
    "Message",
    "Outcome",
    "Plan",
    "PlanSpec",
    "Prompt",
    "Rollout",
    "Run",
    "RunConfig",
    "RunSummary",
    "Sample",
    "StepRecord",
    "__version__",
    "evaluate",
    "load_recipe",
    "open",
    "plan",
    "train",
]

_HOMES = {
    "headrace.api": ("evaluate", "open", "train"),
    "headrace.config.load": ("load_recipe",),
    "headrace.config.schema": ("RunConfig",),
    "headrace.errors": ("HeadraceError",),
    "headrace.loop.run": ("Run",),
    "headrace.planner.plan": ("Plan", "plan"),
    "headrace.planner.spec": ("PlanSpec",),
    "headrace.records": ("Batch", "Message", "Outcome", "Prompt", "Rollout", "Sample"),
    "headrace.telemetry.records": ("EvalRecord", "RunSummary", "StepRecord"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
