"""Predicted against published, for every row of fixtures/: what `headrace plan fixtures` prints and docs show.

    python -m headrace.planner.scoreboard docs/scoreboard.md

Steps are predicted twice on the product's own costs: untuned (serving rows only, no RL step seen; simulated), and with
six constants fitted to all *other* published steps (closed forms, corrected by what the simulator differs by with the
built-in constants). Ratios take the same predictions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from headrace.errors import PlanError
from headrace.planner.closed import Estimate
from headrace.planner.constants import Constants, builtin
from headrace.planner.fact_rules import basis_of, predict_fact
from headrace.planner.fixtures_data import FactRow, Fixture, RatioRow, RunRow, load_fixtures
from headrace.planner.step_fit import (
    PUBLISHED,
    anchored,
    closed_step_s,
    estimate,
    left_out_fits,
    simulated_step_s,
    untuned,
)

GOOD, FAIR = 0.15, 0.30
"""Largest relative errors of the grades."""
CLOSES = 0.01
"""An identity's."""
ESTIMATED = ("rollout_s", "generation_bound")
"""Quantities of runs, beside step_s, that the closed forms give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One published number and ours."""

    fixture: str
    row: str
    quantity: str
    published: float
    predicted: float | None = None
    """None: not compared."""
    untuned: float | None = None
    """Steps and ratios: with constants that have seen no RL step."""
    basis: str
    """identity (the source agrees with itself), formula, costs (built-in constants), left out (constants fitted to
    all other steps), held out (fitted to steps of other sources), note, excluded."""
    grade: str = "-"
    """good (15 %), fair (30 %), poor; right or wrong (signs); closes or open (identities); - (not compared)."""
    where: str = ""
    """Why it fails, or why it is not compared."""

    @property
    def error_frac(self) -> float | None:
        """Predicted over published, less one."""
        return _over(self.predicted, self.published)

    @property
    def untuned_error_frac(self) -> float | None:
        return _over(self.untuned, self.published)


def _over(predicted: float | None, published: float) -> float | None:
    return None if predicted is None or published == 0.0 else predicted / published - 1.0


def grade_of(error_frac: float) -> str:
    """good, fair or poor by the size of the error."""
    size = abs(error_frac)
    return "good" if size <= GOOD else "fair" if size <= FAIR else "poor"


# ---- facts -----------------------------------------------------------------------------------------------------------


def score_facts(fixtures: Iterable[Fixture], constants: Constants | None = None) -> list[Score]:
    """Arithmetic, formulas and single costs: milliseconds in all."""
    known = constants or builtin()
    return [score for fixture in fixtures for row in fixture.facts for score in _score_fact(fixture, row, known)]


def _score_fact(fixture: Fixture, row: FactRow, constants: Constants) -> list[Score]:
    predicted, basis = predict_fact(row, constants), basis_of(row)
    scores = []
    for quantity, published in row.published.items():
        grade, where, of = "-", row.note, basis or "note"
        if quantity in row.excluded:
            of, where = "excluded", row.excluded[quantity]
        elif quantity in predicted:
            error = predicted[quantity] / published - 1.0
            grade = ("closes" if abs(error) < CLOSES else "open") if basis == "identity" else grade_of(error)
        elif basis:
            continue  # an input of the rule, printed for the reader of the file
        scores.append(
            Score(
                fixture=fixture.name,
                row=row.name,
                quantity=quantity,
                published=published,
                predicted=predicted.get(quantity),
                basis=of,
                grade=grade,
                where=where,
            )
        )
    return scores


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPredictions:
    """Step seconds of every run of the fixtures, by (fixture, row)."""

    untuned_s: Mapping[tuple[str, str], float]
    """Of scored steps only."""
    left_out_s: Mapping[tuple[str, str], float]
    """Scored steps: from a fit to the others. Runs without a scored step: plain closed forms (only directions are
    compared), from the fit to all scored ones, none of which is theirs."""
    used: Mapping[tuple[str, str], Constants]
    """What left_out_s rests on."""
    impossible: Mapping[tuple[str, str], str]
    """Why a run cannot be predicted."""


