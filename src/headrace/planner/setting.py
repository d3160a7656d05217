"""One point of the search: who generates, who trains, in which mode."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.schema import FlowConfig
from headrace.planner.spec import HandOffPolicy, Mode, PlanSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A complete choice. Colocated: the same chips take turns, so gen_gpus = train_gpus = all of them."""

    mode: Mode
    colocated: bool
    gen_gpus: int
    train_gpus: int
    gen_tp: int
    """Chips of one engine; engines = gen_gpus // gen_tp."""
    train_tp: int
    train_pp: int
    train_ep: int
    """Expert-parallel width of the trainer, inside its data-parallel ranks."""
    max_running: int
    """Rollouts at once over all engines (flow.max_running)."""
    max_lag_steps: int
    hand_off: HandOffPolicy
    oversample: float = 0.0
    update_split: int = 1
    """Optimizer steps per batch."""
    lent_gpus: int = 0
    """Trainer chips that generate while they wait for data."""

    @property
    def engines(self) -> int:
        return self.gen_gpus // self.gen_tp

    @property
    def gpus(self) -> int:
        """Chips that are paid for."""
        return self.gen_gpus if self.colocated else self.gen_gpus + self.train_gpus

    @property
    def train_dp(self) -> int:
        """Data-parallel ranks of the trainer."""
        return self.train_gpus // (self.train_tp * self.train_pp)

    def flow(self, spec: PlanSpec) -> FlowConfig:
        """The run's own flow settings: what the simulator hands to the Controller and what --emit writes."""
        return FlowConfig(
            mode=self.mode,
            batch_groups=spec.batch_groups,
            group_size=spec.group_size,
            max_lag_steps=self.max_lag_steps,
            max_running=max(self.max_running, spec.group_size),
            oversample=self.oversample,
            zero_signal="refill",
        )

    def words(self) -> str:
        """Short name for tables: 'pipeline 24+8 tp2 C1536 lag4'."""
        split = f"{self.gen_gpus} colocated" if self.colocated else f"{self.gen_gpus}+{self.train_gpus}"
        lent = f" lend {self.lent_gpus}" if self.lent_gpus else ""
        over = f" over {self.oversample:.0%}" if self.oversample else ""
        limits = f"C{self.max_running} lag{self.max_lag_steps}"
        return f"{self.mode} {split} tp{self.gen_tp} {limits} {self.hand_off}{lent}{over}"
