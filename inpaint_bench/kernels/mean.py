"""The mean over ranks of tensors that lie apart here, while those of the other ranks are rows of a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunks import Chunks
from .dispatch import jit, tl, use_triton

CHUNK = 8192  # elements of one program
WARPS = 8


@jit
def _mean(own, rows, columns, inside, i, RANK: tl.constexpr, RANKS: tl.constexpr):
    total = tl.zeros(i.shape, tl.float32)
    for rank in tl.static_range(RANKS):  # in the order of the ranks: all get the same sum
        if rank == RANK:
            total += tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
        else:
            total += tl.load(rows + i, mask=inside, other=0.0).to(tl.float32)
        rows += columns
    tl.store(own + i, (total / RANKS).to(own.dtype.element_ty), mask=inside)


@jit
def _mean_over_ranks(
    addresses, starts, counts, rows, columns, RANK: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    own = tl.multiple_of(tl.load(addresses + program).to(tl.pointer_type(rows.dtype.element_ty)), 16)
    rows += tl.multiple_of(tl.load(starts + program), 16)
    count = tl.load(counts + program)
    i = tl.arange(0, CHUNK)
    if count == CHUNK:  # without a mask, so that the compiler reads 16 bytes at a time
        _mean(own, rows, columns, tl.full([CHUNK], True, tl.int1), i, RANK, RANKS)
    else:
        _mean(own, rows, columns, i < count, i, RANK, RANKS)


def mean_over_ranks(tensors: Sequence[Tensor], rows: Tensor, rank: int, chunks: Chunks) -> None:
    """Replace vectors of this rank by their mean over all ranks, summed in float32 and in the order of the ranks.

    `rows`, [R, C], has those of the other ranks where `chunks`, of CHUNK elements, says. The vectors begin at multiples
    of 16 bytes.
    """
    if use_triton(rows):
        addresses = chunks.addresses(tensors)
        _mean_over_ranks[(len(addresses),)](
            addresses, chunks.starts, chunks.counts, rows, rows.shape[1],
            RANK=rank, RANKS=len(rows), CHUNK=CHUNK, num_warps=WARPS,
        )  # fmt: skip
        return
    for tensor, start in zip(tensors, chunks.offsets, strict=True):
        parts = [tensor if other == rank else row[start : start + len(tensor)] for other, row in enumerate(rows)]
        tensor.copy_(torch.stack(parts).mean(dim=0))