def predict_steps(fixtures: Sequence[Fixture]) -> StepPredictions:
    """Predict every run with constants that have not seen it; some fifteen seconds of one core. Deterministic."""
    runs = {(fixture.name, row.name): row for fixture in fixtures for row in fixture.runs}
    base, impossible = untuned(), {}
    for key, row in list(runs.items()):
        try:
            estimate(row.run, base)
        except PlanError as exc:
            impossible[key] = str(exc)
            del runs[key]
    scored = {key: row for key, row in runs.items() if "step_s" in row.scored}
    rows = list(scored.values())
    step_s = anchored(rows, PUBLISHED.constants(base))
    others = left_out_fits(rows, base, PUBLISHED, step_s=step_s)
    used = dict.fromkeys(runs, PUBLISHED.constants(base))
    used |= {key: found.constants(base) for key, found in zip(scored, others, strict=True)}
    return StepPredictions(
        untuned_s={key: simulated_step_s(row.run, base) for key, row in scored.items()},
        left_out_s={key: (step_s if key in scored else closed_step_s)(row.run, used[key]) for key, row in runs.items()},
        used=used,
        impossible=impossible,
    )


def score_runs(fixtures: Iterable[Fixture], found: StepPredictions) -> list[Score]:
    """Step seconds, and what else of a run is compared."""
    return [score for fixture in fixtures for row in fixture.runs for score in _score_run(fixture, row, found)]


def _score_run(fixture: Fixture, row: RunRow, found: StepPredictions) -> list[Score]:
    key, scores = (fixture.name, row.name), []
    for quantity in ("step_s", *ESTIMATED):
        if quantity not in row.published:
            continue
        published = row.published[quantity]
        base = Score(fixture=fixture.name, row=row.name, quantity=quantity, published=published, basis="excluded")
        if quantity in row.excluded or key in found.impossible:
            reason = row.excluded.get(quantity) or found.impossible[key]
            scores.append(replace(base, where=reason))
            continue
        closed = estimate(row.run, found.used[key])
        if quantity == "step_s":
            predicted, before = found.left_out_s[key], found.untuned_s[key]
            grade = grade_of(predicted / published - 1.0)
            where = "" if grade == "good" else _where(row, predicted / published - 1.0, closed)
            scores.append(
                replace(base, predicted=predicted, untuned=before, basis="left out", grade=grade, where=where)
            )
        elif quantity == "rollout_s":
            grade = grade_of(closed.gen_s / published - 1.0)
            scores.append(replace(base, predicted=closed.gen_s, basis="held out", grade=grade, where=_assumed(row)))
        else:
            bound = float(closed.gen_s > closed.train_s)
            grade = "right" if bound == published else "wrong"
            scores.append(replace(base, predicted=bound, basis="held out", grade=grade, where=_assumed(row)))
    return scores


def _where(row: RunRow, error: float, closed: Estimate) -> str:
    """What the prediction rests on where it fails."""
    speed = "too slow" if error > 0 else "too fast"
    split = f"gen {closed.gen_s:.0f} s, train {closed.train_s:.0f} s"
    return "; ".join(part for part in (f"{speed}: {closed.binding} ({split})", row.note, _assumed(row)) if part)


def _assumed(row: RunRow) -> str:
    return f"assumed: {', '.join(row.assumed)}" if row.assumed else ""


# ---- ratios ----------------------------------------------------------------------------------------------------------


def score_ratios(fixtures: Iterable[Fixture], found: StepPredictions) -> list[Score]:
    """How much faster one run is than another; negative controls are ratios below one."""
    return [
        _score_ratio(fixture, ratio, found)
        for fixture in fixtures
        for ratio in fixture.ratios
        if (fixture.name, ratio.base) not in found.impossible and (fixture.name, ratio.other) not in found.impossible
    ]


def _score_ratio(fixture: Fixture, ratio: RatioRow, found: StepPredictions) -> Score:
    base, other = (fixture.name, ratio.base), (fixture.name, ratio.other)
    predicted = found.left_out_s[base] / found.left_out_s[other]
    scored = base in found.untuned_s and other in found.untuned_s
    before = found.untuned_s[base] / found.untuned_s[other] if scored else None
    share = fixture.run(ratio.base).run.gpus / fixture.run(ratio.other).run.gpus if ratio.per_gpu else 1.0
    right = (predicted * share > 1.0) == (ratio.speedup * share > 1.0)
    return Score(
        fixture=fixture.name,
        row=ratio.name,
        quantity="speedup, sign per GPU" if ratio.per_gpu else "speedup, sign" if ratio.sign_only else "speedup",
        published=ratio.speedup,
        predicted=predicted,
        untuned=before,
        basis="left out" if scored else "held out",
        grade="right" if right else "wrong",
        where=ratio.note,
    )


