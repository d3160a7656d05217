"""What the planner says to a single published number: one small rule per kind, each a formula of the product.

Identities only check that a source agrees with itself; formulas and costs are predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.errors import PlanError
from headrace.planner import closed, normal
from headrace.planner.constants import Constants
from headrace.planner.cost import TrainerCost
from headrace.planner.fixtures_data import FactRow
from headrace.planner.handoff_cost import hand_off_cost
from headrace.planner.hardware import chip
from headrace.planner.lengths import held_moment, length_law
from headrace.planner.models import model
from headrace.planner.pipelinerl import Case
from headrace.planner.spec import ResponseConfig
from headrace.planner.trainer_cost import trainer_cost

Prediction = dict[str, float]
Reads = Callable[[FactRow, Constants], Prediction]

FLOPS_PER_PARAM_TOK = 6.0
"""Of forward and backward together, per parameter and token."""


def predict_fact(row: FactRow, constants: Constants) -> Prediction:
    """Quantity to predicted number; quantities that the rule does not know are absent. {} for a note."""
    found = _RULES.get(row.rule)
    return found[1](row, constants) if found else {}


def basis_of(row: FactRow) -> str:
    """identity, formula or costs; "" for a note."""
    found = _RULES.get(row.rule)
    return found[0] if found else ""


def hit_cap_law(cap_1: float, frac_1: float, cap_2: float, frac_2: float) -> tuple[float, float]:
    """(sigma, median tokens) of the lognormal law with P(L > cap_i) = frac_i.

    (ln cap_i - ln median) / sigma is the normal quantile of 1 - frac_i; two of them give both. PlanError if they do
    not differ.
    """
    z_1, z_2 = normal.quantile(1.0 - frac_1), normal.quantile(1.0 - frac_2)
    if z_1 == z_2 or cap_1 == cap_2:
        raise PlanError(f"caps {cap_1:g} and {cap_2:g} with cut shares {frac_1:g} and {frac_2:g} give no length law")
    sigma = math.log(cap_2 / cap_1) / (z_2 - z_1)
    return sigma, cap_1 * math.exp(-sigma * z_1)


def tail_frac(config: ResponseConfig, groups: int, members: int) -> float:
    """Share of a batch's time after 90 % of its rollouts are done, all started together at one speed per token."""
    law = length_law(config)
    longest = law.max_of(groups, members)
    return max(0.0, 1.0 - law.quantile(0.9) / longest)


def _hit_cap(row: FactRow, _: Constants) -> Prediction:
    cap_1, cap_2 = row.number("fit_cap_1"), row.number("fit_cap_2")
    sigma, median = hit_cap_law(cap_1, row.number("fit_frac_1"), cap_2, row.number("fit_frac_2"))
    return {
        "sigma": sigma,
        "median_tok": median,
        f"mean_tok_{cap_1:.0f}": held_moment(1, median, sigma, cap_1),
        f"mean_tok_{cap_2:.0f}": held_moment(1, median, sigma, cap_2),
    }


def _idle(row: FactRow, _: Constants) -> Prediction:
    rho = row.number("production_per_s") / row.number("consumption_per_s")
    return {"idle_frac": float(closed.trainer_idle_frac(rho))}


def _kv_running(row: FactRow, _: Constants) -> Prediction:
    context_tok = row.number("pool_small_tok") / row.number("running_small")
    return {"running_large": row.number("pool_large_tok") / context_tok}


def _kv_throughput(row: FactRow, _: Constants) -> Prediction:
    def tok_per_s(running: float) -> float:
        moved_bytes = row.number("weights_bytes") + 2.0 * running * row.number("state_bytes")
        return running / (moved_bytes / row.number("hbm_bytes_per_s"))

    return {"tok_per_s_ratio": tok_per_s(row.number("running_large")) / tok_per_s(row.number("running_small"))}


def _ledger(row: FactRow, _: Constants) -> Prediction:
    stale = row.number("stale_tok")
    generated = row.number("consumed_tok") + stale + row.number("surplus_tok")
    return {"generated_tok": generated, "stale_frac": stale / generated}


def _little(row: FactRow, _: Constants) -> Prediction:
    return {"in_flight": row.number("rate_per_s") / row.number("kept_frac") * row.number("latency_s")}


def _mfu(row: FactRow, _: Constants) -> Prediction:
    flops = FLOPS_PER_PARAM_TOK * row.number("active_params") * row.number("tok") * row.number("samples")
    return {"mfu": flops / row.number("busy_s") / (row.number("gpus") * row.number("peak_flops_per_s"))}


def _overlap(row: FactRow, _: Constants) -> Prediction:
    return {"speedup": row.number("sync_step_s") / max(row.number("gen_s"), row.number("train_s"))}


def _pipelinerl(row: FactRow, _: Constants) -> Prediction:
    case = Case(
        chips=int(row.number("gpus")),
        batch=int(row.number("batch")),
        tau=row.number("tau"),
        at_h=row.number("running_per_gpu"),
        at_u=row.number("utilisation"),
    )
    generate, train = case.pipeline_rates(int(row.number("gen_gpus")), case.at_h)
    lag_steps = case.max_lag_steps(int(row.number("gen_gpus")), case.at_h)
    in_turns = case.conventional_rate(lag_steps)
    return {
        "rate_generate": generate,
        "rate_train": train,
        "rate_conventional": in_turns,
        "speedup": min(generate, train) / in_turns,
        "lag_max_steps": lag_steps,
    }


