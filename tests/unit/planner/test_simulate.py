"""The simulator against arithmetic, and the invariants that hold for every plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_world import FREE, FakeDraws, Scene, constant, engine, lognormal, parts, trainer

from headrace.config.schema import FlowConfig
from headrace.errors import PlanError
from headrace.flow.events import MemberEnded, StartGroup, TakeBatch
from headrace.planner.cost import HandOffCost
from headrace.planner.sim_rollout import SimGroup, SimRollout, member_ended
from headrace.planner.sim_trace import ENGINES, TRAINER
from headrace.planner.simulate import Parts, Simulation, Trace, simulate
from headrace.records import Outcome


def flow(mode: str = "pipeline", groups: int = 4, size: int = 4, **rest: Any) -> FlowConfig:
    return FlowConfig.model_validate({"mode": mode, "batch_groups": groups, "group_size": size, **rest})


# -- closed-form limits: no spread, round numbers ---------------------------------------------------------------------


def test_sync_takes_generation_and_training_in_turns() -> None:
    # 16 rollouts on one engine: 100 tokens x 10 ms. Then 2 s of training. Nothing else takes time.
    plan = parts(flow("sync"), batch_s=2.0)
    metrics = simulate(plan, FakeDraws(constant(100), members=4), steps=6)
    assert metrics.step_s == pytest.approx([100 * 0.01 + 2.0] * 4, rel=1e-12)
    assert metrics.wall_s == pytest.approx(6 * 3.0)
    assert metrics.lag_hist == {0: 4 * 16 * 100}
    assert metrics.trainer_shares == pytest.approx(
        {"busy": 2 / 3, "wait_data": 1 / 3, "wait_bound": 0, "hand_off": 0, "idle": 0}
    )
    assert metrics.generator_shares == pytest.approx({"decode": 1 / 3, "prefill": 0, "paused": 0, "idle": 2 / 3})
    assert metrics.samples_per_s == pytest.approx(16 / 3)
    assert metrics.trained_tok_per_s == pytest.approx(1600 / 3)
    assert metrics.running_mean == pytest.approx(16 / 3)
    assert metrics.rollout_s_mean == pytest.approx(1.0)


def test_every_part_of_a_hand_off_takes_its_time() -> None:
    hand_off = HandOffCost(publish_s=0.5, transfer_s=0.25, pause_s=0.125, bytes=1.0)
    plan = parts(flow("sync"), batch_s=2.0, hand_off=hand_off)
    metrics = simulate(plan, FakeDraws(constant(100), members=4), steps=4)
    assert metrics.step_s == pytest.approx([1.0 + 2.0 + 0.5 + 0.25 + 0.125] * 2)
    assert metrics.trainer_shares["hand_off"] == pytest.approx(0.5 / 3.875)
    assert metrics.generator_shares["paused"] == pytest.approx(0.125 / 3.875)


def test_colocated_chips_switch_twice_a_step() -> None:
    plan = parts(flow("sync"), batch_s=2.0, hand_off=replace(FREE, switch_s=0.75), colocated=True)
    metrics = simulate(plan, FakeDraws(constant(100), members=4), steps=4)
    assert metrics.step_s == pytest.approx([1.0 + 2.0 + 2 * 0.75] * 2)


def test_updates_per_batch_pay_the_fixed_costs_each() -> None:
    plan = parts(flow("sync"), batch_s=2.0, updates=3)
    assert simulate(plan, FakeDraws(constant(100), members=4), steps=4).step_s_mean == pytest.approx(1.0 + 3 * 2.0)


def test_the_trainer_is_charged_for_prompts_and_squares() -> None:
    laws = replace(trainer(0.0), s_per_tok=1e-3, s_per_tok2=1e-6)
    plan = replace(parts(flow("sync")), trainer=laws)
    metrics = simulate(plan, FakeDraws(constant(90), members=4, prompt_tok=10), steps=4)
    assert metrics.step_s_mean == pytest.approx(0.9 + 16 * 100 * 1e-3 + 0.5 * 16 * 100**2 * 1e-6)


@pytest.mark.parametrize(("batch_s", "slower"), [(0.5, "generation"), (3.0, "training")])
def test_one_step_off_takes_the_slower_side(batch_s: float, slower: str) -> None:
    plan = parts(flow("one_step_off"), batch_s=batch_s)
    metrics = simulate(plan, FakeDraws(constant(100), members=4), steps=12, warm_up=4)
    assert metrics.step_s_mean == pytest.approx(1.0 if slower == "generation" else 3.0, rel=1e-6)
    assert metrics.lag_max <= 1


@pytest.mark.parametrize("batch_s", [0.5, 1.9, 2.1, 4.0])
def test_the_pipeline_runs_at_the_slower_rate(batch_s: float) -> None:
    # 8 seats on two engines, 100 tokens x 10 ms: 8 rollouts/s, a batch of 16 every 2 s.
    plan = parts(flow("pipeline", max_lag_steps=4, max_running=8), engines=2, batch_s=batch_s)
    metrics = simulate(plan, FakeDraws(constant(100), members=4), steps=40, warm_up=10)
    assert metrics.samples_per_s == pytest.approx(min(8.0, 16 / batch_s), rel=0.01)
    rho = min(1.0, batch_s / 2.0)
    assert metrics.trainer_shares["busy"] == pytest.approx(rho, abs=0.01)


def test_speculative_decoding_divides_the_time() -> None:
    plan = replace(parts(flow("sync"), batch_s=2.0), engines=(engine(accept_tok=2.5),))
    assert simulate(plan, FakeDraws(constant(100), members=4), steps=4).step_s_mean == pytest.approx(0.4 + 2.0)


def test_context_is_integrated_over_the_interval() -> None:
    # A step with context S takes S * 1e-6 s. S grows by 16 a token from 16 * 10; in the middle of 100 each has 60.
    plan = replace(parts(flow("sync"), batch_s=0.0), engines=(engine(base_s=0.0, s_per_tok=1e-6),))
    metrics = simulate(plan, FakeDraws(constant(100), members=4), steps=4)
    assert metrics.step_s_mean == pytest.approx(100 * 16 * 60 * 1e-6)


def test_a_group_pays_its_prompt_once_per_engine() -> None:
    costs = engine(prefill_s_per_tok=0.01)
    one = replace(parts(flow("sync", groups=1), batch_s=0.0), engines=(costs,))
    draws = FakeDraws(constant(100), members=4, prompt_tok=20)
    assert simulate(one, draws, steps=3).step_s_mean == pytest.approx(1.0 + 20 * 0.01)
    two = replace(one, engines=(costs, costs))
    metrics = simulate(two, draws, steps=3)
    assert metrics.step_s_mean == pytest.approx(1.0 + 20 * 0.01)
    assert metrics.generator_shares["prefill"] == pytest.approx(0.2 / 1.2)


def test_members_go_to_the_least_loaded_engine() -> None:
    plan = parts(flow("sync", groups=3, size=3), engines=4)
    simulation = Simulation(plan, FakeDraws(constant(100), members=3), steps=2)
    simulation.advance(0)
    assert [e.b for e in simulation.engines] == [3, 2, 2, 2]


def test_stopping_transfers_pause_the_engines_and_others_do_not() -> None:
    hand_off = replace(FREE, transfer_s=0.4, pause_s=0.1)
    draws = FakeDraws(constant(100), members=4)
    shares = {}
    for policy in ("stop", "in_flight"):
        plan = parts(flow(max_lag_steps=2, max_running=16), batch_s=0.1, hand_off=hand_off, hand_off_policy=policy)
        shares[policy] = simulate(plan, draws, steps=30, warm_up=5).generator_shares["paused"]
    assert shares["stop"] == pytest.approx(5 * shares["in_flight"], rel=0.35)


def test_swaps_under_running_rollouts_split_their_tokens() -> None:
    # The batch ends at 1.0, training at 1.3; the next rollouts run from 1.0 (slots) and see v1 after 30 tokens.
    trace = Trace()
    plan = parts(flow(groups=1, size=2, max_lag_steps=1), batch_s=0.3)
    simulate(plan, FakeDraws(lambda ordinal, member, attempt: 100 + 50 * ordinal, members=2), steps=2, trace=trace)
    ended = [e for _, e, _ in trace.decisions if isinstance(e, MemberEnded)]
    assert [e.stale_tok_by_version for e in ended[:4]] == [((0, 100),)] * 2 + [((0, 130), (1, 20))] * 2
    assert [(e.oldest_version, e.newest_version, e.generated_tok) for e in ended[:4:2]] == [(0, 0, 100), (0, 1, 150)]


# -- memory and seats -------------------------------------------------------------------------------------------------


def test_a_full_engine_queues_first_come_first_served() -> None:
    # Two seats for 4 rollouts: two waves.
    plan = replace(parts(flow("sync", groups=1), batch_s=0.0), engines=(engine(max_running=2),))
    metrics = simulate(plan, FakeDraws(constant(100), members=4), steps=3)
    assert metrics.step_s_mean == pytest.approx(2.0)
    assert metrics.queued_mean == pytest.approx(1.0)
    assert metrics.running_mean == pytest.approx(2.0)


def test_preemption_computes_again_and_loses_nothing() -> None:
    # 4 x 100 tokens + prompt 10 in 250: one is preempted when 240 / 4 = 60 tokens each are sampled, and so on.
    plan = replace(parts(flow("sync", groups=1), batch_s=0.0), engines=(engine(kv_tok=250, prefill_s_per_tok=1e-3),))
    simulation = Simulation(plan, FakeDraws(constant(100), members=4), steps=3)
    metrics = simulation.run()
    assert metrics.preemptions == 2 * 3
    assert metrics.kv_peak_frac <= 1.0
    assert metrics.generated_tok == metrics.trained_tok == 3 * 400
    # All four to 60, three to 80, two to 100; then the two others go on together from 80 and 60, after the prefill of
    # the prompt and 80 tokens for the first and of 60 for the second.
    decode_s = (100 + 40) * 0.01
    assert metrics.step_s_mean == pytest.approx(decode_s + (10 + 90 + 60) * 1e-3)


def test_a_rollout_that_fits_nowhere_is_an_error_with_the_fix() -> None:
    plan = replace(parts(flow("sync", groups=1)), engines=(engine(kv_tok=100),))
    with pytest.raises(PlanError, match=r"110 tokens .* 100 KV tokens .*gen_tp"):
        simulate(plan, FakeDraws(constant(100), members=4), steps=2)


# -- what cannot be planned -------------------------------------------------------------------------------------------


def test_impossible_plans_say_why() -> None:
    draws = FakeDraws(constant(10), members=4)
    with pytest.raises(PlanError, match="no engine"):
        simulate(replace(parts(flow()), engines=()), draws, steps=2)
    with pytest.raises(PlanError, match="leave no room"):
        simulate(replace(parts(flow()), engines=(engine(kv_tok=0),)), draws, steps=2)
    with pytest.raises(PlanError, match="steps = 0"):
        simulate(parts(flow()), draws, steps=0)
    with pytest.raises(PlanError, match="cannot be lent"):
        simulate(parts(flow(), colocated=True, lent=(engine(),)), draws, steps=2)
    with pytest.raises(PlanError, match="no time"):
        simulate(replace(parts(flow(), batch_s=0.0), engines=(engine(base_s=0.0),)), draws, steps=4)


def test_no_signal_at_all_is_an_error() -> None:
    draws = FakeDraws(constant(10), members=4, flat=lambda ordinal: True)
    with pytest.raises(PlanError, match="equal rewards"):
        simulate(parts(flow(refill_budget=5)), draws, steps=2)


def test_infrastructure_that_always_fails_is_an_error() -> None:
    draws = FakeDraws(constant(10), members=4, scene=lambda o, m, a: Scene((10,), fails=True))
    with pytest.raises(PlanError, match="quarantined"):
        simulate(parts(flow(retries=0)), draws, steps=2, prompts=6)


# -- environments -----------------------------------------------------------------------------------------------------


def test_turns_tools_and_grades_take_their_time() -> None:
    scene = Scene((40, 60), tool_tok=(30,), tool_s=(0.5,), start_s=0.25, grade_s=0.125)
    plan = parts(flow("sync"), batch_s=1.0)
    draws = FakeDraws(constant(100), members=4, scene=lambda o, m, a: scene)
    metrics = simulate(plan, draws, steps=4)
    assert metrics.step_s_mean == pytest.approx(0.25 + 0.4 + 0.5 + 0.6 + 0.125 + 1.0)
    assert metrics.tool_mean == pytest.approx(16 * 0.875 / metrics.step_s_mean)
    assert metrics.generated_tok == 4 * 16 * 100


@pytest.mark.parametrize(("keep_kv", "again_tok"), [(True, 30), (False, 10 + 40 + 30)])
def test_kept_entries_save_the_prefill_after_a_tool(keep_kv: bool, again_tok: int) -> None:
    scene = Scene((40, 60), tool_tok=(30,), tool_s=(0.5,))
    plan = replace(
        parts(flow("sync", groups=1, size=2), batch_s=0.0),
        engines=(engine(prefill_s_per_tok=1e-3),) * 2,
        keep_kv=keep_kv,
    )
    metrics = simulate(plan, FakeDraws(constant(100), members=2, scene=lambda o, m, a: scene), steps=3)
    assert metrics.step_s_mean == pytest.approx(0.4 + 0.5 + 0.6 + (10 + again_tok) * 1e-3)


def test_sandboxes_are_shared_out() -> None:
    # 4 rollouts, 2 sandboxes: the second pair starts when the first is graded.
    plan = parts(flow("sync", groups=1), batch_s=0.0, sandboxes=2)
    draws = FakeDraws(constant(100), members=4, scene=lambda o, m, a: Scene((100,), start_s=0.5, grade_s=0.25))
    metrics = simulate(plan, draws, steps=3)
    assert metrics.step_s_mean == pytest.approx(2 * (0.5 + 1.0 + 0.25))
    assert metrics.queued_mean == pytest.approx(1.0)


def test_lost_rollouts_are_tried_again_and_their_tokens_wasted() -> None:
    draws = FakeDraws(
        constant(100), members=4, scene=lambda o, m, attempt: Scene((100,), fails=m == 0 and attempt == 0)
    )
    metrics = simulate(parts(flow("sync"), batch_s=1.0), draws, steps=3)
    assert metrics.wasted_tok == {"retried": 3 * 4 * 50}
    assert metrics.step_s_mean == pytest.approx(0.5 + 1.0 + 1.0)
    assert metrics.groups["trained"] == 12


# -- invariants over many plans ---------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[Parts, FakeDraws]:
    mode = draw(st.sampled_from(["sync", "one_step_off", "pipeline"]))
    size = draw(st.integers(2, 4))
    config: dict[str, Any] = {
        "on_bound": draw(st.sampled_from(["hold", "drop", "carry"])),
        "oversample": draw(st.sampled_from([0.0, 0.0, 0.5])),
        "retries": draw(st.integers(0, 2)),
        "max_running": draw(st.sampled_from([0, size, 3 * size])),
        "refill_budget": 1000,
    }
    if mode == "pipeline":
        config["max_lag_steps"] = draw(st.integers(1, 3))
    sigma = draw(st.sampled_from([0.0, 0.5, 1.2]))
    seed = draw(st.integers(0, 10**6))
    length = lognormal(40.0, sigma, seed=seed, cap_tok=300)
    turns, fail = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([0, 5]))
    colocated = draw(st.booleans())

    def scene(ordinal: int, member: int, attempt: int) -> Scene:
        tok = length(ordinal, member, attempt)
        count = min(turns, tok)
        turn_tok = (tok - count + 1, *(1,) * (count - 1))
        fails = bool(fail) and (ordinal * 7 + member * 3 + attempt) % fail == 0
        return Scene(turn_tok, (7,) * (count - 1), (0.05 * (1 + member),) * (count - 1), 0.02, 0.03 * member, fails)

    plan = Parts(
        flow=flow(mode, draw(st.integers(1, 4)), size, **config),
        engines=tuple(
            engine(
                base_s=0.01,
                per_running_s=0.001,
                s_per_tok=1e-6,
                max_running=draw(st.sampled_from([2, 5, 64])),
                kv_tok=draw(st.sampled_from([400, 700, 10**6])),
                prefill_s_per_tok=1e-4,
            )
            for _ in range(draw(st.integers(1, 3)))
        ),
        trainer=trainer(draw(st.sampled_from([0.05, 1.0])), s_per_tok=1e-4),
        hand_off=HandOffCost(publish_s=0.02, transfer_s=0.3, pause_s=0.05, bytes=1.0, switch_s=0.1),
        colocated=colocated,
        lent=() if colocated or draw(st.booleans()) else (engine(kv_tok=400),),
        hand_off_policy=draw(st.sampled_from(["stop", "in_flight", "delta"])),
        keep_kv=draw(st.booleans()),
        recompute_kv=draw(st.booleans()),
        sandboxes=draw(st.sampled_from([0, 3])),
    )
    flat = draw(st.sampled_from([0, 4]))
    draws = FakeDraws(
        length,
        members=size,
        flat=lambda ordinal: bool(flat) and ordinal % flat == 0,
        scene=scene if turns else None,
    )
    return plan, draws


def recount(simulation: Simulation) -> None:
    """Every engine's counters against its sequences, one by one."""
    for e in simulation.engines:
        assert e.b == len(e.running) <= e.cost.max_running
        tok = {r: r.context_tok + e.decoded_tok - r.from_tok for r in e.running.values()}
        assert e.context_tok == sum(tok.values())
        held = tok | {r: r.context_tok - r.uncached_tok for r in e.parked.values()}
        prompts = {r.group.ordinal: r.group.prompt_tok for r in held}
        assert e.kv_tok == sum(t - r.group.prompt_tok for r, t in held.items()) + sum(prompts.values())
        assert 0 <= e.kv_tok <= e.capacity_tok
        assert all(r.engine is e for r in (*e.running.values(), *e.queue, *e.parked.values()))
        assert not e.off or not (e.running or e.queue or e.parked)


