"""A scripted engine that is killed in the middle of putting a delta in place, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.rollout import scripted
from headrace.rollout.delivery import Deliveries
from headrace.sync.store import Store


def build(*, options: Mapping[str, Any], **more: Any) -> scripted.ScriptedCore:
    """`options` as of the scripted engine, and `marker`: a file that the death leaves, after `dies_after` landings."""
    own = dict(options)
    marker, dies_after = Path(own.pop("marker")), int(own.pop("dies_after"))
    core = scripted.build(options=own, **more)

    def target(store: Store) -> Any:
        memory = scripted._memory(store)
        landings = 0

        def changed(names: frozenset[str]) -> None:
            nonlocal landings
            landings += 1
            if landings > dies_after and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)  # new values are written, nothing is proven or reported

        memory.changed = changed  # type: ignore[method-assign]
        return memory

    core._deliveries = Deliveries(run_id=more["run_id"], target=target, verify_every=2, threads=1)
    return core
