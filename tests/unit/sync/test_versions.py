"""Publishing and receiving: whole and proven, or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.manifest import Manifest, TensorInfo, chain_digest
from headrace.sync.publish import retain, tensor_info, write_version
from headrace.sync.receive import read_version

RUN = "run-1"


def weights(seed: int = 0) -> dict[str, NDArray[np.generic]]:
    rng = np.random.default_rng(seed)
    return {
        "b.weight": rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16),
        "a.weight": rng.standard_normal((2,)).astype(np.float32),
        "norm": np.array(1.5, dtype=np.float16),
    }


def write(folder: Path, version: int = 1, seed: int = 0) -> Manifest:
    return write_version(folder, run_id=RUN, version=version, arrays=weights(seed).items())


def test_round_trip_is_exact(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    read = read_version(manifest, run_id=RUN)
    for name, array in weights().items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert read[name].tobytes() == array.tobytes()
    assert manifest.bytes == 2 * 12 + 4 * 2 + 2
    assert [p.name for p in tmp_path.iterdir()] == ["v000001.safetensors"]


def test_digest_names_the_content(tmp_path: Path) -> None:
    one, same, other = (
        write(tmp_path / n, version, seed) for n, version, seed in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1))
    )
    assert one.digest == same.digest != other.digest


def test_every_damage_is_seen(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    path = Path(manifest.path)
    whole = path.read_bytes()
    for position in range(len(whole) - manifest.bytes, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(SyncError, match=r"tensor '.*' differs"):
            read_version(manifest, run_id=RUN)
    path.write_bytes(whole[:-1])
    with pytest.raises(SyncError, match="reading version 1"):
        read_version(manifest, run_id=RUN)
    path.unlink()
    with pytest.raises(SyncError, match="reading version 1"):
        read_version(manifest, run_id=RUN)


def test_another_versions_file_is_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path, 1, 0), write(tmp_path, 2, 1)
    with pytest.raises(SyncError, match="differs"):
        read_version(dataclasses.replace(first, path=second.path), run_id=RUN)


def test_files_of_another_run_are_refused(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    with pytest.raises(SyncError, match=r"belongs to run 'run-1', this is 'run-2'"):
        read_version(manifest, run_id="run-2")
    with pytest.raises(SyncError, match=r"was written by run 'run-1'"):
        read_version(dataclasses.replace(manifest, run_id="run-2"), run_id="run-2")


def test_wrong_chain_digest_is_refused(tmp_path: Path) -> None:
    manifest = dataclasses.replace(write(tmp_path), digest="0" * 32)
    with pytest.raises(SyncError, match="is not 0000"):
        read_version(manifest, run_id=RUN)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="dtype float64"):
        tensor_info("x", np.zeros(2))
    with pytest.raises(SyncError, match="not contiguous"):
        tensor_info("x", np.zeros((2, 3), np.float32).T)
    with pytest.raises(SyncError, match="dtype int32"):
        write_version(tmp_path, run_id=RUN, version=1, arrays=[("x", np.zeros(2, np.int32))])
    assert list(tmp_path.iterdir()) == []


def test_retain_keeps_what_it_is_told(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write(tmp_path, version)
    retain(tmp_path, [3, 1, 9])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000001.safetensors", "v000003.safetensors"]


@given(st.permutations([("a", "F32"), ("b", "BF16"), ("c", "F16")]))
def test_chain_digest_ignores_order(order: list[tuple[str, str]]) -> None:
    infos = [TensorInfo(name=n, dtype=d, shape=(1,), digest="00") for n, d in order]
    assert chain_digest(infos) == chain_digest(sorted(infos, key=lambda i: i.name))


def test_chain_digest_sees_every_field() -> None:
    info = TensorInfo(name="a", dtype="F32", shape=(2, 3), digest="00")
    changed = [
        dataclasses.replace(info, name="b"),
        dataclasses.replace(info, dtype="F16"),
        dataclasses.replace(info, shape=(3, 2)),
        dataclasses.replace(info, digest="01"),
    ]
    assert len({chain_digest([i]) for i in (info, *changed)}) == 5