@settings(max_examples=60, deadline=None)
@given(plans(), st.booleans())
def test_no_plan_breaks_an_invariant(planned: tuple[Parts, FakeDraws], whole_run: bool) -> None:
    plan, draws = planned
    trace = Trace()
    simulation = Simulation(plan, draws, steps=6, warm_up=1, trace=trace, whole_run=whole_run)
    while simulation.advance():
        recount(simulation)
    metrics = simulation.metrics()
    ledger = simulation.controller.ledger
    ledger.check()
    assert metrics.generated_tok == (
        metrics.trained_tok + metrics.masked_tok + sum(metrics.wasted_tok.values()) + ledger.alive_tok
    )
    assert all(0 <= lag <= plan.flow.lag_bound for lag in (*metrics.lag_hist, *metrics.sample_lag_hist))
    assert metrics.groups["trained"] == 6 * plan.flow.batch_groups
    assert sum(metrics.trainer_shares.values()) == pytest.approx(1.0)
    assert sum(metrics.generator_shares.values()) == pytest.approx(1.0)
    assert all(-1e-9 <= s <= 1.0 for s in (*metrics.trainer_shares.values(), *metrics.generator_shares.values()))
    assert sum(metrics.step_s) <= metrics.wall_s
    assert metrics.kv_peak_frac <= 1.0
    taken = [g for _, _, ds in trace.decisions for d in ds if isinstance(d, TakeBatch) for g in d.group_ids]
    assert len(taken) == len(set(taken))
    if whole_run:
        assert not ledger.alive
        for e in simulation.engines:
            assert (e.b, e.kv_tok, len(e.queue), len(e.parked)) == (0, 0, 0, 0)
    json.dumps(asdict(metrics), allow_nan=False)