def _pipelinerl_lag(row: FactRow, _: Constants) -> Prediction:
    in_flight = row.number("running_per_gpu") * row.number("gen_gpus")
    return {"lag_max_steps": float(math.ceil(in_flight / (row.number("mean_over_max") * row.number("batch"))))}


def _sign_gain(row: FactRow, _: Constants) -> Prediction:
    unit = "h" if "sync_h" in row.inputs else "s"
    return {"speedup": row.number(f"sync_{unit}") / row.number(f"async_{unit}")}


def _spec_decode(row: FactRow, _: Constants) -> Prediction:
    return {"speedup": row.number("accept_tok") / (1.0 + row.number("draft_frac"))}


def _staleness(row: FactRow, _: Constants) -> Prediction:
    lag = closed.staleness_drop_oldest(*(row.number(name) for name in ("running", "batch", "queue", "rho", "tailness")))
    return {"lag_mean": float(lag)}


def _tail_share(row: FactRow, _: Constants) -> Prediction:
    config = ResponseConfig(
        mean_tok=row.number("mean_tok"),
        cap_tok=int(row.number("cap_tok")),
        sigma=row.number("sigma"),
        sigma_within=row.number("sigma_within"),
    )
    return {"tail_frac": tail_frac(config, int(row.number("groups")), int(row.number("group_size")))}


def _train_mfu(row: FactRow, constants: Constants) -> Prediction:
    return {"mfu": _trainer(row, row.word("gpu"), constants).mfu}


def _train_gain(row: FactRow, constants: Constants) -> Prediction:
    seq_tok = row.number("seq_tok")
    base_s, other_s = (
        _trainer(row, row.word(name), constants).batch_s(seq_tok, seq_tok**2) for name in ("gpu", "other_gpu")
    )
    return {"speedup": base_s / other_s}


def _trainer(row: FactRow, gpu: str, constants: Constants) -> TrainerCost:
    """The row's trainer on chips of one kind; batches are large, so that the overhead of a step does not matter."""
    shape, seq_tok, gpus = model(row.word("model")), row.number("seq_tok"), int(row.number("gpus"))
    cost = trainer_cost(
        shape,
        chip(gpu),
        gpus=gpus,
        tp=1,
        pp=1,
        ep=gpus if shape.is_moe else 1,
        precision="bf16",
        lora=bool(row.number("lora")),
        logprob_passes=0,
        seq_tok=seq_tok,
        batch_tok=64 * seq_tok,
        constants=constants,
    )
    return replace(cost, fixed_s=0.0)


def _usd_per_mtok(row: FactRow, _: Constants) -> Prediction:
    usd = row.number("gpus") * row.number("usd_per_gpu_h") * row.number("wall_s") / 3600.0
    return {"usd_per_mtok": usd / (row.number("tok") / 1e6)}


def _wait_plus_train(row: FactRow, _: Constants) -> Prediction:
    return {"step_s": row.number("wait_s") + row.number("train_s")}


def _wall_share(row: FactRow, _: Constants) -> Prediction:
    return {"overhead_frac": row.number("wall_s") / row.number("steps") / row.number("step_s") - 1.0}


def _weight_sync(row: FactRow, constants: Constants) -> Prediction:
    gpu, gpus = chip(row.word("gpu")), int(row.number("gpus"))
    cost = hand_off_cost(
        model(row.word("model")),
        gpu,
        gpu,
        policy="stop",
        train_gpus=gpus,
        gen_gpus=gpus,
        gen_tp=int(row.number("gen_tp")),
        precision=row.word("precision"),
        lora=False,
        constants=constants,
        colocated=bool(row.number("colocated")),
    )
    return {"hand_off_s": cost.publish_s + cost.transfer_s + cost.pause_s}


_RULES: Mapping[str, tuple[str, Reads]] = {
    "hit_cap": ("formula", _hit_cap),
    "idle": ("formula", _idle),
    "kv_running": ("formula", _kv_running),
    "kv_throughput": ("formula", _kv_throughput),
    "ledger": ("identity", _ledger),
    "little": ("formula", _little),
    "mfu": ("formula", _mfu),
    "overlap": ("formula", _overlap),
    "pipelinerl": ("formula", _pipelinerl),
    "pipelinerl_lag": ("formula", _pipelinerl_lag),
    "sign_gain": ("identity", _sign_gain),
    "spec_decode": ("formula", _spec_decode),
    "staleness": ("formula", _staleness),
    "tail_share": ("formula", _tail_share),
    "train_gain": ("costs", _train_gain),
    "train_mfu": ("costs", _train_mfu),
    "usd_per_mtok": ("formula", _usd_per_mtok),
    "wait_plus_train": ("identity", _wait_plus_train),
    "wall_share": ("identity", _wall_share),
    "weight_sync": ("costs", _weight_sync),
}
