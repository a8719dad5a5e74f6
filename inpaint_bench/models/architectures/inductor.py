"""Layers of diffusers' transformers in a form of which inductor makes faster kernels. They compute the same."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import activations
from torch import Tensor, nn


def rewrite(block: nn.Module) -> None:
    """Change the layers of a block that is about to be compiled."""
    module: Any
    for module in block.modules():
        if type(module) in _FASTER and module.approximate == "tanh":
            module.__class__ = _FASTER[type(module)]
        elif hasattr(module, "lora_A"):
            for adapter in module.lora_A:
                module.lora_variant.setdefault(adapter, _ScaledFirst)


def gelu(x: Tensor) -> Tensor:
    """Return GELU in its approximation with a hyperbolic tangent, by the logistic function of twice the argument.

    For a tangent inductor calls CUDA's own, which takes longer than reading and writing the map.
    """
    wide = x.float()
    return (wide * torch.sigmoid(1.5957691216057308 * wide * (1 + 0.044715 * wide * wide))).to(x.dtype)


class _Gelu(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class _ProjectedGelu(activations.GELU):
    def gelu(self, gate: Tensor) -> Tensor:
        return gelu(gate)


_FASTER: dict[type[nn.Module], type[nn.Module]] = {nn.GELU: _Gelu, activations.GELU: _ProjectedGelu}


class _ScaledFirst:
    """An adapter that multiplies the narrow tensor by alpha / rank. peft multiplies the wide one, even by 1.

    A variant as peft calls it, for training alone: it cannot be merged into the weights.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        narrow = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x)) * module.scaling[active_adapter]
        wide: Tensor = module.lora_B[active_adapter](narrow)
        return result + wide
