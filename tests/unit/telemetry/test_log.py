from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.telemetry.log import RunLog, cut_torn_line, read_log
from headrace.telemetry.records import EvalRecord, RunSummary, StepRecord

Step = Callable[..., StepRecord]
Eval = Callable[..., EvalRecord]
Summary = Callable[..., RunSummary]


def test_records_come_back_typed_and_equal(tmp_path: Path, step: Step, evaluation: Eval, summary: Summary) -> None:
    written = [evaluation(0), step(1), step(2), evaluation(2), summary()]
    with RunLog(tmp_path / "run") as log:
        for record in written:
            log.append(record)
    assert read_log(tmp_path / "run") == written


def test_a_record_is_on_disk_before_the_next_one(tmp_path: Path, step: Step) -> None:
    with RunLog(tmp_path) as log:
        log.append(step(1))
        assert [r.version for r in read_log(tmp_path)] == [1]


def test_non_finite_and_numpy_numbers_survive_as_strict_json(tmp_path: Path, step: Step) -> None:
    with RunLog(tmp_path) as log:
        log.append(step(1, loss=math.nan, eta_s=math.inf, metrics={"a": np.float32(0.5), "b": -math.inf}))
    line = (tmp_path / "metrics.jsonl").read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (back,) = read_log(tmp_path)
    assert isinstance(back, StepRecord)
    assert math.isnan(back.loss)
    assert back.eta_s == math.inf
    assert back.metrics == {"a": 0.5, "b": -math.inf}


def test_torn_last_line_is_ignored_by_readers_and_cut_by_the_next_writer(tmp_path: Path, step: Step) -> None:
    with RunLog(tmp_path) as log:
        log.append(step(1))
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"kind":"step","ver')
    assert [r.version for r in read_log(tmp_path)] == [1]
    with RunLog(tmp_path) as log:
        log.append(step(2))
    assert [r.version for r in read_log(tmp_path)] == [1, 2]


@given(body=st.lists(st.text(alphabet="ab", max_size=5), max_size=5), torn=st.text(alphabet="ab", max_size=200_000))
def test_cutting_keeps_exactly_the_complete_lines(
    tmp_path_factory: pytest.TempPathFactory, body: list[str], torn: str
) -> None:
    path = tmp_path_factory.mktemp("cut") / "file"
    whole = "".join(line + "\n" for line in body).encode()
    path.write_bytes(whole + torn.encode())
    cut_torn_line(path)
    assert path.read_bytes() == whole


def test_cutting_a_torn_line_longer_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"whole\n" + b"x" * 200_000)
    cut_torn_line(path)
    assert path.read_bytes() == b"whole\n"


def test_resume_voids_later_steps_evals_and_the_old_summary_but_keeps_their_lines(
    tmp_path: Path, step: Step, evaluation: Eval, summary: Summary
) -> None:
    with RunLog(tmp_path) as log:
        log.append(evaluation(0))
        for version in (1, 2, 3):
            log.append(step(version))
        log.append(evaluation(3))
        log.append(summary(reason="interrupted"))
    with RunLog(tmp_path) as log:
        log.resumed(2)
        log.append(step(3, reward_mean=0.9))
    kept = read_log(tmp_path)
    assert [(r.kind, getattr(r, "version", None)) for r in kept] == [("eval", 0), ("step", 1), ("step", 2), ("step", 3)]
    assert isinstance(kept[-1], StepRecord)
    assert kept[-1].reward_mean == 0.9
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8


def test_missing_log_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run folder: it has no metrics\.jsonl"):
        read_log(tmp_path)


def test_bad_lines_name_file_line_and_reason(tmp_path: Path, step: Step) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("not json\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: not JSON"):
        read_log(tmp_path)
    path.write_text('{"kind":"stop"}\n')
    with pytest.raises(DataError, match="did you mean 'step'"):
        read_log(tmp_path)
    row = dataclasses.asdict(step(1))
    del row["lag_max"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="lag_max: Field required"):
        read_log(tmp_path)


def test_fields_of_a_newer_writer_are_ignored(tmp_path: Path, step: Step) -> None:
    row = dataclasses.asdict(step(1)) | {"added_later": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert read_log(tmp_path) == [step(1)]
