"""Residual addition and LayerNorm in one pass, and the same backward.

`add_layer_norm` forms s = residual + x + bias and y = LayerNorm(s), and returns both: y for the branch, s for the next
residual. Its backward receives both gradients and adds them in the pass that computes the norm's own; the gradient of
the bias (that of the linear layer which made x) falls out as a column sum of that pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import cdiv, jit, tl, triton, use_triton
from .reduce import sum_partials

# Rows of a tile, tiles of a program in the backward pass, warps: by measurement on an H200 (benchmarks/README.md).
FORWARD = {"rows": 4, "warps": 2}  # warps per 512 channels
BACKWARD = {"rows": 2, "tiles": 32, "warps": 1}


@jit
def _layer_norm_forward(
    x, residual, extra_bias, weight, bias, total, y, means, rstds, M, eps,
    C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    real = c < C
    inside = (m[:, None] < M) & real[None, :]
    at = m[:, None].to(tl.int64) * C + c[None, :]
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        s += tl.load(extra_bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        s += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL or HAS_BIAS:
        rounded = s.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        s = rounded.to(tl.float32)  # the norm of what is stored, as the backward pass reads it
    mean = tl.sum(s, axis=1) / C
    centred = tl.where(inside, s - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / C + eps)
    tl.store(means + m, mean, mask=m < M)
    tl.store(rstds + m, rstd, mask=m < M)
    w = tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    out = centred * rstd[:, None] * w[None, :] + b[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@jit
def _layer_norm_backward(
    dy, dtotal, total, weight, means, rstds, dx, partials, M,
    C: tl.constexpr, HAS_DTOTAL: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write dx, and per program the column sums of dy * xhat, dy and dx: [programs, 3, C]."""
    c = tl.arange(0, BLOCK_C)
    real = c < C
    w = tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
    # Summed over the rows of a tile only at the end: a reduction across warps for each costs more than the tile.
    dweight = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    dbias = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    columns = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in range(TILES):
        m = (tl.program_id(0) * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < M) & real[None, :]
        at = m[:, None].to(tl.int64) * C + c[None, :]
        mean = tl.load(means + m, mask=m < M, other=0.0)
        rstd = tl.load(rstds + m, mask=m < M, other=0.0)
        s = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        xhat = tl.where(inside, (s - mean[:, None]) * rstd[:, None], 0.0)
        wg = g * w[None, :]
        c1 = tl.sum(wg, axis=1) / C
        c2 = tl.sum(wg * xhat, axis=1) / C
        d = rstd[:, None] * (wg - c1[:, None] - xhat * c2[:, None])
        if HAS_DTOTAL:
            d += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, d, 0.0)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        dweight += g * xhat
        dbias += g
        columns += d
    out = partials + tl.program_id(0) * 3 * C + c
    tl.store(out, tl.sum(dweight, axis=0), mask=real)
    tl.store(out + C, tl.sum(dbias, axis=0), mask=real)
    tl.store(out + 2 * C, tl.sum(columns, axis=0), mask=real)


def _warps(per_512_channels: int, block_c: int) -> int:
    return max(1, min(8, per_512_channels * block_c // 512))


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        extra_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        channels = x.shape[-1]
        rows = x.numel() // channels
        same = residual is None and extra_bias is None
        y, total = torch.empty_like(x), x if same else torch.empty_like(x)
        means, rstds = torch.empty(2, rows, dtype=torch.float32, device=x.device).unbind()
        block_c = triton.next_power_of_2(channels)
        _layer_norm_forward[(cdiv(rows, FORWARD["rows"]),)](
            x, x if residual is None else residual, weight if extra_bias is None else extra_bias, weight, bias,
            total, y, means, rstds, rows, eps, C=channels, HAS_RESIDUAL=residual is not None,
            HAS_BIAS=extra_bias is not None, BLOCK_M=FORWARD["rows"], BLOCK_C=block_c,
            num_warps=_warps(FORWARD["warps"], block_c),
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, means, rstds)
        ctx.given = residual is not None, extra_bias is not None
        return y, total.view_as(total) if same else total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None) -> tuple[Any, ...]:
        total, weight, means, rstds = ctx.saved_tensors
        channels = total.shape[-1]
        rows = total.numel() // channels
        tiles = max(1, min(BACKWARD["tiles"], rows // (BACKWARD["rows"] * 512)))  # enough programs for every SM
        programs = cdiv(rows, BACKWARD["rows"] * tiles)
        dx = torch.empty_like(total)
        partials = torch.empty(programs, 3, channels, dtype=torch.float32, device=dx.device)
        block_c = triton.next_power_of_2(channels)
        _layer_norm_backward[(programs,)](
            dy.contiguous(), dy if dtotal is None else dtotal.contiguous(), total, weight, means, rstds, dx, partials,
            rows, C=channels, HAS_DTOTAL=dtotal is not None, TILES=tiles, BLOCK_M=BACKWARD["rows"],
            BLOCK_C=block_c, num_warps=_warps(BACKWARD["warps"], block_c),
        )  # fmt: skip
        dweight, dbias, columns = sum_partials(partials.flatten(1), weight.dtype).unflatten(0, (3, channels)).unbind()
        has_residual, has_bias = ctx.given
        return dx, dx if has_residual else None, columns if has_bias else None, dweight, dbias, None


def add_layer_norm_reference(
    x: Tensor, residual: Tensor | None, extra_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute what `add_layer_norm` does in plain PyTorch."""
    total = x if extra_bias is None else x + extra_bias
    total = total if residual is None else total + residual
    return F.layer_norm(total, (x.shape[-1],), weight, bias, eps), total


def add_layer_norm(
    x: Tensor, residual: Tensor | None, extra_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(residual + x + extra_bias) over the last dimension, and the sum itself; [..., C] each."""
    if use_triton(x):
        return _AddLayerNorm.apply(x.contiguous(), residual, extra_bias, weight, bias, eps)
    return add_layer_norm_reference(x, residual, extra_bias, weight, bias, eps)
