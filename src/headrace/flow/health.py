"""Do generator and trainer run at matching rates? Rates, shares and a verdict over a sliding window of steps.

Trainer time:    hand_off  StepEnded (or the start) until it asks again: publication
                 wait_data fewer than B groups complete
                 wait_bound B are complete, but an older one still runs and would break the lag bound
                 busy      TakeBatch until StepEnded
                 idle      before the first BatchWanted and after the run is ending
Generator time:  blocked   no rollout runs (so none may start), else active

Two-stage pipeline: throughput = min(production capacity, consumption). Capacity is production per second in which the
generator was not blocked; consumption is samples per second in which the trainer was busy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

TrainerState = Literal["busy", "wait_data", "wait_bound", "hand_off", "idle"]
TRAINER_STATES: tuple[TrainerState, ...] = ("busy", "wait_data", "wait_bound", "hand_off", "idle")
Verdict = Literal[
    "generation_bound",
    "training_bound",
    "environment_bound",
    "sync_bound",
    "bound_by_staleness",
    "signal_starved",
    "balanced",
]

WINDOW_STEPS = 8
STEADY_STEPS = 3
"""A new verdict must hold for so many steps in a row before it replaces the old one."""
STARVED_FRAC = 0.5
"""Zero-signal share of scored groups from which the signal is the problem."""
WAIT_FRAC = 0.15
"""A side that stands still for less than this share of the time does not bound the run."""
ENV_FRAC = 0.5
"""Share of rollout time in tools and grading from which the environment is the slow part."""


@dataclass(slots=True)
class StepWindow:
    """What happened between two ends of steps; sums of them describe a window."""

    seconds: dict[TrainerState, float] = field(default_factory=lambda: dict.fromkeys(TRAINER_STATES, 0.0))
    blocked_s: float = 0.0
    landing_s: float = 0.0
    """From published to landed."""
    usable_samples: int = 0
    usable_tok: int = 0
    trained_samples: int = 0
    scored_groups: int = 0
    zero_signal_groups: int = 0
    gen_s: float = 0.0
    env_s: float = 0.0
    grade_s: float = 0.0

    def add(self, other: StepWindow) -> None:
        for state, seconds in other.seconds.items():
            self.seconds[state] += seconds
        for name in self.__slots__:
            if name != "seconds":
                setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0


class Health:
    """Fed by the controller with every change; asked by reports."""

    def __init__(self, *, in_flight: bool, lag_bound: int) -> None:
        self._in_flight = in_flight
        self._lag_bound = lag_bound
        self._steps: deque[StepWindow] = deque(maxlen=WINDOW_STEPS)
        self._now = StepWindow()
        self._total = StepWindow()
        self._state: TrainerState = "idle"
        self._since_s: float | None = None
        self.blocked = True
        """No rollout runs."""
        self._blocked_since_s: float | None = None
        self._published_s: float | None = None
        self.verdict: Verdict = "balanced"
        self._candidate: Verdict = "balanced"
        self._candidate_steps = 0

    # -- fed by the controller ---------------------------------------------------------------------------------

    def trainer(self, state: TrainerState, time_s: float) -> None:
        """The trainer is in `state` from now on."""
        if self._since_s is not None:
            self._now.seconds[self._state] += time_s - self._since_s
        self._state, self._since_s = state, time_s

    def generator(self, blocked: bool, time_s: float) -> None:
        """The generator has nothing to do, or something again."""
        if self.blocked and self._blocked_since_s is not None:
            self._now.blocked_s += time_s - self._blocked_since_s
        self.blocked, self._blocked_since_s = blocked, time_s

    def scored(self, samples: int, tok: int, *, zero_signal: bool) -> None:
        """A group was completed; filtered ones are not usable."""
        self._now.scored_groups += 1
        if zero_signal:
            self._now.zero_signal_groups += 1
        else:
            self._now.usable_samples += samples
            self._now.usable_tok += tok

    def step_ended(self, trained_samples: int, time_s: float) -> None:
        self.trainer("hand_off", time_s)
        self.generator(self.blocked, time_s)
        self._published_s = time_s
        self._now.trained_samples = trained_samples
        self._steps.append(self._now)
        self._total.add(self._now)
        self._now = StepWindow()
        self._judge()

    def landed(self, time_s: float) -> None:
        if self._published_s is not None:
            self._now.landing_s += time_s - self._published_s
            self._published_s = None

    def observe_rollout(self, gen_s: float, env_s: float, grade_s: float) -> None:
        """Optional: where one rollout spent its time, in seconds."""
        self._now.gen_s += gen_s
        self._now.env_s += env_s
        self._now.grade_s += grade_s

    @property
    def state(self) -> TrainerState:
        """What the trainer does now."""
        return self._state

    # -- asked by reports --------------------------------------------------------------------------------------

    @property
    def window(self) -> StepWindow:
        """Sums over the last WINDOW_STEPS steps."""
        total = StepWindow()
        for step in self._steps:
            total.add(step)
        return total

    @property
    def last_step(self) -> StepWindow:
        """The step that ended last (all zeros before the first)."""
        return self._steps[-1] if self._steps else StepWindow()

    def production_per_s(self) -> float:
        """Usable samples per second of wall time."""
        w = self.window
        return _ratio(w.usable_samples, w.wall_s)

    def production_tok_per_s(self) -> float:
        """Usable sampled tokens per second of wall time."""
        w = self.window
        return _ratio(w.usable_tok, w.wall_s)

    def capacity_per_s(self) -> float:
        """Usable samples per second in which the generator was not blocked."""
        w = self.window
        return _ratio(w.usable_samples, w.wall_s - w.blocked_s)

    def consumption_per_s(self) -> float:
        """Samples per second in which the trainer was busy."""
        w = self.window
        return _ratio(w.trained_samples, w.seconds["busy"])

    def rho(self) -> float:
        """Production / consumption: below 1 the trainer starves."""
        return _ratio(self.production_per_s(), self.consumption_per_s())

    def trainer_shares(self, *, whole_run: bool = False) -> dict[TrainerState, float]:
        """Shares of the trainer's time by state; they add up to 1 (all zeros before the first step)."""
        w = self._total if whole_run else self.window
        return {state: _ratio(seconds, w.wall_s) for state, seconds in w.seconds.items()}

    def blocked_frac(self, *, whole_run: bool = False) -> float:
        """Share of the time in which no rollout ran."""
        w = self._total if whole_run else self.window
        return _ratio(w.blocked_s, w.wall_s)

    def zero_signal_frac(self) -> float:
        """Share of scored groups that were filtered for equal rewards."""
        w = self.window
        return _ratio(w.zero_signal_groups, w.scored_groups)

    def remedies(self) -> list[str]:
        """What would help, in words, with the gain that the two-stage model predicts. Empty when balanced."""
        w = self.window
        shares = self.trainer_shares()
        now_per_s = _ratio(w.trained_samples, w.wall_s)
        capacity_per_s, consumption_per_s = self.capacity_per_s(), self.consumption_per_s()
        match_per_s = min(capacity_per_s, consumption_per_s)

        def gain(per_s: float) -> str:
            return f"{max(0.0, _ratio(per_s, now_per_s) - 1.0):+.0%} samples/s"

        if self.verdict == "generation_bound":
            factor = _ratio(consumption_per_s, capacity_per_s)
            return [
                f"more generation ({factor:.2f} x today's keeps the trainer busy): {gain(consumption_per_s)}",
                "shorter responses (sampling.max_new_tok) or a larger engine.max_batch raise it too",
            ]
        if self.verdict == "environment_bound":
            env_frac = _ratio(w.env_s + w.grade_s, w.gen_s + w.env_s + w.grade_s)
            what = "env.grade_workers" if w.grade_s > w.env_s else "tool or sandbox capacity"
            return [
                f"more {what} (rollouts spend {env_frac:.0%} of their time there): {gain(consumption_per_s)} at most"
            ]
        if self.verdict == "training_bound":
            factor = _ratio(capacity_per_s, consumption_per_s)
            return [f"more training ({factor:.2f} x today's uses all that is generated): {gain(capacity_per_s)}"]
        if self.verdict == "sync_bound":
            remedies = []
            if not self._in_flight:
                remedies.append(f"let both sides overlap (flow.mode = 'pipeline'): {gain(match_per_s)}")
            elif self.blocked_frac() >= WAIT_FRAC:
                slots = f"flow.max_lag_steps = {self._lag_bound + 1} gives generation more slots to go on with"
                remedies.append(f"{slots}: {gain(match_per_s)} at most")
            hand_off_s = w.seconds["hand_off"]
            if _ratio(hand_off_s, w.wall_s) >= WAIT_FRAC / 2:
                share = _ratio(hand_off_s, w.wall_s)
                remedies.append(
                    f"a cheaper hand-off ({share:.0%} of the trainer's time): {gain(now_per_s / (1 - share))}"
                )
            return remedies
        if self.verdict == "bound_by_staleness":
            free_per_s = _ratio(now_per_s, 1.0 - shares["wait_bound"])
            return [
                f"flow.max_lag_steps = {self._lag_bound + 1} (more off-policy): {gain(free_per_s)} at most",
                "flow.oversample = 0.25 or flow.on_bound = 'carry' (wasted or masked tokens instead of waiting)",
            ]
        if self.verdict == "signal_starved":
            usable_frac = 1.0 - self.zero_signal_frac()
            bounded = min(_ratio(capacity_per_s, usable_frac), consumption_per_s)
            return [f"curriculum.kind = 'band', or prompts nearer to the policy's ability: {gain(bounded)} at most"]
        return []

    # -- verdict -----------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        seen = self._raw_verdict()
        if seen == self._candidate:
            self._candidate_steps += 1
        else:
            self._candidate, self._candidate_steps = seen, 1
        if self._candidate_steps >= STEADY_STEPS:
            self.verdict = seen

    def _raw_verdict(self) -> Verdict:
        """The window's verdict, without memory."""
        w = self.window
        shares = self.trainer_shares()
        if self.zero_signal_frac() >= STARVED_FRAC:
            return "signal_starved"
        blocked_frac = self.blocked_frac()
        if shares["wait_bound"] >= WAIT_FRAC and shares["wait_bound"] >= shares["wait_data"]:
            return "bound_by_staleness"
        takes_turns = blocked_frac >= WAIT_FRAC and shares["wait_data"] >= WAIT_FRAC
        if takes_turns or shares["hand_off"] >= max(WAIT_FRAC, shares["wait_data"]):
            return "sync_bound"
        if shares["wait_data"] >= WAIT_FRAC:
            env_frac = _ratio(w.env_s + w.grade_s, w.gen_s + w.env_s + w.grade_s)
            return "environment_bound" if env_frac >= ENV_FRAC else "generation_bound"
        if blocked_frac >= WAIT_FRAC:
            return "training_bound"
        return "balanced"
