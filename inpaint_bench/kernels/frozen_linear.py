"""Linear layers whose frozen weights are stored in 8 or 4 bits, and computed with in the type of their input.

fp8: float8_e4m3 with a scale for each output row. The scales are powers of two, so that dequantising rounds nothing.
nf4: the 16 quantiles of a normal distribution of Dettmers et al. (arXiv 2305.14314), with a scale for every 64 weights.

Weights are dequantised at each use, in the forward pass and again in the backward pass, which keeps the stored ones
only. It is plain PyTorch: within a compiled block it becomes one kernel before the product, on CPUs too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dispatch import autocast_dtype

BLOCK = 64  # weights of one scale of nf4


def nf4_levels() -> Tensor:
    """Return the 16 values of NF4, rising from -1 to 1 with 0 among them: eight below it, seven above. [16] float32."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2  # the outermost quantile of both halves
    below, above = (torch.special.ndtri(torch.linspace(offset, 0.5, n, dtype=torch.float64)[:-1]) for n in (8, 9))
    return (torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)]) / above[0]).float()


def store_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [O, I] weights to float8_e4m3 [O, I] and scales [O, 1] in the weights' type."""
    largest = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(torch.float8_e4m3fn).max)))
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale.to(weight.dtype)


def store_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [O, I] weights to two in a byte [O, I / 2], and bf16 scales [O I / 64]."""
    blocks = weight.float().reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=1).bfloat16()
    levels = nf4_levels().to(weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    numbers = torch.bucketize(blocks / scale.float().clamp(min=1e-30)[:, None], between).to(torch.uint8)
    pairs = numbers.view(len(weight), -1, 2)
    return pairs[..., 0] << 4 | pairs[..., 1], scale


def restore(stored: Tensor, scale: Tensor, levels: Tensor, dtype: torch.dtype, *, backward: bool = False) -> Tensor:
    """Dequantise weights to [O, I] in `dtype`. `levels` [256, 2]: the two values of each byte of nf4.

    `backward`: by other operations to the same result. Inductor (seen with 2.13) merges equal ones of the forward and
    the backward pass, and would keep the dequantised weights in between.
    """
    if stored.dtype == torch.float8_e4m3fn:
        wide = torch.float32 if backward else dtype
        return (stored.to(wide) * scale.to(wide)).to(dtype)
    index = stored.to(torch.int64 if backward else torch.int32)
    return (levels[index].view(-1, BLOCK) * scale[:, None]).view(len(stored), -1).to(dtype)


class _Product(torch.autograd.Function):
    """x W^T + b. PyTorch's own would keep the dequantised W for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale: Tensor, levels: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored, scale, levels)
        return F.linear(x, restore(stored, scale, levels, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stored, scale, levels = ctx.saved_tensors
        return gradient @ restore(stored, scale, levels, gradient.dtype, backward=True), None, None, None, None


class FrozenLinear(nn.Module):
    """A linear layer with the weights of another one, `kind` fp8 or nf4, which are no parameters. Its bias stays."""

    stored: Tensor
    scale: Tensor
    levels: Tensor

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        stored, scale = (store_fp8 if kind == "fp8" else store_nf4)(linear.weight.detach())
        levels = nf4_levels().to(stored.device)
        self.register_buffer("stored", stored)
        self.register_buffer("scale", scale)
        self.register_buffer("levels", torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1))

    @property
    def weight(self) -> Tensor:
        """Return the dequantised weights, [O, I] bf16."""
        return restore(self.stored, self.scale, self.levels, torch.bfloat16)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of weights and scales."""
        return self.stored.nbytes + self.scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O], in autocast's type if it is on, else in that of `x`."""
        x = x.to(autocast_dtype(x))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        result: Tensor = _Product.apply(x, self.stored, self.scale, self.levels, bias)
        return result


def store_frozen(network: nn.Module, kind: str) -> None:
    """Replace the linear layers of a network whose weights are frozen."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not child.weight.requires_grad:
                setattr(parent, name, FrozenLinear(child, kind))
