"""Published measurements of other systems, as typed data: what the scoreboard compares the planner with.

Each file of fixtures/ is one source: where it comes from, what is missing in it, and three kinds of rows. Runs are
whole RL steps in the planner's own terms; ratios compare two runs; facts are single numbers under a named rule.
A figure that contradicts its own source stays in the file and is excluded, with the reason.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from headrace.config.schema import Fraction, Positive, Section
from headrace.errors import PlanError, did_you_mean
from headrace.planner.setting import Setting
from headrace.planner.spec import (
    ClusterConfig,
    HandOffPolicy,
    LimitsConfig,
    Mode,
    PlanSpec,
    Precision,
    ResponseConfig,
    SearchConfig,
)

Confidence = Literal["complete", "partial", "sign_only"]
Rule = Literal[
    "hit_cap",
    "idle",
    "kv_running",
    "kv_throughput",
    "ledger",
    "little",
    "mfu",
    "note",
    "overlap",
    "pipelinerl",
    "pipelinerl_lag",
    "sign_gain",
    "spec_decode",
    "staleness",
    "tail_share",
    "train_gain",
    "train_mfu",
    "usd_per_mtok",
    "wait_plus_train",
    "wall_share",
    "weight_sync",
]
RULES: tuple[str, ...] = get_args(Rule)
Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RunTerms(Section):
    """One RL run: everything that a spec and a setting need."""

    model: str
    gpu: str
    precision: Precision = "bf16"
    mode: Mode
    colocated: bool = False
    gen_gpus: Count
    train_gpus: Annotated[int, Field(ge=0)] = 0
    """0 where colocated: the generator's."""
    gen_tp: Count = 1
    train_tp: Count = 1
    train_pp: Count = 1
    train_ep: Count = 1
    lag: Annotated[int, Field(ge=0)] = 0
    hand_off: HandOffPolicy = "stop"
    groups: Count
    group_size: Annotated[int, Field(ge=2)]
    updates: Count = 1
    """Optimizer steps per batch."""
    passes: Annotated[int, Field(ge=0, le=3)] = 0
    """Log-prob passes of the trainer beside the update."""
    prompt_tok: Count
    mean_tok: Positive
    cap_tok: Count
    sigma: Annotated[float, Field(ge=0.0, le=3.0)] = 1.0
    sigma_within: Annotated[float, Field(ge=0.0, le=3.0)] = 0.35
    mem_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    max_seqs: Count = 256
    oversample: Annotated[float, Field(ge=0.0, le=4.0)] = 0.0
    zero_signal_frac: Fraction = 0.0
    lent_gpus: Annotated[int, Field(ge=0)] = 0
    running: Annotated[int, Field(ge=0)] = 0
    """Rollouts at once; 0 = as many as the lag allows."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.colocated == bool(self.train_gpus):
            raise ValueError("give train_gpus for separate pools, colocated = true for a shared one")
        if self.gen_gpus % self.gen_tp:
            raise ValueError(f"gen_gpus = {self.gen_gpus} is no multiple of gen_tp = {self.gen_tp}")
        return self

    @property
    def samples(self) -> int:
        """Rollouts per optimizer batch."""
        return self.groups * self.group_size

    @property
    def gpus(self) -> int:
        """Chips that are paid for."""
        return self.gen_gpus + self.train_gpus

    def spec(self, *, seed: int = 0) -> PlanSpec:
        """The same as a spec whose search leaves nothing open."""
        return PlanSpec(
            model=self.model,
            precision=self.precision,
            batch_groups=self.groups,
            group_size=self.group_size,
            prompt_tok=self.prompt_tok,
            zero_signal_frac=self.zero_signal_frac,
            logprob_passes=self.passes,
            seed=seed,
            response=ResponseConfig(
                mean_tok=self.mean_tok, cap_tok=self.cap_tok, sigma=self.sigma, sigma_within=self.sigma_within
            ),
            cluster=ClusterConfig(gpu=self.gpu, num_gpus=self.gpus, mem_frac=self.mem_frac, max_seqs=self.max_seqs),
            limits=LimitsConfig(max_lag_steps=self.lag),
            search=SearchConfig(modes=(self.mode,), oversample=(self.oversample,), update_splits=(self.updates,)),
        )

    def setting(self) -> Setting:
        """The same as a point of the search."""
        allowed = self.running or int((self.lag + 1) * self.samples * (1.0 + self.oversample))
        return Setting(
            mode=self.mode,
            colocated=self.colocated,
            gen_gpus=self.gen_gpus,
            train_gpus=self.gen_gpus if self.colocated else self.train_gpus,
            gen_tp=self.gen_tp,
            train_tp=self.train_tp,
            train_pp=self.train_pp,
            train_ep=self.train_ep,
            max_running=min(allowed, self.gen_gpus // self.gen_tp * self.max_seqs),
            max_lag_steps=self.lag,
            hand_off=self.hand_off,
            oversample=self.oversample,
            update_split=self.updates,
            lent_gpus=self.lent_gpus,
        )


class Row(Section):
    """What every row has."""

    name: str
    published: dict[str, Finite]
    """Quantity to number, units in the name."""
    excluded: dict[str, str] = Field(default_factory=dict)
    """Quantity to the reason why it is not scored."""
    assumed: tuple[str, ...] = ()
    """Inputs that we chose, because the source does not say."""
    note: str = ""

    @model_validator(mode="after")
    def _excluded_exist(self) -> Self:
        for quantity in self.excluded:
            if quantity not in self.published:
                raise ValueError(f"{self.name}: excluded {quantity!r}; {did_you_mean(quantity, self.published)}")
        return self

    @property
    def scored(self) -> dict[str, float]:
        """Published figures that are neither excluded nor contradictory."""
        return {name: value for name, value in self.published.items() if name not in self.excluded}


class RunRow(Row):
    """A run whose step seconds (or other quantities) are published."""

    run: RunTerms


class RatioRow(Section):
    """How much faster one run's step is than another's."""

    name: str
    base: str
    """Row of the slower-by-intention run."""
    other: str
    speedup: Positive
    """base step_s / other step_s; below 1 the other lost."""
    per_gpu: bool = False
    """The two hold different numbers of chips, and per chip the gain turns into a loss."""
    sign_only: bool = False
    """Only the direction is compared."""
    note: str = ""


class FactRow(Row):
    """Numbers under a rule; `note` is a figure to read, not to score."""

    rule: Rule
    inputs: dict[str, Finite | str] = Field(default_factory=dict)

    def number(self, name: str) -> float:
        """An input that must be a number. Raises PlanError naming the row."""
        value = self.inputs.get(name)
        if not isinstance(value, float | int):
            raise PlanError(f"{self.name}: rule {self.rule} needs the number {name!r}; given: {sorted(self.inputs)}")
        return float(value)

    def word(self, name: str) -> str:
        """An input that must be text. Raises PlanError naming the row."""
        value = self.inputs.get(name)
        if not isinstance(value, str):
            raise PlanError(f"{self.name}: rule {self.rule} needs the name {name!r}; given: {sorted(self.inputs)}")
        return value


class Fixture(Section):
    """One source."""

    name: str
    """File name without .yaml."""
    title: str
    source: str
    version: str
    """Commit, release or date."""
    read: str
    """When we read it."""
    licence: str
    confidence: Confidence
    """complete: absolute numbers are compared. partial: some inputs are assumed. sign_only: directions."""
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[RunRow, ...] = ()
    ratios: tuple[RatioRow, ...] = ()
    facts: tuple[FactRow, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for rows in (self.runs, self.facts, self.ratios):
            names = [row.name for row in rows]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"two rows are named {twice[0]!r}")
        known = [row.name for row in self.runs]
        for ratio in self.ratios:
            for name in (ratio.base, ratio.other):
                if name not in known:
                    raise ValueError(f"ratio {ratio.name!r} names the run {name!r}; {did_you_mean(name, known)}")
        return self

    def run(self, name: str) -> RunRow:
        """A run by name; PlanError with the nearest names otherwise."""
        for row in self.runs:
            if row.name == name:
                return row
        raise PlanError(f"{self.name} has no run {name!r}; {did_you_mean(name, [row.name for row in self.runs])}")


def parse_fixture(name: str, text: str) -> Fixture:
    """A fixture from YAML text. `templates:` holds anchors for the rows and is not read itself.

    Raises PlanError naming the file, the place and what is wrong.
    """
    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise PlanError(f"fixtures/{name}.yaml is no YAML: {exc}") from exc
    if not isinstance(data, dict):
        raise PlanError(f"fixtures/{name}.yaml must hold a mapping, not {type(data).__name__}")
    data.pop("templates", None)
    try:
        return Fixture.model_validate({**data, "name": name})
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"fixtures/{name}.yaml: {where}: {first['msg']} (got {first['input']!r:.80})") from exc


def fixture_names() -> tuple[str, ...]:
    """Names of the shipped files, sorted."""
    found = (entry.name for entry in files(__package__).joinpath("fixtures").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


@cache
def load_fixture(name: str) -> Fixture:
    """A shipped fixture by name. Raises PlanError with the nearest names."""
    names = fixture_names()
    if name not in names:
        raise PlanError(f"no fixture {name!r}; {did_you_mean(name, names)}")
    text = files(__package__).joinpath("fixtures", f"{name}.yaml").read_text(encoding="utf-8")
    return parse_fixture(name, text)


def load_fixtures() -> tuple[Fixture, ...]:
    """All shipped fixtures, by name."""
    return tuple(load_fixture(name) for name in fixture_names())
