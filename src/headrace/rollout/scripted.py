"""A deterministic engine without a model: lengths, times and answers follow laws that a test or a plan chooses.

Everything about a request follows from its seed and prompt (and, for the answer, the version served); nothing depends
on what else runs, except time. Never imports torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.clock import Clock, VirtualClock, WallClock
from headrace.config.schema import EngineConfig
from headrace.errors import ConfigError, EngineError, SyncError
from headrace.records import Completion, FinishReason, GenRequest
from headrace.rollout.counter_rng import seed_bits, uniform
from headrace.rollout.delivery import Deliveries
from headrace.rollout.engine import EngineStats, KvPolicy, SwapReport
from headrace.rollout.profile import StepProfile
from headrace.rollout.spans import spans_of
from headrace.sync.manifest import Manifest, StoreManifest
from headrace.sync.receive import read_version
from headrace.sync.replica import MemoryReplica, newest_layout
from headrace.sync.report import SyncReport
from headrace.sync.staging import Patch
from headrace.sync.store import Store

_LENGTH, _ANSWER, _TOKENS = -1, -2, 0
"""Positions of the counter generator that decide the length, the answer, and (from there on) the tokens."""


class ScriptedOptions(BaseModel):
    """`engine.options` of kind `scripted`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    length: Literal["constant", "lognormal", "list"] = "constant"
    """Law of completion lengths; all are cut at the request's max_new_tok."""
    length_tok: Annotated[float, Field(ge=1.0)] = 16.0
    """The constant length, or the median of the lognormal law."""
    length_sigma: Annotated[float, Field(ge=0.0)] = 0.7
    """Standard deviation of the logarithm of the length (lognormal)."""
    length_list: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Lengths to draw from with equal chances (list)."""
    base_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds that a decode step takes, whatever runs."""
    per_request_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Further seconds of a decode step for each running request."""
    prefill_s_per_tok: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds for each prompt token that is computed (a group's common prompt once)."""
    swap_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds that a swap pauses decoding."""
    vocab: Annotated[int, Field(ge=2)] = 256
    """Tokens are drawn from [1, vocab); token 0 ends a completion."""
    seed: int = 0
    """Added to every request's seed."""
    right_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Chance at version 0 that the text is right_text, else wrong_text. Unset: the text is the ids in decimal."""
    right_p_per_version: float = 0.0
    """Added to that chance with every version."""
    right_text: str = "1"
    """What a scripted reward takes for right."""
    wrong_text: str = "0"
    """What it takes for wrong."""
    verify_weights: bool = True
    """Fetch, check and hold the weights of a staged version; false for hand-offs without files."""


@dataclass(slots=True, kw_only=True)
class _Running:
    request: GenRequest
    length: int
    arrived_s: float
    started_s: float | None = None
    kv_version: int = 0
    ids: list[int] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)


class _Memory(MemoryReplica):
    """Weights that nothing reads."""

    def expect(self, patches: Sequence[Patch]) -> None:
        return None


def _memory(store: Store) -> _Memory:
    layout = newest_layout(store)
    if layout is None:
        raise SyncError(f"{store.url} holds no version")
    return _Memory(MemoryReplica.zeros(layout).arrays())


class ScriptedCore:
    """Implements `engine.EngineCore`."""

    takes_deltas = True

    def __init__(
        self,
        options: ScriptedOptions,
        *,
        config: EngineConfig,
        run_id: str,
        version: int,
        clock: Clock,
        verify_every: int = 8,
    ) -> None:
        self._options, self._config, self._run_id, self._clock = options, config, run_id, clock
        self._version, self._digest = version, ""
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._ended: list[Completion] = []
        self._staged: dict[int, Manifest] = {}
        self._deliveries = Deliveries(run_id=run_id, target=_memory, verify_every=verify_every, threads=1)
        self._decode_tok = self._prefill_tok = self._shared_tok = 0
        self._decode_s = self._prefill_s = self._paused_s = 0.0
        self._profile = StepProfile()

    def add(self, requests: Sequence[GenRequest]) -> None:
        known = {r.request.id for r in (*self._running, *self._waiting)}
        for request in requests:
            if request.id in known:
                raise EngineError(f"request id {request.id!r} is in use; ids of unfinished requests must differ")
            known.add(request.id)
            length = min(self._length(request), request.sampling.max_new_tok)
            item = _Running(request=request, length=length, arrived_s=self._clock.now())
            total = len(request.prompt_ids) + request.sampling.max_new_tok
            if not request.prompt_ids:
                self._end(item, "error", "the prompt has no tokens")
            elif total > self._config.max_context_tok:
                limit = f"engine.max_context_tok = {self._config.max_context_tok}"
                self._end(item, "error", f"prompt + max_new_tok = {total} tokens, the limit is {limit}")
            else:
                self._waiting.append(item)

    def cancel(self, request_id: str) -> None:
        for item in (*self._waiting, *self._running):
            if item.request.id == request_id:
                self._waiting = deque(r for r in self._waiting if r is not item)
                self._running = [r for r in self._running if r is not item]
                self._end(item, "cancelled")
                return

    def step(self) -> list[Completion]:
        self._admit()
        if self._running:
            self._decode()
        ended, self._ended = self._ended, []
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def stage(self, manifest: Manifest) -> None:
        if manifest.version == self._version and self._digest in ("", manifest.digest):
            pass  # the initial weights have no digest until a manifest names it
        elif manifest.version <= self._version:
            raise SyncError(f"v{manifest.version} cannot be staged: v{self._version} is served, versions never go down")
        if manifest.run_id != self._run_id:
            raise SyncError(f"version {manifest.version} belongs to run {manifest.run_id!r}, this is {self._run_id!r}")
        if self._options.verify_weights:
            if isinstance(manifest, StoreManifest):
                self._deliveries.stage(manifest)
            else:
                read_version(manifest, run_id=self._run_id)
        self._staged[manifest.version] = manifest

    def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        pause_s, recomputed_tok, sync = 0.0, 0, None
        if version != self._version:
            if version < self._version or version not in self._staged:
                have = ", ".join(f"v{v}" for v in sorted(self._staged)) or "none"
                raise SyncError(f"cannot swap to v{version}: v{self._version} is served, staged versions: {have}")
            sync = self._land(version)
            self._version, pause_s = version, self._options.swap_s
            if kv != "keep":
                recomputed_tok = sum(len(r.request.prompt_ids) + len(r.ids) - 1 for r in self._running)
                pause_s += recomputed_tok * self._options.prefill_s_per_tok
                for item in self._running:
                    item.kv_version = version
            self._wait(pause_s)
            self._paused_s += pause_s
        elif version in self._staged:
            sync = self._land(version)
        self._staged = {v: manifest for v, manifest in self._staged.items() if v > version}
        return SwapReport(
            version=self._version,
            digest=self._digest,
            running=len(self._running),
            pause_s=pause_s,
            recomputed_tok=recomputed_tok,
            sync=sync,
        )

    def _land(self, version: int) -> SyncReport | None:
        manifest, sync = self._staged.pop(version), None
        if isinstance(manifest, StoreManifest) and self._options.verify_weights:
            sync = self._deliveries.land(version)
        self._digest = manifest.digest
        return sync

    def stats(self) -> EngineStats:
        used_tok = sum(len(r.request.prompt_ids) + len(r.ids) for r in self._running)
        return EngineStats(
            version=self._version,
            digest=self._digest,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_frac=used_tok / (self._config.max_batch * self._config.max_context_tok),
            decode_tok=self._decode_tok,
            prefill_tok=self._prefill_tok,
            shared_tok=self._shared_tok,
            decode_s=self._decode_s,
            prefill_s=self._prefill_s,
            idle_s=0.0,
            paused_s=self._paused_s,
            decode_points=self._profile.decode_points(),
            prefills=self._profile.prefills(),
        )

    # --- inside a step

    def _admit(self) -> None:
        shared = {(r.request.group_id, r.request.prompt_ids) for r in self._running if r.kv_version == self._version}
        computed_tok = 0
        while self._waiting and len(self._running) < self._config.max_batch:
            item = self._waiting.popleft()
            if reason := item.request.refusal(self._version):
                self._end(item, "error", reason)
                continue
            item.kv_version = self._version
            prefix = (item.request.group_id, item.request.prompt_ids)
            if item.request.group_id and prefix in shared:
                self._shared_tok += len(item.request.prompt_ids) - 1
            else:
                computed_tok += len(item.request.prompt_ids) - 1
                shared.add(prefix)
            self._running.append(item)
        self._prefill_tok += computed_tok
        seconds = computed_tok * self._options.prefill_s_per_tok
        self._prefill_s += seconds
        if computed_tok:
            self._profile.prefilled(tok=computed_tok, seconds=seconds)
        self._wait(seconds)

    def _decode(self) -> None:
        started_s = self._clock.now()
        seconds = self._options.base_s + self._options.per_request_s * len(self._running)
        self._wait(seconds)
        self._decode_s += seconds
        self._decode_tok += len(self._running)
        context_tok = sum(len(r.request.prompt_ids) + len(r.ids) for r in self._running)
        self._profile.decoded(running=len(self._running), context_tok=context_tok, seconds=seconds)
        going_on = []
        for item in self._running:
            if item.started_s is None:
                item.started_s = started_s
            last = len(item.ids) + 1 == item.length
            ends = last and item.length < item.request.sampling.max_new_tok
            item.ids.append(0 if ends else self._token(item.request, len(item.ids)))
            item.versions.append((self._version, item.kv_version))
            if last:
                self._end(item, "stop" if ends else "length")
            else:
                going_on.append(item)
        self._running = going_on

    def _end(self, item: _Running, finish: FinishReason, error: str = "") -> None:
        now_s = self._clock.now()
        started_s = now_s if item.started_s is None else item.started_s
        self._ended.append(
            Completion(
                request_id=item.request.id,
                ids_N=np.array(item.ids, np.int32),
                logp_N=np.full(len(item.ids), -np.log(self._options.vocab), np.float32),
                spans=spans_of(item.versions),
                finish=finish,
                text=self._text(item),
                error=error,
                queue_s=started_s - item.arrived_s,
                gen_s=now_s - started_s,
            )
        )

    def _wait(self, seconds: float) -> None:
        if isinstance(self._clock, VirtualClock):
            self._clock.advance_to(self._clock.now() + seconds)
        elif seconds > 0:
            time.sleep(seconds)

    # --- laws

    def _length(self, request: GenRequest) -> int:
        options = self._options
        if options.length == "constant":
            return round(options.length_tok)
        u = self._uniform(request, _LENGTH)
        if options.length == "list":
            return options.length_list[int(u * len(options.length_list))]
        return max(1, round(float(options.length_tok * np.exp(options.length_sigma * NormalDist().inv_cdf(u)))))

    def _token(self, request: GenRequest, index: int) -> int:
        return 1 + int(self._uniform(request, _TOKENS + index) * (self._options.vocab - 1))

    def _text(self, item: _Running) -> str:
        options = self._options
        if not item.ids:
            return ""
        if options.right_p is None:
            return " ".join(str(i) for i in item.ids if i)
        newest = item.versions[-1][0]
        chance = options.right_p + options.right_p_per_version * newest
        return options.right_text if self._uniform(item.request, _ANSWER) < chance else options.wrong_text

    def _uniform(self, request: GenRequest, position: int) -> float:
        """A number in (0, 1) that depends on seeds, prompt and position only."""
        prompt = xxhash.xxh3_64_intdigest(np.array(request.prompt_ids, np.int64).tobytes())
        seed = seed_bits((prompt ^ request.sampling.seed) + self._options.seed)
        return float(uniform(np.array([seed]), np.array([seed_bits(position)]))[0])


def build(
    *,
    options: Mapping[str, Any],
    engine: Mapping[str, Any],
    run_id: str,
    version: int = 0,
    clock: Clock | None = None,
    verify_every: int = 8,
) -> ScriptedCore:
    """A scripted core; `engine` is EngineConfig.model_dump(). Raises ConfigError for options that do not exist.

    With a VirtualClock time moves as the laws say; otherwise a step sleeps.
    """
    try:
        parsed = ScriptedOptions(**options)
    except ValidationError as exc:
        known = ", ".join(ScriptedOptions.model_fields)
        raise ConfigError(f"engine.options of a scripted engine: {exc}\n  options: {known}") from exc
    if parsed.length == "list" and not parsed.length_list:
        raise ConfigError("engine.options: length = 'list' needs length_list with at least one length")
    return ScriptedCore(
        parsed,
        config=EngineConfig(**engine),
        run_id=run_id,
        version=version,
        clock=clock or WallClock(),
        verify_every=verify_every,
    )
