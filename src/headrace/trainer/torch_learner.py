"""A learner in one process on PyTorch: full fine-tuning or LoRA, float32 masters, any model transformers loads.

train(batch):  for each update: forward_backward -> optim_step
forward_backward: micro-batches -> log-probs -> loss -> gradients summed in float32 -> report
optim_step:       norm -> clip -> AdamW on the masters -> compute copy
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError, NonFiniteError
from headrace.records import Batch
from headrace.sync.manifest import StoreManifest
from headrace.sync.store import Store
from headrace.trainer import checkpoint
from headrace.trainer.arrays import to_array
from headrace.trainer.batching import MicroBatch, micro_batches, split
from headrace.trainer.exact_logp import ExactScorer
from headrace.trainer.learner import ForwardBackwardReport, OptimReport
from headrace.trainer.lora import Adapters
from headrace.trainer.masters import Masters
from headrace.trainer.memory import keep_freed_memory
from headrace.trainer.model import Policy
from headrace.trainer.objective import Objective, Seen, drop_nonfinite, find_loss, make_targets
from headrace.trainer.schedule import learning_rate

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def build(*, config: dict[str, Any], model_dir: str) -> TorchLearner:
    """Factory for `trainer.kind = "torch"`: a resolved recipe (`RunConfig.model_dump()`) and a model folder."""
    keep_freed_memory()
    return TorchLearner(RunConfig.model_validate(config), model_dir)


class TorchLearner:
    """Implements `Learner`."""

    def __init__(self, config: RunConfig, model_dir: str) -> None:
        """Load the model; DataError when it cannot be, ConfigError for settings that cannot work."""
        self.config, self.model_dir = config, model_dir
        if config.model.dtype == "float16":
            raise ConfigError(
                "model.dtype = 'float16' is not supported by the torch learner: its gradients would underflow without "
                "loss scaling; use 'bfloat16' or 'float32'"
            )
        self.device = pick_device(config.model.device)
        torch.manual_seed(config.seed)
        self._objective = Objective(config.loss, find_loss(config.loss, config.recipe_dir))
        self.policy = self._load()
        self._adapters = Adapters(self.policy.module, config.lora, config.seed) if config.lora.rank else None
        trained = self._adapters.parameters if self._adapters else dict(self.policy.named_parameters())
        self.masters = Masters(trained, config.optim)
        self.policy.collect(self.masters.grad_of)
        needs_copy = config.loss.kl_coef > 0 and self._adapters is None
        self._reference = self._load() if needs_copy else None
        if self._reference is not None:
            self._reference.module.requires_grad_(False)
        self.step = 0
        self._last: Batch | None = None
        """The batch whose gradients are held; to find the culprit of a norm that is not finite."""
        self._logp_c_K = np.zeros(0, np.float32)
        """Of the last forward_backward."""
        self._exact: ExactScorer | None = None

    def train(self, batch: Batch) -> tuple[list[ForwardBackwardReport], list[OptimReport]]:
        """Everything for one batch: trainer.updates_per_batch optimizer steps on whole groups.

        Proximal log-probs of later updates are computed once, before the first update changes the weights.
        """
        parts = split(batch, self.config.trainer.updates_per_batch)
        wants_proximal = self.config.loss.needs_proximal
        proximal = [None, *(self.logp(part) if wants_proximal else None for part in parts[1:])]
        forward, optim = [], []
        for part, logp_q in zip(parts, proximal, strict=True):
            forward.append(self.forward_backward(part, logp_q))
            optim.append(self.optim_step())
        if self._exact is not None:
            began = time.perf_counter()
            clean, _ = drop_nonfinite(batch)
            exact = self._exact.metrics(clean, self._logp_c_K if len(parts) == 1 else None)
            exact["exact/score_s"] = time.perf_counter() - began
            forward[-1] = replace(forward[-1], metrics={**forward[-1].metrics, **exact})
        return forward, optim

    def follow(self, manifest: StoreManifest) -> None:
        """Hear of a version published from here: what loss.exact_logp rebuilds old versions from."""
        loss, trainer = self.config.loss, self.config.trainer
        if loss.exact_logp == "off":
            return
        if self._exact is None or self._exact.store_url != manifest.store:
            self._exact = ExactScorer(
                self._load(),
                Store(manifest.store, durable=False),
                run_id=manifest.run_id,
                micro_batch_tok=trainer.micro_batch_tok,
                share_prompts=trainer.share_prompts,
                frac=loss.exact_logp_frac if loss.exact_logp == "sampled" else None,
                seed=self.config.seed,
                threads=torch.get_num_threads(),
            )
        self._exact.walker.know(manifest.version, manifest.digest)

    def forward_backward(self, batch: Batch, logp_q_K: NDArray[np.float32] | None = None) -> ForwardBackwardReport:
        """Add the batch's gradients. `logp_q_K`: proximal log-probs from `logp`; None when the weights have not moved.

        NonFiniteError names the sample; then gradients are cleared, weights and optimizer are untouched.
        """
        began = time.perf_counter()
        batch, nonfinite = drop_nonfinite(batch)
        targets = make_targets(batch, self.config.loss)
        targets.nonfinite_tok = nonfinite
        seen = self._objective.start(targets)
        micros = self._cut(batch)
        self._last = batch
        try:
            for micro in micros:
                logp_K, entropy_K = self.policy.logp(micro, batch.temperature)
                reference_K = self._reference_logp(micro, batch.temperature)
                loss = self._objective.micro_loss(
                    micro, targets, seen, logp_K, entropy_K, logp_q_K=logp_q_K, logp_ref_K=reference_K
                )
                torch.autograd.backward(loss)
        except NonFiniteError:
            self.masters.clear()
            raise
        self._logp_c_K = seen.logp_c_K
        return ForwardBackwardReport(
            loss=seen.loss,
            trained_tok=len(targets.sample_K),
            forward_tok=sum(m.tokens for m in micros),
            micro_batches=len(micros),
            busy_s=time.perf_counter() - began,
            metrics=self._objective.metrics(targets, seen),
        )

    def optim_step(self) -> OptimReport:
        """Clip, step, clear gradients. NonFiniteError names the sample if the norm is not finite; nothing changed."""
        began = time.perf_counter()
        norm = self.masters.grad_norm()
        if not np.isfinite(norm):
            try:
                culprit = self._find_culprit()
            finally:
                self.masters.clear()
            raise NonFiniteError(f"gradient norm is {norm}: {culprit}; weights and optimizer are unchanged")
        limit = self.config.optim.max_grad_norm
        scale = limit / norm if limit and norm > limit else 1.0
        total = self.config.steps * self.config.trainer.updates_per_batch
        lr = learning_rate(self.config.optim, self.step, total)
        self.masters.step(lr, scale)
        self.step += 1
        return OptimReport(step=self.step, lr=lr, grad_norm=norm, busy_s=time.perf_counter() - began)

    def logp(self, batch: Batch) -> NDArray[np.float32]:
        """Log-probs of the batch's trained tokens under the current weights, flat [K], without gradients."""
        batch, _ = drop_nonfinite(batch)
        targets = make_targets(batch, self.config.loss)
        logp_K = np.zeros(len(targets.sample_K), dtype=np.float32)
        with torch.no_grad():
            for micro in self._cut(batch):
                logp_K[targets.index(micro)] = self.policy.logp(micro, batch.temperature)[0].cpu().numpy()
        return logp_K

    def named_arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """The weights to serve, Hugging Face names; copies only where LoRA is merged.

        The arrays are views of the live weights: use or copy them before the next optimizer step.
        """
        for name, parameter in self.policy.named_parameters():
            weight = parameter.detach()
            if self._adapters is not None:
                weight = self._adapters.merged(name, weight, self.masters.master_of)
            yield name, to_array(weight)

    def save(self, folder: Path) -> None:
        """Write masters, optimizer state, step and fingerprint into an existing empty folder."""
        checkpoint.write_state(
            folder, self.masters.state(), step=self.step, fingerprint=self._fingerprint(), rng=checkpoint.rng_state()
        )

    def load(self, folder: Path) -> None:
        """Restore; DataError that names the difference when it was saved by another model, adapter or optimizer."""
        expect = {name: tuple(t.shape) for name, t in self.masters.state().items()}
        tensors, step, rng = checkpoint.read_state(folder, fingerprint=self._fingerprint(), expect=expect)
        self.masters.restore(tensors, step)
        checkpoint.set_rng_state(rng)
        self.step = step

    def export(self, folder: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads; with LoRA also adapter/ for PEFT."""
        arrays = ((name, np.ascontiguousarray(a)) for name, a in self.named_arrays())
        checkpoint.export_model(folder, model_dir=Path(self.model_dir), arrays=arrays, dtype=self.config.model.dtype)
        if self._adapters is not None:
            self._adapters.write_peft(folder / "adapter", self.masters.master_of, self.model_dir)

    def describe(self) -> dict[str, Any]:
        """What this learner is, for logs."""
        return {
            "kind": "torch",
            "parameters": sum(p.numel() for _, p in self.policy.named_parameters()),
            "trained_parameters": int(self.masters.master.numel()),
            "dtype": self.config.model.dtype,
            "device": str(self.device),
            "flat_forward": self.policy.flat,
            "step": self.step,
        }

    def _load(self) -> Policy:
        return Policy(
            self.model_dir,
            dtype=_DTYPES[self.config.model.dtype],
            device=self.device,
            head_chunk_tok=self.config.trainer.head_chunk_tok,
        )

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        trainer = self.config.trainer
        return micro_batches(batch, budget_tok=trainer.micro_batch_tok, share_prompts=trainer.share_prompts)

    def _reference_logp(self, micro: MicroBatch, temperature: float) -> Tensor | None:
        """Log-probs under the initial model (adapters off, or a second copy); None without a KL term."""
        if self.config.loss.kl_coef == 0:
            return None
        with torch.no_grad():
            if self._reference is not None:
                return self._reference.logp(micro, temperature)[0]
            assert self._adapters is not None
            self._adapters.enabled = False
            try:
                return self.policy.logp(micro, temperature)[0]
            finally:
                self._adapters.enabled = True

    def _find_culprit(self) -> str:
        """Recompute the last batch sample by sample, with the batch's own advantages, and name the bad one."""
        if self._last is None:
            return "no batch was computed"
        batch = self._last
        targets = make_targets(batch, self.config.loss)
        for index, sample in enumerate(batch.samples):
            self.masters.clear()
            micros = [
                m for m in micro_batches(_only(batch, index), budget_tok=1 << 30, share_prompts=False) if m.tokens
            ]
            for micro in micros:
                micro = replace(micro, sample_K=np.full_like(micro.sample_K, index))
                seen: Seen = self._objective.start(targets)
                logp_K, entropy_K = self.policy.logp(micro, batch.temperature)
                loss = self._objective.micro_loss(
                    micro, targets, seen, logp_K, entropy_K, logp_q_K=None, logp_ref_K=None
                )
                torch.autograd.backward(loss)
            if not np.isfinite(self.masters.grad_norm()):
                return f"sample {sample.group_id!r}/{sample.member} has gradients that are not finite"
        return "no single sample reproduces it (their sum overflows)"

    def _fingerprint(self) -> dict[str, Any]:
        optim, lora = self.config.optim, self.config.lora
        shapes = [(n, tuple(p.shape)) for n, p in self.masters.parameters.items()]
        return {
            "learner": "torch",
            "model_type": self.policy.config.model_type,
            "trained_layout": checkpoint.layout_digest(shapes),
            "trained_parameters": int(self.masters.master.numel()),
            "dtype": self.config.model.dtype,
            "lora.rank": lora.rank,
            "lora.alpha": lora.alpha if lora.rank else None,
            "lora.target": sorted(lora.target) if lora.rank else None,
            "optim.betas": list(optim.betas),
            "optim.eps": optim.eps,
            "optim.weight_decay": optim.weight_decay,
        }


def pick_device(name: str) -> torch.device:
    """auto takes cuda, then mps, then cpu."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _only(batch: Batch, index: int) -> Batch:
    """A batch with one sample."""
    sample = batch.samples[index]
    group = next(g for g in batch.groups if g.group_id == sample.group_id)
    return replace(batch, groups=(replace(group, samples=(sample,)),))
