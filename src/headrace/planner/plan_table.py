"""What a plan's table says: one column per number, the same in the terminal and in the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.planner.memory import MemoryFit
from headrace.planner.setting import Setting
from headrace.planner.spec import PlanSpec
from headrace.telemetry.format import count, duration, percent

if TYPE_CHECKING:
    from headrace.planner.evaluate import Evaluated
    from headrace.planner.plan import Band, Plan, Sensitivity


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One number of each plan."""

    head: str
    """Short, for tables."""
    name: str
    """In full, for lists and tooltips."""
    text: Callable[[Evaluated], str]
    rank: int
    """Where space is short, columns with a low rank stay."""
    words: bool = False
    """Text, not a number: stands left."""
    summary: bool = False
    """Sums up what a list in full says in several lines."""


def significant(value: float) -> str:
    """A number with three significant digits; '-' where there is none.

    >>> significant(12.0), significant(0.01234), significant(2345.6), significant(0.0)
    ('12.0', '0.0123', '2 346', '0')
    """
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 99.95 else f"{value:#.3g}"


def usd(value: float) -> str:
    """Dollars.

    >>> usd(0.0421), usd(3.456), usd(12.3), usd(12345.6)
    ('$0.042', '$3.46', '$12.30', '$12 346')
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 100:
        return f"${value:,.0f}".replace(",", " ")
    return f"${value:.2f}" if abs(value) >= 0.1 or value == 0 else f"${value:.2g}"


def gain(share: float) -> str:
    """A change with its sign.

    >>> gain(0.094), gain(-0.002), gain(0.3), gain(-0.0001)
    ('+9.4 %', '-0.2 %', '+30 %', '0 %')
    """
    if not math.isfinite(share):
        return "-"
    if abs(share) < 0.0005:
        return "0 %"
    return f"{100 * share:+.{0 if abs(share) >= 0.0995 else 1}f} %"


def times(band: Band) -> str:
    """A ratio with its band: '1.62x (1.38 to 1.84)'."""
    return f"{band.mid:.2f}x ({band.low:.2f} to {band.high:.2f})"


def mode_words(setting: Setting) -> str:
    """The mode, as people say it."""
    return setting.mode.replace("_", " ")


def split_words(setting: Setting) -> str:
    """Generator + trainer chips; colocated chips do both."""
    lent = f" lend {setting.lent_gpus}" if setting.lent_gpus else ""
    return f"{setting.gen_gpus} both" if setting.colocated else f"{setting.gen_gpus}+{setting.train_gpus}{lent}"


def trainer_words(setting: Setting) -> str:
    """Parallelism of the trainer: tensor x pipeline x expert x data."""
    parts = [("tp", setting.train_tp), ("pp", setting.train_pp), ("ep", setting.train_ep), ("dp", setting.train_dp)]
    return " ".join(f"{name}{width}" for name, width in parts if width > 1 or name == "tp")


def memory_words(fit: MemoryFit) -> str:
    """GB at the worst instant of the GB that may be used."""
    return f"{fit.used_bytes / 1e9:.0f}/{fit.limit_bytes / 1e9:.0f}"


def sync_words(setting: Setting) -> str:
    """How weights travel, and the optimizer steps between two hand-offs: 'in flight/1'."""
    return f"{setting.hand_off.replace('_', ' ')}/{setting.update_split}"


def _idle(e: Evaluated) -> str:
    if e.setting.colocated:  # the same chips: what the trainer "waits" for is their own generating
        return f"{100 * e.metrics.generator_idle_frac:.0f}"
    return f"{100 * e.metrics.trainer_idle_frac:.0f}/{100 * e.metrics.generator_idle_frac:.0f}"


def _lag(e: Evaluated) -> str:
    return f"{e.metrics.lag_mean:.1f}/{e.metrics.lag_p99}/{e.metrics.lag_max}"


COLUMNS: tuple[Column, ...] = (
    Column(head="mode", name="mode", text=lambda e: mode_words(e.setting), rank=0, words=True),
    Column(head="chips", name="chips, generator + trainer", text=lambda e: split_words(e.setting), rank=1, words=True),
    Column(head="engine", name="engines x chips of each",
           text=lambda e: f"{e.setting.engines} x tp{e.setting.gen_tp}", rank=11, words=True),
    Column(head="trainer", name="parallelism of the trainer",
           text=lambda e: trainer_words(e.setting), rank=15, words=True),
    Column(head="run", name="rollouts at once (flow.max_running)",
           text=lambda e: str(e.setting.max_running), rank=8),
    Column(head="lag ≤", name="bound on lag, steps", text=lambda e: str(e.setting.max_lag_steps), rank=6),
    Column(head="hand-off", name="hand-off / sync period in steps",
           text=lambda e: sync_words(e.setting), rank=12, words=True),
    Column(head="smp/s", name="trained rollouts per second",
           text=lambda e: significant(e.metrics.samples_per_s), rank=2),
    Column(head="step s", name="step time p50/p99, seconds",
           text=lambda e: f"{significant(e.metrics.step_s_p50)}/{significant(e.metrics.step_s_p99)}", rank=3),
    Column(head="idle %", name="idle trainer/generator (or all), %", text=_idle, rank=5),
    Column(head="lag", name="lag of trained tokens, mean/p99/max", text=_lag, rank=4),
    Column(head="waste", name="wasted tokens, of generated ones",
           text=lambda e: percent(e.metrics.wasted_frac, 1), rank=9),
    Column(head="KV", name="KV occupancy, mean", text=lambda e: percent(e.metrics.kv_used_frac), rank=10),
    Column(head="gen GB", name="memory of a generator chip at its worst instant, GB of GB",
           text=lambda e: memory_words(e.generator_fit), rank=13, summary=True),
    Column(head="train GB", name="memory of a trainer chip at its worst instant, GB of GB",
           text=lambda e: memory_words(e.trainer_fit), rank=14, summary=True),
    Column(head="$/step", name="dollars per step", text=lambda e: usd(e.usd_per_step), rank=16),
    Column(head="$/Mtok", name="dollars per million trained tokens", text=lambda e: usd(e.usd_per_mtok), rank=7),
    Column(head="wall", name="wall time, P50", text=lambda e: duration(e.wall_s.p50), rank=3),
    Column(head="P90", name="wall time, P90", text=lambda e: duration(e.wall_s.p90), rank=17),
    Column(head="P99", name="wall time, P99", text=lambda e: duration(e.wall_s.p99), rank=18),
)  # fmt: skip
"""In the order in which they stand."""


def chips_words(spec: PlanSpec) -> str:
    """What the cluster consists of.

    >>> chips_words(PlanSpec())
    '8 x h100'
    """
    cluster = spec.cluster
    own = f"{cluster.num_gpus} x {cluster.gpu}"
    return f"{cluster.num_generate} x {cluster.gpu_generate} + {own}" if cluster.gpu_generate else own


def workload_words(spec: PlanSpec) -> str:
    """Batch and lengths.

    >>> workload_words(PlanSpec())
    '64 x 16 rollouts a batch, prompts 512 tok, responses 2 000 tok (lognormal, cap 16.4k)'
    """
    response, episode = spec.response, spec.episode
    lengths = f"file {response.path}" if response.law == "file" else f"{count(response.mean_tok)} tok ({response.law}"
    lengths += f" (cap {count(response.cap_tok)})" if response.law == "file" else f", cap {count(response.cap_tok)})"
    turns = f", {significant(episode.turns)} turns" if episode.turns > 1 else ""
    batch = f"{spec.batch_groups} x {spec.group_size} rollouts a batch"
    return f"{batch}, prompts {count(spec.prompt_tok)} tok, responses {lengths}{turns}"


def widest_first(sensitivities: Iterable[Sensitivity]) -> list[Sensitivity]:
    """By the distance between the step times at both ends; first those where the plan cannot run at one."""

    def width_s(s: Sensitivity) -> float:
        return math.inf if s.step_s_low is None or s.step_s_high is None else abs(s.step_s_high - s.step_s_low)

    return sorted(sensitivities, key=width_s, reverse=True)


def other_plans(s: Sensitivity, best: Setting) -> list[str]:
    """What would be the best plan at each end, where that is another one: 'pipeline 16+16 ... at x2'."""
    if not s.changes:
        return []
    ends = ((s.best_low, s.low_label), (s.best_high, s.high_label))
    return [f"{words} at {label}" for words, label in ends if words != best.words()]


def drifts(plan: Plan) -> bool:
    """Whether the workload moves during the run, so that a schedule says something."""
    return len({(phase.length_factor, phase.turns_factor) for phase in plan.phases}) > 1
