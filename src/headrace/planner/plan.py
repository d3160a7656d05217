"""A plan: the best settings for a spec, with bands, what binds, what would change the answer, and what it rests on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config.load import document, load_document
from headrace.config.schema import RunConfig
from headrace.planner import sensitivity
from headrace.planner.assemble import CostBook
from headrace.planner.calibrations import choose
from headrace.planner.constants import Constants, weakest_grade
from headrace.planner.drift import drift_points
from headrace.planner.evaluate import Evaluated
from headrace.planner.facts import Grade
from headrace.planner.hosted import Hosted, hosted_lines
from headrace.planner.phases import Phase, phases, run_s
from headrace.planner.recipe import recipe_of_plan
from headrace.planner.search import Found, search
from headrace.planner.sensitivity import Band, Remedy, Sensitivity
from headrace.planner.spec import PlanSpec
from headrace.telemetry.format import duration

__all__ = ["Band", "Phase", "Plan", "Point", "Remedy", "Sensitivity", "Term", "plan"]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of the prediction, and what it rests on."""

    name: str
    grade: Grade
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One screened setting, by closed forms."""

    words: str
    mode: str
    samples_per_s: float
    lag_mean: float
    usd_per_mtok: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `plan` found. `ranked` is simulated, `points` are estimates."""

    spec: PlanSpec
    calibration: str
    calibration_date: str
    ranked: tuple[Evaluated, ...]
    """Best first, by the objective; every one keeps the limits."""
    best_sync: Evaluated | None
    """The fastest synchronous setting on all chips, limits left aside; None if sync cannot run here."""
    step_s: Band
    """Of the best plan: P10, simulated, P90."""
    speedup: Band | None
    """Best over best synchronous, in samples per second."""
    binding: str
    """One sentence."""
    remedies: tuple[Remedy, ...]
    sensitivities: tuple[Sensitivity, ...]
    terms: tuple[Term, ...]
    phases: tuple[Phase, ...]
    """Under drift: the best split along the run; empty without."""
    hosted: tuple[Hosted, ...]
    """List prices of hosted services for this model and workload; empty where none is known."""
    notes: tuple[str, ...]
    screened: int
    pruned: Mapping[str, int]
    points: tuple[Point, ...]
    plan_s: float
    """Seconds that planning took (not part of the JSON)."""

    @property
    def best(self) -> Evaluated:
        return self.ranked[0]

    @property
    def simulated(self) -> int:
        return len(self.ranked)

    @property
    def grade(self) -> Grade:
        """The weakest of the terms that decide the step time."""
        return weakest_grade(term.grade for term in self.terms if term.name in ("decode", "training"))

    def about(self) -> str:
        """What the best plan predicts, in a few lines: the comment on top of an emitted recipe."""
        best, metrics = self.best, self.best.metrics
        setting = best.setting
        lines = [
            f"Planned by `headrace plan` for {self.spec.model} on {self.spec.cluster.num_gpus} {self.spec.cluster.gpu}"
            f" (calibration: {self.calibration}).",
            f"{setting.words()}: {setting.engines} engines of {setting.gen_tp}, trainer tp {setting.train_tp} "
            f"pp {setting.train_pp} ep {setting.train_ep}.",
            f"Predicted: step {self.step_s.mid:.3g} s ({self.step_s.low:.3g} to {self.step_s.high:.3g}), "
            f"lag mean {metrics.lag_mean:.2f} p99 {metrics.lag_p99} max {metrics.lag_max}, "
            f"trainer waits {metrics.trainer_idle_frac:.0%}, wasted {metrics.wasted_frac:.0%}.",
        ]
        if setting.engines > 1 or self.spec.cluster.gpu != "cpu":
            lines.append(
                "This version launches one engine and one trainer on one machine; flow settings hold anywhere."
            )
        return "\n".join(lines)

    def recipe(self, base: RunConfig | None = None) -> str:
        """TOML for `headrace train`; what `base` says is kept, except for what the plan decides."""
        return recipe_of_plan(self.spec, self.best.setting, base=base, about=self.about())

    def to_json(self) -> str:
        """Everything but plan_s, stable: same spec, seed and calibration give the same bytes."""
        data: dict[str, Any] = {
            "spec": self.spec.model_dump(mode="json"),
            "calibration": self.calibration,
            "calibration_date": self.calibration_date,
            "grade": self.grade,
            "best": _evaluated(self.best),
            "best_sync": None if self.best_sync is None else _evaluated(self.best_sync),
            "step_s": asdict(self.step_s),
            "speedup": None if self.speedup is None else asdict(self.speedup),
            "binding": self.binding,
            "remedies": [asdict(r) for r in self.remedies],
            "sensitivities": [asdict(s) for s in self.sensitivities],
            "terms": [asdict(t) for t in self.terms],
            "phases": [asdict(p) for p in self.phases],
            "hosted": [asdict(h) for h in self.hosted],
            "notes": list(self.notes),
            "screened": self.screened,
            "pruned": dict(self.pruned),
            "ranked": [_evaluated(e) for e in self.ranked],
        }
        return json.dumps(data, indent=1, allow_nan=False)


