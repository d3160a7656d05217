"""From (spec, setting) to costs: the glue between tables of hardware, formulas and the simulator."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

from headrace.errors import PlanError
from headrace.planner.closed import DecodeArrays, LengthTable, length_table
from headrace.planner.constants import Basis, Constants, load
from headrace.planner.cost import EngineCost, HandOffCost, TrainerCost
from headrace.planner.draws import Draws
from headrace.planner.drift import drift_factors
from headrace.planner.engine_cost import engine_cost
from headrace.planner.handoff_cost import hand_off_cost
from headrace.planner.hardware import Chip, chip
from headrace.planner.lengths import LengthLaw, length_law
from headrace.planner.memory import MemoryFit, generator_memory, smallest_parallelism, trainer_memory
from headrace.planner.models import ModelShape, model
from headrace.planner.setting import Setting
from headrace.planner.simulate import Parts
from headrace.planner.spec import HandOffPolicy, PlanSpec
from headrace.planner.trainer_cost import trainer_cost
from headrace.planner.turns import turns_mean


@dataclass(frozen=True, slots=True)
class Workload:
    """Averages of one rollout, at one point of the run."""

    prompt_tok: float
    group_size: int
    table: LengthTable
    """Of response (sampled) tokens."""
    group_longest_tok: float
    batch_longest_tok: float
    turns: float
    tool_tok: float
    """Tokens that tools add to one rollout's context in all."""
    away_s: float
    """Seconds of one rollout outside the engine: sandbox start, tools, grading."""
    away_longest_s: float
    """The same for the slowest of a batch."""

    @property
    def resident_tok(self) -> float:
        """Mean context of a running rollout in a steady state."""
        return self.prompt_tok + self.table.resident_tok + self.tool_tok / 2

    def siblings(self, engines: float) -> float:
        """Members of a group that meet on one engine: rollouts go to the least loaded one."""
        return max(1.0, self.group_size / engines)

    def kv_tok(self, engines: float) -> float:
        """Mean KV entries of a running rollout; siblings on an engine share the prompt's while they run."""
        alive = max(1.0, self.siblings(engines) * self.table.mean_tok / self.group_longest_tok)
        return self.resident_tok - self.prompt_tok * (1.0 - 1.0 / alive)

    @property
    def sample_tok(self) -> float:
        """Mean tokens of a whole sample, which the trainer sees."""
        return self.prompt_tok + self.table.mean_tok + self.tool_tok

    @property
    def square_tok2(self) -> float:
        """E[sample tokens ^ 2], prompt and tool tokens taken as constant."""
        fixed = self.prompt_tok + self.tool_tok
        return fixed**2 + 2 * fixed * self.table.mean_tok + self.table.square_tok2


def workload(spec: PlanSpec, law: LengthLaw, turns_factor: float = 1.0) -> Workload:
    """Averages of `spec`'s rollouts under a length law. Raises PlanError for impossible turns."""
    episode = spec.episode
    turns = min(turns_mean(episode, turns_factor), max(1.0, law.mean_tok))  # each turn samples a token at least
    calls = turns - 1.0
    away_s = episode.start_s + episode.grade_s + calls * episode.tool_s
    # The slowest of n sums of geometrically many lognormal times, as the normal tail of their mean and variance.
    square = math.exp(min(episode.tool_sigma**2, 20.0))
    variance = (calls * square + calls * calls) * episode.tool_s**2
    high = math.sqrt(2.0 * math.log(max(spec.batch_samples, 2)))
    return Workload(
        prompt_tok=float(spec.prompt_tok),
        group_size=spec.group_size,
        table=length_table(law),
        group_longest_tok=law.max_of_members(spec.group_size),
        batch_longest_tok=law.max_of(spec.batch_groups, spec.group_size),
        turns=turns,
        tool_tok=calls * episode.tool_tok,
        away_s=away_s,
        away_longest_s=away_s + high * math.sqrt(variance),
    )


