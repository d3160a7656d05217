"""headrace weights on checkpoints of a few kilobytes: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.cli import main
from headrace.cli.weights_view import size
from headrace.errors import DataError, SyncError
from headrace.sync.checkpoint import INDEX, open_checkpoint
from headrace.sync.delta_apply import alone, apply_in_place
from headrace.sync.delta_file import read_delta
from headrace.sync.delta_summary import layer_of
from headrace.sync.layout import read_layout

Masters = dict[str, NDArray[np.float32]]


def masters(seed: int = 0) -> Masters:
    rng = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (64, 24),
        "model.layers.2.up.weight": (24, 48),
        "model.layers.10.up.weight": (24, 48),
        "model.norm.weight": (24,),
    }
    return {name: (rng.standard_normal(shape) * 0.03).astype(np.float32) for name, shape in shapes.items()}


def trained(values: Masters, seed: int, step: float = 1e-5) -> Masters:
    rng = np.random.default_rng(seed)
    return {n: (v + rng.standard_normal(v.shape) * step).astype(np.float32) for n, v in values.items()}


def save(folder: Path, values: Masters, *, shards: int = 1) -> Path:
    """A checkpoint with a config beside it."""
    folder.mkdir(parents=True)
    arrays = {n: np.ascontiguousarray(v).astype(ml_dtypes.bfloat16) for n, v in values.items()}
    (folder / "config.json").write_text('{"model_type": "tiny"}', encoding="utf-8")
    if shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = sorted(arrays)[i::shards]
        save_file({n: arrays[n] for n in part}, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return folder


class World:
    """Two versions of a checkpoint, the delta between them, and the command line."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.capsys = capsys
        self.old_values = masters()
        self.new_values = trained(self.old_values, 1)
        self.a = save(root / "a", self.old_values)
        self.b = save(root / "b", self.new_values)
        self.delta = root / "ab.delta"

    def run(self, *args: object) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `headrace weights ...`."""
        with pytest.raises(SystemExit) as ended:
            main(["weights", *map(str, args)])
        captured = self.capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, captured.out, captured.err

    def ok(self, *args: object) -> str:
        code, out, err = self.run(*args)
        assert code == 0, err
        return out

    def refused(self, *args: object) -> str:
        """What a command says that must fail and leave everything as it was."""
        before = self.files()
        code, out, err = self.run(*args)
        assert (code, out) == (2, ""), (out, err)
        assert self.files() == before
        assert len(err.splitlines()) <= 3
        return err

    def json(self, *args: object) -> Any:
        return json.loads(self.ok(*args, "--json"))

    def files(self) -> dict[str, bytes]:
        return {p.relative_to(self.root).as_posix(): p.read_bytes() for p in self.root.rglob("*") if p.is_file()}


@pytest.fixture
def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    return World(tmp_path, capsys)


def bits(folder: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in open_checkpoint(folder).bits.items()}


def bits_now(folder: Path) -> dict[str, bytes]:
    """Also in the middle of a change, when a checkpoint refuses to be opened."""
    data = (folder / "model.safetensors").read_bytes()
    return {n: v.tobytes() for n, (_, v) in read_layout(np.frombuffer(data, np.uint8), "").items()}


def changes(world: World) -> int:
    """Counted with NumPy alone."""
    pairs = [(world.old_values[n], world.new_values[n]) for n in world.old_values]
    cast = [[v.astype(ml_dtypes.bfloat16).view(np.uint16) for v in pair] for pair in pairs]
    return sum(int((old != new).sum()) for old, new in cast)


def test_diff_and_apply_give_the_other_checkpoint(world: World) -> None:
    about = world.json("diff", world.a, world.b, "-o", world.delta)
    assert about["changed"] == changes(world) > 0
    assert about["full_bytes"] == 2 * (64 * 24 + 2 * 24 * 48 + 24)
    assert about["file_bytes"] == world.delta.stat().st_size
    assert sum(mode["bytes"] for mode in about["modes"].values()) == about["body_bytes"]
    assert sum(about["steps"]) == about["changed"]
    assert [row["layer"] for row in about["layers"]] == [
        "model.embed_tokens", "model.layers.2", "model.layers.10", "model.norm",
    ]  # fmt: skip
    out = world.root / "out"
    applied = world.json("apply", world.a, world.delta, "-o", out)
    assert applied == {"path": str(out), "digest": about["to_digest"], "changed": about["changed"]}
    assert (out / "model.safetensors").read_bytes() == (world.b / "model.safetensors").read_bytes()
    assert (out / "config.json").read_bytes() == (world.a / "config.json").read_bytes()
    assert world.json("verify", out, world.b)["equal"] is True


def test_the_same_checkpoints_give_the_same_file(world: World) -> None:
    world.ok("diff", world.a, world.b, "-o", world.delta, "--threads", 1)
    world.ok("diff", world.a, world.b, "-o", world.root / "again.delta", "--threads", 3)
    assert world.delta.read_bytes() == (world.root / "again.delta").read_bytes()


def test_shards_are_no_part_of_a_version(world: World) -> None:
    world.ok("diff", world.a, world.b, "-o", world.delta)
    sharded = save(world.root / "sharded", world.old_values, shards=3)
    world.ok("apply", sharded, world.delta, "-o", world.root / "out")
    assert sorted(p.name for p in (world.root / "out").iterdir()) == sorted(p.name for p in sharded.iterdir())
    assert bits(world.root / "out") == bits(world.b)
    assert world.json("verify", world.root / "out", world.b)["equal"] is True


def test_single_files_and_other_forms_of_weights(world: World) -> None:
    world.ok("diff", world.a / "model.safetensors", world.b, "-o", world.delta)
    world.ok("apply", world.a / "model.safetensors", world.delta, "-o", world.root / "out.safetensors")
    assert (world.root / "out.safetensors").read_bytes() == (world.b / "model.safetensors").read_bytes()
    (world.a / "pytorch_model.bin").write_bytes(b"old")
    (world.a / "version.json").write_text("{}", encoding="utf-8")
    world.ok("apply", world.a, world.delta, "-o", world.root / "out")
    assert sorted(p.name for p in (world.root / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_every_dtype_and_every_bit_pattern(world: World) -> None:
    rng = np.random.default_rng(7)
    dtypes = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, np.int8, np.int64]
    sides = []
    for _ in range(2):
        arrays = {np.dtype(d).name: rng.integers(0, 256, 40 * np.dtype(d).itemsize, np.uint8).view(d) for d in dtypes}
        arrays["empty"] = np.zeros((0, 7), np.float32)
        arrays["scalar"] = np.array(rng.standard_normal(), np.float32)
        arrays["flag"] = rng.integers(0, 2, 9).astype(np.bool_)
        sides.append(world.root / f"side{len(sides)}.safetensors")
        save_file(arrays, sides[-1])
    world.ok("diff", *sides, "-o", world.delta)
    out = world.root / "out.safetensors"
    world.ok("apply", sides[0], world.delta, "-o", out)
    assert out.read_bytes() == sides[1].read_bytes()
    world.ok("publish", sides[0], "--store", world.root / "store")
    world.ok("publish", sides[1], "--store", world.root / "store")
    world.ok("pull", "--store", world.root / "store", "--follow", world.root / "f", "--once")
    assert world.json("verify", world.root / "f", sides[1])["equal"] is True


def test_tensors_at_odd_addresses(world: World) -> None:
    """Headers need not be padded; such files are read, but not changed in place."""
    odd = []
    for folder in (world.a, world.b):
        data = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        odd.append(world.root / f"{folder.name}.safetensors")
        odd[-1].write_bytes((size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :])
    world.ok("diff", *odd, "-o", world.delta)
    assert world.json("verify", world.b, world.delta)["is"] == "to"
    assert "at an odd address" in world.refused("apply", odd[0], world.delta, "--in-place")
    world.ok("apply", odd[0], world.delta, "-o", world.root / "out.safetensors")
    assert (world.root / "out.safetensors").read_bytes() == odd[1].read_bytes()


def test_equal_checkpoints_give_an_empty_delta(world: World) -> None:
    assert "nothing changed" in world.ok("diff", world.a, world.a, "-o", world.delta)
    world.ok("apply", world.a, world.delta, "-o", world.root / "out")
    assert bits(world.root / "out") == bits(world.a)
    assert world.json("inspect", world.delta)["ratio_to_limit"] == 1.0


def test_verify_names_the_version_or_the_first_difference(world: World) -> None:
    world.ok("diff", world.a, world.b, "-o", world.delta)
    assert world.json("verify", world.a, world.delta)["is"] == "from"
    assert world.json("verify", world.b, world.delta)["is"] == "to"
    other = trained(world.old_values, 1)
    other["model.norm.weight"][5] = 1.0
    c = save(world.root / "c", other)
    err = world.refused("verify", c, world.delta)
    assert "is neither version" in err
    assert "'model.norm.weight'" in err
    old, new = (
        np.float32(v).astype(ml_dtypes.bfloat16).view(np.uint16) for v in (world.new_values["model.norm.weight"][5], 1)
    )
    assert f"'model.norm.weight', element 5: BF16 bits 0x{old:04x} and 0x{new:04x}" in world.refused(
        "verify", world.b, c
    )
    half = {**world.old_values, "model.norm.weight": world.new_values["model.norm.weight"] + 0}
    half["model.layers.10.up.weight"] = world.new_values["model.layers.10.up.weight"]
    assert "a mixture" in world.refused("verify", save(world.root / "half", half), world.delta)
    code, out, _ = world.run("verify", world.a, world.b, "--json")
    assert code == 2
    assert json.loads(out)["first_difference"]["tensor"] == "model.embed_tokens.weight"


def test_wrong_base_is_named_with_both_digests(world: World) -> None:
    about = world.json("diff", world.a, world.b, "-o", world.delta)
    c = save(world.root / "c", trained(world.new_values, 2))
    found = world.json("verify", c, c)["digests"][0]
    for how in (["-o", world.root / "out"], ["--in-place"]):
        err = world.refused("apply", c, world.delta, *how)
        assert found in err
        assert about["from_digest"] in err
        assert "already" in world.refused("apply", world.b, world.delta, *how)


def test_what_cannot_be_opened(world: World) -> None:
    out = ["-o", world.delta]
    assert "no such file" in world.refused("diff", world.root / "nope", world.b, *out)
    text = world.root / "text.safetensors"
    text.write_text("hello", encoding="utf-8")
    assert "no valid safetensors file" in world.refused("diff", text, world.b, *out)
    (world.root / "empty.safetensors").touch()
    assert "no valid safetensors file" in world.refused("diff", world.root / "empty.safetensors", world.b, *out)
    assert "no delta file" in world.refused("inspect", text)
    assert "no delta file" in world.refused("apply", world.a, text, "-o", world.root / "out")
    reshaped = {**world.old_values, "model.norm.weight": np.zeros(25, np.float32)}
    err = world.refused("diff", world.a, save(world.root / "r", reshaped), *out)
    assert "tensor 'model.norm.weight' was BF16 [24] and is BF16 [25]" in err
    fewer = {n: v for n, v in world.old_values.items() if n != "model.norm.weight"}
    assert "absent" in world.refused("diff", world.a, save(world.root / "f", fewer), *out)
    (world.root / "bare").mkdir()
    assert "holds neither" in world.refused("diff", world.root / "bare", world.b, *out)
    assert "does not exist" in world.refused("diff", world.a, world.b, "-o", world.root / "no" / "x.delta")


@pytest.mark.parametrize("shard", ["../a/model.safetensors", "/etc/x.safetensors", "gone.safetensors", "weights.bin"])
def test_an_index_names_only_shards_beside_it(world: World, shard: str) -> None:
    folder = save(world.root / "sharded", world.old_values, shards=2)
    about = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    about["weight_map"]["model.norm.weight"] = shard
    (folder / INDEX).write_text(json.dumps(about), encoding="utf-8")
    assert Path(shard).name in world.refused("verify", folder, world.a)


def test_an_index_that_says_too_much_or_is_not_alone(world: World) -> None:
    folder = save(world.root / "sharded", world.old_values, shards=2)
    about = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    about["weight_map"]["extra"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(about), encoding="utf-8")
    assert "has no tensor 'extra'" in world.refused("verify", folder, world.a)
    shutil.copy(world.a / "model.safetensors", folder)
    assert "holds both" in world.refused("verify", folder, world.a)


def test_every_damaged_byte_of_a_delta_is_seen(world: World) -> None:
    world.ok("diff", world.a, world.b, "-o", world.delta)
    whole = world.delta.read_bytes()
    damaged = world.root / "damaged.delta"
    for at in [*range(48), *range(48, len(whole), 97), len(whole) - 1]:
        data = bytearray(whole)
        data[at] ^= 1
        damaged.write_bytes(data)
        with pytest.raises((SyncError, DataError), match=r"damaged|no delta file"):
            read_delta(damaged)
    for cut in (whole[:20], whole[:-1], whole + b"x"):
        damaged.write_bytes(cut)
        assert "damaged" in world.refused("apply", world.a, damaged, "--in-place")


def test_in_place_is_all_or_nothing(world: World) -> None:
    world.ok("diff", world.a, world.b, "-o", world.delta)
    before = world.files()
    half: list[dict[str, bytes]] = []

    def failing(stage: str, done: int, total: int) -> None:
        if stage == "applying" and done < total:
            half.append(bits_now(world.a))
            raise SyncError("the disk is on fire")

    with pytest.raises(SyncError, match="on fire"):
        apply_in_place(world.a, read_delta(world.delta), threads=1, progress=failing)
    assert half[0] not in (bits(world.a), bits(world.b)), "it failed in the middle"
    assert world.files() == before
    world.ok("apply", world.a, world.delta, "--in-place")
    assert world.json("verify", world.a, world.b)["equal"] is True
    assert sorted(p.name for p in world.a.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_change_that_was_cut_off_is_refused_and_recovered(world: World, shards: int) -> None:
    """What lies on disk after kill -9: the journal, and half of the new values."""
    world.ok("diff", world.a, world.b, "-o", world.delta)
    served, kept = save(world.root / "served", world.old_values, shards=shards), world.root / "kept"

    def copying(stage: str, done: int, total: int) -> None:
        if stage == "applying" and not kept.exists():
            shutil.copytree(served, kept)

    apply_in_place(served, read_delta(world.delta), threads=1, progress=copying)
    assert bits(served) == bits(world.b)
    assert "headrace weights recover" in world.refused("verify", kept, world.a)
    shard = next(kept.glob("*.safetensors"))
    assert "headrace weights recover" in world.refused("verify", shard, world.a)
    again = shutil.copytree(kept, world.root / "again")
    assert "is back" in world.ok("recover", kept)
    assert bits(kept) == bits(world.a)
    assert "nothing to recover" in world.ok("recover", kept)
    world.ok("apply", again, world.delta, "--in-place")
    assert bits(again) == bits(world.b)


def test_in_place_leaves_links_and_locked_folders_alone(world: World) -> None:
    world.ok("diff", world.a, world.b, "-o", world.delta)
    linked = world.root / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(world.a / "model.safetensors")
    assert "is a link to" in world.refused("apply", linked, world.delta, "--in-place")
    with alone(world.a):
        assert "by another process" in world.refused("apply", world.a, world.delta, "--in-place")


def test_apply_never_replaces(world: World) -> None:
    world.ok("diff", world.a, world.b, "-o", world.delta)
    assert "exists already" in world.refused("apply", world.a, world.delta, "-o", world.b)
    assert "one of -o OUT" in world.refused("apply", world.a, world.delta)
    assert "one of -o OUT" in world.refused("apply", world.a, world.delta, "-o", world.root / "o", "--in-place")


@pytest.mark.parametrize("columns", ["80", "120"])
def test_inspect_fits_the_terminal(world: World, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    world.ok("diff", world.a, world.b, "-o", world.delta)
    out = world.ok("inspect", world.delta)
    assert max(map(len, out.splitlines())) <= int(columns)
    for word in ("density", "modes", "limit", "steps of the last place", "model.layers.10"):
        assert word in out
    assert out.index("model.layers.2 ") < out.index("model.layers.10 ")
    from_pair = world.json("inspect", world.a, world.b)
    from_file = world.json("inspect", world.delta)
    assert {**from_pair, "times": 0, "delta": 0} == {**from_file, "times": 0, "delta": 0}


def test_inspect_writes_a_page(world: World) -> None:
    page = world.root / "page.html"
    world.ok("inspect", world.a, world.b, "--html", page)
    text = page.read_text(encoding="utf-8")
    assert "model.layers.10" in text
    assert 'src="http' not in text


def test_publish_pull_squash_collect(world: World) -> None:
    store, folder = world.root / "store", world.root / "follow"
    steps = [world.a, world.b]
    values = world.new_values
    for i in range(2, 5):
        values = trained(values, i)
        steps.append(save(world.root / f"v{i}", values))
    for i, path in enumerate(steps[:2]):
        done = world.json("publish", path, "--store", store, "--run-id", "r1", "--keyframe-every", 3)
        assert (done["version"], done["run_id"], done["published"], done["keyframe"]) == (i, "r1", True, i == 0)
    again = world.json("publish", world.b, "--store", store)
    assert (again["published"], again["version"]) == (False, 1)
    assert world.json("pull", "--store", store, "--follow", folder, "--once")["version"] == 1
    for path in steps[2:]:
        done = world.json("publish", path, "--store", store, "--keyframe-every", 3)
    log = world.json("log", "--store", store)
    assert [(e["version"], e["source"] is None) for e in log["edges"]] == [
        (4, False), (3, True), (3, False), (2, False), (1, False), (0, True),
    ]  # fmt: skip
    merged = world.json("squash", "--store", store, "1", "4")
    assert (merged["span"], merged["version"]) == (3, 4)
    landed = world.json("pull", "--store", store, "--follow", folder, "--once", "--files-from", world.a)
    assert landed["report"]["body_bytes"] == merged["bytes"]
    assert bits(folder) == bits(steps[4])
    assert (folder / "config.json").exists()
    before = world.files()
    plan = world.json("gc", "--store", store, "--keep", 1, "--grace", 0, "--dry-run")
    assert plan["edges"] == 4  # all but the newest keyframe and what leads on from it
    assert {n for n, _ in world.files().items() ^ before.items()} <= {"store/clock", "store/clock/now"}
    assert "run r1" in world.ok("log", "--store", store)
    assert world.json("gc", "--store", store, "--keep", 1, "--grace", 0)["edges"] == 4
    assert world.json("pull", "--store", store, "--follow", world.root / "late", "--once")["version"] == 4
    assert bits(world.root / "late") == bits(steps[4])


def test_a_restart_from_an_older_checkpoint_is_a_new_version(world: World) -> None:
    store = world.root / "store"
    for path in (world.a, world.b, world.a):
        done = world.json("publish", path, "--store", store)
    assert done["version"] == 2
    world.ok("pull", "--store", store, "--follow", world.root / "f", "--once")
    assert bits(world.root / "f") == bits(world.a)


def test_other_tensors_are_published_whole(world: World) -> None:
    store = world.root / "store"
    world.ok("publish", world.a, "--store", store)
    other = save(world.root / "other", {**world.old_values, "extra": np.ones(3, np.float32)})
    assert world.json("publish", other, "--store", store)["keyframe"] is True
    world.ok("pull", "--store", store, "--follow", world.root / "f", "--once")
    assert bits(world.root / "f") == bits(other)


def test_what_a_store_refuses(world: World) -> None:
    store, folder = world.root / "store", world.root / "f"
    for command in (["log"], ["gc"], ["squash", "0", "1"]):
        assert "nothing was published" in world.refused(*command, "--store", store)
    assert "nothing was published" in world.refused("pull", "--store", store, "--follow", folder, "--once")
    late = world.refused("pull", "--store", store, "--follow", folder, "--timeout", "0")
    assert "no new version" in late
    assert not folder.exists()
    world.ok("publish", world.a, "--store", store)
    assert "--run-id is 'x'" in world.refused("publish", world.b, "--store", store, "--run-id", "x")
    err = world.refused("squash", "--store", store, "0", "9")
    assert "version '9'" in err
    foreign = save(world.root / "foreign", world.new_values)
    assert "none of run 'weights'" in world.refused("pull", "--store", store, "--follow", foreign, "--once")
    sharded = save(world.root / "sharded", world.new_values, shards=2)
    assert "holds shards" in world.refused("pull", "--store", store, "--follow", sharded, "--once")


def test_choose_predicts_each_stage_for_a_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    args = ["choose", "--bandwidth", "1Gbit", "--replicas", 4, "--model-bytes", "16GB", "--density", 0.0164]
    found = world.json(*args, "--threads", 4)
    modes = {row["mode"]: row for row in found["modes"]}
    # 16 GB at the measured ratios of 137.7 and 46.6, four times through 125 MB/s; 0.57 GB/s and core encode.
    assert modes["ctx"]["transfer_s"] == pytest.approx(4 * 16e9 / 137.7 / 125e6, rel=0.01)
    assert modes["xor"]["transfer_s"] == pytest.approx(4 * 16e9 / 46.6 / 125e6, rel=0.01)
    assert modes["raw"]["transfer_s"] == 512.0
    assert modes["dense"]["bottleneck"] == "transfer"
    assert modes["ctx"]["encode_s"] == pytest.approx(16 / 0.57 / found["threads"])
    assert found["situation"]["threads"] == 4
    assert found["mode"] == min(modes, key=lambda name: modes[name]["total_s"])
    assert found["allowed"] == [found["mode"], "dense"]
    table = world.ok(*args)
    *rows, why = table.splitlines()
    assert len(rows) == 2 + len(modes)
    assert max(map(len, rows)) <= 80
    assert all(stage in rows[0] for stage in ("diff", "encode", "transfer", "decode", "apply", "total"))
    assert rows[2].split()[:2] == ["ctx", "8"]
    assert why.startswith("1 Gbit/s to 4 replicas: transfer dominates")
    assert world.json("choose", "--bandwidth", "200Gbit", "--model-bytes", "16GB")["mode"] == "raw"


def test_choose_refuses_what_it_cannot_read(world: World) -> None:
    assert "'fast' is no number of bytes/s" in world.refused("choose", "--bandwidth", "fast", "--model-bytes", "16GB")
    assert "'16Gbit' is no number of bytes;" in world.refused(
        "choose", "--bandwidth", "1GB/s", "--model-bytes", "16Gbit"
    )


def test_words_for_people() -> None:
    assert [size(n) for n in (0, 999, 85_433, 999_600, 16e9, 1.5e12)] == [
        "0 B", "999 B", "85.4 kB", "1 MB", "16 GB", "1,500 GB",
    ]  # fmt: skip
    assert layer_of("h.3.attn.weight") == "h.3"
    assert layer_of("lm_head.weight") == "lm_head"
    assert layer_of("3.weight") == "3"
