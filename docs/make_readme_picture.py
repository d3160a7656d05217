"""Draws the picture of the README from a run: python docs/make_readme_picture.py RUN [START_S END_S]

Without times the most telling four optimizer steps are shown (telemetry/timeline.py says what that is).
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.telemetry.plot import plot
from headrace.telemetry.timeline import read_timeline, telling_window

PICTURE = Path(__file__).parent / "img" / "timeline.png"


def main(run: Path, times: list[str]) -> None:
    """Write docs/img/timeline.png."""
    timeline = read_timeline(run)
    window = (float(times[0]), float(times[1])) if times else telling_window(timeline)
    plot(timeline, PICTURE, window=window, width_in=10.0)
    sys.stdout.write(f"{PICTURE}: {window}\n")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
