from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from headrace.sync.report import SyncReport
from headrace.telemetry.deliveries import DeliveryTotals
from headrace.telemetry.records import RunSummary
from headrace.telemetry.summary import summary_panel


def test_totals_leave_the_base_out_and_are_means_per_version() -> None:
    totals = DeliveryTotals()
    assert totals.summary() == {}
    totals.published(SyncReport(version=0, digest="a", density=1.0, full_bytes=1000, bytes_by_mode={"dense": 700}))
    totals.landed(SyncReport(version=0, digest="a", pause_s=9.0))
    for sent, limit, encode_s in ((10, 8.0, 0.2), (30, 0.0, 0.4)):
        report = SyncReport(
            version=1, digest="b", density=sent / 1000, full_bytes=1000, bytes_by_mode={"ctx": sent},
            limit_bytes=limit, encode_s=encode_s,
        )  # fmt: skip
        totals.published(report)
    totals.landed(SyncReport(version=2, digest="c", pause_s=0.1, apply_s=0.06, resynced=True))
    summary = totals.summary()
    assert summary["versions"] == 2
    assert summary["base_bytes"] == 700
    assert summary["bytes"] == 20
    assert summary["ratio"] == 50
    assert summary["ratio_to_limit"] == 0.8
    assert summary["density"] == pytest.approx(0.02)
    assert summary["encode_s"] == pytest.approx(0.3)
    assert (summary["pause_s"], summary["pause_max_s"], summary["apply_s"]) == (0.1, 0.1, 0.06)
    assert (summary["resyncs"], summary["failed_swaps"]) == (1, 0)


@pytest.mark.parametrize("width", [72, 100])
def test_the_summary_says_how_weights_travelled(width: int, summary: Callable[..., RunSummary]) -> None:
    sync = {
        "versions": 40, "base_bytes": 184e6, "bytes": 1.43e6, "full_bytes": 269e6, "ratio": 188.1, "density": 0.0143,
        "ratio_to_limit": 0.87, "resyncs": 1, "failed_swaps": 0, "pause_max_s": 0.1, "diff_s": 0.0, "encode_s": 0.61,
        "put_s": 0.01, "get_s": 0.02, "decode_s": 0.43, "pause_s": 0.083, "apply_s": 0.05, "verify_s": 0.03,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(summary_panel(summary(sync=sync, sync_mode="delta"), width))
    output = console.file
    assert isinstance(output, io.StringIO)
    text = output.getvalue()
    assert {len(line) for line in text.splitlines()} == {width}
    sizes = ("1.43 MB a version", "188 x smaller", "1.43 %", "87 % of the entropy limit")
    for words in (*sizes, "encode 610", "pause 83", "1 resyncs"):
        assert words in text
