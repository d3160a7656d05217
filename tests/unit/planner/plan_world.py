"""Plans made by hand, with round numbers: what tables and pages are tested on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.planner.closed import Estimate
from headrace.planner.cost import DecodeTable, EngineCost, HandOffCost, TrainerCost
from headrace.planner.evaluate import Evaluated, Wall
from headrace.planner.memory import MemoryFit
from headrace.planner.outcome import Metrics
from headrace.planner.plan import Band, Phase, Plan, Point, Remedy, Sensitivity, Term
from headrace.planner.setting import Setting
from headrace.planner.spec import PlanSpec

SPEC = PlanSpec(model="qwen3-30b-a3b", cluster={"gpu": "h100", "num_gpus": 32}, steps=200)

ENGINE = EngineCost(
    decode=DecodeTable(
        mem_s=(0.0, 0.01), mem_s_per_tok=1e-8, flop_s=(0.0, 0.001), flop_s_per_tok=0.0, other_s=(0.0, 0.002)
    ),
    prefill_s_per_tok=1e-5, prefill_s_per_tok2=0.0, prefill_s_min=0.01, kv_capacity_tok=500_000, max_running=1,
)  # fmt: skip


def setting(**changes: Any) -> Setting:
    given = {
        "mode": "pipeline", "colocated": False, "gen_gpus": 24, "train_gpus": 8, "gen_tp": 2, "train_tp": 1,
        "train_pp": 1, "train_ep": 8,
        "max_running": 1536, "max_lag_steps": 4, "hand_off": "in_flight",
    }  # fmt: skip
    return Setting(**(given | changes))  # type: ignore[arg-type]


SYNC = setting(mode="sync", colocated=True, gen_gpus=32, train_gpus=32, max_lag_steps=0, max_running=1024)


def metrics(samples_per_s: float = 12.5, *, sync: bool = False) -> Metrics:
    """1024 rollouts a step, lags 0 to 4 (mean 1.70, p99 3), 4.0 % wasted; a synchronous one has lag 0."""
    step_s = 1024 / samples_per_s
    shares = {"busy": 0.55, "wait_data": 0.35, "wait_bound": 0.0, "hand_off": 0.04, "idle": 0.06}
    return Metrics(
        steps=16,
        wall_s=16 * step_s,
        samples_per_s=samples_per_s,
        trained_tok_per_s=2000 * samples_per_s,
        step_s_mean=step_s,
        step_s_p50=step_s,
        step_s_p99=1.25 * step_s,
        step_s=tuple(step_s * (1 + 0.02 * ((7 * i) % 5 - 2)) for i in range(14)),
        trainer_shares=shares if sync else shares | {"busy": 0.88, "wait_data": 0.05, "hand_off": 0.05, "idle": 0.02},
        generator_shares={"decode": 0.6, "prefill": 0.03, "paused": 0.02, "idle": 0.35 if sync else 0.04},
        lag_hist={0: 1000} if sync else {0: 100, 1: 300, 2: 400, 3: 199, 4: 1},
        sample_lag_hist={0: 64} if sync else {1: 10, 2: 30, 3: 20, 4: 4},
        generated_tok=30_000_000,
        trained_tok=28_800_000,
        wasted_tok={"cancelled_oversample": 1_000_000, "dropped_stale": 200_000},
        groups={"trained": 1024, "dropped_stale": 9},
        kv_used_frac=0.78,
        kv_peak_frac=0.97,
        running_mean=1490.0,
        queued_mean=12.0,
        rollout_s_mean=90.0,
        rollout_s_p50=70.0,
        rollout_s_p99=300.0,
        rollout_s_max=420.0,
        queue_s_mean=15.0,
    )


def memory(side: str) -> MemoryFit:
    instants = {"load": 30.5e9, "decode of one sequence": 41.25e9}
    if side == "trainer":
        instants = {"log-prob pass": 30e9, "forward": 44e9, "backward": 61.5e9, "optimizer step": 58e9}
    worst = max(instants, key=instants.__getitem__)
    return MemoryFit(side=side, instants=instants, limit_bytes=72e9, fits=True, worst=worst)


def evaluated(chosen: Setting, samples_per_s: float = 12.5) -> Evaluated:
    sync = chosen.mode == "sync"
    step_s = 1024 / samples_per_s
    usd_per_step = 32 * 2.5 * step_s / 3600
    return Evaluated(
        setting=chosen,
        estimate=Estimate(
            step_s=step_s, samples_per_s=samples_per_s, gen_s=step_s, train_s=0.9 * step_s, rho=0.9,
            trainer_idle_frac=0.1, generator_idle_frac=0.0, lag_mean=0.0 if sync else 1.7, usd_per_step=usd_per_step,
            usd_per_mtok=usd_per_step / 2.048, slots=1700, binding="tail (sync)" if sync else "generation: KV",
        ),
        metrics=metrics(samples_per_s, sync=sync),
        generator_fit=memory("generator"),
        trainer_fit=memory("trainer"),
        usd_per_step=usd_per_step,
        usd_per_mtok=usd_per_step / 2.048,
        usd=200 * usd_per_step,
        wall_s=Wall(200 * step_s, 205 * step_s, 212 * step_s),
        error_frac=0.02,
        engine=ENGINE,
        trainer=TrainerCost(s_per_tok=1e-5, s_per_tok2=0.0, fixed_s=1.0, mfu=0.2),
        hand_off=HandOffCost(publish_s=1.0, transfer_s=2.0, pause_s=0.5, bytes=6e10),
        binding="tail (sync)" if sync else "generation: KV",
    )  # fmt: skip


def plan(**changes: Any) -> Plan:
    """A pipeline at 12.5 samples/s over a synchronous plan at 7.7, nine settings in all, no drift."""
    ranked = [evaluated(setting(), 12.5)]
    ranked += [evaluated(setting(gen_gpus=24 - 2 * i, train_gpus=8 + 2 * i), 12.4 - 0.4 * i) for i in range(1, 8)]
    sync = evaluated(SYNC, 7.7)
    points = [
        Point(samples_per_s=e.metrics.samples_per_s * (1 - 0.01 * k), lag_mean=0.2 * k if e is not sync else 0.0,
              usd_per_mtok=e.usd_per_mtok * (1 + 0.01 * k), words=e.setting.words(), mode=e.setting.mode)
        for e in (*ranked, sync) for k in range(12)
    ]  # fmt: skip
    given = {
        "spec": SPEC,
        "calibration": "built-in",
        "calibration_date": "2026-11-29",
        "ranked": (*ranked, sync),
        "best_sync": sync,
        "step_s": Band(low=68.0, mid=81.9, high=98.0),
        "speedup": Band(low=1.38, mid=1.62, high=1.84),
        "binding": "Generation binds, by KV entries: 1 490 of 1 700 slots are full, the trainer waits 5 % of its time.",
        "remedies": (
            Remedy(what="+8 h100 generating", gain_frac=0.094, note="then training binds"),
            Remedy(what="+20 % HBM", gain_frac=0.051),
            Remedy(what="+8 h100 training", gain_frac=0.004, note="the trainer already waits"),
        ),
        "sensitivities": (
            Sensitivity(what="response length", low_label="x0.5", high_label="x2", step_s_low=45.0, step_s_high=150.0,
                        best_low="pipeline 20+12", best_high="pipeline 26+6", changes=True),
            Sensitivity(what="trainer MFU", low_label="-30 %", high_label="+30 %", step_s_low=104.0, step_s_high=80.0,
                        best_low="pipeline 20+12", best_high="pipeline 24+8", changes=True),
            Sensitivity(what="length spread (sigma)", low_label="0.5", high_label="1.5", step_s_low=78.0,
                        step_s_high=90.0, best_low="pipeline 24+8", best_high="pipeline 24+8", changes=False),
        ),
        "terms": (
            Term(name="decode", grade="fitted", source="serving rows of vLLM on H100, 2026-11"),
            Term(name="hand_off", grade="spec", source="published rates of the checkpoint engine, 2025"),
            Term(name="training", grade="spec", source="training rows of NeMo RL, 2026-11"),
            Term(name="lengths", grade="guess", source="lognormal with sigma 1.0: nothing was measured"),
            Term(name="price", grade="measured", source="cluster.usd_per_gpu_h of the spec"),
        ),
        "phases": (),
        "hosted": (),
        "notes": ("Staleness costs steps, and how many is not modelled: objective wall counts seconds only.",),
        "screened": 2345,
        "pruned": {"memory": 120, "dominated": 2100},
        "plan_s": 0.84,
        "points": tuple(points),
    }  # fmt: skip
    return Plan(**(given | changes))  # type: ignore[arg-type]


def phases() -> tuple[Phase, ...]:
    """Lengths grow fourfold; the best split moves once."""
    start, later = setting(), setting(gen_gpus=26, train_gpus=6)
    rows = ((0.0, 1.0, start, 82.0, 82.0), (0.5, 2.0, start, 150.0, 150.0), (1.0, 4.0, later, 260.0, 299.0))
    return tuple(
        Phase(at_frac=at, length_factor=factor, turns_factor=1.0, best=best, best_step_s=best_s, static_step_s=static_s,
              regret_frac=static_s / best_s - 1, replan=best is later)
        for at, factor, best, best_s, static_s in rows
    )  # fmt: skip


def spoiled(good: Evaluated) -> Evaluated:
    """The same without any statistics, as of a simulation that trained nothing."""
    return replace(good, metrics=Metrics(
        steps=0, wall_s=0.0, samples_per_s=0.0, trained_tok_per_s=0.0, step_s_mean=0.0, step_s_p50=0.0, step_s_p99=0.0
    ))  # fmt: skip