# ---- all -------------------------------------------------------------------------------------------------------------


def score(fixtures: Sequence[Fixture] | None = None) -> list[Score]:
    """Every score of `fixtures` (the shipped ones): steps, then ratios, then facts."""
    chosen = load_fixtures() if fixtures is None else fixtures
    found = predict_steps(chosen)
    return [*score_runs(chosen, found), *score_ratios(chosen, found), *score_facts(chosen)]


def rows_json(scores: Iterable[Score]) -> str:
    """Scores as a JSON list, errors included."""
    rows = [
        asdict(score) | {"error_frac": score.error_frac, "untuned_error_frac": score.untuned_error_frac}
        for score in scores
    ]
    return json.dumps(rows, indent=1)


def models_of(fixtures: Iterable[Fixture]) -> dict[tuple[str, str], str]:
    """Model of every run, by (fixture, row)."""
    return {(fixture.name, row.name): row.run.model for fixture in fixtures for row in fixture.runs}


def partitions(scores: Iterable[Score], names: Mapping[tuple[str, str], str]) -> dict[str, tuple[int, float, float]]:
    """Name (a model, say, by (fixture, row)) to (steps, mean absolute error untuned, the same left out), as shares;
    "all" is everything together."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for one in scores:
        if one.quantity != "step_s":
            continue
        if one.basis == "left out" and one.error_frac is not None and one.untuned_error_frac is not None:
            pair = (abs(one.untuned_error_frac), abs(one.error_frac))
            for name in (names[one.fixture, one.row], "all"):
                errors.setdefault(name, []).append(pair)
    return {
        name: (len(pairs), fmean(before for before, _ in pairs), fmean(after for _, after in pairs))
        for name, pairs in sorted(errors.items())
    }


# ---- the page --------------------------------------------------------------------------------------------------------

HEAD = """# Scoreboard

What the planner predicts for published measurements of other systems. `python -m headrace.planner.scoreboard
docs/scoreboard.md` writes this page; the figures are typed by hand in `src/headrace/planner/fixtures/`, each file with
source, date, and what the source leaves open.

How to read it:

- **untuned**: costs with constants from serving measurements alone; no RL step was seen (MFU 40 %, no overhead).
- **left out**: six constants (how much slower rollouts decode than serving, and the rate at which all but matrix
  products holds up training, for dense and mixture-of-experts models; overhead per optimizer step and per GB of
  weights) fitted to all other published steps. No row takes part in the fit that predicts it. Closed forms, each times
  what the simulator differs by with the built-in constants, which are fitted to all rows. Rows of several releases of
  one system resemble each other; `benchmarks/planner_accuracy.py` also holds out whole models and simulates every fit.
- **held out**: the fit saw steps of other sources only, and inputs that the source does not give were assumed.
- **formula**, **costs**: one formula or cost with the built-in constants. Hand-off constants were chosen on the rows of
  `weight_sync`; no constant was fitted to the rows of `prime_mfu`.
