"""Names of versions, documents and ways between them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SyncError
from headrace.sync.catalog import Edge, cheapest_path
from headrace.sync.codec import CHUNK_ELEMS
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.receiver import Receiver
from headrace.sync.replica import MemoryReplica
from headrace.sync.staging import chunk_hashes
from headrace.sync.store import Store
from headrace.sync.version import Table, TensorSpec, state_hash

_runs = itertools.count()


def spec(name: str, shape: tuple[int, ...] = (2, 3), dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def table(*specs: TensorSpec, aliases: dict[str, str] | None = None, fill: str = "0") -> Table:
    hashes = {s.name: (fill * 32,) * len(s.starts) for s in specs}
    return Table(specs={s.name: s for s in specs}, hashes=hashes, aliases=aliases or {})


def test_digest_is_the_one_of_the_documented_text() -> None:
    """Written out by hand: the bytes are the same on every machine and in every release."""
    text = (
        "headrace version 1, chunks of 4194304\n"
        f'["a","F32",[],["{"0" * 32}"]]\n'
        f'["b.weight","BF16",[2,3],["{"0" * 32}"]]\n'
        '["empty","BF16",[0,7],[]]\n'
        '["b.tied","b.weight"]\n'
    )
    found = table(spec("b.weight"), spec("empty", (0, 7)), spec("a", (), "F32"), aliases={"b.tied": "b.weight"})
    assert found.digest == blake3(text.encode()).hexdigest()
    assert CHUNK_ELEMS == 4194304


def test_state_hash_is_golden() -> None:
    values = np.array([0.0, -0.0, np.nan, 1.5, -3.25], np.float32).astype(ml_dtypes.bfloat16)
    assert state_hash(values) == state_hash(values.view(np.uint16)) == state_hash(values.view(np.uint8))
    assert (
        state_hash(np.zeros(0, np.uint16)) == "99aa06d3014798d86001c324468d497f"
    )  # xxh3-128 of nothing, its test vector


@pytest.mark.parametrize(
    "change",
    [
        lambda t: dataclasses.replace(t, hashes={**t.hashes, "a": ("1" * 32,)}),
        lambda t: dataclasses.replace(t, specs={**t.specs, "a": spec("a", (3, 2))}),
        lambda t: dataclasses.replace(t, specs={**t.specs, "a": spec("a", dtype="F16")}),
        lambda t: dataclasses.replace(t, aliases={"c": "b"}),
        lambda t: table(spec("a"), spec("b"), spec("c")),
        lambda t: table(spec("a"), spec("c")),
    ],
)
def test_digest_sees_everything(change: Callable[[Table], Table]) -> None:
    before = table(spec("a"), spec("b"), aliases={"c": "a"})
    assert change(before).digest != before.digest


@given(st.permutations(["a", "b", "c", "d"]))
def test_digest_ignores_order(names: list[str]) -> None:
    assert table(*(spec(n) for n in names)).digest == table(spec("a"), spec("b"), spec("c"), spec("d")).digest


def test_layout_difference_names_the_first() -> None:
    one = table(spec("a"), spec("b"), aliases={"c": "a"})
    assert one.layout_difference(table(spec("a"), spec("b"), aliases={"c": "a"}, fill="1")) is None
    assert one.layout_difference(table(spec("a", (6,)), spec("b"))) == "tensor 'a' was BF16 [2, 3] and is BF16 [6]"
    assert one.layout_difference(table(spec("a"))) == "tensor 'b' was BF16 [2, 3] and is absent"
    assert one.layout_difference(table(spec("a"), spec("b"))) == "tied tensors were {'c': 'a'} and are {}"


def test_update_changes_one_chunk() -> None:
    long = spec("long", (2 * CHUNK_ELEMS + 1,))
    before = table(long, spec("a"))
    after = before.updated({("long", CHUNK_ELEMS): "1" * 32})
    assert after.hashes["long"] == ("0" * 32, "1" * 32, "0" * 32)
    assert after.chunk("long", CHUNK_ELEMS) == "1" * 32
    assert before.hashes["long"] == ("0" * 32,) * 3
    assert after.digest != before.digest
    for name, start in (("long", 1), ("long", 3 * CHUNK_ELEMS), ("none", 0)):
        with pytest.raises(SyncError, match=f"no chunk at element {start} of tensor '{name}'"):
            before.chunk(name, start)


def edge(source: str | None, target: str, size: int) -> Edge:
    key = blake3(f"{source}{target}{size}".encode()).hexdigest()
    return Edge(
        source=source and source * 64,
        target=target * 64,
        version=int(target, 16),
        span=1,
        bytes=size,
        manifest=f"objects/{key}.json",
        packs=(),
    )


def path_bytes(edges: list[Edge], target: str, sources: dict[str | None, int]) -> int | None:
    found = cheapest_path(edges, sources, target * 64)
    return None if found is None else sum(e.bytes for e in found[1])


def test_cheapest_path() -> None:
    edges = [edge(None, "0", 100), edge("0", "1", 10), edge("1", "2", 10), edge("0", "2", 15), edge(None, "2", 90)]
    assert path_bytes(edges, "2", {None: 0}) == 90
    assert path_bytes(edges, "2", {None: 0, "0" * 64: 0}) == 15
    assert path_bytes(edges, "2", {None: 0, "1" * 64: 0}) == 10
    assert path_bytes(edges, "2", {"2" * 64: 0, None: 0}) == 0
    assert path_bytes(edges, "3", {None: 0}) is None
    found = cheapest_path(edges, {"0" * 64: 0, None: 0}, "2" * 64, {edges[3].manifest})
    assert found is not None
    assert [e.bytes for e in found[1]] == [10, 10]


@given(
    st.lists(st.tuples(st.sampled_from([None, *"012345"]), st.sampled_from("012345"), st.integers(0, 50)), max_size=16)
)
def test_cheapest_path_is_the_minimum_over_all_paths(rows: list[tuple[str | None, str, int]]) -> None:
    edges = [edge(*row) for row in rows]

    def shortest(at: str | None, left: int) -> float:
        if at == "5" * 64:
            return 0
        ways = [e.bytes + shortest(e.target, left - 1) for e in edges if e.source == at] if left else []
        return min(ways, default=float("inf"))

    best = shortest(None, 6)
    assert path_bytes(edges, "5", {None: 0}) == (None if best == float("inf") else best)


ODD = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFC1, 0x0001, 0x8001, 0x3F80, 0x7F7F]  # 0, -0, inf, NaN, denormals
DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.bool_]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), max_size=3),
    density=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    transposed=st.booleans(),
)
def test_any_weights_arrive_bit_for_bit(
    seed: int, dtype: type, shape: list[int], density: float, transposed: bool
) -> None:
    rng = np.random.default_rng(seed)
    width = np.dtype(dtype).itemsize
    top = 2 if dtype is np.bool_ else 256

    def bytes_like(count: int) -> np.ndarray:
        return rng.integers(0, top, count * width, dtype=np.uint8)

    elems = int(np.prod(shape))
    old = bytes_like(elems)
    new = old.copy()
    hit = np.repeat(rng.random(elems) < density, width)
    new[hit] = bytes_like(elems)[hit]
    if width == 2 and elems:
        new.view(np.uint16)[rng.integers(0, elems, 3)] = rng.choice(np.array(ODD, np.uint16), 3)

    def shaped(raw: np.ndarray) -> np.ndarray:
        array = raw.view(dtype).reshape(shape)
        return array.T if transposed else array

    store = Store(f"memory://property-{next(_runs)}")
    publisher = DeltaPublisher(store, run_id="r")
    publisher.start({"w": shaped(old), "other": np.ones(3, np.float32)}, version=0)
    target = MemoryReplica({"w": np.zeros(elems, dtype), "other": np.zeros(3, np.float32)})
    receiver = Receiver(store, target, run_id="r")
    receiver.sync()
    assert target.arrays()["w"].tobytes() == shaped(old).tobytes()
    report = publisher.publish({"w": shaped(new), "other": np.ones(3, np.float32)}, version=1)
    assert report.body_bytes <= elems * width * 1.01 + 64
    receiver.sync()
    assert target.arrays()["w"].tobytes() == shaped(new).tobytes()


def test_threads_and_order_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(0, 2**16, CHUNK_ELEMS // 4, dtype=np.uint16) for n in ("b", "a", "c")}
    made = []
    for threads, names in ((1, "abc"), (3, "cab")):
        store = Store(f"memory://threads-{next(_runs)}")
        publisher = DeltaPublisher(store, run_id="r", threads=threads, wall_s=lambda: 0.0)
        publisher.start({n: arrays[n] for n in names}, version=0)
        publisher.publish({n: arrays[n] ^ np.uint16(1) for n in names}, version=1)
        made.append([(s.key, s.size) for s in store.list("objects")])
    assert made[0] == made[1], "packs, manifests and catalogs are the same bytes"


def test_tensors_of_several_chunks() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 2 * CHUNK_ELEMS + 5, dtype=np.uint16)
    new = old.copy()
    new[[3, CHUNK_ELEMS - 1, 2 * CHUNK_ELEMS + 4]] += 1
    store = Store(f"memory://long-{next(_runs)}")
    publisher = DeltaPublisher(store, run_id="r", pack_bytes=1)
    publisher.start({"long": old}, version=0)
    target = MemoryReplica({"long": np.zeros_like(old)})
    receiver = Receiver(store, target, run_id="r")
    receiver.sync()
    report = publisher.publish({"long": new}, version=1)
    assert report.density == 3 / old.size
    staged = receiver.prepare()
    assert staged is not None
    assert [(p.start, p.changed) for p in staged.patches] == [(0, 2), (2 * CHUNK_ELEMS, 1)], "one chunk is untouched"
    receiver.commit(staged)
    receiver.finish()
    assert np.array_equal(target.arrays()["long"], new)
    assert receiver.table is not None
    assert receiver.table.hashes["long"] == chunk_hashes(receiver.table.specs["long"].starts, new)
