"""One copy of the weights that goes to any version: bit for bit, in bounded memory, by the cheapest way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delivery import RUN, Engine, World, copied_arrays
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import SyncError
from headrace.sync.walk import Walker

LAST = 8


class Chain:
    """A run with versions 0 to 8, and what each of them is."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.world = World(folder, **options)
        self.served = [copied_arrays(self.world.model.served())]
        for _ in range(LAST):
            self.served.append(copied_arrays(self.world.publish()))

    def walker(self, **options: Any) -> tuple[Engine, Walker]:
        engine = Engine(self.served[0])
        return engine, Walker(self.world.store, engine.arrays(), run_id=RUN, **options)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(way=st.lists(st.integers(0, LAST), min_size=1, max_size=8), limit=st.sampled_from([0, 3000, 1 << 30]))
def test_any_way_ends_where_it_should(chain: Chain, way: list[int], limit: int) -> None:
    engine, walker = chain.walker(undo_limit_bytes=limit)
    for version in way:
        walker.go_to(version)
        assert engine.holds(chain.served[version])
        assert walker.undo_bytes <= limit


def test_back_is_undone_and_not_fetched(chain: Chain) -> None:
    engine, walker = chain.walker()
    walker.go_to(6)
    fetched = walker.fetched_bytes
    walker.go_to(2)
    assert engine.holds(chain.served[2])
    assert (walker.undone, walker.rebuilt) == (4, 1)
    assert walker.fetched_bytes == fetched
    walker.go_to(2)
    assert (walker.undone, walker.fetched_bytes) == (4, fetched)


def test_without_memory_the_way_back_is_a_keyframe(chain: Chain) -> None:
    engine, walker = chain.walker(undo_limit_bytes=0)
    walker.go_to(6)
    walker.go_to(2)
    assert engine.holds(chain.served[2])
    assert (walker.undone, walker.rebuilt) == (0, 2)


def test_a_step_costs_what_it_changes(chain: Chain) -> None:
    heard: list[frozenset[str]] = []
    _, walker = chain.walker(changed=heard.append)
    walker.go_to(0)
    assert walker.undo_bytes == 0, "a keyframe is no step that is remembered"
    heard.clear()
    walker.go_to(1)
    model_bytes = sum(a.nbytes for a in chain.served[0].values())
    assert 0 < walker.undo_bytes < 2 * model_bytes
    assert len(heard) == 1
    assert "embed.weight" in heard[0]
    assert "empty" not in heard[0]


def test_unknown_versions_and_other_runs_are_named(chain: Chain, tmp_path: Path) -> None:
    _, walker = chain.walker()
    with pytest.raises(SyncError, match=r"version 99 cannot be rebuilt: .* has versions 0 to 8"):
        walker.go_to(99)
    engine, _ = chain.walker()
    with pytest.raises(SyncError, match="holds run 'run-1', this is 'other'"):
        Walker(chain.world.store, engine.arrays(), run_id="other").go_to(1)


def test_a_version_that_changed_nothing_is_known_by_its_digest(tmp_path: Path) -> None:
    world = World(tmp_path)
    same = copied_arrays(world.publish())
    world.version += 1
    report = world.publisher.publish(world.model.served(), version=world.version)
    world.publish()
    engine = Engine(same)
    walker = Walker(world.store, engine.arrays(), run_id=RUN)
    with pytest.raises(SyncError, match="version 2 cannot be rebuilt"):
        walker.go_to(2)
    walker.know(2, report.digest)
    walker.go_to(2)
    assert engine.holds(same)


def test_a_collected_version_is_gone_and_the_rest_goes_on(tmp_path: Path) -> None:
    chain = Chain(tmp_path, keyframe_every=4)
    engine, walker = chain.walker()
    walker.go_to(7)
    chain.world.compactor().collect(keep_versions=2, grace_s=-120.0, skew_s=0.0)
    fresh, other = chain.walker()
    with pytest.raises(SyncError, match="version 2 cannot be rebuilt"):
        other.go_to(2)
    other.go_to(8)
    assert fresh.holds(chain.served[8])
    walker.go_to(8)
    assert engine.holds(chain.served[8])


def test_weights_that_somebody_else_changed_are_found_and_rebuilt(chain: Chain) -> None:
    engine, walker = chain.walker()
    walker.go_to(3)
    engine.weights["embed.weight"][0] += 1
    walker.go_to(4)
    assert engine.holds(chain.served[4])
    assert walker.rebuilt == 2


def test_an_undo_that_does_not_give_the_old_bits_is_refused(chain: Chain) -> None:
    engine, walker = chain.walker()
    walker.go_to(4)
    bits = engine.weights["layers.1.experts.fp8"].view(np.uint8)  # few of its codes change in a step
    bits[:] = np.roll(bits, 1)
    with pytest.raises(SyncError, match="not what it should be"):
        walker.go_to(3)
    assert walker.digest is None
    walker.go_to(3)
    assert engine.holds(chain.served[3])


def test_a_damaged_delta_leads_around_it_or_to_an_error(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    engine, walker = chain.walker()
    walker.go_to(7)
    pack = chain.world.pack_path()
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(SyncError):
        walker.go_to(8)
    walker.go_to(6)
    assert engine.holds(chain.served[6]), "what is held was not touched by what failed"
