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

# By measurement on an H200 (benchmarks/README.md).
FORWARD = {"rows": 4, "warps": 2}  # rows of a tile, warps per 512 channels
BACKWARD = {"values": 640, "warps": 1024, "tiles": 32}  # values of a warp's tile; warps of a launch; tiles of a program


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
def _load_part(dy, total, at, inside, mean, rstd, weight):
    """Return the gradient of y, the normalised input and the weighted gradient of a part of the rows."""
    xhat = (tl.load(total + at, mask=inside, other=0.0).to(tl.float32) - mean[:, None]) * rstd[:, None]
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    return g, xhat, g * weight[None, :]


@jit
def _store_part(d, dtotal, dx, at, inside, HAS_DTOTAL: tl.constexpr):
    if HAS_DTOTAL:
        d += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    return tl.where(inside, d, 0.0)


@jit
def _layer_norm_backward(
    dy, dtotal, total, weight, means, rstds, dx, partials, M,
    C: tl.constexpr, HAS_DTOTAL: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Write dx, and per program the column sums of dy * xhat, dy and dx: [programs, 3, C].

    A row is in two parts, a power of two and the rest: of one part of 512 lanes a third would idle at 320 channels.
    """
    c1, c2 = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    w1 = tl.load(weight + c1).to(tl.float32)
    w2 = tl.load(weight + c2, mask=c2 < C, other=0.0).to(tl.float32)
    # Summed over the rows of a tile only at the end: a reduction across warps for each costs more than the tile.
    dweight1, dweight2 = tl.zeros([BLOCK_M, FIRST], tl.float32), tl.zeros([BLOCK_M, REST], tl.float32)
    dbias1, dbias2 = tl.zeros([BLOCK_M, FIRST], tl.float32), tl.zeros([BLOCK_M, REST], tl.float32)
    columns1, columns2 = tl.zeros([BLOCK_M, FIRST], tl.float32), tl.zeros([BLOCK_M, REST], tl.float32)
    for tile in tl.range(TILES, num_stages=3):
        m = (tl.program_id(0) * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside1 = (m[:, None] < M) & (c1[None, :] < C)
        inside2 = (m[:, None] < M) & (c2[None, :] < C)
        at1, at2 = m[:, None].to(tl.int64) * C + c1[None, :], m[:, None].to(tl.int64) * C + c2[None, :]
        mean = tl.load(means + m, mask=m < M, other=0.0)
        rstd = tl.load(rstds + m, mask=m < M, other=0.0)
        g1, xhat1, wg1 = _load_part(dy, total, at1, inside1, mean, rstd, w1)
        g2, xhat2, wg2 = _load_part(dy, total, at2, inside2, mean, rstd, w2)
        centre = ((tl.sum(wg1, axis=1) + tl.sum(wg2, axis=1)) / C)[:, None]
        slope = ((tl.sum(wg1 * xhat1, axis=1) + tl.sum(wg2 * xhat2, axis=1)) / C)[:, None]
        columns1 += _store_part(rstd[:, None] * (wg1 - centre - xhat1 * slope), dtotal, dx, at1, inside1, HAS_DTOTAL)
        columns2 += _store_part(rstd[:, None] * (wg2 - centre - xhat2 * slope), dtotal, dx, at2, inside2, HAS_DTOTAL)
        dweight1 += g1 * xhat1
        dweight2 += g2 * xhat2
        dbias1 += g1
        dbias2 += g2
    out = partials + tl.program_id(0) * 3 * C
    tl.store(out + c1, tl.sum(dweight1, axis=0))
    tl.store(out + c2, tl.sum(dweight2, axis=0), mask=c2 < C)
    tl.store(out + C + c1, tl.sum(dbias1, axis=0))
    tl.store(out + C + c2, tl.sum(dbias2, axis=0), mask=c2 < C)
    tl.store(out + 2 * C + c1, tl.sum(columns1, axis=0))
    tl.store(out + 2 * C + c2, tl.sum(columns2, axis=0), mask=c2 < C)


def _floor_power_of_two(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


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
            num_warps=max(1, min(8, FORWARD["warps"] * block_c // 512)),
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
        block_m = _floor_power_of_two(BACKWARD["values"] // channels)
        warps = min(8, _floor_power_of_two(block_m * channels // BACKWARD["values"]))
        tiles = max(1, min(BACKWARD["tiles"], rows * warps // (block_m * BACKWARD["warps"])))
        programs = cdiv(rows, block_m * tiles)
        dx = torch.empty_like(total)
        partials = torch.empty(programs, 3, channels, dtype=torch.float32, device=dx.device)
        first = _floor_power_of_two(channels - 1)
        _layer_norm_backward[(programs,)](
            dy.contiguous(), dy if dtotal is None else dtotal.contiguous(), total, weight, means, rstds, dx, partials,
            rows, C=channels, HAS_DTOTAL=dtotal is not None, TILES=tiles, BLOCK_M=block_m,
            FIRST=first, REST=triton.next_power_of_2(channels - first), num_warps=warps,
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
