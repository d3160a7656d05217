from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.errors import DataError
from headrace.telemetry import format as fmt
from headrace.telemetry import svg
from headrace.telemetry.log import RunLog
from headrace.telemetry.records import EvalRecord, RunSummary, StepRecord
from headrace.telemetry.report import write_report

Step = Callable[..., StepRecord]
Eval = Callable[..., EvalRecord]
Summary = Callable[..., RunSummary]


def test_a_report_is_one_file_without_network_or_script(
    tmp_path: Path, step: Step, evaluation: Eval, summary: Summary
) -> None:
    with RunLog(tmp_path) as log:
        log.append(evaluation(0))
        for version in range(1, 30):
            log.append(step(version, loss=math.nan))
        log.append(evaluation(29, 0.4))
        log.append(summary())
    path = write_report(tmp_path)
    page = path.read_text()
    assert path == tmp_path / "report.html"
    assert "http" not in page
    assert "<script" not in page
    assert "nan" not in page
    assert "31.0 % → 40.0 %" in page
    assert "filtered zero signal" in page
    for chart in re.findall(r"<svg.*?</svg>", page):
        ElementTree.fromstring(chart)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_report_of_a_run_that_has_hardly_begun(tmp_path: Path, step: Step, steps: int) -> None:
    with RunLog(tmp_path) as log:
        for version in range(1, steps + 1):
            log.append(step(version))
    page = write_report(tmp_path).read_text()
    assert ("no step yet" if steps == 0 else "1 steps so far") in page


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder"):
        write_report(tmp_path)


def test_names_are_escaped(tmp_path: Path, summary: Summary) -> None:
    with RunLog(tmp_path / "a<b>") as log:
        log.append(summary(reason="failed: <object>"))
    page = write_report(tmp_path / "a<b>").read_text()
    assert "<object>" not in page
    assert "a&lt;b&gt;" in page


def test_constant_series_and_gaps_are_drawn_inside_the_frame() -> None:
    chart = svg.line_chart({"flat": [(1.0, 5.0), (2.0, math.inf), (3.0, 5.0)]})
    points = re.findall(r'points="([^"]+)"', chart)
    assert len(points) == 1
    for pair in points[0].split():
        x, y = map(float, pair.split(","))
        assert svg.LEFT <= x <= svg.WIDTH - svg.RIGHT
        assert svg.TOP <= y <= svg.HEIGHT - svg.BOTTOM


def test_stacked_bars_add_up() -> None:
    chart = svg.stacked_chart([1.0, 2.0], {"a": [1.0, 2.0], "b": [1.0, 0.0]})
    heights = [float(h) for h in re.findall(r'<rect[^>]* height="([\d.]+)"', chart)]
    assert heights == pytest.approx([heights[0], 2 * heights[0], heights[0]], abs=0.11)


def test_running_mean() -> None:
    assert svg.running_mean([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0, 1.0), (1, 2.0), (2, 4.0)]


def test_numbers_as_people_read_them() -> None:
    assert [fmt.duration(s) for s in (0.0, 0.25, 59.94, 60.0, 3599.6, 86_400.0, math.nan)] == [
        "0.00 s", "0.25 s", "59.9 s", "1:00", "1:00:00", "24:00:00", "-",
    ]  # fmt: skip
    assert [fmt.count(n) for n in (0, 9.5, 10, 9_999, 10_000, 123_456, 999_600, 5e9)] == [
        "0", "9.5", "10", "9 999", "10.0k", "123k", "1M", "5G",
    ]  # fmt: skip
    assert [svg.tick(v) for v in (0, 0.25, 1500, 2e6, 4e-4)] == ["0", "0.25", "1.5k", "2M", "4e-04"]


def test_sparkline_bins_and_scales() -> None:
    assert fmt.sparkline([0, 1, 2, 3], 2) == "▁█"
    assert fmt.sparkline([1.0, math.nan, 1.0], 8) == "▁▁"
    assert fmt.sparkline([], 8) == ""
    assert fmt.sparkline([0, 1], 8, ascii_only=True) == "_#"
