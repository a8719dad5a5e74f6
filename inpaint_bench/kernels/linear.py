"""Linear layers whose weights are stored in 8 or 4 bits, and such whose products are in FP8, in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dispatch import autocast_dtype

# --- frozen weights in few bits, computed with in the type of their input ------------------------

# fp8: float8_e4m3 with a scale for each output row. The scales are powers of two, so that dequantising rounds nothing.
# nf4: the 16 levels of Dettmers et al. (arXiv 2305.14314), quantiles of a normal distribution, with a scale for every
# 64 weights.
#
# Weights are dequantised at each use, in the forward pass and again in the backward pass, which keeps the stored ones
# only. Within a compiled block that becomes one kernel before the product, on CPUs too.
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


# --- products in FP8 -----------------------------------------------------------------------------

# e4m3 values, one scale per row of each operand. The forward product and the gradient of the input are in FP8, the
# gradient of a trained weight is not. A frozen weight is stored in FP8 alone, with a scale per row. The gradient of the
# input sums over these rows: their scales go into the gradient of the output before that is rounded, so that the one
# copy serves both products. torch.compile fuses the rounding with what comes before it.
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
