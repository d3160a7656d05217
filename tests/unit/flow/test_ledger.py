"""Where every token went."""

import pytest
from flow_world import World, train

from headrace.config.schema import FlowConfig
from headrace.errors import FlowError
from headrace.flow.group import LiveGroup
from headrace.flow.ledger import Ledger
from headrace.records import Outcome


def group(gid: str, ordinal: int = 0) -> LiveGroup:
    return LiveGroup(group_id=gid, ordinal=ordinal, attempt=0, prompt_index=0, version=0, deadline=1, members=2)


def test_check_names_the_offending_row() -> None:
    ledger = Ledger()
    ledger.admit(group("g000007"))
    ledger.check()
    ledger.alive["g000007"].generated_tok = 5
    with pytest.raises(FlowError, match="row g000007: generated 5 tok is not scored 0"):
        ledger.check()


def test_check_names_totals_that_do_not_balance() -> None:
    ledger = Ledger()
    ledger.admit(group("g000000"))
    ledger.admitted += 1
    with pytest.raises(FlowError, match="does not balance"):
        ledger.check()


def test_a_group_ends_once() -> None:
    ledger = Ledger()
    one = group("g000000")
    ledger.admit(one)
    ledger.close(one, "dropped_stale")
    with pytest.raises(FlowError, match=r"already final \(dropped_stale\)"):
        ledger.close(one, "unfinished")


def test_only_completed_groups_are_taken_and_only_taken_ones_trained() -> None:
    ledger = Ledger()
    one = group("g000000")
    ledger.admit(one)
    with pytest.raises(FlowError, match="it is running"):
        ledger.take(one, 0)
    with pytest.raises(FlowError, match="never taken"):
        ledger.train(one, 0)


def test_drain_gives_each_changed_row_once_and_forgets_final_ones() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2))
    world.start()
    train(world, 1)
    assert world.controller.ledger.drain_changes() == []
    assert world.controller.ledger.alive == {}
    row = world.journal["g000000"]
    assert (row.state, row.bucket, row.taken_version, row.rewards) == ("final", "trained", 0, (0.0, 1.0))
    assert (row.generated_tok, row.trained_tok, row.wasted_tok, row.mean_response_tok) == (20, 20, 0, 10.0)


def test_without_pairs_all_tokens_count_as_the_oldest_version() -> None:
    world = World(FlowConfig(mode="pipeline", batch_groups=1, group_size=2, max_lag_steps=1))
    world.start()
    train(world, 1)
    world.land()
    world.finish("g000001", tok_by_version=((0, 3), (1, 4)), pairs=False)
    assert world.journal["g000001"].tok_by_version == ((0, 14),)
    assert (world.journal["g000001"].oldest_version, world.journal["g000001"].newest_version) == (0, 1)


def test_acceptance_by_length_shows_who_is_starved() -> None:
    """Ten short groups train, ten long ones are dropped."""
    ledger = Ledger()
    assert ledger.accept_by_length() == ()
    for n in range(20):
        one = group(f"g{n:06d}", n)
        ledger.admit(one)
        one.rewards = [1.0, 0.0]
        one.pending = 0
        tok = 10 + n
        one.generated_tok = one.scored_tok = tok
        ledger.generated_tok += tok
        one.tok_by_version = {0: tok}
        if n < 10:
            ledger.complete(one)
            ledger.take(one, 0)
            ledger.train(one, 0)
        else:
            ledger.close(one, "dropped_stale")
    assert ledger.accept_by_length() == (1.0,) * 5 + (0.0,) * 5
    ledger.check()


def test_a_rollout_without_tokens_is_possible() -> None:
    world = World(FlowConfig(mode="sync", batch_groups=1, group_size=2))
    world.start()
    world.want()
    world.end("g000000", 0, tok_by_version=())
    world.end("g000000", 1, tok_by_version=(), outcome=Outcome.POLICY_FAIL)
    assert world.batch is not None
    world.step()
    assert world.controller.ledger.trained_tok == 0