class CostBook:
    """Every cost of one spec at one point of the run, computed once per distinct argument.

    `at` is the share of the run (drift). Raises PlanError for unknown chips, models, calibrations, impossible lengths.
    """

    def __init__(self, spec: PlanSpec, constants: Constants | None = None, *, at: float = 0.0) -> None:
        self.spec = spec
        self.constants = constants if constants is not None else load(spec.calibration)
        self.shape: ModelShape = model(spec.model)
        cluster = spec.cluster
        self.mixed = bool(cluster.gpu_generate)
        """Generation has a pool of chips of its own."""
        if self.mixed != bool(cluster.num_generate):
            raise PlanError(
                f"cluster.gpu_generate = {cluster.gpu_generate!r} and cluster.num_generate = {cluster.num_generate} "
                "belong together: set both for a mixed pool, neither for one kind of chip"
            )
        self.train_chip: Chip = chip(cluster.gpu)
        self.gen_chip: Chip = chip(cluster.gpu_generate) if self.mixed else self.train_chip
        self.length_factor, self.turns_factor = drift_factors(spec.drift, at)
        law = length_law(spec.response)
        self.law: LengthLaw = law if self.length_factor == 1.0 else law.scaled(self.length_factor)
        self.workload = workload(spec, self.law, self.turns_factor)
        self.longest_tok = spec.prompt_tok + spec.response.cap_tok + self.workload.tool_tok
        """Context of a rollout that reaches the cap: what memory must hold on both sides."""
        self._open()

    def _open(self) -> None:
        """Costs are worked out when first asked for."""
        self.engine = cache(self._engine)
        self.arrays = cache(self._arrays)
        self.trainer = cache(self._trainer)
        self.layout = cache(self._layout)
        self.hand_off = cache(self._hand_off)
        self.generator_fit = cache(self._generator_fit)

    def with_constants(self, constants: Constants) -> CostBook:
        """The same spec under other constants. Its lengths, which no constant changes and which take most of the time
        to open a book, are shared."""
        book = copy(self)
        book.constants = constants
        book._open()
        return book

    def basis(self) -> dict[str, Basis]:
        """What each term rests on: the constants, or the chip's own figures where those are a guess."""
        gen, train, spec = self.gen_chip, self.train_chip, self.spec
        found = self.constants.basis(
            model=self.shape.name, gen_chip=gen.name, train_chip=train.name, precision=spec.precision
        )
        figures = {
            "decode": gen.facts.get("hbm_rate"),
            "prefill": gen.facts.get(spec.precision),
            "training": train.facts.get(spec.train_precision),
        }
        for term, figure in figures.items():
            basis = found[term]
            if figure is not None and figure.grade == "guess" and basis.grade != "measured":
                found[term] = Basis(f"{basis.name}; the chip's figures: {figure.source}", "guess")
        return found

    @property
    def usd_per_chip_s(self) -> tuple[float, float]:
        """Dollars per second of one (generator, trainer) chip: the spec's price, else the dated table's."""
        given = self.spec.cluster.usd_per_gpu_h
        gen, train = self.gen_chip.usd_per_h.value, self.train_chip.usd_per_h.value
        return (gen / 3600.0, train / 3600.0) if given is None else (given / 3600.0, given / 3600.0)

    def usd_per_s(self, setting: Setting) -> float:
        """Dollars per second of all chips that the setting holds."""
        gen_usd, train_usd = self.usd_per_chip_s
        return gen_usd * setting.gen_gpus + (0.0 if setting.colocated else train_usd * setting.train_gpus)

    def draws(self) -> Draws:
        """The random rollouts of this spec: the same for every setting."""
        return Draws(self.spec, seed=self.spec.seed, law=self.law, turns_factor=self.turns_factor)

    def _engine(self, gen_tp: int) -> EngineCost:
        """One engine of gen_tp generator chips."""
        spec = self.spec
        return engine_cost(
            self.shape,
            self.gen_chip,
            tp=gen_tp,
            precision=spec.precision,
            mem_frac=spec.cluster.mem_frac,
            max_seqs=spec.cluster.max_seqs,
            context_tok=self.workload.resident_tok,
            constants=self.constants,
            accept_tok=spec.spec_accept_tok,
            draft_frac=spec.spec_draft_frac if spec.spec_accept_tok > 1.0 else 0.0,
        )

    def _arrays(self, gen_tp: int) -> DecodeArrays:
        """The same engine's decode table, vectorised."""
        return DecodeArrays(self.engine(gen_tp))

    def _generator_fit(self, gen_tp: int) -> MemoryFit:
        """Of one chip of an engine that must hold one rollout at the cap."""
        cluster = self.spec.cluster
        return generator_memory(
            self.shape,
            self.gen_chip,
            tp=gen_tp,
            precision=self.spec.precision,
            mem_frac=cluster.mem_frac,
            max_seqs=cluster.max_seqs,
            context_tok=self.longest_tok,
            constants=self.constants,
        )

    def _layout(self, train_gpus: int) -> tuple[int, int, int]:
        """(tp, pp, ep) of the fastest trainer that fits `train_gpus` chips. Raises PlanError with what would fit."""
        spec = self.spec
        layouts = smallest_parallelism(
            self.shape,
            self.train_chip,
            train_gpus,
            precision=spec.train_precision,
            lora=spec.lora,
            seq_tok=self.longest_tok,
            constants=self.constants,
            reference=self._has_reference,
        )
        allowed = [layout for layout in layouts if not spec.search.train_tp or layout[0] in spec.search.train_tp]
        if not allowed:
            raise PlanError(
                f"search.train_tp = {list(spec.search.train_tp)} fits no trainer of {train_gpus} "
                f"{self.train_chip.name}; possible: {sorted({tp for tp, _, _ in layouts})}"
            )
        # Expert width changes memory, not time: the first of each (tp, pp) is the one that needs fewest chips.
        narrow = list({layout[:2]: layout for layout in reversed(allowed)}.values())[::-1]
        return min(narrow, key=lambda layout: self.batch_s(self.trainer(train_gpus, *layout)))

    @property
    def _has_reference(self) -> bool:
        """Two log-prob passes: those of the old policy and of a frozen reference, whose weights need room."""
        return self.spec.logprob_passes >= 2

    def trainer_fit(self, setting: Setting) -> MemoryFit:
        """Of one trainer chip, at its worst instant."""
        return trainer_memory(
            self.shape,
            self.train_chip,
            gpus=setting.train_gpus,
            tp=setting.train_tp,
            pp=setting.train_pp,
            ep=setting.train_ep,
            precision=self.spec.train_precision,
            lora=self.spec.lora,
            seq_tok=self.longest_tok,
            constants=self.constants,
            reference=self._has_reference,
        )

    def batch_s(self, trainer: TrainerCost, update_split: int = 1) -> float:
        """Seconds of a mean batch; each of its optimizer steps pays the fixed part."""
        tok2 = self.spec.batch_samples * self.workload.square_tok2
        return trainer.batch_s(self.batch_tok, tok2) + (update_split - 1) * trainer.fixed_s

    @property
    def batch_tok(self) -> float:
        """Tokens of a mean batch that the trainer computes."""
        spec, work = self.spec, self.workload
        once = (spec.batch_samples - spec.batch_groups) * work.prompt_tok if spec.share_prompts else 0.0
        return spec.batch_samples * work.sample_tok - once

    def _trainer(self, train_gpus: int, tp: int, pp: int, ep: int) -> TrainerCost:
        """Training a mean batch, packed into sequences as long as the longest sample."""
        spec = self.spec
        return trainer_cost(
            self.shape,
            self.train_chip,
            gpus=train_gpus,
            tp=tp,
            pp=pp,
            ep=ep,
            precision=spec.train_precision,
            lora=spec.lora,
            logprob_passes=spec.logprob_passes,
            seq_tok=self.longest_tok,
            batch_tok=self.batch_tok,
            constants=self.constants,
        )

    def _hand_off(
        self, policy: HandOffPolicy, train_gpus: int, gen_gpus: int, gen_tp: int, colocated: bool
    ) -> HandOffCost:
        spec = self.spec
        return hand_off_cost(
            self.shape,
            self.train_chip,
            self.gen_chip,
            policy=policy,
            train_gpus=train_gpus,
            gen_gpus=gen_gpus,
            gen_tp=gen_tp,
            precision=spec.precision,
            lora=spec.lora,
            constants=self.constants,
            colocated=colocated,
        )

    def hand_off_of(self, setting: Setting) -> HandOffCost:
        """One version of this setting on its way. Chips that are lent pay the switch of colocated ones."""
        place = setting.train_gpus, setting.gen_gpus, setting.gen_tp
        cost = self.hand_off(setting.hand_off, *place, setting.colocated)
        if not setting.lent_gpus:
            return cost
        return replace(cost, switch_s=self.hand_off(setting.hand_off, *place, True).switch_s)

    def trainer_of(self, setting: Setting) -> TrainerCost:
        """This setting's trainer."""
        return self.trainer(setting.train_gpus, setting.train_tp, setting.train_pp, setting.train_ep)