def plan(
    spec: PlanSpec | Mapping[str, Any] | str | Path,
    *,
    constants: Constants | None = None,
    calibrations: Path | None = None,
    progress: Say | None = None,
) -> Plan:
    """Search, simulate the best, and say how sure that is.

    `spec`: a PlanSpec, the same as nested mappings, or the path of a TOML file (docs/plan-spec.md).
    `constants`: the calibration to use; else the spec's, looked up in the folder `calibrations`, else the newest there
    that knows this model and chip, else the seeds. Raises PlanError when nothing is possible, with what would be.
    """
    began_s = time.perf_counter()
    spec = _spec(spec)
    say: Say = progress or (lambda _: None)
    used = constants if constants is not None else choose(spec, calibrations)
    found = search(spec, constants=used, progress=lambda what, done, of: say(f"{what} {done + 1} of {of}"))
    say("weighing what would change it")
    book = CostBook(spec, used)
    speedup = sensitivity.speedup_band(spec, used, found) if found.best_sync is not None else None
    schedule = phases(spec, used, found, say) if len(drift_points(spec.drift)) > 1 else ()
    hosted = hosted_lines(book, found.best)
    return Plan(
        spec=spec,
        calibration=used.name,
        calibration_date=used.date,
        ranked=found.ranked,
        best_sync=found.best_sync,
        step_s=sensitivity.step_band(found.best),
        speedup=speedup,
        binding=sensitivity.binding_words(book, found.best),
        remedies=sensitivity.remedies(spec, used, found.best),
        sensitivities=sensitivity.sensitivities(spec, used, found),
        terms=_terms(book),
        phases=schedule,
        hosted=hosted,
        notes=(*_drift_note(spec, schedule), *_notes(book, found), *(line.words() for line in hosted)),
        screened=len(found.estimates),
        pruned=found.pruned,
        points=tuple(
            Point(
                words=setting.words(),
                mode=setting.mode,
                samples_per_s=estimate.samples_per_s,
                lag_mean=estimate.lag_mean,
                usd_per_mtok=estimate.usd_per_mtok,
            )
            for setting, estimate in found.estimates
        ),
        plan_s=time.perf_counter() - began_s,
    )


def _spec(given: PlanSpec | Mapping[str, Any] | str | Path) -> PlanSpec:
    if isinstance(given, PlanSpec):
        return given
    if isinstance(given, str | Path):
        return load_document(PlanSpec, given, what="spec")
    return document(PlanSpec, given)


def _terms(book: CostBook) -> tuple[Term, ...]:
    """What each part of the prediction rests on."""
    basis = book.basis()
    terms = [Term(name=name, grade=b.grade, source=f"calibration {b.name}") for name, b in basis.items()]
    response, cluster = book.spec.response, book.spec.cluster
    from_file = response.law == "file"
    terms.append(
        Term(
            name="lengths",
            grade="measured" if from_file else "guess",
            source=response.path
            if from_file
            else f"{response.law}, mean {response.mean_tok:g}, sigma {response.sigma:g}",
        )
    )
    terms.append(Term(name="model", grade=book.shape.grade, source=book.shape.source))
    memory = book.gen_chip.facts["hbm"]
    terms.append(Term(name="memory", grade=memory.grade, source=memory.source))
    if cluster.usd_per_gpu_h is not None:
        terms.append(Term(name="price", grade="spec", source=f"given: {cluster.usd_per_gpu_h:g} $/h"))
    else:
        price = book.gen_chip.usd_per_h
        terms.append(Term(name="price", grade=price.grade, source=f"{price.value:g} $/h, {price.source}, {price.date}"))
    return tuple(terms)


def _drift_note(spec: PlanSpec, schedule: Sequence[Phase]) -> list[str]:
    if not schedule:
        return []
    moved_s, static_s = run_s(spec.steps, schedule)
    kept = "cannot run to the end" if static_s is None else f"takes {duration(static_s)}"
    return [
        f"wall time and dollars above are those of the start; under this drift {spec.steps} steps take "
        f"{duration(moved_s)} when the split moves with it, and the first split kept {kept}"
    ]


def _notes(book: CostBook, found: Found) -> tuple[str, ...]:
    spec = book.spec
    notes = []
    if spec.response.law != "file":
        notes.append(
            f"response lengths are assumed ({spec.response.law}, mean {spec.response.mean_tok:g}, sigma "
            f"{spec.response.sigma:g}); response.law = 'file' with path = a run folder uses measured ones"
        )
    note = getattr(book.law, "note", "")
    if note:
        notes.append(note)
    if spec.search.objective == "quality":
        notes.append(
            f"the staleness penalty ({spec.search.penalty_per_lag:.0%} more steps per step of mean lag) is a guess"
        )
    if found.best_sync is None:
        notes.append("no synchronous setting is possible here, so there is no speed-up to show")
    return tuple(notes)


def _evaluated(found: Evaluated) -> dict[str, Any]:
    metrics = found.metrics
    shown = asdict(metrics) | {
        "lag_mean": metrics.lag_mean,
        "lag_p99": metrics.lag_p99,
        "lag_max": metrics.lag_max,
        "wasted_frac": metrics.wasted_frac,
        "trainer_idle_frac": metrics.trainer_idle_frac,
        "generator_idle_frac": metrics.generator_idle_frac,
    }
    return {
        "words": found.setting.words(),
        "setting": asdict(found.setting),
        "metrics": shown,
        "estimate": asdict(found.estimate),
        "generator_memory": asdict(found.generator_fit),
        "trainer_memory": asdict(found.trainer_fit),
        "usd_per_step": found.usd_per_step,
        "usd_per_mtok": found.usd_per_mtok,
        "usd": found.usd,
        "wall_s": {"p50": found.wall_s.p50, "p90": found.wall_s.p90, "p99": found.wall_s.p99},
        "error_frac": found.error_frac,
        "binding": found.binding,
        "mfu": found.trainer.mfu,
    }
