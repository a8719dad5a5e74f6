"""Flow matching, as FLUX and SD 3 are trained (arXiv 2403.03206): which times are drawn.

x_s = (1 - s) x_0 + s noise, and the network predicts noise - x_0. A timestep is 1,000 s.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

STEPS = 1000  # timesteps for s from 0 to 1
SHIFT_TOKENS, SHIFT = (256, 4096), (0.5, 1.15)  # tokens of an image, and the shift of FLUX's times at these


def shift_of_times(tokens: int) -> float:
    """Return by how much FLUX's times are shifted towards noise for an image of so many tokens, linear in them."""
    (few, many), (low, high) = SHIFT_TOKENS, SHIFT
    return low + (high - low) * (tokens - few) / (many - few)


def draw_timesteps(count: int, shift: float, device: torch.device, generator: Generator) -> Tensor:
    """Draw [count] int64 timesteps of 1 to STEPS: s is logit-normal, then shifted towards noise."""
    s = torch.randn(count, device=device, generator=generator).sigmoid()
    scale = math.exp(shift)
    return (STEPS * scale * s / (1 + (scale - 1) * s)).round().clamp(1, STEPS).long()