def test_engine_time_and_trainer_time_are_all_of_the_wall() -> None:
    plan = parts(flow(max_lag_steps=2), engines=3, batch_s=1.0, hand_off=replace(FREE, pause_s=0.1, publish_s=0.2))
    simulation = Simulation(plan, FakeDraws(lognormal(60, 1.0), members=4), steps=30, warm_up=0)
    metrics = simulation.run()
    assert sum(simulation.tally.trainer_s.values()) == pytest.approx(metrics.wall_s)
    for e in simulation.engines:
        spent_s = e.decode_s + e.prefill_s + e.paused_s + e.idle_s
        assert spent_s == pytest.approx(e.time_s)
        assert e.time_s == pytest.approx(metrics.wall_s, abs=0.02)


@pytest.mark.parametrize("sandboxes", [0, 12])
def test_littles_law(sandboxes: int) -> None:
    draws = FakeDraws(
        lognormal(60, 0.7),
        members=4,
        scene=lambda o, m, a: Scene((20 + o % 40, 30), (5,), (0.3,), 0.1, 0.2),
    )
    plan = replace(parts(flow(max_lag_steps=2), batch_s=0.5, sandboxes=sandboxes), engines=(engine(max_running=8),) * 2)
    simulation = Simulation(plan, draws, steps=400, warm_up=20)
    metrics = simulation.run()
    inside = metrics.running_mean + metrics.queued_mean + metrics.tool_mean
    per_s = len(simulation.tally.rollout_s) / sum(metrics.step_s)
    assert inside == pytest.approx(per_s * metrics.rollout_s_mean, rel=0.02)


