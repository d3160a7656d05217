"""A fit to rows that known constants made finds them again; public rows keep their accuracy where they are at hand."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import PlanError
from headrace.planner.calibrate_serving import FITTED, descend, fit_serving, predict_s, read_rows
from headrace.planner.constants import Constants, builtin
from headrace.planner.facts import Fact

TRUTH = {"mem_eff": 0.66, "prefill_eff": 0.5, "layer_s": 40e-6, "allreduce_s": 12e-6, "step_s": 2e-3}
ROW = {
    "id": "r", "silicon_data_source": "file; silicon_concurrency=8; x", "backend": "vllm",
    "model_path": "Qwen/Qwen3-8B", "system": "h100_sxm", "precision": "bf16", "mode": "agg", "isl": "1024",
    "osl": "512", "batch_size": "8",
    "tp_size": "1", "attention_dp_size": "1", "moe_tp_size": "1", "moe_ep_size": "1", "silicon_tpot_ms": "10",
}  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return path


def grid(**more: str) -> list[dict[str, str]]:
    """Rows of one group over widths, loads and lengths."""
    return [
        {**ROW, "tp_size": str(tp), "silicon_data_source": f"silicon_concurrency={n}", "isl": isl, "osl": osl, **more}
        for tp in (1, 2, 4, 8)
        for n in (1, 8, 32, 128)
        for isl, osl in (("1024", "1024"), ("8192", "1024"), ("1024", "256"))
    ]


def made_by(path: Path, values: dict[str, float], **more: str) -> Path:
    """The grid with TPOTs that the planner's own costs give under `values`."""
    rows = grid(**more)
    truth = Constants(
        name="truth",
        **{k: Fact(value=v, unit="s", source="test", date="2026-11-29", grade="fitted") for k, v in values.items()},
    )
    seconds = predict_s(read_rows(write(path, rows)), truth)
    return write(path, [{**row, "silicon_tpot_ms": str(1e3 * s)} for row, s in zip(rows, seconds, strict=True)])


def test_a_fit_finds_the_constants_that_made_the_rows(tmp_path):
    rows = read_rows(made_by(tmp_path / "rows.csv", TRUTH))
    fitted, report = fit_serving(rows, builtin(), name="mine", date="2026-11-29")
    assert report.rows == 48
    assert report.fitted < 0.02 < 0.15 < report.untuned
    used = fitted.for_serving("h100", "bf16", "vllm")
    assert used.mem_eff.value == pytest.approx(0.66, rel=0.1)
    assert used.step_s.value + 36 * used.layer_s.value == pytest.approx(2e-3 + 36 * 40e-6, rel=0.1)
    assert used.mem_eff.grade == "fitted"
    assert used.mem_eff.source == "mine: fit to 48 serving rows"


def test_outliers_do_not_move_the_fit(tmp_path):
    path = made_by(tmp_path / "rows.csv", TRUTH)
    rows = read_rows(path)
    spoiled = [
        row if i % 12 else type(row)(**{n: getattr(row, n) for n in row.__slots__} | {"tpot_s": row.tpot_s * 10})
        for i, row in enumerate(rows)
    ]
    fitted, report = fit_serving(spoiled, builtin(), name="mine", date="2026-11-29")
    used = fitted.for_serving("h100", "bf16", "vllm")
    assert np.median(np.abs(predict_s(rows, used) / [r.tpot_s for r in rows] - 1)) < 0.03
    assert report.fitted_median < 0.03


def test_constants_stay_inside_their_bounds(tmp_path):
    rows = read_rows(made_by(tmp_path / "rows.csv", {**TRUTH, "mem_eff": 0.05}))
    used = fit_serving(rows, builtin(), name="mine", date="2026-11-29")[0].for_serving("h100", "bf16")
    for name, (low, high) in FITTED.items():
        assert low * (1 - 1e-9) <= getattr(used, name).value <= high * (1 + 1e-9)
    assert used.mem_eff.value == pytest.approx(FITTED["mem_eff"][0])


def test_the_fit_is_the_same_every_time_and_keeps_other_constants(tmp_path):
    rows = read_rows(made_by(tmp_path / "rows.csv", TRUTH))
    base = Constants(name="base", train_eff=Fact(value=0.3, unit="frac", source="t", date="2026", grade="measured"))
    one, two = (fit_serving(rows, base, name="mine", date="2026-11-29")[0] for _ in range(2))
    assert one == two
    assert (one.name, one.train_eff.value) == ("mine", 0.3)


