"""Hand-off of one version: publish (trainer) -> stage, verify, swap (generator) -> landed.

A version counts as landed only when the engine reports the digest that the trainer published.
"""

from __future__ import annotations

from pathlib import Path

from headrace.clock import Clock
from headrace.config.schema import RunConfig
from headrace.errors import SyncError
from headrace.rollout.engine import Engine, SwapReport
from headrace.sync.manifest import Manifest
from headrace.sync.publish import retain
from headrace.trainer.remote import RemoteLearner


class Handoff:
    """Moves weights from the learner to the engine and remembers how long each part took."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        folder: Path,
        learner: RemoteLearner,
        engine: Engine,
        clock: Clock,
    ) -> None:
        self._kv = config.engine.kv_on_swap
        self._run_id = run_id
        self._folder = folder
        self._learner = learner
        self._engine = engine
        self._clock = clock
        self.publish_s = 0.0
        """Of the newest publish."""
        self.land_s = 0.0
        """Of the newest landing, staging included."""
        self.report: SwapReport | None = None
        """Of the newest swap."""

    async def publish(self, version: int) -> Manifest:
        """Write the learner's weights as this version. It is not served until `land`."""
        started_s = self._clock.now()
        manifest = await self._learner.publish(str(self._folder), self._run_id, version)
        self.publish_s = self._clock.now() - started_s
        return manifest

    async def land(self, manifest: Manifest) -> None:
        """Stage, swap, and prove that what is served is what was published; then delete older snapshots."""
        started_s = self._clock.now()
        await self._engine.stage(manifest)
        report = await self._engine.swap(manifest.version, self._kv)
        if report.version != manifest.version or report.digest != manifest.digest:
            raise SyncError(
                f"the engine serves version {report.version} with digest {report.digest} after a swap to version "
                f"{manifest.version} with digest {manifest.digest}"
            )
        self.land_s = self._clock.now() - started_s
        self.report = report
        retain(self._folder, [*range(manifest.version, manifest.version + 3)])
