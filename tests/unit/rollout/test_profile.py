from __future__ import annotations

from headrace.rollout.profile import KEEP, StepProfile


def test_a_compiling_first_step_is_forgotten_and_steps_are_counted() -> None:
    profile = StepProfile()
    profile.decoded(running=3, context_tok=30, seconds=9.0)
    for step in range(KEEP):
        profile.decoded(running=3, context_tok=100 + step, seconds=0.010 + 0.001 * (step % 3))
    profile.decoded(running=1, context_tok=7, seconds=0.002)
    single, triple = profile.decode_points()
    assert (single.running, single.steps, single.context_tok, single.step_s) == (1, 1, 7.0, 0.002)
    assert (triple.running, triple.steps) == (3, KEEP + 1)
    assert triple.step_s == 0.011
    assert triple.context_tok == 100 + (KEEP - 1) / 2


def test_prefills_keep_the_newest() -> None:
    profile = StepProfile()
    for tok in range(1000):
        profile.prefilled(tok=tok, seconds=tok * 1e-4)
    newest = profile.prefills()
    assert len(newest) == 4 * KEEP
    assert newest[-1] == (999, 999 * 1e-4)
