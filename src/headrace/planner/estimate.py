"""Closed-form estimates of thousands of settings at once: what the search screens with.

Pipeline settings are vectors, one entry per setting, for each engine width. Modes that take turns share few distinct
generation phases, which are integrated once each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from headrace.planner.assemble import CostBook, decoding_engines
from headrace.planner.closed import BatchTime, Estimate, Steady, batch_time, engine_slots, keep_frac, steady
from headrace.planner.cost import HandOffCost
from headrace.planner.normal import Floats
from headrace.planner.setting import Setting

MAX_P = 8.0
"""Exponent of the smooth maximum of generation, training and the bound on lag: sides that are nearly as fast as each
other wait for each other now and then. Two equal ones take 9 % longer than one, as in our simulator."""
LENT_SHARE = 0.5
"""Of a lent engine's rate that counts: what runs there when it is called back is computed again elsewhere."""
HAND_OFF_SHARE = 0.4
"""A side that spends more of its time on hand-offs than this is bound by them."""


class Estimator:
    """Estimates for one book of costs."""

    def __init__(self, book: CostBook) -> None:
        self.book = book
        spec, work = book.spec, book.workload
        self._keep = keep_frac(spec.zero_signal_frac, spec.episode.fail_frac / 2)  # half an attempt is lost
        table = work.table
        self._batch_draws = table.independent(work.batch_longest_tok)
        self._group_draws = table.independent(work.group_longest_tok)
        self._generation = cache(self._generate_batch)
        self._oldest_tok = cache(self._longest_within)
        self.slots = cache(self._slots)
        self.seats = cache(self._seats)
        self.prefill_s = cache(self._prefill_s)

    def all(self, settings: Sequence[Setting]) -> list[Estimate]:
        """One estimate per setting, in order."""
        found: dict[int, Estimate] = {}
        widths: dict[int, list[int]] = defaultdict(list)
        for i, setting in enumerate(settings):
            if setting.mode == "pipeline":
                widths[setting.gen_tp].append(i)
            else:
                found[i] = self._in_turns(setting)
        for gen_tp, places in widths.items():
            found.update(zip(places, self._pipelines(gen_tp, [settings[i] for i in places]), strict=True))
        return [found[i] for i in range(len(settings))]

    # ---- what both need ----------------------------------------------------------------------------------------------

    def _slots(self, gen_tp: int, engines: float) -> float:
        """Rollouts that one engine of so many holds at once in a steady state, at most."""
        return engine_slots(self.book.engine(gen_tp), self.book.workload.kv_tok(engines))

    def _seats(self, gen_tp: int, engines: float) -> float:
        """Rollouts in flight that keep every slot busy: those in tools come on top."""
        engine, work = self.book.engine(gen_tp), self.book.workload
        running = max(1.0, self.slots(gen_tp, engines))
        step_s = float(self.book.arrays(gen_tp).step_s(running, running * work.resident_tok))
        on_engine_s = work.table.mean_tok / engine.accept_tok * step_s + running * self.prefill_s(gen_tp, engines)
        return engines * running * (1.0 + work.away_s / on_engine_s)

    def _prefill_s(self, gen_tp: int, engines: float) -> float:
        """Engine seconds of prefill per rollout: its share of the prompt, and what tools add.

        Siblings spread over the engines; those that meet on one share the prompt. 0 where other chips prefill.
        """
        return 0.0 if self.book.spec.prefill_split > 0 else self._prefill_alone_s(gen_tp, engines)

    def _prefill_alone_s(self, gen_tp: int, engines: float) -> float:
        engine, work = self.book.engine(gen_tp), self.book.workload
        seconds = engine.prefill_s(work.prompt_tok) / work.siblings(engines)
        calls = work.turns - 1.0
        if calls > 0:
            added, before = work.tool_tok / calls, work.resident_tok
            keep_kv = self.book.spec.episode.keep_kv
            seconds += calls * (engine.prefill_s(added, before) if keep_kv else engine.prefill_s(added + before))
        return seconds

    def hand_off(self, setting: Setting) -> HandOffCost:
        """One version on its way."""
        return self.book.hand_off_of(setting)

    def decoders(self, setting: Setting) -> float:
        """Engines that decode; the rest of a prefill/decode split prefills."""
        return decoding_engines(setting, self.book.spec.prefill_split)

    def generation_words(self, gen_tp: int, engines: float, running: float, away_share: float) -> str:
        """Which resource of generation to widen."""
        engine, work = self.book.engine(gen_tp), self.book.workload
        if away_share > 0.5:
            return "environment"
        if self.book.arrays(gen_tp).compute_bound(max(running, 1.0), running * work.resident_tok):
            return "generation: compute"
        slots = self.slots(gen_tp, engines)
        return "generation: KV" if slots < engine.max_running and running > 0.9 * slots else "generation: slots"

    # ---- pipeline ----------------------------------------------------------------------------------------------------

    def _pipelines(self, gen_tp: int, settings: Sequence[Setting]) -> list[Estimate]:
        book = self.book
        spec, work, engine = book.spec, book.workload, book.engine(gen_tp)
        samples, groups, members = spec.batch_samples, spec.batch_groups, spec.group_size
        hand_offs = [self.hand_off(s) for s in settings]
        publish_s, transfer_s, pause_s = (
            _floats(getattr(h, name) for h in hand_offs) for name in ("publish_s", "transfer_s", "pause_s")
        )
        engines = _floats(self.decoders(s) for s in settings)
        seats = _floats(self._seats_of(s) for s in settings) - (members - 1) / 2  # a group waits for all its seats
        slots = _floats(self.slots(gen_tp, n) for n in engines)
        prefill_s = _floats(self.prefill_s(gen_tp, n) for n in engines)
        run = steady(
            engine,
            book.arrays(gen_tp),
            in_system=np.maximum(seats, 1.0) / engines,
            slots=slots,
            tok=work.table.mean_tok,
            context_tok=work.resident_tok,
            prefill_s=prefill_s,
            away_s=work.away_s,
        )
        rate = engines * run.rollouts_per_s
        if spec.prefill_split > 0:
            prefillers = _floats(s.engines for s in settings) - engines
            alone_s = _floats(self._prefill_alone_s(gen_tp, n) for n in engines)
            rate = np.minimum(rate, np.maximum(prefillers, 1.0) / np.maximum(alone_s, 1e-12))
        stands_s = pause_s + np.where([s.hand_off == "stop" for s in settings], transfer_s, 0.0)
        gen_s = samples / (rate * self._keep) + stands_s
        work_s = _floats(book.batch_s(book.trainer_of(s), s.update_split) for s in settings)
        train_s = work_s + publish_s

        gen_s = self._with_lent(settings, hand_offs, gen_s, stands_s, rate, train_s, engines)
        lag = _floats(s.max_lag_steps for s in settings)
        held = np.ceil((lag + 1) * groups * (1 + _floats(s.oversample for s in settings)) - 1e-9)
        landing_s = transfer_s + pause_s
        oldest_tok = _floats(self._oldest_tok(s.max_lag_steps) for s in settings)

        def bound_s(token_s: Floats) -> Floats:
            """Seconds per step that the bound on lag demands when a token takes token_s.

            A rollout may take lag + 1 steps before the trainer waits for it: within 22 % of our simulator (four
            workloads, lag 1 to 8, where nothing else binds); batches of few groups take longer at lag 1 and 2.
            """
            group_s = work.group_longest_tok * token_s + work.away_s
            held_s = group_s / (1.0 - spec.zero_signal_frac) + train_s + landing_s
            little_s = groups * held_s / (held - groups / 2)
            oldest_s = (oldest_tok * token_s + work.away_longest_s) / (lag + 1.0)
            return np.maximum(little_s, oldest_s)

        token_s, held_back_s = self._held_back(gen_tp, run, prefill_s, gen_s, stands_s, bound_s)
        group_s = work.group_longest_tok * token_s + work.away_s
        slowest_s = np.maximum(np.maximum(gen_s, train_s), held_back_s)
        step_s = slowest_s * sum((each_s / slowest_s) ** MAX_P for each_s in (gen_s, train_s, held_back_s)) ** (
            1 / MAX_P
        )

        waits_s = np.where(gen_s < slowest_s, held * step_s / groups - train_s - landing_s, group_s + step_s / 2)
        taken_s = np.clip(waits_s, group_s, np.maximum(lag * step_s, group_s))
        age_s = work.table.resident_tok * token_s
        lag_mean = np.clip((taken_s - age_s + landing_s) / step_s, 0.0, lag)
        out = []
        for i, setting in enumerate(settings):
            if held_back_s[i] >= slowest_s[i]:
                binding = "lag bound"
            elif train_s[i] >= slowest_s[i]:
                binding = "hand-off" if publish_s[i] > HAND_OFF_SHARE * step_s[i] else "training"
            elif stands_s[i] > HAND_OFF_SHARE * step_s[i]:
                binding = "hand-off"
            else:
                away_share = work.away_s / (work.away_s + float(run.rollout_s[i]))
                binding = self.generation_words(gen_tp, float(engines[i]), float(run.running[i]), away_share)
            out.append(
                self._estimate(
                    setting, float(step_s[i]), float(gen_s[i]), float(train_s[i]), float(lag_mean[i]), binding
                )
            )
        return out

    def _longest_within(self, lag: int) -> float:
        """Expected longest of the rollouts that are admitted within `lag` steps."""
        spec = self.book.spec
        return self.book.law.max_of(lag * spec.batch_groups, spec.group_size)

    def _held_back(
        self,
        gen_tp: int,
        run: Steady,
        prefill_s: Floats,
        gen_s: Floats,
        stands_s: Floats,
        bound_s: Callable[[Floats], Floats],
    ) -> tuple[Floats, Floats]:
        """(seconds per token, seconds per step) where the bound on lag meets generation.

        A bound that holds groups back also empties the engines, which then decode faster: with a share x of the
        running sequences, generation takes gen_s * speed / x and a token less time. x is where both agree, or 1.
        """
        work, engine, arrays = self.book.workload, self.book.engine(gen_tp), self.book.arrays(gen_tp)
        tok = work.table.mean_tok

        def token_s(share: Floats) -> Floats:
            running = np.maximum(run.running * share, 1.0)
            return arrays.step_s(running, running * work.resident_tok) / engine.accept_tok + running * prefill_s / tok

        full_s = token_s(np.ones_like(gen_s))
        low, high = np.zeros_like(gen_s), np.ones_like(gen_s)
        for _ in range(16):
            share = (low + high) / 2
            each_s = token_s(share)
            slower = (gen_s - stands_s) * each_s / (full_s * share) + stands_s > bound_s(each_s)
            low, high = np.where(slower, share, low), np.where(slower, high, share)
        each_s = np.where(gen_s >= bound_s(full_s), full_s, token_s(high))
        return each_s, bound_s(each_s)

    def _with_lent(
        self,
        settings: Sequence[Setting],
        hand_offs: Sequence[HandOffCost],
        gen_s: Floats,
        stands_s: Floats,
        rate: Floats,
        train_s: Floats,
        engines: Floats,
    ) -> Floats:
        """Seconds of generation when trainer chips help from the end of training on, less two switches.

        B = own * s + lent * (s - busy) solved for s, where that is longer than busy.
        """
        lent = _floats(s.lent_gpus // s.gen_tp for s in settings)
        if not lent.any():
            return gen_s
        busy_s = train_s + 2.0 * _floats(h.switch_s for h in hand_offs)
        needed = (gen_s - stands_s) * rate
        lent_rate = LENT_SHARE * rate / engines * lent
        helped_s = (needed + lent_rate * busy_s) / (rate + lent_rate) + stands_s
        return np.where((lent > 0) & (gen_s > busy_s), np.minimum(gen_s, helped_s), gen_s)

    # ---- modes that take turns ---------------------------------------------------------------------------------------

    def _in_turns(self, setting: Setting) -> Estimate:
        book = self.book
        hand_off = self.hand_off(setting)
        generation = self._generation(
            setting.gen_tp, self.decoders(setting), setting.oversample, self._seats_of(setting)
        )
        away_s, extra_s = book.workload.away_longest_s, self._refill_s(setting)
        gen_s = max(generation.wall_s + away_s + extra_s, self._sandbox_s(setting))
        work_s = book.batch_s(book.trainer_of(setting), setting.update_split)
        train_s = work_s + hand_off.publish_s
        moved_s = hand_off.transfer_s + hand_off.pause_s
        words = self.generation_words(setting.gen_tp, self.decoders(setting), generation.running, 0.0)
        tail_s = generation.tail_s + extra_s
        if setting.mode == "sync":
            moved_s += 2.0 * hand_off.switch_s if setting.colocated else 0.0
            step_s, lag_mean = gen_s + train_s + moved_s, 0.0
            shares = {"training": work_s, "hand-off": moved_s + hand_off.publish_s}
        else:
            step_s, lag_mean = max(gen_s, train_s) + moved_s, 1.0
            shares = {"training": train_s if train_s > gen_s else 0.0, "hand-off": moved_s}
        if setting.mode == "sync" or gen_s >= train_s:
            bulk_s = max(0.0, generation.wall_s - generation.tail_s)
            shares |= {words: bulk_s, "tail (sync)": tail_s, "environment": gen_s - bulk_s - tail_s}
        binding = max(shares, key=shares.__getitem__)
        return self._estimate(setting, step_s, gen_s, train_s, lag_mean, binding)

    def _generate_batch(self, gen_tp: int, engines: float, oversample: float, max_running: int) -> BatchTime:
        book = self.book
        spec, work = book.spec, book.workload
        return batch_time(
            book.engine(gen_tp),
            book.arrays(gen_tp),
            work.table,
            sequences=spec.batch_samples * (1.0 + oversample) / engines,
            independent=self._batch_draws,
            prompt_tok=work.prompt_tok + work.tool_tok / 2,
            shared_tok=work.resident_tok - work.kv_tok(engines),
            prefill_s=self.prefill_s(gen_tp, engines),
            seats=max_running / engines,
            until_frac=1.0 / (1.0 + oversample),
            group_draws=self._group_draws,
        )

    def _refill_s(self, setting: Setting) -> float:
        """Taking turns, zero-signal groups are replaced: the longest chain of replacements, or all of their work.

        The most of n geometric numbers exceeds the first draw by about (ln n + 0.58) / ln(1/z); each replacement runs
        nearly alone and takes the longest of a group.
        """
        spec, work, engine = self.book.spec, self.book.workload, self.book.engine(setting.gen_tp)
        zero = spec.zero_signal_frac
        if zero == 0.0:
            return 0.0
        arrays, tok, context_tok = self.book.arrays(setting.gen_tp), work.table.mean_tok, work.resident_tok
        chain = max(zero / (1.0 - zero), (math.log(spec.batch_groups) + 0.5772) / -math.log(zero) - 0.5)
        few = float(min(spec.group_size, engine.max_running))
        chain_s = (
            work.group_longest_tok / engine.accept_tok * float(arrays.step_s(few, few * context_tok)) + work.away_s
        )
        engines = self.decoders(setting)
        running = max(1.0, min(self.slots(setting.gen_tp, engines), self._seats_of(setting) / engines))
        each_s = tok / engine.accept_tok * float(arrays.step_s(running, running * context_tok)) / running
        work_s = spec.batch_samples * zero / (1.0 - zero) / engines * each_s
        return max(chain * chain_s, work_s)

    def _sandbox_s(self, setting: Setting) -> float:
        """Seconds of a batch whose rollouts take turns in too few sandboxes."""
        spec, work, engine = self.book.spec, self.book.workload, self.book.engine(setting.gen_tp)
        if not spec.episode.sandboxes:
            return 0.0
        running = max(1.0, min(self._seats_of(setting) / self.decoders(setting), engine.max_running))
        step_s = float(self.book.arrays(setting.gen_tp).step_s(running, running * work.resident_tok))
        each_s = work.away_s + work.table.mean_tok / engine.accept_tok * step_s
        return spec.batch_samples / self._keep * each_s / spec.episode.sandboxes

    def _seats_of(self, setting: Setting) -> int:
        """Rollouts at once: the setting's, or as many as there are sandboxes."""
        sandboxes = self.book.spec.episode.sandboxes
        return min(setting.max_running, sandboxes) if sandboxes else setting.max_running

    # ---- accounts ----------------------------------------------------------------------------------------------------

    def _estimate(
        self, setting: Setting, step_s: float, gen_s: float, train_s: float, lag_mean: float, binding: str
    ) -> Estimate:
        book = self.book
        samples = book.spec.batch_samples
        usd = book.usd_per_s(setting) * step_s
        return Estimate(
            step_s=step_s,
            samples_per_s=samples / step_s,
            gen_s=gen_s,
            train_s=train_s,
            rho=train_s / gen_s,
            trainer_idle_frac=max(0.0, 1.0 - train_s / step_s),
            generator_idle_frac=max(0.0, 1.0 - gen_s / step_s),
            lag_mean=lag_mean,
            usd_per_step=usd,
            usd_per_mtok=usd / (samples * book.workload.table.mean_tok) * 1e6,
            slots=int(self.slots(setting.gen_tp, self.decoders(setting)) * self.decoders(setting)),
            binding=binding,
        )


def _floats(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)