def json_of(plan: Parts, draws: FakeDraws, **rest: Any) -> str:
    trace = Trace()
    metrics = simulate(plan, draws, steps=8, trace=trace, **rest)
    return json.dumps(asdict(metrics)) + trace.chrome_json() + repr(trace.decisions)


@settings(max_examples=10, deadline=None)
@given(plans())
def test_the_same_seed_gives_the_same_bytes(planned: tuple[Parts, FakeDraws]) -> None:
    assert json_of(*planned) == json_of(*planned)


def test_a_trace_changes_nothing() -> None:
    plan, draws = parts(flow(max_lag_steps=2), engines=2), FakeDraws(lognormal(60, 1.0), members=4)
    assert simulate(plan, draws, steps=8) == simulate(plan, draws, steps=8, trace=Trace())


def test_the_trace_shows_who_was_busy_when() -> None:
    trace = Trace()
    plan = parts(flow("sync"), engines=2, batch_s=2.0, hand_off=replace(FREE, publish_s=0.5, pause_s=0.25))
    simulate(plan, FakeDraws(constant(100), members=4), steps=2, trace=trace)
    events = json.loads(trace.chrome_json())["traceEvents"]
    spans = [(e["name"], e["pid"], e["tid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert spans[:4] == [
        ("train", TRAINER, 0, 1.0, 2.0),
        ("publish", TRAINER, 0, 3.0, 0.5),
        ("swap", ENGINES, 0, 3.5, 0.25),
        ("swap", ENGINES, 1, 3.5, 0.25),
    ]
    running = [(e["ts"] / 1e6, e["args"]["running"]) for e in events if e["name"] == "engine 1"]
    assert running[:2] == [(0.0, 8), (1.0, 0)]
    assert [e["args"] for e in events if e["name"] == "lag"] == [{"mean": 0.0, "max": 0}] * 2
    groups = [(e["ph"], e["id"]) for e in events if e.get("cat") == "group"]
    assert groups[:8] == [("b", f"g{i:06d}") for i in range(4)] + [("e", f"g{i:06d}") for i in range(4)]


def test_twice_as_fast_takes_half_as_long_with_the_same_lag() -> None:
    draws = FakeDraws(lognormal(60, 1.0), members=4)

    def run(factor: float) -> Any:
        hand_off = HandOffCost(publish_s=0.2 * factor, transfer_s=0.3 * factor, pause_s=0.1 * factor, bytes=1.0)
        plan = replace(
            parts(flow(max_lag_steps=3), batch_s=1.0 * factor, hand_off=hand_off),
            engines=(engine(base_s=0.01 * factor, s_per_tok=1e-6 * factor),) * 2,
        )
        return simulate(plan, draws, steps=20)

    slow, fast = run(1.0), run(0.5)
    assert fast.step_s_mean == pytest.approx(slow.step_s_mean / 2)
    assert fast.lag_hist == slow.lag_hist


def test_nothing_starts_beyond_the_end_of_a_whole_run() -> None:
    trace = Trace()
    metrics = simulate(
        parts(flow(max_lag_steps=3)), FakeDraws(lognormal(60, 1.0), members=4), steps=5, trace=trace, whole_run=True
    )
    started = [d for _, _, ds in trace.decisions for d in ds if isinstance(d, StartGroup)]
    assert len(started) == metrics.groups["trained"] == 20
    assert metrics.generated_tok == metrics.trained_tok


# -- monotone with common random numbers ------------------------------------------------------------------------------


def rate(change: Callable[[Parts], Parts], draws: FakeDraws, mode: str = "pipeline", **rest: Any) -> float:
    plan = parts(flow(mode, groups=8, **rest), engines=2, batch_s=0.5)
    plan = replace(plan, engines=(engine(per_running_s=1e-3, s_per_tok=1e-6, max_running=16),) * 2)
    return simulate(change(plan), draws, steps=30, warm_up=5).samples_per_s


def test_more_engines_never_slow_a_generation_bound_run() -> None:
    draws = FakeDraws(lognormal(80, 0.8), members=4)
    rates = [rate(lambda p, n=n: replace(p, engines=p.engines[:1] * n), draws) for n in (1, 2, 3, 4)]  # type: ignore[misc]
    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * rates[0]


def test_more_memory_never_slows_generation() -> None:
    draws = FakeDraws(lognormal(80, 0.8, cap_tok=400), members=4)
    rates = []
    for kv_tok in (450, 900, 1800, 3600):
        costs = engine(max_running=16, kv_tok=kv_tok)
        rates.append(rate(lambda p, costs=costs: replace(p, engines=(costs, costs)), draws))  # type: ignore[misc]
    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * rates[0]


def test_a_wider_spread_never_speeds_sync_up() -> None:
    rates = []
    for sigma in (0.0, 0.4, 0.8, 1.2):
        draws = FakeDraws(lognormal(80, sigma, seed=3), members=4)
        rates.append(rate(lambda p: p, draws, mode="sync"))
    assert rates == sorted(rates, reverse=True)


def test_longer_tools_never_speed_generation_up() -> None:
    rates = []
    for tool_s in (0.0, 0.5, 2.0):
        draws = FakeDraws(
            constant(100),
            members=4,
            scene=lambda o, m, a, s=tool_s: Scene((50 + m, 50), (5,), (s,)),  # type: ignore[misc]
        )
        rates.append(rate(lambda p: p, draws, max_lag_steps=2))
    assert rates == sorted(rates, reverse=True)


def test_sync_never_beats_its_slowest_rollout() -> None:
    length = lognormal(80, 1.0)
    metrics = simulate(parts(flow("sync"), batch_s=0.5), FakeDraws(length, members=4), steps=5, warm_up=0)
    longest = [max(length(o, m, 0) for o in range(4 * k, 4 * k + 4) for m in range(4)) for k in range(5)]
    assert all(step >= 0.01 * tok + 0.5 - 1e-9 for step, tok in zip(metrics.step_s, longest, strict=True))


def test_lent_chips_help_a_waiting_trainer() -> None:
    draws = FakeDraws(lognormal(80, 0.5), members=4)
    alone = rate(lambda p: p, draws)
    lent = rate(lambda p: replace(p, lent=p.engines), draws)
    dear = rate(lambda p: replace(p, lent=p.engines, hand_off=replace(FREE, switch_s=100.0)), draws)
    assert lent > 1.1 * alone
    assert dear == pytest.approx(alone, rel=0.03)


# -- shortcuts --------------------------------------------------------------------------------------------------------


def test_the_quick_constructor_makes_the_same_event() -> None:
    group = SimGroup(group_id="g000001", ordinal=1, prompt_tok=5, rewards=(0.5, 1.0), started_s=0.0)
    rollout = SimRollout(group, 1, 2, 7, 0.0)
    for pairs, oldest, newest in ((((3, 4), (5, 3)), 3, 5), ((), None, None)):
        rollout.pairs = pairs
        assert member_ended(9.0, rollout, Outcome.OK, 1.0, 7) == MemberEnded(
            time_s=9.0,
            group_id="g000001",
            member=1,
            attempt=2,
            outcome=Outcome.OK,
            reward=1.0,
            generated_tok=7,
            oldest_version=oldest,
            newest_version=newest,
            stale_tok_by_version=pairs,
        )
