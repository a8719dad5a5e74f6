"""The mean of few long rows, each element read once."""

from __future__ import annotations

from torch import Tensor

from .dispatch import cdiv, jit, tl, use_triton

BLOCK = 4096  # elements of one program
WARPS = 8


@jit
def _mean_of_rows(rows, mean, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at, total = i, tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(ROWS):
        total += tl.load(rows + at, mask=i < columns, other=0.0).to(tl.float32)
        at += columns
    tl.store(mean + i, (total / ROWS).to(mean.dtype.element_ty), mask=i < columns)


def mean_of_rows(rows: Tensor, mean: Tensor) -> None:
    """Write the mean over the rows of [R, C] to `mean`, [C], summed in float32 in the order of the rows."""
    count, columns = rows.shape
    if use_triton(rows):
        grid = (cdiv(columns, BLOCK),)
        _mean_of_rows[grid](rows, mean, columns, ROWS=count, BLOCK=BLOCK, num_warps=WARPS)
    else:
        mean.copy_(rows.mean(dim=0))
