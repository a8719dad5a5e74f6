"""GroupNorm, with or without SiLU, over channels-last maps, forward and backward in as few passes as memory allows.

A map is [N, ..., C]: N images, P pixels, C channels, contiguous. It may come as two maps side by side, [N, ..., C1] and
[N, ..., C2], as when a UNet joins a skip connection: the joined map is then never written. A `shift` [N, C], whose
rows may have any stride, is added to the map before the norm (the bias of the convolution before it, and the time
embedding), without a pass of its own.

Most norms of a network stand at the head of a residual branch. Their input is then needed a second time (the residual),
and a third (a skip connection). `group_norm` returns such further uses as aliases of its input: their gradients arrive
with the norm's own backward, which adds them in the same pass.

Statistics are exact per block of pixels (mean, and squared deviations from that mean) and joined by Chan's formula, so
that a large mean does not cost digits. Source: Chan, Golub, LeVeque, Am. Stat. 37 (1983).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import cdiv, largest_power_of_two_divisor, triton, use_triton
from .group_norm_kernels import (
    _group_norm_backward,
    _group_norm_backward_blocks,
    _group_norm_backward_groups,
    _group_norm_blocks,
    _group_norm_forward,
    _group_norm_groups,
    _group_norm_small,
)
from .reduce import keep_column_sums, sum_partials

# By measurement on an H200 (benchmarks/README.md). Pixels and channels of a tile:
BLOCK_P = 32
BLOCK_C = 64
FORWARD_P, FORWARD_WARPS = 64, 4  # for the last pass forward
BACKWARD_WARPS = 2  # likewise backward
# Small maps take one launch forward, whose programs hold a group of an image each: at most so many numbers, rounded up
# to powers of two, in one program, and in the programs of one group over all images.
SMALL_GROUP, SMALL_BATCH = 2**14, 2**17
MAX_BLOCKS = 8192  # most blocks of an image, which one program joins: with more pixels, a block has several tiles


class _Grid:
    """How the kernels divide one map, or two side by side, for launches."""

    def __init__(self, x1: Tensor, x2: Tensor | None, shift: Tensor | None, groups: int) -> None:
        self.images, c1 = x1.shape[0], x1.shape[-1]
        self.pixels = x1[0].numel() // c1
        c2 = x2.shape[-1] if x2 is not None else 0
        self.channels = c1 + c2
        self.block_c = min(largest_power_of_two_divisor(c, BLOCK_C) for c in (c1, c2 or c1))
        self.tiles_of_block = triton.next_power_of_2(cdiv(self.pixels, BLOCK_P * MAX_BLOCKS))
        self.blocks = cdiv(self.pixels, BLOCK_P * self.tiles_of_block)
        self.maps = {"C1": c1, "C2": c2, "GROUPS": groups, "HAS_SHIFT": shift is not None}
        self.block_g = triton.next_power_of_2(self.channels // groups)
        self.whole = {"BLOCK_P": triton.next_power_of_2(self.pixels), "BLOCK_G": self.block_g}
        self.numbers = self.whole["BLOCK_P"] * self.block_g
        self.is_small = self.numbers <= min(SMALL_GROUP, SMALL_BATCH // self.images)

    def over(self, pixels: int) -> tuple[tuple[int, int], int]:
        """Return the programs for blocks of so many pixels, and the blocks of an image."""
        blocks = cdiv(self.pixels, pixels)
        return (self.images * blocks, self.channels // self.block_c), blocks

    def joining(self, blocks: int) -> dict[str, Any]:
        """Return the settings of a kernel that joins the blocks of an image: thousands are too many for 4 warps."""
        return {
            **self.maps, "BLOCK_B": triton.next_power_of_2(blocks), "BLOCK_G": self.block_g,
            "num_warps": 4 if blocks <= 128 else 16,
        }  # fmt: skip


def keep_statistics(y: Tensor, means: Tensor, deviations: Tensor) -> None:
    """Leave with a map [N, ..., C] what a norm of it begins with; it holds until the map is written to.

    Both are [N, blocks, C] of `BLOCK_P` pixels each: `block_statistics` of them.
    """
    if not y.is_inference():  # such tensors have no version by which a later write would be seen
        y.block_statistics = y._version, means, deviations  # type: ignore[attr-defined]


def _statistics(x: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Return means and squared deviations of the blocks of a map, as its maker left them or from a pass over it."""
    version, *kept = getattr(x, "block_statistics", (None,))
    if kept and version == x._version and kept[0].shape[1] == grid.blocks:
        return kept[0], kept[1]
    channels = x.shape[-1]
    means, deviations = torch.empty(2, len(x), grid.blocks, channels, dtype=torch.float32, device=x.device).unbind()
    block_c = largest_power_of_two_divisor(channels, BLOCK_C)
    _group_norm_blocks[(len(x) * grid.blocks, channels // block_c)](
        x, means, deviations, grid.pixels, grid.blocks,
        C=channels, TILES=grid.tiles_of_block, BLOCK_P=BLOCK_P, BLOCK_C=block_c, num_warps=1,
    )  # fmt: skip
    return means, deviations


def forward(
    x1: Tensor,
    x2: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    shift: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, and per image the groups' mean and 1/std and the channels' mean (empty without a shift)."""
    grid = _Grid(x1, x2, shift, groups)
    n, channels, pixels = grid.images, grid.channels, grid.pixels
    other, added = (x1 if x2 is None else x2), (x1 if shift is None else shift)
    new: dict[str, Any] = {"dtype": torch.float32, "device": x1.device}
    mean, rstd = torch.empty(n, groups, **new), torch.empty(n, groups, **new)
    channel_mean = torch.empty(n, 0 if shift is None else channels, **new)
    y = torch.empty(*x1.shape[:-1], channels, dtype=x1.dtype, device=x1.device)
    if grid.is_small:
        _group_norm_small[(n, groups)](
            x1, other, added, added.stride(0), weight, bias, y, mean, rstd, channel_mean, pixels, eps,
            **grid.maps, **grid.whole, SILU=silu, num_warps=max(4, min(16, grid.numbers // 1024)),
        )  # fmt: skip
        return y, mean, rstd, channel_mean
    statistics = _statistics(x1, grid)
    _group_norm_groups[(n, groups)](
        *statistics, *(statistics if x2 is None else _statistics(x2, grid)), added, added.stride(0),
        mean, rstd, channel_mean, pixels, grid.blocks, eps,
        SPAN=BLOCK_P * grid.tiles_of_block, **grid.joining(grid.blocks),
    )  # fmt: skip
    programs, blocks = grid.over(FORWARD_P)
    _group_norm_forward[programs](
        x1, other, added, added.stride(0), weight, bias, mean, rstd, y, pixels, blocks,
        **grid.maps, SILU=silu, BLOCK_P=FORWARD_P, BLOCK_C=grid.block_c, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return y, mean, rstd, channel_mean


def backward(
    dy: Tensor, extras: tuple[Tensor | None, ...], silu: bool, keep_columns: bool, x1: Tensor, x2: Tensor | None,
    weight: Tensor, bias: Tensor, shift: Tensor | None, mean: Tensor, rstd: Tensor, channel_mean: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of both maps, weight, bias and shift (any tensor without one).

    `extras` are added to the gradients: two to the first map's, one to the second's. `keep_columns` keeps the column
    sums of the first for `reduce.column_sums`: the bias of the layer that made this map needs them.
    """
    grid = _Grid(x1, x2, shift, mean.shape[1])
    n, channels, pixels, groups = grid.images, grid.channels, grid.pixels, mean.shape[1]
    other, added = (x1 if x2 is None else x2), (x1 if shift is None else shift)
    new: dict[str, Any] = {"dtype": torch.float32, "device": x1.device}
    image_sums = torch.empty(n, 2, channels, **new)  # sums of dz * xhat, and of dz
    dshift = torch.empty(0, device=x1.device) if shift is None else shift.new_empty(shift.shape)
    dx1 = torch.empty_like(x1)
    dx2 = torch.empty_like(x2) if x2 is not None else None
    inputs = dy, x1, other, added, added.stride(0), weight, bias, mean, rstd
    settings = {**grid.maps, "SILU": silu, "BLOCK_P": BLOCK_P, "BLOCK_C": grid.block_c}
    tiles_of_block = 2 * grid.tiles_of_block
    programs, blocks = grid.over(BLOCK_P * tiles_of_block)
    sums, products = torch.empty(2, n, blocks, channels, **new).unbind()
    _group_norm_backward_blocks[programs](
        *inputs, sums, products, pixels, blocks, **settings, TILES=tiles_of_block, num_warps=1
    )
    mean_dz, mean_product = torch.empty(2, n, groups, **new).unbind()
    _group_norm_backward_groups[(n, groups)](
        sums, products, weight, mean, rstd, channel_mean, image_sums, mean_dz, mean_product, dshift,
        pixels, blocks, **grid.joining(blocks),
    )  # fmt: skip
    programs, blocks = grid.over(BLOCK_P)
    columns = torch.empty(n, blocks, x1.shape[-1], **new) if keep_columns else None
    _group_norm_backward[programs](
        *inputs, mean_dz, mean_product, *(x1 if e is None else e for e in extras),
        dx1, dx1 if dx2 is None else dx2, sums if columns is None else columns, pixels, blocks,
        **settings, **{f"EXTRA{i}": e is not None for i, e in enumerate(extras, 1)}, COLUMNS=keep_columns,
        num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    if columns is not None:
        keep_column_sums(dx1, columns.flatten(0, 1))
    dweight, dbias = sum_partials(image_sums.flatten(1), weight.dtype).unflatten(0, (2, channels)).unbind()
    return dx1, dx2, dweight, dbias, dshift


def _alias(x: Tensor) -> Tensor:
    alias = x.view_as(x)
    if hasattr(x, "block_statistics"):
        alias.block_statistics = x.block_statistics  # type: ignore[attr-defined]
    return alias


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor | None, weight: Tensor, bias: Tensor, shift: Tensor | None,
        groups: int, eps: float, silu: bool, uses: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        y, *saved = forward(x1, x2, weight, bias, shift, groups, eps, silu)
        ctx.save_for_backward(x1, x2, weight, bias, shift, *saved)
        ctx.set_materialize_grads(False)  # a further use without a gradient adds nothing
        ctx.silu, ctx.uses = silu, uses
        aliases = [_alias(x1) for _ in range(uses)]
        return (y, *aliases) if x2 is None else (y, *aliases, *(_alias(x2) for _ in range(min(uses, 1))))

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *extras: Tensor | None) -> tuple[Any, ...]:
        _, x2, _, _, shift, *_ = ctx.saved_tensors
        extra = [None if e is None else e.contiguous() for e in extras]
        first = extra[: ctx.uses] + [None] * (2 - ctx.uses)
        last = extra[ctx.uses] if x2 is not None and ctx.uses else None
        keep_columns = shift is None  # a shift has the bias of the layer before in it
        *gradients, dshift = backward(dy.contiguous(), (*first, last), ctx.silu, keep_columns, *ctx.saved_tensors)
        return *gradients, None if shift is None else dshift, None, None, None, None


def group_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float, silu: bool, shift: Tensor | None = None
) -> Tensor:
    """Compute what `group_norm` does of one map in plain PyTorch."""
    flat = x.flatten(1, -2)
    moved = (flat if shift is None else flat + shift[:, None]).transpose(1, 2)
    y = F.group_norm(moved, groups, weight, bias, eps).transpose(1, 2).view_as(x)
    return F.silu(y) if silu else y


def group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    groups: int,
    eps: float,
    silu: bool,
    joined: Tensor | None = None,
    shift: Tensor | None = None,
    uses: int = 0,
) -> tuple[Tensor, ...]:
    """Normalise `x` [N, ..., C1], joined with a second map [N, ..., C2] if given, per image and group of channels.

    Returns y [N, ..., C1 + C2], then `uses` (at most 2) aliases of `x` for its further uses, then one of `joined`.
    """
    if use_triton(x):
        second = None if joined is None else joined.contiguous()
        return _GroupNorm.apply(x.contiguous(), second, weight, bias, shift, groups, eps, silu, uses)
    whole = x if joined is None else torch.cat([x, joined], dim=-1)
    y = group_norm_reference(whole, weight, bias, groups=groups, eps=eps, silu=silu, shift=shift)
    return (y, *[x] * uses) if joined is None else (y, *[x] * uses, *[joined] * min(uses, 1))


# --- one map, as an operator of PyTorch, which torch.compile leaves whole in its graph -------------


@torch.library.custom_op("inpaint_bench::group_norm", mutates_args=())
def _one_map(
    x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward(x, None, weight, bias, shift, groups, eps, silu)


@torch.library.custom_op("inpaint_bench::group_norm_backward", mutates_args=())
def _one_map_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, mean: Tensor, rstd: Tensor,
    channel_mean: Tensor, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, _, dweight, dbias, dshift = backward(
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
    """Compute what `group_norm` does of one map, as one operator of a graph that torch.compile makes."""
    if not use_triton(x):
        return group_norm_reference(x, weight, bias, groups=groups, eps=eps, silu=silu, shift=shift)
    y: Tensor = _one_map(x.contiguous(), weight, bias, shift, groups, eps, silu)[0]
    return y
