"""A moving average of the trained weights, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DECAY = 0.9999


class Average:
    """`average = decay * average + (1 - decay) * weights`, after every step."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = parameters
        self.tensors = [p.detach().float().clone(memory_format=torch.preserve_format) for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        current = [p.detach() if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        torch._foreach_lerp_(self.tensors, current, 1 - self.decay)

    @torch.no_grad()
    def load(self, tensors: list[Tensor]) -> None:
        torch._foreach_copy_(self.tensors, tensors)
