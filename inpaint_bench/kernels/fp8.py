"""Linear layers whose products are in FP8: e4m3 values, one scale per row of each operand.

The forward product and the gradient of the input are in FP8, the gradient of a trained weight is not. A frozen weight
is stored in FP8 alone, with a scale per row. The gradient of the input sums over these rows: their scales go into the
gradient of the output before that is rounded, so that the one copy serves both products.

Written in plain PyTorch, of which torch.compile fuses the rounding with what comes before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import autocast_dtype

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
CAPABILITY = (8, 9)  # compute capability of Ada, the first with FP8 products
MULTIPLE = 16  # rows and columns of a weight must be multiples of this


def unavailable_reason(device: torch.device) -> str | None:
    """Return why FP8 products cannot run on the device, None if they can. A CPU emulates them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "FP8 products need compute capability 8.9 (Ada, Hopper) or later"
    return None


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round [M, K] to FP8. Returns the values [M, K] and what to multiply each row by, float32 [M, 1]."""
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply FP8 [M, K] by the transpose of [N, K], scales [M, 1] and [N, 1] -> [M, N]."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=True)
    return (a.float() @ b.float().t() * a_scale * b_scale.t()).to(dtype)


class _Linear(torch.autograd.Function):
    """x [M, I] by a weight [O, I] in FP8 with scales [O, 1]; `trained` is the weight itself, if it is trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, trained: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale, None if trained is None else x)
        return product(*round_rows(x), weight, scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        weight, scale, x = ctx.saved_tensors
        ones = torch.ones(weight.shape[1], 1, device=dy.device)
        dx = product(*round_rows(dy * scale.t()), weight.t().contiguous(), ones, dy.dtype)
        return dx, None, None, None if x is None else dy.t() @ x


def _multiply(x: Tensor, weight: Tensor, scale: Tensor, trained: Tensor | None, bias: Tensor | None) -> Tensor:
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight, scale, trained).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


class FrozenFp8Linear(nn.Module):
    """A linear layer whose weight is stored in FP8 and not trained."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        values, scale = round_rows(linear.weight.detach())
        self.register_buffer("weight", values)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return _multiply(x.to(autocast_dtype(x)), self.weight, self.scale, None, self.bias)


class TrainedFp8Linear(nn.Linear):
    """A linear layer whose weight is trained, and rounded to FP8 for each product."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        x = x.to(autocast_dtype(x))  # FP8 products return 16-bit numbers
        weight = self.weight.to(x.dtype)
        with torch.no_grad():
            rounded = round_rows(weight)
        return _multiply(x, *rounded, weight, self.bias)


def convert(network: nn.Module) -> int:
    """Give the linear layers of a network FP8 products, those of adapters excepted. Returns their number."""
    count = 0
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or any(size % MULTIPLE for size in layer.weight.shape):
                continue
            if isinstance(parent, nn.ModuleDict):  # peft keeps its adapters in these
                continue
            if layer.weight.requires_grad:
                layer.__class__ = TrainedFp8Linear
            else:
                setattr(parent, name, FrozenFp8Linear(layer))
            count += 1
    return count
