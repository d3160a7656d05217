"""Which calibration a plan uses."""

from __future__ import annotations

from pathlib import Path

from headrace.planner.constants import Constants, builtin, load
from headrace.planner.hardware import chip
from headrace.planner.models import model
from headrace.planner.spec import PlanSpec


def choose(spec: PlanSpec, folder: Path | None) -> Constants:
    """The one that `spec` names; else the newest in `folder` that knows its model on its chip, or its chip and
    precision; else the seeds. Raises PlanError for a name that does not exist."""
    if spec.calibration:
        return load(spec.calibration, folder)
    if folder is None or not folder.is_dir():
        return builtin()
    name, chips = (
        model(spec.model).name,
        {chip(spec.cluster.gpu).name, chip(spec.cluster.gpu_generate or spec.cluster.gpu).name},
    )
    for path in sorted(folder.glob("*.json"), key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True):
        constants = load(str(path))
        knows_model = any(constants.law(name, each) is not None for each in chips)
        knows_chip = any(s.chip in chips and s.precision in ("", spec.precision) for s in constants.serving)
        if knows_model or knows_chip:
            return constants
    return builtin()
