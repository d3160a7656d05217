"""One request's state between its arrival and its completion."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.records import Completion, FinishReason, GenRequest
from headrace.rollout.spans import spans_of


@dataclass(slots=True, kw_only=True)
class Running:
    """A request that is waiting or holds a row; a row's KV has one entry fewer than `ids`."""

    request: GenRequest
    arrived_s: float
    ids: list[int]
    """Prompt and what was sampled."""
    logps: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(policy_version, kv_version) of each sampled token."""
    kv_version: int = 0
    """Version with which the oldest KV entry of the row was computed."""
    shares: bool = True
    """Its prompt's KV may be copied for others (of the same version)."""
    started_s: float | None = None

    @property
    def sampled(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def sampled_ids(self) -> list[int]:
        return self.ids[len(self.request.prompt_ids) :]

    @property
    def prefix(self) -> tuple[str, tuple[int, ...]]:
        """Equal for requests that may share their prompt's KV."""
        return self.request.group_id, self.request.prompt_ids

    def append(self, token: int, logp: float, version: int) -> None:
        self.ids.append(token)
        self.logps.append(logp)
        self.versions.append((version, self.kv_version))

    def complete(self, finish: FinishReason, *, now_s: float, text: str = "", error: str = "") -> Completion:
        started_s = self.started_s if self.started_s is not None else now_s
        return Completion(
            request_id=self.request.id,
            ids_N=np.array(self.sampled_ids, np.int32),
            logp_N=np.array(self.logps, np.float32),
            spans=spans_of(self.versions),
            finish=finish,
            text=text,
            error=error,
            queue_s=started_s - self.arrived_s,
            gen_s=now_s - started_s,
        )
