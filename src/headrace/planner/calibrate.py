"""Constants from this machine's own runs: laws that replace the formulas for (model, chip) in later predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date

from headrace.errors import PlanError
from headrace.planner.constants import Constants, MeasuredLaw
from headrace.planner.facts import Fact
from headrace.planner.measure import RunMeasurement, fit_batches, fit_decode


def calibrate_runs(
    runs: Sequence[RunMeasurement], *, model: str, chip: str, name: str, base: Constants, today: date
) -> Constants:
    """`base` with one law for each width (threads of generator and trainer) among `runs`; runs of a width are fitted
    together. Laws that `base` has for the same model, chip and width are replaced.

    Raises PlanError when there is no run.
    """
    if not runs:
        raise PlanError("calibrate needs at least one run folder")
    widths = sorted({(run.generator_threads, run.trainer_threads) for run in runs})
    laws = [
        _law([r for r in runs if (r.generator_threads, r.trainer_threads) == width], model, chip, today)
        for width in widths
    ]
    kept = [
        law for law in base.laws if (law.model, law.chip) != (model, chip) or (law.gen_tp, law.train_gpus) not in widths
    ]
    return base.model_copy(update={"name": name, "date": today.isoformat(), "laws": (*kept, *laws)})


def _law(runs: Sequence[RunMeasurement], model: str, chip: str, today: date) -> MeasuredLaw:
    source = ", ".join(run.run for run in runs)

    def fact(value: float, unit: str) -> Fact:
        return Fact(value=value, unit=unit, source=source, date=today.isoformat(), grade="measured")

    def mean(values: Iterable[float]) -> float:
        known = list(values)
        return sum(known) / len(known)

    base_s, per_request_s, per_context_tok_s = fit_decode([p for r in runs for p in r.decode_points]).coefficients
    prefills = [p for r in runs for p in r.prefill_points]
    points = [p for r in runs for p in r.batch_points]
    fixed_s, s_per_tok = fit_batches(points, mean(r.optim_s for r in runs)).coefficients
    return MeasuredLaw(
        model=model,
        chip=chip,
        gen_tp=runs[0].generator_threads,
        train_gpus=runs[0].trainer_threads,
        base_s=fact(base_s, "s"),
        per_request_s=fact(per_request_s, "s"),
        per_context_tok_s=fact(per_context_tok_s, "s/tok"),
        prefill_s_per_tok=fact(sum(s for _, s in prefills) / sum(t for t, _ in prefills), "s/tok")
        if prefills
        else None,
        train_fixed_s=fact(fixed_s, "s"),
        train_s_per_tok=fact(s_per_tok, "s/tok"),
        publish_s=fact(mean(r.publish_s for r in runs), "s"),
        land_s=fact(mean(r.transfer_s for r in runs), "s"),
        pause_s=fact(mean(r.pause_s for r in runs), "s"),
    )
