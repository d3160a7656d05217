"""The controller's view of a learner in another process: the servant's methods, awaited, each with a deadline."""

from __future__ import annotations

from typing import Any, cast

from headrace.records import Batch
from headrace.roles import Handle
from headrace.sync.manifest import Manifest
from headrace.trainer.learner import ForwardBackwardReport, OptimReport


class RemoteLearner:
    """Calls raise the servant's exception, RoleDiedError, or DeadlineError."""

    def __init__(self, handle: Handle, call_deadline_s: float) -> None:
        self._handle = handle
        self._deadline_s = call_deadline_s

    async def train(self, batch: Batch) -> tuple[list[ForwardBackwardReport], list[OptimReport]]:
        """See LearnerServant.train."""
        return cast(tuple[list[ForwardBackwardReport], list[OptimReport]], await self._call("train", batch))

    async def forward_backward(self, batch: Batch) -> ForwardBackwardReport:
        """See LearnerServant.forward_backward."""
        return cast(ForwardBackwardReport, await self._call("forward_backward", batch))

    async def optim_step(self) -> OptimReport:
        """See LearnerServant.optim_step."""
        return cast(OptimReport, await self._call("optim_step"))

    async def publish(self, folder: str, run_id: str, version: int) -> Manifest:
        """See LearnerServant.publish."""
        return cast(Manifest, await self._call("publish", folder, run_id, version))

    async def save(self, folder: str) -> None:
        """See LearnerServant.save."""
        await self._call("save", folder)

    async def load(self, folder: str) -> None:
        """See LearnerServant.load."""
        await self._call("load", folder)

    async def export(self, folder: str) -> None:
        """See LearnerServant.export."""
        await self._call("export", folder)

    async def describe(self) -> dict[str, Any]:
        """See LearnerServant.describe."""
        return cast(dict[str, Any], await self._call("describe"))

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._handle.call(method, *args, deadline_s=self._deadline_s)
