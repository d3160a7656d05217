"""From a recipe to a plan's spec, and from a plan back to a recipe: the plan is the run."""

from __future__ import annotations

from typing import Any

import tomli_w

from headrace.config.schema import RunConfig
from headrace.errors import PlanError
from headrace.planner.setting import Setting
from headrace.planner.spec import (
    ClusterConfig,
    LimitsConfig,
    PlanSpec,
    ResponseConfig,
    SearchConfig,
)

MEAN_FRAC = 0.5
"""Mean response over its cap when nothing was measured. A guess: `headrace calibrate RUN` replaces it."""
CPU = "cpu"
"""Chip name whose units are CPU cores: there engine.threads and trainer.threads are the split."""


def spec_of_recipe(
    recipe: RunConfig, *, cluster: ClusterConfig | None = None, mean_tok: float = 0.0, prompt_tok: int = 0
) -> PlanSpec:
    """What `recipe` asks for, as a spec. Lengths that a recipe cannot know are given or guessed (MEAN_FRAC)."""
    cap_tok = recipe.sampling.max_new_tok
    context_tok = recipe.engine.max_context_tok
    flow = recipe.flow
    return PlanSpec(
        model=recipe.model.name,
        precision=_precision(recipe.model.dtype),
        lora=recipe.lora.rank > 0,
        steps=recipe.steps,
        batch_groups=flow.batch_groups,
        group_size=flow.group_size,
        prompt_tok=prompt_tok or max(1, (context_tok - cap_tok) // 2),
        logprob_passes=int(recipe.loss.needs_proximal) + int(recipe.loss.kl_coef > 0),
        share_prompts=recipe.trainer.share_prompts,
        seed=recipe.seed,
        response=ResponseConfig(mean_tok=min(cap_tok, mean_tok or max(1.0, MEAN_FRAC * cap_tok)), cap_tok=cap_tok),
        cluster=cluster or ClusterConfig(gpu=CPU, num_gpus=2, max_seqs=recipe.engine.max_batch),
        limits=LimitsConfig(max_lag_steps=max(1, flow.lag_bound)),
        search=SearchConfig(oversample=(flow.oversample,), update_splits=(recipe.trainer.updates_per_batch,)),
    )


def setting_of_recipe(recipe: RunConfig, cores: int) -> Setting:
    """What `headrace train` does with this recipe on `cores` CPU cores: one engine and one trainer, threads as widths.

    Roles that take turns have every core (they count as colocated), roles that overlap share them; staging a version
    stands still with the engine (hand_off "stop").
    """
    flow = recipe.flow
    in_turns = flow.mode == "sync"
    half = max(1, cores // 2)
    generator = recipe.engine.threads or (cores if in_turns else half)
    trainer = recipe.trainer.threads or (cores if in_turns else max(1, cores - half))
    return Setting(
        mode=flow.mode,
        colocated=in_turns and generator == trainer,
        gen_gpus=generator,
        train_gpus=trainer,
        gen_tp=generator,
        train_tp=1,
        train_pp=1,
        train_ep=1,
        max_running=flow.max_running or flow.slots * flow.group_size,
        max_lag_steps=flow.lag_bound,
        hand_off="stop",
        oversample=flow.oversample,
        update_split=recipe.trainer.updates_per_batch,
    )


def recipe_of_plan(spec: PlanSpec, setting: Setting, *, base: RunConfig | None = None, about: str = "") -> str:
    """The TOML that `headrace train` runs for this setting; `about` becomes the comment on top.

    What `base` says is kept, except for what the plan decides. Raises PlanError if the two contradict each other.
    """
    data: dict[str, Any] = {} if base is None else base.model_dump(mode="json", exclude_unset=True)
    data.pop("recipe_dir", None)
    data.setdefault("name", "planned")
    data["steps"] = spec.steps
    data.setdefault("model", {}).setdefault("name", spec.model)
    flow = setting.flow(spec)
    planned: dict[str, Any] = {
        "mode": flow.mode,
        "batch_groups": flow.batch_groups,
        "group_size": flow.group_size,
        "max_running": flow.max_running,
    }
    if flow.mode == "pipeline":
        planned["max_lag_steps"] = setting.max_lag_steps
    if setting.oversample:
        planned["oversample"] = setting.oversample
    kept = {k: v for k, v in data.get("flow", {}).items() if k not in ("max_lag_steps", "oversample")}
    data["flow"] = kept | planned
    engine = data.setdefault("engine", {})
    engine["max_batch"] = max(1, -(-flow.max_running // setting.engines))
    data.setdefault("sampling", {})["max_new_tok"] = spec.response.cap_tok
    engine.setdefault("max_context_tok", spec.response.cap_tok + 2 * spec.prompt_tok)
    if spec.cluster.gpu == CPU:
        engine["threads"] = setting.gen_gpus
        data.setdefault("trainer", {})["threads"] = setting.train_gpus
    if setting.update_split > 1:
        kind = data.setdefault("loss", {}).setdefault("kind", "cispo")
        if kind == "pg":
            raise PlanError(
                f"the plan splits a batch into {setting.update_split} updates, and loss.kind = 'pg' has no clipping; "
                "use loss.kind = 'cispo' in the recipe or search.update_splits = [1] in the spec"
            )
        data.setdefault("trainer", {})["updates_per_batch"] = setting.update_split
    if spec.lora:
        data.setdefault("lora", {}).setdefault("rank", 32)
    RunConfig.model_validate(data)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in about.splitlines())
    return comment + ("\n" if comment else "") + tomli_w.dumps(data)


def _precision(dtype: str) -> Any:
    return {"float32": "fp32"}.get(dtype, "bf16")
