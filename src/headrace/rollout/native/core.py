"""The embedded engine's core: which request runs when.

    add -> waiting -> admit: take a row, prefill the prompt but its last token (or copy a group member's KV)
                   -> decode: each step feeds every row its last token and samples the next one
                   -> end token, stop string, length, cancel -> Completion; the row is free
    stage, swap: between two steps; a swap exchanges weights and starts new spans

Rows 0..n-1 are in use whenever a step decodes, so that the arithmetic needs no gathering.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.clock import Clock, WallClock
from headrace.config.schema import EngineConfig
from headrace.errors import ConfigError, EngineError, SyncError
from headrace.records import Completion, FinishReason, GenRequest
from headrace.rollout.delivery import Deliveries
from headrace.rollout.engine import EngineStats, KvPolicy, SwapReport
from headrace.rollout.native import loading
from headrace.rollout.native.backend import Backend
from headrace.rollout.native.decoder import Decoder, supports
from headrace.rollout.native.fallback import Fallback
from headrace.rollout.native.running import Running
from headrace.rollout.native.sampling import draw
from headrace.rollout.native.text import Detokenizer
from headrace.rollout.profile import StepProfile
from headrace.sync.manifest import FullManifest, Manifest, StoreManifest, TensorInfo, chain_digest
from headrace.sync.receive import read_version
from headrace.sync.report import SyncReport

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Staged:
    """A version that waits for its swap."""

    digest: str
    land: Callable[[], SyncReport | None]
    """Puts it in place."""
    stalled_s: float
    """Decoding stood still for staging it."""


class NativeCore:
    """Continuous batching over a Backend; implements `engine.EngineCore`."""

    takes_deltas = True

    def __init__(
        self,
        backend: Backend,
        *,
        config: EngineConfig,
        run_id: str,
        version: int,
        end_ids: frozenset[int],
        detokenizer: Detokenizer,
        clock: Clock,
        verify_every: int = 8,
    ) -> None:
        self._backend, self._config, self._run_id = backend, config, run_id
        self._end_ids, self._detokenizer, self._clock = end_ids, detokenizer, clock
        self._version, self._digest = version, chain_digest(backend.infos)
        self._waiting: deque[Running] = deque()
        self._rows: list[Running | None] = []
        self._ended: list[Completion] = []
        self._staged: dict[int, _Staged] = {}
        self._verify_every = verify_every
        self._deliveries = self._new_deliveries()
        self._broken = ""
        self._decode_tok = self._prefill_tok = self._shared_tok = 0
        self._decode_s = self._prefill_s = self._paused_s = 0.0
        self._profile = StepProfile()

    # --- requests

    def add(self, requests: Sequence[GenRequest]) -> None:
        known = {r.request.id for r in (*self._running(), *self._waiting)}
        now_s = self._clock.now()
        for request in requests:
            if request.id in known:
                raise EngineError(f"request id {request.id!r} is in use; ids of unfinished requests must differ")
            known.add(request.id)
            item = Running(request=request, arrived_s=now_s, ids=list(request.prompt_ids))
            reason = self._refusal(request)
            if reason:
                self._ended.append(item.complete("error", now_s=now_s, error=reason))
            else:
                self._waiting.append(item)

    def cancel(self, request_id: str) -> None:
        for item in self._waiting:
            if item.request.id == request_id:
                self._waiting.remove(item)
                self._end(item, "cancelled")
                return
        for row, running in enumerate(self._rows):
            if running is not None and running.request.id == request_id:
                self._rows[row] = None
                self._end(running, "cancelled")
                return

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        if self._broken:
            raise EngineError(f"nothing can be decoded: {self._broken}")
        self._admit()
        self._compact()
        if self._rows:
            self._decode()
        ended, self._ended = self._ended, []
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._ended or any(r is not None for r in self._rows))

    # --- weights

    @torch.inference_mode()
    def stage(self, manifest: Manifest) -> None:
        if manifest.version == self._version and manifest.digest == self._digest:
            return
        # The first weights have the digest of a snapshot; from a store they come under another one.
        renames = isinstance(manifest, StoreManifest) and not self._deliveries.landed
        if manifest.version < self._version or (manifest.version == self._version and not renames):
            raise SyncError(
                f"version {manifest.version} (digest {manifest.digest}) cannot be staged: "
                f"the engine serves v{self._version} (digest {self._digest}) and versions never go down"
            )
        staged = self._staged.get(manifest.version)
        if staged is not None and staged.digest == manifest.digest:
            return
        if isinstance(manifest, StoreManifest):
            self._stage_delta(manifest)
        else:
            self._stage_full(manifest)

    def _stage_full(self, manifest: FullManifest) -> None:
        started_s = self._clock.now()
        arrays = read_version(manifest, run_id=self._run_id)
        layout = [(t.name, t.dtype, t.shape) for t in manifest.tensors]
        _check_same_model(manifest.version, layout, self._backend.infos)
        weights = self._backend.stage(arrays)

        stalled_s = self._clock.now() - started_s

        def land() -> None:
            self._backend.swap(weights, manifest.tensors)
            self._deliveries = self._new_deliveries()

        self._staged[manifest.version] = _Staged(manifest.digest, land, stalled_s)
        self._paused_s += stalled_s

    def _stage_delta(self, manifest: StoreManifest) -> None:
        """Not a pause: the worker stages beside decoding."""
        version, deliveries = manifest.version, self._deliveries
        layout = [(spec.name, spec.dtype, spec.shape) for spec in deliveries.stage(manifest)]
        if layout:
            _check_same_model(version, layout, self._backend.infos)
        if version == self._version and (count := deliveries.changes(version)):
            deliveries.forget(version)
            raise SyncError(
                f"version {version} is served, but {count} elements differ from what was published under that number"
            )
        self._staged[version] = _Staged(manifest.digest, lambda: deliveries.land(version), 0.0)

    def _new_deliveries(self) -> Deliveries:
        return Deliveries(
            run_id=self._run_id,
            target=lambda store: self._backend.held(),
            verify_every=self._verify_every,
            threads=torch.get_num_threads(),
        )

    @torch.inference_mode()
    def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        running = list(self._running())
        recomputed_tok, started_s, stalled_s, sync = 0, self._clock.now(), 0.0, None
        if version in self._staged:
            stalled_s = self._staged[version].stalled_s
            sync = self._land(version)
        elif version != self._version:
            have = ", ".join(f"v{v}" for v in sorted(self._staged)) or "none"
            raise SyncError(f"cannot swap to v{version}: the engine serves v{self._version}, staged versions: {have}")
        if version != self._version:
            self._version = version
            if kv != "keep":
                recomputed_tok = self._recompute()
            if kv == "flush":
                for item in running:
                    item.shares = False
        pause_s = self._clock.now() - started_s
        self._paused_s += pause_s
        return SwapReport(
            version=self._version,
            digest=self._digest,
            running=len(running),
            pause_s=stalled_s + pause_s,
            recomputed_tok=recomputed_tok,
            sync=sync,
        )

    def _land(self, version: int) -> SyncReport | None:
        """Put a staged version in place; on SyncError the old one goes on, or nothing is decoded any more."""
        staged = self._staged.pop(version)
        try:
            sync = staged.land()
        except SyncError as exc:
            if self._deliveries.fenced:
                self._broken = str(exc)
            raise
        self._broken, self._digest = "", staged.digest
        self._staged = {v: later for v, later in self._staged.items() if v > version}
        return sync

    def stats(self) -> EngineStats:
        running = list(self._running())
        room_tok = self._config.max_batch * self._config.max_context_tok
        return EngineStats(
            version=self._version,
            digest=self._digest,
            running=len(running),
            waiting=len(self._waiting),
            kv_used_frac=sum(len(r.ids) for r in running) / room_tok,
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

    def _running(self) -> list[Running]:
        return [r for r in self._rows if r is not None]

    def _refusal(self, request: GenRequest) -> str:
        """Why a request can never run here, or empty."""
        sampling, prompt_tok = request.sampling, len(request.prompt_ids)
        if prompt_tok == 0:
            return "the prompt has no tokens"
        if sampling.max_new_tok < 1:
            return f"max_new_tok = {sampling.max_new_tok} must be >= 1"
        if prompt_tok + sampling.max_new_tok > self._config.max_context_tok:
            return (
                f"prompt of {prompt_tok} tokens + max_new_tok = {sampling.max_new_tok} = "
                f"{prompt_tok + sampling.max_new_tok} tokens, the limit is "
                f"engine.max_context_tok = {self._config.max_context_tok}"
            )
        wrong = next((i for i in request.prompt_ids if not 0 <= i < self._backend.vocab), None)
        if wrong is not None:
            return f"prompt token id {wrong} is outside the vocabulary [0, {self._backend.vocab})"
        if sampling.stop and not self._detokenizer.available:
            return f"stop strings {sampling.stop!r} need a tokenizer in the model folder, which has none"
        return ""

    def _admit(self) -> None:
        """Give rows to waiting requests; prefill each different prompt once."""
        donors = {
            r.prefix: row
            for row, r in enumerate(self._rows)
            if r is not None and r.shares and r.kv_version == self._version
        }
        fresh: list[int] = []
        copies: list[tuple[int, int]] = []
        free = [row for row, r in enumerate(self._rows) if r is None]
        free += range(len(self._rows), self._config.max_batch)
        for row in free:
            item = self._next_waiting()
            if item is None:
                break
            item.kv_version = self._version
            self._rows[row : row + 1] = [item]
            if self._backend.can_share and item.request.group_id and item.prefix in donors:
                copies.append((donors[item.prefix], row))
            else:
                fresh.append(row)
                donors[item.prefix] = row
        if not fresh and not copies:
            return
        started_s = self._clock.now()
        computed_tok = self._prefill(fresh)
        self._prefill_tok += computed_tok
        for src, dst in copies:
            prefix_tok = len(self._row(dst).ids) - 1
            self._backend.copy_row(src, dst, prefix_tok)
            self._shared_tok += prefix_tok
        seconds = self._clock.now() - started_s
        self._prefill_s += seconds
        if computed_tok:
            self._profile.prefilled(tok=computed_tok, seconds=seconds)

    def _next_waiting(self) -> Running | None:
        """The next request that may start; those that want other weights end here."""
        while self._waiting:
            item = self._waiting.popleft()
            reason = item.request.refusal(self._version)
            if not reason:
                return item
            self._end(item, "error", error=reason)
        return None

    def _prefill(self, rows: list[int]) -> int:
        """Compute the KV of all tokens but the last one of each row; returns how many."""
        ids = [self._row(row).ids[:-1] for row in rows]
        self._backend.prefill(rows, ids)
        return sum(len(i) for i in ids)

    def _recompute(self) -> int:
        rows = [row for row, r in enumerate(self._rows) if r is not None]
        for row in rows:
            self._row(row).kv_version = self._version
        return self._prefill(rows)

    def _compact(self) -> None:
        """Move last rows into holes, so that rows 0..n-1 are in use."""
        for hole in range(len(self._rows)):
            while self._rows and self._rows[-1] is None:
                self._rows.pop()
            if hole >= len(self._rows):
                return
            if self._rows[hole] is None:
                last = self._row(len(self._rows) - 1)
                self._backend.copy_row(len(self._rows) - 1, hole, len(last.ids) - 1)
                self._rows[hole] = last
                self._rows.pop()

    def _decode(self) -> None:
        started_s = self._clock.now()
        running = self._running()
        context_tok = sum(len(r.ids) for r in running)
        logits_BV = self._backend.decode([r.ids[-1] for r in running], [len(r.ids) - 1 for r in running])
        ids_B, logp_B = draw(logits_BV, [r.request.sampling for r in running], [r.sampled for r in running])
        self._decode_tok += len(running)
        for row, (item, token, logp) in enumerate(zip(running, ids_B.tolist(), logp_B.tolist(), strict=True)):
            if not 0 <= token < self._backend.vocab:
                raise EngineError(f"sampled id {token} is outside the vocabulary [0, {self._backend.vocab})")
            if item.started_s is None:
                item.started_s = started_s
            item.append(token, logp, self._version)
            finish = self._finish(item)
            if finish is not None:
                self._rows[row] = None
                self._end(item, finish)
        seconds = self._clock.now() - started_s
        self._decode_s += seconds
        self._profile.decoded(running=len(running), context_tok=context_tok, seconds=seconds)

    def _finish(self, item: Running) -> FinishReason | None:
        sampling, token = item.request.sampling, item.ids[-1]
        if token in self._end_ids or token in sampling.stop_ids:
            return "stop"
        if sampling.stop and self._detokenizer.stops(item.sampled_ids, sampling.stop):
            return "stop"
        return "length" if item.sampled >= sampling.max_new_tok else None

    def _end(self, item: Running, finish: FinishReason, *, error: str = "") -> None:
        text = self._detokenizer.text(item.sampled_ids, item.request.sampling.stop) if item.sampled else ""
        self._ended.append(item.complete(finish, now_s=self._clock.now(), text=text, error=error))

    def _row(self, row: int) -> Running:
        item = self._rows[row]
        if item is None:
            raise EngineError(f"row {row} holds no request")
        return item


def build(
    *,
    model_dir: str,
    engine: dict[str, Any],
    dtype: str,
    device: str,
    run_id: str,
    version: int = 0,
    ignore_end: bool = False,
    verify_every: int = 8,
) -> NativeCore:
    """An engine core that serves the model in `model_dir` as `version`.

    `engine` is EngineConfig.model_dump(); `dtype` is bfloat16, float32 or float16; `device` may be auto.
    `ignore_end`: only stop ids, stop strings and lengths end a completion (for benchmarks).
    Raises ConfigError and DataError.
    """
    config = EngineConfig(**engine)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype = {dtype!r} must be one of {', '.join(_DTYPES)}")
    device = _device(device)
    model_config = loading.load_config(model_dir)
    limit = getattr(model_config, "max_position_embeddings", None)
    if limit is not None and config.max_context_tok > limit:
        raise ConfigError(
            f"engine.max_context_tok = {config.max_context_tok} is more than the model in {model_dir} can: "
            f"max_position_embeddings = {limit}"
        )
    model = loading.load_model(model_dir, _DTYPES[dtype])
    backend: Backend
    if supports(model_config, config.max_context_tok):
        backend = Decoder(
            model_config,
            loading.named_tensors(model),
            dtype=_DTYPES[dtype],
            device=device,
            max_batch=config.max_batch,
            max_context_tok=config.max_context_tok,
            fixed_shapes=config.deterministic,
        )
    else:
        backend = Fallback(model, device=device)
    return NativeCore(
        backend,
        config=config,
        run_id=run_id,
        version=version,
        end_ids=frozenset() if ignore_end else loading.end_ids(model_dir, model_config),
        detokenizer=Detokenizer(model_dir),
        clock=WallClock(),
        verify_every=verify_every,
    )


def _device(name: str) -> str:
    """Resolve "auto": CUDA, then MPS, then the CPU."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _check_same_model(
    version: int, tensors: Iterable[tuple[str, str, tuple[int, ...]]], served: tuple[TensorInfo, ...]
) -> None:
    """Raise SyncError that names the first tensor (name, dtype, shape) that differs from the served one."""
    new = {name: (dtype, shape) for name, dtype, shape in tensors}
    old = {t.name: (t.dtype, t.shape) for t in served}
    for name in sorted(new.keys() | old.keys()):
        if new.get(name) != old.get(name):
            raise SyncError(
                f"version {version}: tensor {name!r} is {new.get(name, 'missing')}, "
                f"the engine serves {old.get(name, 'no such tensor')}"
            )