def test_small_groups_keep_the_seeds(tmp_path):
    rows = read_rows(write(tmp_path / "rows.csv", [ROW] * 3))
    fitted, report = fit_serving(rows, builtin(), name="mine", date="2026-11-29")
    assert fitted.serving == ()
    assert report.groups == ()
    assert report.fitted == report.untuned > 0


def test_rows_that_are_no_engine_of_a_known_model_are_counted_and_left_out(tmp_path):
    odd = [{**ROW, "model_path": "who/knows"}, {**ROW, "system": "z9000"}, {**ROW, "tp_size": "28"}, ROW]
    report = fit_serving(read_rows(write(tmp_path / "rows.csv", odd)), builtin(), name="x", date="2026-11-29")[1]
    assert report.rows == 1
    assert sum(report.skipped.values()) == 3
    with pytest.raises(PlanError, match="none of 3 serving rows"):
        fit_serving(read_rows(write(tmp_path / "rows.csv", odd[:3])), builtin(), name="x", date="2026-11-29")


@pytest.mark.parametrize(
    ("tp", "dp", "moe_tp", "moe_ep", "gpus", "copies"),
    [
        (8, 1, 8, 1, 8, 1),
        (8, 1, 1, 8, 8, 1),
        (4, "", 1, 1, 4, 1),
        (1, 8, 1, 8, 8, 8),
        (64, 1, 8, 8, 8, 1),  # the product of both widths of 8 chips
        (1, 64, 8, 8, 8, 8),
        (4, 4, 1, 16, 4, 4),
    ],
)
def test_widths_of_an_engine(tmp_path, tp, dp, moe_tp, moe_ep, gpus, copies):
    row = {**ROW, "tp_size": tp, "attention_dp_size": dp, "moe_tp_size": moe_tp, "moe_ep_size": moe_ep}
    (read,) = read_rows(write(tmp_path / "rows.csv", [row]))
    assert (read.gpus, read.attention_dp) == (gpus, copies)


def test_a_row_is_read_with_its_load_and_its_group(tmp_path):
    untagged = {**ROW, "silicon_data_source": "", "attention_dp_size": "4", "precision": "int4"}
    one, two = read_rows(write(tmp_path / "rows.csv", [ROW, untagged, {**ROW, "mode": "disagg"}]))
    assert one.group == ("h100", "vllm", "bf16")
    assert (one.concurrency, two.concurrency) == (8, 32)
    assert two.group.precision == "fp4"
    assert one.tpot_s == 0.01


def test_requests_beyond_kv_memory_do_not_slow_the_others(tmp_path):
    loads = [{**ROW, "isl": "8192", "silicon_data_source": f"silicon_concurrency={n}"} for n in (16, 200, 2000)]
    few, many, most = predict_s(read_rows(write(tmp_path / "rows.csv", loads)), builtin())
    assert few < many == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", "it has no column id, "),
        (None, "cannot be read"),
    ],
)
def test_another_file_is_refused(tmp_path, text, problem):
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=problem):
        read_rows(path)


@pytest.mark.parametrize("change", [{"silicon_tpot_ms": "nan"}, {"silicon_tpot_ms": "0"}, {"isl": "many"}])
def test_a_bad_row_is_named(tmp_path, change):
    with pytest.raises(PlanError, match="row 'r'"):
        read_rows(write(tmp_path / "rows.csv", [{**ROW, **change}]))


def test_the_search_finds_a_corner_and_an_inner_least():
    bounds = np.array([[-1.0, 1.0], [-1.0, 1.0]])
    point = descend(lambda x: (x[0] - 3) ** 2 + (x[1] - 0.3) ** 2 + 0.5 * x[0] * x[1], np.zeros(2), bounds)
    assert point == pytest.approx([1.0, 0.05], abs=0.01)


@pytest.mark.skipif("HEADRACE_SERVING_DATA" not in os.environ, reason="HEADRACE_SERVING_DATA names no serving table")
def test_public_rows_are_predicted_as_well_as_documented():
    rows = read_rows(Path(os.environ["HEADRACE_SERVING_DATA"]))
    _, report = fit_serving(rows, builtin(), name="public", date="2026-11-29")
    assert report.rows > 0.98 * len(rows)
    assert report.untuned < 0.25
    assert report.fitted < 0.17
    assert report.fitted_median < 0.12