def decoding_engines(setting: Setting, prefill_split: float) -> int:
    """Engines that decode when a share of them only prefills; at least one of each kind."""
    if prefill_split == 0.0 or setting.engines < 2:
        return setting.engines
    return min(max(1, round(setting.engines * (1.0 - prefill_split))), setting.engines - 1)


def parts_of(spec: PlanSpec, setting: Setting, constants: Constants | None = None, *, at: float = 0.0) -> Parts:
    """What the simulator needs to play `setting`. Raises PlanError where the spec or the setting cannot work."""
    return parts(CostBook(spec, constants, at=at), setting)


def parts(book: CostBook, setting: Setting) -> Parts:
    """The same from a book that is already open.

    With a prefill/decode split only the decoding engines are simulated and prefill takes no time on them; the closed
    form caps the rate at what the prefilling ones do.
    """
    spec = book.spec
    engine = book.engine(setting.gen_tp)
    if spec.prefill_split > 0 and setting.engines > 1:
        engine = replace(engine, prefill_s_per_tok=0.0, prefill_s_per_tok2=0.0, prefill_s_min=0.0)
    return Parts(
        flow=setting.flow(spec),
        engines=(engine,) * decoding_engines(setting, spec.prefill_split),
        trainer=book.trainer_of(setting),
        hand_off=book.hand_off_of(setting),
        colocated=setting.colocated,
        updates=setting.update_split,
        lent=(engine,) * (setting.lent_gpus // setting.gen_tp),
        hand_off_policy=setting.hand_off,
        keep_kv=spec.episode.keep_kv,
        sandboxes=spec.episode.sandboxes,
        share_prompts=spec.share_prompts,
    )
