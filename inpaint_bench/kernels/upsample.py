"""Nearest upsampling by 2 and the 3x3 convolution behind it, as one transposed convolution: 4x4, stride 2, padding 1.

The weights of the 4x4 kernel are sums of 1, 2 or 4 weights of the 3x3 kernel. Four pixels of the result take 16
products per channel instead of 36, and the doubled map is never written. The gradient of the 3x3 weights is the same
sums of the 4x4 kernel's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .dispatch import cdiv, jit, tl, use_triton

SUM_TAPS = {"block": 32, "warps": 4}


@jit
def _sum_taps(source, target, rows, columns, TAPS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum taps of [rows, TAPS, TAPS, columns] into [columns, SUMS, SUMS, rows]."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    from_at = r[:, None] * (TAPS * TAPS) * columns + c[None, :]
    to_at = c[:, None] * (SUMS * SUMS) * rows + r[None, :]
    from_mask = (r[:, None] < rows) & (c[None, :] < columns)
    to_mask = (c[:, None] < columns) & (r[None, :] < rows)
    for y in tl.static_range(SUMS):
        for x in tl.static_range(SUMS):
            total = tl.zeros([BLOCK, BLOCK], tl.float32)
            for a in tl.static_range(TAPS):
                for b in tl.static_range(TAPS):
                    # Along one axis the taps (a, b, c) become (c, b + c, a + b, a), and back.
                    if (a + y == 2 or a + y == 3) and (b + x == 2 or b + x == 3):
                        values = tl.load(source + from_at + (a * TAPS + b) * columns, mask=from_mask, other=0.0)
                        total += values.to(tl.float32)
            out = tl.trans(total).to(target.dtype.element_ty)
            tl.store(target + to_at + (y * SUMS + x) * rows, out, mask=to_mask)


def sum_taps(weight: Tensor, sums: int) -> Tensor:
    """Turn the weight [R, C, 3, 3] into [C, R, 4, 4] (`sums` 4), or the gradient back (3). Both are channels-last."""
    rows, columns, taps, _ = weight.shape
    weight = weight.contiguous(memory_format=torch.channels_last)
    target = weight.new_empty(columns, sums, sums, rows)
    block = SUM_TAPS["block"]
    _sum_taps[(cdiv(rows, block), cdiv(columns, block))](
        weight, target, rows, columns, TAPS=taps, SUMS=sums, BLOCK=block, num_warps=SUM_TAPS["warps"]
    )
    return target.permute(0, 3, 1, 2)


_FROZEN = WeakIdKeyDictionary()


def _of_frozen(weight: Tensor) -> Tensor:
    """Return the 4x4 kernel of a weight that is not trained, summed once for each version of it."""
    version, wide = _FROZEN.get(weight, (None, None))
    if version != weight._version:
        wide = sum_taps(weight, 4)
        _FROZEN[weight] = weight._version, wide
    kernel: Tensor = wide
    return kernel


class _UpsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = sum_taps(weight, 4) if weight.requires_grad else _of_frozen(weight)
        ctx.save_for_backward(x, wide)
        return F.conv_transpose2d(x, wide, None, 2, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, wide = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        geometry = (2, 2), (1, 1), (1, 1), True, (0, 0), 1
        dx, dwide, _ = torch.ops.aten.convolution_backward(dy, x, wide, None, *geometry, (True, True, False))
        return dx, sum_taps(dwide, 3)


def upsample_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Double the sides of [N, H, W, I] and convolve by [O, I, 3, 3] with padding 1 -> [N, 2H, 2W, O]."""
    maps = x.permute(0, 3, 1, 2)
    if use_triton(x):
        return _UpsampleConv.apply(maps, weight).permute(0, 2, 3, 1)
    doubled = F.interpolate(maps, scale_factor=2.0, mode="nearest")
    return F.conv2d(doubled, weight, None, 1, 1).permute(0, 2, 3, 1)
