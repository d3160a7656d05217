"""Deltas in the native engine: what is served afterwards equals a full load bit for bit, or is what it was before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import MODELS, Trainer, core_of, land, sampled

from headrace.errors import EngineError, SyncError
from headrace.rollout.native import packing
from headrace.rollout.native.weights import can_pack


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_version_by_deltas_is_the_full_load_bit_for_bit(
    name: str, dtype: str, folders: Any, tmp_path: Path
) -> None:
    trainer = Trainer(folders(name), dtype, tmp_path)
    core, loaded = (core_of(folders(name), dtype, verify_every=2) for _ in range(2))
    before = sampled(core)
    for size in (0.0, 1e-4, 3e-3, 0.3):  # from few elements to all of them
        delta, full = trainer.publish(size)
        land(core, delta)
        land(loaded, full)
        assert sampled(core) == sampled(loaded)
    assert sampled(core) != before


def test_whatever_mode_is_chosen_the_same_is_served(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path, choose=True, threads=2)
    core, loaded = (core_of(folders("tied"), "bfloat16") for _ in range(2))
    for _ in range(5):
        delta, full = trainer.publish()
        land(core, delta)
        land(loaded, full)
        assert sampled(core) == sampled(loaded)


def test_one_delta_over_several_versions_and_a_late_start_arrive_at_the_same(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path, keyframe_every=2)
    core = core_of(folders("tied"), "bfloat16")
    land(core, trainer.publish()[0])
    skipped = [trainer.publish() for _ in range(3)]
    land(core, skipped[2][0])
    late, full = (core_of(folders("tied"), "bfloat16") for _ in range(2))
    land(late, skipped[1][0])  # as after kill -9: what was served, then what was staged
    land(late, skipped[2][0])
    land(full, skipped[2][1])
    assert sampled(core) == sampled(late) == sampled(full)


def test_a_swap_that_cannot_be_proven_is_taken_back_bit_for_bit(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path)
    core = core_of(folders("tied"), "bfloat16")
    land(core, trainer.publish()[0])
    before, digest = sampled(core), core.stats().digest
    delta, full = trainer.publish(1e-3)
    core.stage(delta)
    ready, staged = core._deliveries._staged[1]
    assert staged is not None
    wrong = [replace(staged.patches[-1], new_hash="0" * 32)]
    core._deliveries._staged[1] = (ready, replace(staged, patches=(*staged.patches[:-1], *wrong)))
    with pytest.raises(SyncError, match="after the scatter"):
        core.swap(1, "keep")
    assert (core.stats().version, core.stats().digest) == (0, digest)
    assert sampled(core) == before
    land(core, delta)
    loaded = core_of(folders("tied"), "bfloat16")
    land(loaded, full)
    assert sampled(core) == sampled(loaded)


def test_weights_that_are_no_version_are_never_decoded_with(folders: Any, tmp_path: Path) -> None:
    """Neither forward nor back: nothing is sampled until a keyframe has landed."""
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path)
    core = core_of(folders("tied"), "bfloat16")
    land(core, trainer.publish()[0])
    delta, full = trainer.publish(1e-3)
    core.stage(delta)
    assert core._deliveries._target is not None
    norm = core._deliveries._target.arrays()["model.norm.weight"].view(np.uint16)
    norm[3] ^= 1  # a bit flips between staging and scatter
    with pytest.raises(SyncError, match="after the scatter"):
        core.swap(1, "keep")
    with pytest.raises(EngineError, match="nothing can be decoded"):
        core.step()
    core.stage(delta)
    report = core.swap(1, "keep")
    assert report.digest == delta.digest
    assert report.sync is not None
    assert report.sync.resynced
    loaded = core_of(folders("tied"), "bfloat16")
    land(loaded, full)
    assert sampled(core) == sampled(loaded)


def test_damaged_packs_are_an_error_or_a_detour_never_weights(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "float32", tmp_path, keyframe_every=2)
    core = core_of(folders("tied"), "float32")
    land(core, trainer.publish()[0])
    before = sampled(core)
    known = {path.name for path in (tmp_path / "deltas" / "objects").glob("*.pack")}
    first, _ = trainer.publish()
    for pack in (tmp_path / "deltas" / "objects").glob("*.pack"):
        if pack.name not in known:
            pack.write_bytes(pack.read_bytes()[:-1] + b"\0")
    with pytest.raises(SyncError, match="its content"):
        core.stage(first)
    assert sampled(core) == before
    second, full = trainer.publish()  # the delta to it starts at the damaged one; its keyframe does not
    land(core, second)
    loaded = core_of(folders("tied"), "float32")
    land(loaded, full)
    assert sampled(core) == sampled(loaded)


def test_other_weights_under_the_served_number_are_refused(folders: Any, tmp_path: Path) -> None:
    trainer = Trainer(folders("tied"), "bfloat16", tmp_path)
    trainer.served["model.norm.weight"].mul_(2)
    delta, _ = trainer.publish()
    core = core_of(folders("tied"), "bfloat16")
    with pytest.raises(SyncError, match="96 elements differ"):
        core.stage(delta)


# --- prepacked weights

SHAPES = [(96, 64), (300, 64), (10, 7), (64, 160)]
packs = pytest.mark.skipif(not can_pack(torch.bfloat16, "cpu"), reason="this CPU has no prepacked bfloat16 linear")


@packs
@pytest.mark.parametrize("shape", SHAPES)
def test_writing_into_packed_weights_equals_packing_again(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    dense = torch.from_numpy(rng.integers(0, 2**15, shape, np.int16)).view(torch.bfloat16)
    where = np.sort(rng.choice(dense.numel(), dense.numel() // 3, replace=False))
    bits = rng.integers(0, 2**16, where.size, np.uint16)  # NaNs and infinities among them
    packed = packing.pack(dense)
    assert packing.write_packed(packed, where, bits) is packed
    dense.view(-1).view(torch.int16).numpy().view(np.uint16)[where] = bits
    expected = packing.pack(dense).to_dense().view(torch.int16)
    assert torch.equal(packed.to_dense().view(torch.int16), expected)
    assert torch.equal(expected, dense.view(torch.int16))


@packs
def test_the_places_in_packed_weights_are_all_different() -> None:
    for shape in SHAPES:
        places = packing.places_of(*shape)
        assert places is not None
        assert np.unique(places).size == shape[0] * shape[1]
