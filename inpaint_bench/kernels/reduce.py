"""Column sums: bias gradients, and the last step of every kernel that leaves partial sums per block of rows.

A kernel that writes a gradient can leave its partial sums with it (`keep_column_sums`): the gradient of a bias is then
summed from them, without reading the gradient again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import cdiv, jit, largest_power_of_two_divisor, tl, use_triton

# Rows and columns of a tile, warps, by the most rows: by measurement on an H200 (benchmarks/README.md).
SHAPES: dict[float, tuple[int, int, int]] = {8: (8, 512, 4), 256: (128, 16, 4), float("inf"): (512, 8, 8)}


@jit
def _partial_column_sums(x, out, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr):
    first = tl.program_id(0) * BLOCK_R * TILES
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in range(TILES):
        r = first + tile * BLOCK_R + tl.arange(0, BLOCK_R)
        values = tl.load(x + r[:, None].to(tl.int64) * columns + c[None, :], mask=r[:, None] < rows, other=0.0)
        total += values.to(tl.float32)
    tl.store(out + tl.program_id(0) * columns + c, tl.sum(total, axis=0))


@jit
def _sum_partials(partials, out, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in range(TILES):
        r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        total += tl.load(partials + r[:, None] * columns + c[None, :], mask=r[:, None] < rows, other=0.0)
    tl.store(out + c, tl.sum(total, axis=0).to(out.dtype.element_ty))


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum float32 partial sums [R, C] over the rows. Returns [C] in `dtype`."""
    rows, columns = partials.shape
    out = torch.empty(columns, dtype=dtype, device=partials.device)
    block_r, block_c, warps = next(shape for most, shape in SHAPES.items() if rows <= most)
    block_c = largest_power_of_two_divisor(columns, block_c)
    _sum_partials[(columns // block_c,)](
        partials, out, rows, columns,
        BLOCK_R=block_r, BLOCK_C=block_c, TILES=cdiv(rows, block_r), num_warps=warps,
    )  # fmt: skip
    return out


def keep_column_sums(x: Tensor, partials: Tensor) -> None:
    """Leave float32 partial sums [R, C] of the rows of `x` with it; they hold until `x` is written to."""
    x.column_partials = x._version, partials  # type: ignore[attr-defined]


def column_sums(x: Tensor) -> Tensor:
    """Sum [..., C] over all but the last dimension, in float32. Returns [C] in the type of `x`."""
    version, partials = getattr(x, "column_partials", (None, None))
    if partials is not None and version == x._version:
        return sum_partials(partials, x.dtype)
    x = x.reshape(-1, x.shape[-1])
    if not use_triton(x):
        return x.sum(0)
    x = x.contiguous()
    rows, columns = x.shape
    block_c = largest_power_of_two_divisor(columns, 64)
    tiles = 8 if rows >= 16384 else 2
    blocks = cdiv(rows, 64 * tiles)
    partials = torch.empty(blocks, columns, dtype=torch.float32, device=x.device)
    _partial_column_sums[(blocks, columns // block_c)](
        x, partials, rows, columns, BLOCK_R=64, BLOCK_C=block_c, TILES=tiles, num_warps=4
    )
    return sum_partials(partials, x.dtype)
