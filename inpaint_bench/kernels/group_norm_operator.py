"""GroupNorm of one map as an operator of PyTorch, which torch.compile leaves whole in its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import group_norm
from .dispatch import use_triton


@torch.library.custom_op("inpaint_bench::group_norm", mutates_args=())
def _one_map(
    x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return group_norm.forward(x, None, weight, bias, shift, groups, eps, silu)


@torch.library.custom_op("inpaint_bench::group_norm_backward", mutates_args=())
def _one_map_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, mean: Tensor, rstd: Tensor,
    channel_mean: Tensor, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, _, dweight, dbias, dshift = group_norm.backward(
        dy.contiguous(), (None,) * 3, silu, False, x, None, weight, bias, shift, mean, rstd, channel_mean
    )
    return dx, dweight.clone(), dbias.clone(), dshift  # what an operator returns may share no memory


@_one_map.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, groups: int, eps: float, silu: bool) -> Any:
    mean, rstd = (x.new_empty(len(x), groups, dtype=torch.float32) for _ in range(2))
    own = x.new_empty(len(x), 0 if shift is None else x.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape), mean, rstd, own


@_one_map_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, *rest: Any) -> Any:
    dshift = x.new_empty(0, dtype=torch.float32) if shift is None else shift.new_empty(shift.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape), dshift


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, shift, _, _, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias, shift, *output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    *gradients, dshift = _one_map_backward(dy, *ctx.saved_tensors, ctx.silu)
    return *gradients, None if ctx.saved_tensors[3] is None else dshift, None, None, None


_one_map.register_autograd(_differentiate, setup_context=_save)


def compiled_group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float, silu: bool, shift: Tensor | None = None
) -> Tensor:
    """Compute what `group_norm.group_norm` does of one map, as one operator of a graph that torch.compile makes."""
    if not use_triton(x):
        return group_norm.group_norm_reference(x, weight, bias, groups=groups, eps=eps, silu=silu, shift=shift)
    y: Tensor = _one_map(x.contiguous(), weight, bias, shift, groups, eps, silu)[0]
    return y