- **identity**: nothing is predicted; the source's own figures are checked against each other.
- Figures that contradict their own source are excluded, with the reason.
"""


def markdown(scores: Sequence[Score], fixtures: Sequence[Fixture]) -> str:
    """The whole page."""
    steps = [one for one in scores if one.basis == "left out" and one.quantity == "step_s"]
    ratios = [one for one in scores if one.quantity.startswith("speedup") and one.basis in ("left out", "held out")]
    others = [one for one in scores if one.basis == "held out" and one not in ratios]
    facts = [one for one in scores if one.basis in ("formula", "costs", "identity")]
    excluded = [one for one in scores if one.basis == "excluded"]
    names = models_of(fixtures)
    parts = [HEAD, "## Steps by model\n", _table(PARTITION_HEAD, _partition_rows(scores, names))]
    parts += ["## Steps\n", "Seconds per optimizer batch.\n", _table(STEP_HEAD, [_step_cells(one) for one in steps])]
    parts += ["## Ratios and negative controls\n", RATIO_TEXT, _table(RATIO_HEAD, [_ratio_cells(s) for s in ratios])]
    parts += ["## Facts\n", TRAINING_TEXT, facts_table(facts)]
    parts += ["## Other quantities of runs\n", facts_table(others)]
    parts += ["## Excluded\n", _table(EXCLUDED_HEAD, [_excluded_cells(one) for one in excluded])]
    parts += ["## Sources\n", sources_table(fixtures)]
    return "\n".join(parts)


PARTITION_HEAD = ("model", "steps", "untuned: mean absolute error", "left out: mean absolute error")
STEP_HEAD = ("source", "run", "published", "untuned", "error", "left out", "error", "grade", "where it fails")
RATIO_HEAD = ("source", "comparison", "published", "untuned", "left out", "direction", "note")
FACT_HEAD = ("source", "fact", "quantity", "published", "predicted", "error", "basis", "grade", "note")
EXCLUDED_HEAD = ("source", "row", "quantity", "published", "why")
SOURCE_HEAD = ("file", "source", "version", "licence", "confidence", "missing")
RATIO_TEXT = """Step seconds of the first over those of the second. Below 1 the change lost: a planner that always sees
a gain is wrong. "per GPU" means that the second run holds more chips, and that the direction is judged per chip.
"""


TRAINING_TEXT = """The trainer's rate saturates: matrix products at 60 % of the peak, and the rest at a rate that is
the same on every chip. That law was chosen on the steps above, where H100 and GB200 meet, so `prime_mfu` asks rows that
took no part. On H20 it is right, where scaling with the peak would be off by 60 to 70 %. From H100 to B200, where peaks
grow 2.28 times, trainers gained 1.07 to 1.94 times: the law says too little for mixtures of experts (1.13) and too much
for dense models (1.73). Shares of the peak on one 8-GPU node with FSDP are far below those of NeMo RL's tuned layouts,
which the rates come from, and so are those of vTrain's A100 runs (23 to 36 %, where the law says 54 %): calibrate with
a run of your own before you trust seconds of training.
"""


def facts_table(facts: Iterable[Score]) -> str:
    """Facts as Markdown; everything in it is arithmetic on the files, formulas and built-in constants."""
    return _table(FACT_HEAD, [_fact_cells(one) for one in facts])


def sources_table(fixtures: Iterable[Fixture]) -> str:
    """Where the figures come from."""
    rows = [
        (f"`{f.name}`", f.source, f.version, f.licence, f.confidence.replace("_", " "), "; ".join(f.missing))
        for f in fixtures
    ]
    return _table(SOURCE_HEAD, rows)


def _partition_rows(scores: Sequence[Score], names: Mapping[tuple[str, str], str]) -> list[tuple[str, ...]]:
    return [
        (name, str(count), f"{before:.0%}", f"{after:.0%}")
        for name, (count, before, after) in partitions(scores, names).items()
    ]


def _step_cells(one: Score) -> tuple[str, ...]:
    return (
        one.fixture, one.row, _number(one.published), _number(one.untuned), _percent(one.untuned_error_frac),
        _number(one.predicted), _percent(one.error_frac), one.grade, one.where,
    )  # fmt: skip


def _ratio_cells(one: Score) -> tuple[str, ...]:
    kind = one.quantity.removeprefix("speedup").strip(", ")
    name = f"{one.row} ({kind})" if kind else one.row
    numbers = ("" if ratio is None else f"{ratio:.2f}" for ratio in (one.published, one.untuned, one.predicted))
    return (one.fixture, name, *numbers, one.grade, one.where)


def _fact_cells(one: Score) -> tuple[str, ...]:
    return (
        one.fixture, one.row, one.quantity, _number(one.published), _number(one.predicted), _percent(one.error_frac),
        one.basis, one.grade, one.where,
    )  # fmt: skip


def _excluded_cells(one: Score) -> tuple[str, ...]:
    return (one.fixture, one.row, one.quantity, _number(one.published), one.where)


def _number(value: float | None) -> str:
    """Three or four significant digits, whole from 1,000 on."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.0%}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Write the page to the path given."""
    if len(arguments) != 1:
        raise PlanError("usage: python -m headrace.planner.scoreboard docs/scoreboard.md")
    fixtures = load_fixtures()
    Path(arguments[0]).write_text(markdown(score(fixtures), fixtures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
