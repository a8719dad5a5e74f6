"""Elementwise operations with a bias and its gradient: GEGLU, and the sum of a map, a bias and a residual.

And the softmax of rows that no attention kernel takes, without a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import group_norm
from .dispatch import cdiv, jit, largest_power_of_two_divisor, tl, triton, use_triton
from .group_norm_kernels import block_statistics
from .reduce import column_sums, sum_partials

# Rows and columns of a tile, tiles of a program, warps: by measurement on an H200 (benchmarks/README.md).
GEGLU_FORWARD = {"rows": 8, "columns": 256, "warps": 4}
GEGLU_BACKWARD = {"rows": 1, "columns": 256, "tiles": 32, "warps": 2}
ADD_BIAS = {"rows": 16, "columns": 64, "warps": 4}  # with statistics: rows as a norm has them, and one warp


@jit
def _normal(gate):
    """Return P(N < gate) and exp(-gate^2 / 2). The error is below 1e-7: Abramowitz and Stegun, 7.1.26."""
    t = 1.0 / (1.0 + 0.231641888 * tl.abs(gate))
    power = tl.exp2(gate * gate * -0.7213475204444817)
    polynomial = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * power * t * polynomial
    return tl.where(gate < 0, tail, 1.0 - tail), power


@jit
def _geglu_forward(x, bias, y, M, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = m[:, None] < M
    at = m[:, None].to(tl.int64) * (2 * INNER) + c[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + c).to(tl.float32)[None, :]
    gate = tl.load(x + at + INNER, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(bias + INNER + c).to(tl.float32)[None, :]
    out = value * gate * _normal(gate)[0]
    tl.store(y + m[:, None].to(tl.int64) * INNER + c[None, :], out.to(y.dtype.element_ty), mask=inside)


@jit
def _geglu_backward(
    dy, x, bias, dx, partials, M,
    INNER: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write dx [M, 2 * INNER], and per program its column sums."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value_bias = tl.load(bias + c).to(tl.float32)[None, :]
    gate_bias = tl.load(bias + INNER + c).to(tl.float32)[None, :]
    value_sum = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    gate_sum = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in range(TILES):
        m = (tl.program_id(0) * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = m[:, None] < M
        at = m[:, None].to(tl.int64) * (2 * INNER) + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + value_bias
        gate = tl.load(x + at + INNER, mask=inside, other=0.0).to(tl.float32) + gate_bias
        g = tl.load(dy + m[:, None].to(tl.int64) * INNER + c[None, :], mask=inside, other=0.0).to(tl.float32)
        normal, power = _normal(gate)
        dvalue = g * gate * normal
        dgate = g * value * (normal + gate * power * 0.3989422804014327)
        tl.store(dx + at, dvalue.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + INNER, dgate.to(dx.dtype.element_ty), mask=inside)
        value_sum += dvalue  # zero in rows beyond M, where g is
        gate_sum += dgate
    out = partials + tl.program_id(0) * (2 * INNER) + c
    tl.store(out, tl.sum(value_sum, axis=0))
    tl.store(out + INNER, tl.sum(gate_sum, axis=0))


@jit
def _add_bias(
    x, bias, residual, y, means, deviations, M, H, W, C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PADDED: tl.constexpr,
    STATISTICS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write M rows. PADDED: they are maps of (H + 1) x (W + 1) pixels, with zeros in the last row and column.

    STATISTICS: write those of blocks of BLOCK_M rows, which a norm of the result begins with.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    source, inside = m, m < M
    if PADDED:
        column, row, image = m % (W + 1), m // (W + 1) % (H + 1), m // (W + 1) // (H + 1)
        source, inside = (image * H + row) * W + column, inside & (column < W) & (row < H)
    at, real = source[:, None].to(tl.int64) * C + c[None, :], inside[:, None]
    out = tl.load(x + at, mask=real, other=0.0).to(tl.float32) + tl.load(bias + c).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        out += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    if PADDED:
        out = tl.where(real, out, 0.0)
    rounded = out.to(y.dtype.element_ty)
    tl.store(y + m[:, None].to(tl.int64) * C + c[None, :], rounded, mask=m[:, None] < M)
    if STATISTICS:
        first = tl.program_id(0) * BLOCK_M
        _, mean, squares = block_statistics(rounded.to(tl.float32), m, first, M, BLOCK_M)
        tl.store(means + tl.program_id(0) * C + c, mean)
        tl.store(deviations + tl.program_id(0) * C + c, squares)


def _launch_add_bias(x: Tensor, bias: Tensor, residual: Tensor | None, y: Tensor, *, padded: bool = False) -> Tensor:
    """Write the sum into `y`, of the shape of `x`, or with `padded` one row and column larger, and return it."""
    channels, (height, width) = y.shape[-1], x.shape[-3:-1] if padded else (0, 0)
    rows = y.numel() // channels
    block_m, warps = ADD_BIAS["rows"], ADD_BIAS["warps"]
    block_c = largest_power_of_two_divisor(channels, ADD_BIAS["columns"])
    means = deviations = bias
    pixels = rows // len(y)
    # Statistics of a map that a norm may follow, in its blocks, if no block crosses from one image to the next.
    statistics = y.ndim == 4 and not padded and pixels % group_norm.BLOCK_P == 0
    if statistics:
        block_m, warps, blocks = group_norm.BLOCK_P, 1, pixels // group_norm.BLOCK_P
        means, deviations = torch.empty(2, len(y), blocks, channels, dtype=torch.float32, device=y.device).unbind()
    _add_bias[(cdiv(rows, block_m), channels // block_c)](
        x, bias, x if residual is None else residual, y, means, deviations, rows, height, width, C=channels,
        HAS_RESIDUAL=residual is not None, PADDED=padded, STATISTICS=statistics, BLOCK_M=block_m, BLOCK_C=block_c,
        num_warps=warps,
    )  # fmt: skip
    if statistics:
        group_norm.keep_statistics(y, means, deviations)
    return y


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        inner = x.shape[-1] // 2
        rows = x.numel() // (2 * inner)
        y = torch.empty(*x.shape[:-1], inner, dtype=x.dtype, device=x.device)
        block_m, block_c = GEGLU_FORWARD["rows"], largest_power_of_two_divisor(inner, GEGLU_FORWARD["columns"])
        _geglu_forward[(cdiv(rows, block_m), inner // block_c)](
            x, bias, y, rows, INNER=inner, BLOCK_M=block_m, BLOCK_C=block_c, num_warps=GEGLU_FORWARD["warps"]
        )
        ctx.save_for_backward(x, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, bias = ctx.saved_tensors
        inner = x.shape[-1] // 2
        rows = x.numel() // (2 * inner)
        block_m, block_c = GEGLU_BACKWARD["rows"], largest_power_of_two_divisor(inner, GEGLU_BACKWARD["columns"])
        tiles = max(1, min(GEGLU_BACKWARD["tiles"], rows // (block_m * 256)))
        programs = cdiv(rows, block_m * tiles)
        dx = torch.empty_like(x)
        partials = torch.empty(programs, 2 * inner, dtype=torch.float32, device=x.device)
        _geglu_backward[(programs, inner // block_c)](
            dy.contiguous(), x, bias, dx, partials, rows, INNER=inner, TILES=tiles, BLOCK_M=block_m, BLOCK_C=block_c,
            num_warps=GEGLU_BACKWARD["warps"],
        )  # fmt: skip
        return dx, sum_partials(partials, bias.dtype)


def geglu(x: Tensor, bias: Tensor) -> Tensor:
    """Return value * gelu(gate) of [value; gate] = x + bias, [..., 2I] -> [..., I]; gelu by erf, as diffusers."""
    if use_triton(x):
        return _Geglu.apply(x.contiguous(), bias)
    value, gate = (x + bias).chunk(2, dim=-1)
    return value * F.gelu(gate)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        ctx.has_residual = residual is not None
        return _launch_add_bias(x, bias, residual, torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        dy = dy.contiguous()
        return dy, column_sums(dy), dy if ctx.has_residual else None


def add_bias(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return x + bias + residual, [..., C]."""
    if use_triton(x):
        return _AddBias.apply(x.contiguous(), bias, None if residual is None else residual.contiguous())
    return x + bias if residual is None else x + bias + residual


def add_bias_padded(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Return x + bias + residual, [N, H, W, C] -> [N, H + 1, W + 1, C], zeros below and to the right; no gradient."""
    if not use_triton(x):
        return F.pad(x + bias + residual, (0, 0, 0, 1, 0, 1))
    n, height, width, channels = x.shape
    y = x.new_empty(n, height + 1, width + 1, channels)
    return _launch_add_bias(x.contiguous(), bias, residual.contiguous(), y, padded=True)


@jit
def _softmax_rows(x, y, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * COLUMNS + c
    values = tl.load(x + at, mask=c < COLUMNS, other=-float("inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + at, (weights / tl.sum(weights, axis=0)).to(y.dtype.element_ty), mask=c < COLUMNS)


def softmax_rows(x: Tensor) -> Tensor:
    """Return the softmax over the last dimension, summed in float32; no gradient."""
    if not use_triton(x):
        return torch.softmax(x, dim=-1)
    x, columns = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    _softmax_rows[(x.numel() // columns,)](x, y, COLUMNS=columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
