"""Rotary position embeddings of queries and keys, as an operator that torch.compile leaves whole in its graph.

Inductor joins them with the norms of queries and keys to one kernel, which takes longer than both apart: 314 us for
8 x 1,540 tokens of FLUX on an H200, where reading and writing both maps take 75.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import cdiv, jit, tl, use_triton

ROWS, WARPS = 16, 4  # rows and warps of a program; a row is a head of a token


@jit
def _rotate(x, cos, sin, y, M, S, H, D: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, column = (row < M)[:, None], tl.arange(0, D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column
    angle = (row // H % S)[:, None] * D + column
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(values, (BLOCK, D // 2, 2)))
    turned = tl.reshape(tl.join(-second, first), (BLOCK, D)) * tl.load(sin + angle, mask=inside, other=0.0)
    if INVERSE:
        turned = -turned
    out = values * tl.load(cos + angle, mask=inside, other=0.0) + turned
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@torch.library.custom_op("inpaint_bench::rotate", mutates_args=())
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    if not use_triton(x):
        return rotate_reference(x, cos, -sin if inverse else sin)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _, length, heads, size = x.shape
    rows = x.numel() // size
    _rotate[(cdiv(rows, ROWS),)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        y,
        rows,
        length,
        heads,
        D=size,
        INVERSE=inverse,
        BLOCK=ROWS,
        num_warps=WARPS,
    )
    return y


@_rotated.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.inverse = inputs[3]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _rotated(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rotated.register_autograd(_differentiate, setup_context=_save)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in plain PyTorch."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-second, first], dim=-1).flatten(-2)
    return (x.float() * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], *, sequence_dim: int) -> Tensor:
    """Rotate each pair of columns of [N, S, H, D] by an angle of its token: cosines and sines [S, D], each value twice.

    Called like diffusers' `apply_rotary_emb`. It computes in float32.
    """
    assert sequence_dim == 1
    cos, sin = (angle.to(x.device, torch.float32) for angle in angles)
    rotated: Tensor = _rotated(x, cos, sin, False)
    return rotated
