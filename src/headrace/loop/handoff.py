"""Hand-off of one version: publish (trainer) -> stage, verify, swap (generator) -> landed.

A version counts as landed only when the engine reports the digest that the trainer published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headrace.clock import Clock
from headrace.config.schema import RunConfig
from headrace.errors import SyncError
from headrace.rollout.engine import Engine, SwapReport
from headrace.sync.manifest import FullManifest, Manifest, StoreManifest
from headrace.sync.publish import retain
from headrace.sync.report import SyncReport
from headrace.telemetry.deliveries import DeliveryTotals
from headrace.trainer.remote import RemoteLearner

_LAND_TRIES = 2
"""A swap that failed was taken back; the second try starts from what the generator then holds, or from a keyframe."""


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
        self.totals = DeliveryTotals()
        """Of all versions of this process's run."""
        self._published: SyncReport | None = None
        self._landed: SyncReport | None = None

    async def publish(self, version: int) -> Manifest:
        """Publish the learner's weights as this version. It is not served until `land`."""
        started_s = self._clock.now()
        manifest = await self._learner.publish(str(self._folder), self._run_id, version)
        self.publish_s = self._clock.now() - started_s
        self._published = _cost(manifest, self.publish_s)
        self.totals.published(self._published)
        return manifest

    async def land(self, manifest: Manifest) -> None:
        """Stage, swap, and prove that what is served is what was published; then delete older snapshots."""
        started_s = self._clock.now()
        report = await self._stage_and_swap(manifest)
        if report.version != manifest.version or report.digest != manifest.digest:
            raise SyncError(
                f"the engine serves version {report.version} with digest {report.digest} after a swap to version "
                f"{manifest.version} with digest {manifest.digest}"
            )
        self.land_s = self._clock.now() - started_s
        self.report = report
        self._landed = replace(
            report.sync or SyncReport(version=manifest.version, digest=manifest.digest), pause_s=report.pause_s
        )
        self.totals.landed(self._landed)
        if isinstance(manifest, FullManifest):
            retain(self._folder, [*range(manifest.version, manifest.version + 3)])

    async def _stage_and_swap(self, manifest: Manifest) -> SwapReport:
        for attempt in range(1, _LAND_TRIES + 1):
            await self._engine.stage(manifest)
            try:
                return await self._engine.swap(manifest.version, self._kv)
            except SyncError:
                self.totals.failed_swaps += 1
                if attempt == _LAND_TRIES:
                    raise
        raise AssertionError("the last try returns or raises")

    def metrics(self) -> Mapping[str, float]:
        """Of the newest publish and the newest landing, by the names in docs/metrics.md."""
        out: dict[str, float] = {}
        if (published := self._published) is not None:
            out |= {
                "sync/bytes": published.body_bytes,
                "sync/ratio": published.ratio,
                "sync/density": published.density,
                "sync/diff_s": published.diff_s,
                "sync/encode_s": published.encode_s,
                "sync/put_s": published.put_s,
            }
            if published.limit_bytes:
                out["sync/ratio_to_limit"] = published.ratio_to_limit
        if (landed := self._landed) is not None:
            out |= {
                "sync/get_s": landed.get_s,
                "sync/decode_s": landed.decode_s,
                "sync/apply_s": landed.apply_s,
                "sync/verify_s": landed.verify_s,
            }
        return out


def _cost(manifest: Manifest, publish_s: float) -> SyncReport:
    """What publishing cost; a snapshot is all bytes, written."""
    if isinstance(manifest, StoreManifest):
        return manifest.report
    return SyncReport(
        version=manifest.version,
        digest=manifest.digest,
        density=1.0,
        full_bytes=manifest.bytes,
        bytes_by_mode={"full": manifest.bytes},
        put_s=publish_s,
    )
