"""Numbers as people read them: durations, counts, shares, sparklines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"


def duration(seconds: float) -> str:
    """Short length of time.

    >>> duration(0.25), duration(8.04), duration(75), duration(3725)
    ('0.25 s', '8.0 s', '1:15', '1:02:05')
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{max(seconds, 0.0):.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: float) -> str:
    """Count with three significant digits and a unit letter.

    >>> count(7), count(1890), count(61_300), count(2_450_000)
    ('7', '1 890', '61.3k', '2.45M')
    """
    if not math.isfinite(number):
        return "-"
    size = abs(number)
    if size < 10:
        return f"{number:.0f}" if number == int(number) else f"{number:.1f}"
    if size < 9_999.5:
        return f"{number:,.0f}".replace(",", " ")
    if size < 999_500:
        return f"{number / 1e3:.1f}k" if size < 99_950 else f"{number / 1e3:.0f}k"
    if size < 999.5e6:
        return f"{number / 1e6:.3g}M"
    return f"{number / 1e9:.3g}G"


def size_text(size_bytes: float) -> str:
    """Bytes with a decimal unit.

    >>> size_text(812), size_text(1_310_000), size_text(269e6)
    ('812 B', '1.31 MB', '269 MB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.0f} B"


def percent(share: float, digits: int = 0) -> str:
    """A share as per cent.

    >>> percent(0.123), percent(0.123, 1)
    ('12 %', '12.3 %')
    """
    return f"{100 * share:.{digits}f} %" if math.isfinite(share) else "-"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """The last values as blocks, from their least to their largest; more than `width` values are averaged in bins.

    >>> sparkline([0.0, 0.5, 1.0], 8)
    '▁▅█'
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    if len(finite) > width:
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(finite), max(finite)
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    if high - low < 1e-12:
        return blocks[0] * len(finite)
    top = len(blocks) - 1
    return "".join(blocks[math.floor((v - low) / (high - low) * top + 0.5)] for v in finite)
