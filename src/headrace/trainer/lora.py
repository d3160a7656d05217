"""Low-rank adapters: y = W x + (alpha / rank) * B (A x), with W frozen; on disk in PEFT's layout.

Dimension letters: O outputs, I inputs, R rank. LoRA: arXiv 2106.09685. A starts random (Kaiming uniform), B at 0, so
the first forward pass is the base model's. Serving gets W + (alpha / rank) * B A, computed in float32 and rounded once:
an update much smaller than a bfloat16 step of W is lost there, not in the adapter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.config.schema import LoraConfig
from headrace.errors import ConfigError, did_you_mean


class Adapters:
    """Adapters of one model; `enabled = False` computes the base model (the KL reference)."""

    def __init__(self, module: nn.Module, config: LoraConfig, seed: int) -> None:
        """Freeze the module and hook adapters onto every linear layer whose last name part is a target.

        ConfigError if a target matches no layer.
        """
        self.config = config
        self.scale = config.alpha / config.rank
        self.enabled = True
        module.requires_grad_(False)
        linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
        known = {n.rpartition(".")[2] for n in linears}
        for target in config.target:
            if target not in known:
                raise ConfigError(f"lora.target names {target!r}, no linear layer is called so; {_near(target, known)}")
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, nn.Parameter] = {}
        self._weights: dict[str, tuple[str, str]] = {}
        for name, linear in linears.items():
            if name.rpartition(".")[2] not in config.target:
                continue
            a_RI = torch.empty(config.rank, linear.in_features)
            nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5), generator=generator)
            b_OR = torch.zeros(linear.out_features, config.rank)
            like = linear.weight
            a, b = (nn.Parameter(t.to(device=like.device, dtype=like.dtype)) for t in (a_RI, b_OR))
            keys = (f"{name}.lora_A.weight", f"{name}.lora_B.weight")
            self.parameters |= dict(zip(keys, (a, b), strict=True))
            self._weights[f"{name}.weight"] = keys
            linear.register_forward_hook(self._hook(a, b))

    def merged(self, name: str, weight_OI: Tensor, masters: Mapping[str, Tensor]) -> Tensor:
        """The served weight of parameter `name`, in its dtype; the weight itself where there is no adapter."""
        keys = self._weights.get(name)
        if keys is None:
            return weight_OI
        a_RI, b_OR = masters[keys[0]], masters[keys[1]]
        return (weight_OI.float() + self.scale * (b_OR @ a_RI)).to(weight_OI.dtype)

    def write_peft(self, folder: Path, masters: Mapping[str, Tensor], base: str) -> None:
        """Write adapter_model.safetensors and adapter_config.json, as `peft.PeftModel.from_pretrained` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"base_model.model.{n}": t.detach().cpu().contiguous().clone() for n, t in masters.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "target_modules": list(self.config.target),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _hook(self, a_RI: Tensor, b_OR: Tensor) -> Callable[[Any, Any, Tensor], Tensor]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if not self.enabled:
                return out
            return out + F.linear(F.linear(inputs[0], a_RI), b_OR) * self.scale

        return hook


def _near(name: str, known: set[str]) -> str:
    return did_you_mean(name, known)
