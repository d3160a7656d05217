"""Float32 master weights, their gradients and their compute copy, each one flat buffer.

The optimizer then is a few long vector operations, the global norm one reduction, a checkpoint a few arrays. The
module's parameters are views of the compute copy (bfloat16 or float16; with float32 they are the masters themselves).
Gradients arrive in the compute dtype and are summed in float32 over micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace.config.schema import OptimConfig


class Masters:
    """Owns masters, gradients, AdamW. Weight decay acts on matrices only, not on norms and biases."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        """Takes over the parameters: their storage moves into the compute buffer, in the given order."""
        self.parameters = dict(parameters)
        ordered = sorted(self.parameters, key=lambda n: self.parameters[n].ndim < 2)  # matrices first, stable
        total = sum(p.numel() for p in self.parameters.values())
        matrix = sum(p.numel() for p in self.parameters.values() if p.ndim >= 2)
        first = next(iter(self.parameters.values()))
        self.device, self.dtype = first.device, first.dtype
        self.master = torch.empty(total, dtype=torch.float32, device=self.device)
        self.grad = torch.zeros_like(self.master)
        same = self.dtype == torch.float32
        self.compute = self.master if same else torch.empty(total, dtype=self.dtype, device=self.device)
        self.grad_of: dict[str, Tensor] = {}
        self.master_of: dict[str, Tensor] = {}
        at = 0
        for name in ordered:
            parameter = self.parameters[name]
            here = slice(at, at + parameter.numel())
            at = here.stop
            self.master_of[name] = self.master[here].view(parameter.shape)
            self.grad_of[name] = self.grad[here].view(parameter.shape)
            self.master_of[name].copy_(parameter.data)
            view = self.compute[here].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            hook: Any = _collect(self.grad_of[name])
            cast(Any, parameter).register_post_accumulate_grad_hook(hook)
        self._parts = [slice(0, matrix), slice(matrix, total)]
        self._leaves = [nn.Parameter(self.master[part]) for part in self._parts]
        decay = (config.weight_decay, 0.0)
        self.optimizer = torch.optim.AdamW(
            [{"params": [leaf], "weight_decay": d} for leaf, d in zip(self._leaves, decay, strict=True)],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def grad_norm(self) -> float:
        """Global 2-norm of the summed gradients."""
        return float(torch.linalg.vector_norm(self.grad))

    def step(self, lr: float, grad_scale: float) -> None:
        """One AdamW step with gradients times `grad_scale`, then the compute copy and cleared gradients."""
        if grad_scale != 1.0:
            self.grad.mul_(grad_scale)
        for group, leaf, part in zip(self.optimizer.param_groups, self._leaves, self._parts, strict=True):
            group["lr"] = lr
            leaf.grad = self.grad[part]
        self.optimizer.step()
        self.refresh()
        self.clear()

    def refresh(self) -> None:
        """Cast the masters into the compute copy."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def clear(self) -> None:
        """Forget gradients."""
        self.grad.zero_()

    def state(self) -> dict[str, Tensor]:
        """Masters and optimizer moments as flat float32 tensors."""
        tensors = {"master": self.master}
        for key in ("exp_avg", "exp_avg_sq"):
            for i, leaf in enumerate(self._leaves):
                state = self.optimizer.state.get(leaf, {})
                tensors[f"{key}.{i}"] = state[key] if state else torch.zeros_like(leaf.data)
        return tensors

    def restore(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Inverse of `state`; `steps` is the number of optimizer steps they have seen. Gradients are cleared."""
        self.master.copy_(tensors["master"])
        for i, leaf in enumerate(self._leaves):
            self.optimizer.state.pop(leaf, None)
            if steps:
                self.optimizer.state[leaf] = {
                    "step": torch.tensor(float(steps), dtype=torch.float32, device=leaf.device),
                    "exp_avg": tensors[f"exp_avg.{i}"].to(self.device, copy=True),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{i}"].to(self.device, copy=True),
                }
        self.refresh()
        self.clear()


def _collect(grad: Tensor) -> Any:
    """Hook that moves a parameter's fresh gradient into its float32 accumulator."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            grad.add_(parameter.grad)
            parameter.grad = None

    return hook
