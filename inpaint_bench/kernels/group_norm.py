"""GroupNorm, with or without SiLU, over channels-last maps, forward and backward in as few passes as memory allows.

A map is [N, ..., C]: N images, P pixels, C channels, contiguous. It may come as two maps side by side, [N, ..., C1] and
[N, ..., C2], as where a UNet joins a skip connection: the joined map is then never written. A `shift` [N, C], whose
rows may have any stride, is added to the map before the norm (the bias of the convolution before it, and the time
embedding), without a pass of its own.

Most norms of a network stand at the head of a residual branch. Their input is then needed a second time (the residual),
and a third (a skip connection). `group_norm` returns such further uses as aliases of its input: their gradients arrive
with the norm's own backward, which adds them in the same pass.

Statistics are exact per block of pixels (mean, and squared deviations from that mean) and joined by Chan's formula, so
that a large mean does not cost digits. Source: Chan, Golub, LeVeque, Am. Stat. 37 (1983).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import cdiv, jit, largest_power_of_two_divisor, tl, triton, use_triton
from .reduce import keep_column_sums, sum_partials

# Pixels and channels of a tile, warps: by measurement on an H200 (benchmarks/README.md).
BLOCK_P = 32
BLOCK_C = 64
WARPS = 1
# Small maps take one launch forward, whose programs hold a group of an image each: at most so many numbers, as rounded
# up to powers of two, in a program and in all of a group's number.
SMALL_GROUP, SMALL_BATCH = 2**14, 2**17
MAX_BLOCKS = 8192  # of an image, which one program joins: where there are more pixels, a block has several tiles


@jit
def _load_tile(x1, x2, image, p, c0, P, C1: tl.constexpr, C2: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load [BLOCK_P, BLOCK_C] of the joined map as float32. A tile lies wholly in one of the two maps."""
    c = tl.arange(0, BLOCK_C)
    row = image.to(tl.int64) * P + p
    inside = p[:, None] < P
    if C2 == 0:
        return tl.load(x1 + row[:, None] * C1 + c0 + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if c0 < C1:
        tile = tl.load(x1 + row[:, None] * C1 + c0 + c[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        tile = tl.load(x2 + row[:, None] * C2 + (c0 - C1) + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return tile


@jit
def block_statistics(x, p, first, P, BLOCK_P: tl.constexpr):
    """Return how many pixels a tile [BLOCK_P, C] has, and of each channel the mean and squared deviations from it."""
    count = tl.maximum(tl.minimum(P - first, BLOCK_P), 0).to(tl.float32)
    mean = tl.sum(x, axis=0) / tl.maximum(count, 1.0)
    centred = tl.where(p[:, None] < P, x - mean[None, :], 0.0)
    return count, mean, tl.sum(centred * centred, axis=0)


@jit
def _group_norm_blocks(
    x, means, deviations, P, BLOCKS, C: tl.constexpr, TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Write mean and sum of squared deviations per image, block of pixels and channel: [N, BLOCKS, C] each."""
    image, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    c0 = tl.program_id(1) * BLOCK_C
    mean = tl.zeros([BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for tile in range(TILES):
        first = (block * TILES + tile) * BLOCK_P
        p = first + tl.arange(0, BLOCK_P)
        values = _load_tile(x, x, image, p, c0, P, C, 0, BLOCK_C)
        count, own, deviation = block_statistics(values, p, first, P, BLOCK_P)
        before = 1.0 * tile * BLOCK_P
        share = count / (before + count)
        apart = own - mean
        mean += apart * share
        squares += deviation + apart * apart * before * share
    out = tl.program_id(0) * C + c0 + tl.arange(0, BLOCK_C)
    tl.store(means + out, mean)
    tl.store(deviations + out, squares)


@jit
def _group_norm_groups(
    means1, deviations1, means2, deviations2, shift, shift_row, group_mean, group_rstd, channel_mean, P, BLOCKS, eps,
    C1: tl.constexpr, C2: tl.constexpr, GROUPS: tl.constexpr, HAS_SHIFT: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Join the blocks of SPAN pixels of one image and group: mean and 1/std of the shifted map, each channel's mean."""
    image, group = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = C1 + C2
    SIZE: tl.constexpr = C // GROUPS
    b, c = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_G)
    inside = (b[:, None] < BLOCKS) & (c[None, :] < SIZE)
    row, channel = image * BLOCKS + b[:, None], group * SIZE + c[None, :]
    mean = tl.load(means1 + row * C1 + channel, mask=inside & (channel < C1), other=0.0)
    squares = tl.load(deviations1 + row * C1 + channel, mask=inside & (channel < C1), other=0.0)
    if C2 > 0:
        mean += tl.load(means2 + row * C2 + channel - C1, mask=inside & (channel >= C1), other=0.0)
        squares += tl.load(deviations2 + row * C2 + channel - C1, mask=inside & (channel >= C1), other=0.0)
    count = tl.where(b < BLOCKS, tl.minimum(P - b * SPAN, SPAN), 0).to(tl.float32)
    if HAS_SHIFT:
        added = tl.load(shift + image * shift_row + group * SIZE + c, mask=c < SIZE, other=0.0).to(tl.float32)
        mean = tl.where(inside, mean + added[None, :], 0.0)
    total = SIZE * P
    centre = tl.sum(mean * count[:, None]) / total
    apart = tl.where(inside, mean - centre, 0.0)
    variance = (tl.sum(squares) + tl.sum(apart * apart * count[:, None])) / total
    tl.store(group_mean + image * GROUPS + group, centre)
    tl.store(group_rstd + image * GROUPS + group, 1.0 / tl.sqrt(variance + eps))
    if HAS_SHIFT:
        own = tl.sum(mean * count[:, None], axis=0) / P
        tl.store(channel_mean + image * C + group * SIZE + c, own, mask=c < SIZE)


@jit
def _normalised(
    x, shift, shift_row, group_mean, group_rstd, image, c,
    C: tl.constexpr, GROUPS: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """Return (x + shift - mean) / std of a tile and 1/std per channel."""
    group = image * GROUPS + c // (C // GROUPS)
    mean, rstd = tl.load(group_mean + group), tl.load(group_rstd + group)
    if HAS_SHIFT:
        mean -= tl.load(shift + image * shift_row + c).to(tl.float32)
    return (x - mean[None, :]) * rstd[None, :], rstd


@jit
def _group_norm_forward(
    x1, x2, shift, shift_row, weight, bias, group_mean, group_rstd, y, P, BLOCKS,
    C1: tl.constexpr, C2: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr, HAS_SHIFT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    image, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    c0 = tl.program_id(1) * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    x = _load_tile(x1, x2, image, p, c0, P, C1, C2, BLOCK_C)
    xhat, _ = _normalised(x, shift, shift_row, group_mean, group_rstd, image, c, C1 + C2, GROUPS, HAS_SHIFT)
    z = xhat * tl.load(weight + c).to(tl.float32)[None, :] + tl.load(bias + c).to(tl.float32)[None, :]
    if SILU:
        z = z * tl.sigmoid(z)
    at = (image.to(tl.int64) * P + p)[:, None] * (C1 + C2) + c[None, :]
    tl.store(y + at, z.to(y.dtype.element_ty), mask=p[:, None] < P)


@jit
def _group_norm_small(
    x1, x2, shift, shift_row, weight, bias, y, group_mean, group_rstd, channel_mean, P, eps,
    C1: tl.constexpr, C2: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr, HAS_SHIFT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Do all of the forward pass for one image and group, whose channels may lie in both maps."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    C: tl.constexpr = C1 + C2
    SIZE: tl.constexpr = C // GROUPS
    p, own = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_G)
    real, c = own < SIZE, group * SIZE + own
    inside, row = (p < P)[:, None] & real[None, :], (image * P + p)[:, None]
    x = tl.load(x1 + row * C1 + c[None, :], mask=inside & (c < C1)[None, :], other=0.0).to(tl.float32)
    if C2 > 0:
        x += tl.load(x2 + row * C2 + (c - C1)[None, :], mask=inside & (c >= C1)[None, :], other=0.0).to(tl.float32)
    if HAS_SHIFT:
        added = tl.load(shift + image * shift_row + c, mask=real, other=0.0).to(tl.float32)
        x = tl.where(inside, x + added[None, :], 0.0)
        tl.store(channel_mean + image * C + c, tl.sum(x, axis=0) / P, mask=real)
    mean = tl.sum(x) / (SIZE * P)
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred) / (SIZE * P) + eps)
    z = centred * rstd * tl.load(weight + c, mask=real, other=0.0).to(tl.float32)[None, :]
    z += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + row * C + c[None, :], z.to(y.dtype.element_ty), mask=inside)
    tl.store(group_mean + image * GROUPS + group, mean)
    tl.store(group_rstd + image * GROUPS + group, rstd)


@jit
def _backward_tile(
    dy, x1, x2, shift, shift_row, weight, bias, group_mean, group_rstd, image, p, c0, P,
    C1: tl.constexpr, C2: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr, HAS_SHIFT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return the gradient before the SiLU, the normalised input, the weight and 1/std of a tile."""
    c = c0 + tl.arange(0, BLOCK_C)
    inside = p[:, None] < P
    x = _load_tile(x1, x2, image, p, c0, P, C1, C2, BLOCK_C)
    xhat, rstd = _normalised(x, shift, shift_row, group_mean, group_rstd, image, c, C1 + C2, GROUPS, HAS_SHIFT)
    w = tl.load(weight + c).to(tl.float32)
    at = (image.to(tl.int64) * P + p)[:, None] * (C1 + C2) + c[None, :]
    dz = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        z = xhat * w[None, :] + tl.load(bias + c).to(tl.float32)[None, :]
        gate = tl.sigmoid(z)
        dz *= gate * (1.0 + z * (1.0 - gate))
    return dz, tl.where(inside, xhat, 0.0), w, rstd


@jit
def _group_norm_backward_blocks(
    dy, x1, x2, shift, shift_row, weight, bias, group_mean, group_rstd, sums, products, P, BLOCKS,
    C1: tl.constexpr, C2: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr, HAS_SHIFT: tl.constexpr,
    TILES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write sum(dz) and sum(dz * xhat) per image, block of pixels and channel: [N, BLOCKS, C] each."""
    image, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    c0 = tl.program_id(1) * BLOCK_C
    total = tl.zeros([BLOCK_C], tl.float32)
    product = tl.zeros([BLOCK_C], tl.float32)
    for tile in range(TILES):
        p = (block * TILES + tile) * BLOCK_P + tl.arange(0, BLOCK_P)
        dz, xhat, _, _ = _backward_tile(
            dy, x1, x2, shift, shift_row, weight, bias, group_mean, group_rstd, image, p, c0, P,
            C1, C2, GROUPS, SILU, HAS_SHIFT, BLOCK_C,
        )  # fmt: skip
        total += tl.sum(dz, axis=0)
        product += tl.sum(dz * xhat, axis=0)
    out = tl.program_id(0) * (C1 + C2) + c0 + tl.arange(0, BLOCK_C)
    tl.store(sums + out, total)
    tl.store(products + out, product)


@jit
def _group_norm_backward_groups(
    sums, products, weight, group_mean, group_rstd, channel_mean, image_sums, mean_dz, mean_product, dshift,
    P, BLOCKS,
    C1: tl.constexpr, C2: tl.constexpr, GROUPS: tl.constexpr, HAS_SHIFT: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Join the blocks of one image and group: sums per channel, the group's two means, the shift's gradient."""
    image, group = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = C1 + C2
    SIZE: tl.constexpr = C // GROUPS
    b, c = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_G)
    real = c < SIZE
    inside = (b[:, None] < BLOCKS) & real[None, :]
    at = (image * BLOCKS + b[:, None]) * C + group * SIZE + c[None, :]
    dz = tl.sum(tl.load(sums + at, mask=inside, other=0.0), axis=0)
    product = tl.sum(tl.load(products + at, mask=inside, other=0.0), axis=0)
    channel = group * SIZE + c
    w = tl.load(weight + channel, mask=real, other=0.0).to(tl.float32)
    total = SIZE * P
    c1, c2 = tl.sum(w * dz) / total, tl.sum(w * product) / total
    tl.store(image_sums + image * 2 * C + channel, product, mask=real)
    tl.store(image_sums + image * 2 * C + C + channel, dz, mask=real)
    tl.store(mean_dz + image * GROUPS + group, c1)
    tl.store(mean_product + image * GROUPS + group, c2)
    if HAS_SHIFT:  # the sum of dx over the pixels, from sums that are known already
        centre, rstd = tl.load(group_mean + image * GROUPS + group), tl.load(group_rstd + image * GROUPS + group)
        own = tl.load(channel_mean + image * C + channel, mask=real, other=0.0)
        gradient = rstd * (w * dz - P * c1 - P * (own - centre) * rstd * c2)
        tl.store(dshift + image * C + channel, gradient.to(dshift.dtype.element_ty), mask=real)


@jit
def _group_norm_backward(
    dy, x1, x2, shift, shift_row, weight, bias, group_mean, group_rstd, mean_dz, mean_product,
    extra1, extra2, extra3, dx1, dx2, columns, P, BLOCKS,
    C1: tl.constexpr, C2: tl.constexpr, GROUPS: tl.constexpr, SILU: tl.constexpr, HAS_SHIFT: tl.constexpr,
    EXTRA1: tl.constexpr, EXTRA2: tl.constexpr, EXTRA3: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both maps; extra1 and extra2 are added to that of the first, extra3 to the second.

    COLUMNS: sums over the pixels of a block, of the first map's gradient, go to `columns` [N, BLOCKS, C1].
    """
    image, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    c0 = tl.program_id(1) * BLOCK_C
    c = tl.arange(0, BLOCK_C)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = p[:, None] < P
    dz, xhat, w, rstd = _backward_tile(
        dy, x1, x2, shift, shift_row, weight, bias, group_mean, group_rstd, image, p, c0, P,
        C1, C2, GROUPS, SILU, HAS_SHIFT, BLOCK_C,
    )  # fmt: skip
    group = image * GROUPS + (c0 + c) // ((C1 + C2) // GROUPS)
    c1, c2 = tl.load(mean_dz + group), tl.load(mean_product + group)
    dx = rstd[None, :] * (dz * w[None, :] - c1[None, :] - xhat * c2[None, :])
    row = (image.to(tl.int64) * P + p)[:, None]
    if C2 == 0:
        at = row * C1 + c0 + c[None, :]
        if EXTRA1:
            dx += tl.load(extra1 + at, mask=inside, other=0.0).to(tl.float32)
        if EXTRA2:
            dx += tl.load(extra2 + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx1 + at, dx.to(dx1.dtype.element_ty), mask=inside)
        if COLUMNS:
            tl.store(columns + tl.program_id(0) * C1 + c0 + c, tl.sum(tl.where(inside, dx, 0.0), axis=0))
    else:
        if c0 < C1:
            at = row * C1 + c0 + c[None, :]
            if EXTRA1:
                dx += tl.load(extra1 + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx1 + at, dx.to(dx1.dtype.element_ty), mask=inside)
            if COLUMNS:
                tl.store(columns + tl.program_id(0) * C1 + c0 + c, tl.sum(tl.where(inside, dx, 0.0), axis=0))
        else:
            at = row * C2 + (c0 - C1) + c[None, :]
            if EXTRA3:
                dx += tl.load(extra3 + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx2 + at, dx.to(dx2.dtype.element_ty), mask=inside)


class _Grid:
    """How the kernels divide one map, or two side by side, for launches."""

    def __init__(self, x1: Tensor, x2: Tensor | None, shift: Tensor | None, groups: int, silu: bool) -> None:
        self.images, c1 = x1.shape[0], x1.shape[-1]
        self.pixels = x1[0].numel() // c1
        c2 = x2.shape[-1] if x2 is not None else 0
        self.channels, tiles = c1 + c2, cdiv(self.pixels, BLOCK_P)
        block_c = min(largest_power_of_two_divisor(c, BLOCK_C) for c in (c1, c2 or c1))
        self.per_block = {"TILES": triton.next_power_of_2(cdiv(tiles, MAX_BLOCKS))}
        self.blocks, self.span = cdiv(tiles, self.per_block["TILES"]), self.per_block["TILES"] * BLOCK_P
        self.of_blocks = self.images * self.blocks, self.channels // block_c
        self.of_tiles, self.tiles = (self.images * tiles, self.channels // block_c), tiles
        self.maps = {"C1": c1, "C2": c2, "BLOCK_P": BLOCK_P, "BLOCK_C": block_c}
        self.norm = {**self.maps, "GROUPS": groups, "SILU": silu, "HAS_SHIFT": shift is not None}
        sizes = {"BLOCK_B": self.blocks, "BLOCK_G": self.channels // groups, "BLOCK_P": self.pixels}
        whole = {name: triton.next_power_of_2(size) for name, size in sizes.items()}
        self.small = {**self.norm, "BLOCK_P": whole.pop("BLOCK_P"), "BLOCK_G": whole["BLOCK_G"]}
        del self.small["BLOCK_C"]
        self.numbers = self.small["BLOCK_P"] * self.small["BLOCK_G"]
        self.is_small = self.numbers <= min(SMALL_GROUP, SMALL_BATCH // self.images)
        self.joint = {**whole, "C1": c1, "C2": c2, "GROUPS": groups, "HAS_SHIFT": shift is not None}


def keep_statistics(y: Tensor, means: Tensor, deviations: Tensor) -> None:
    """Leave with a map [N, ..., C] what a norm of it begins with; it holds until the map is written to.

    Both are [N, blocks, C] of `BLOCK_P` pixels each: `block_statistics` of them.
    """
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
        C=channels, **grid.per_block, BLOCK_P=BLOCK_P, BLOCK_C=block_c, num_warps=WARPS,
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
    grid = _Grid(x1, x2, shift, groups, silu)
    n, channels, pixels = grid.images, grid.channels, grid.pixels
    other, added = (x1 if x2 is None else x2), (x1 if shift is None else shift)
    new: dict[str, Any] = {"dtype": torch.float32, "device": x1.device}
    mean, rstd = torch.empty(n, groups, **new), torch.empty(n, groups, **new)
    channel_mean = torch.empty(n, 0 if shift is None else channels, **new)
    y = torch.empty(*x1.shape[:-1], channels, dtype=x1.dtype, device=x1.device)
    if grid.is_small:
        _group_norm_small[(n, groups)](
            x1, other, added, added.stride(0), weight, bias, y, mean, rstd, channel_mean, pixels, eps,
            **grid.small, num_warps=max(4, min(16, grid.numbers // 1024)),
        )  # fmt: skip
        return y, mean, rstd, channel_mean
    statistics = _statistics(x1, grid)
    _group_norm_groups[(n, groups)](
        *statistics, *(statistics if x2 is None else _statistics(x2, grid)), added, added.stride(0),
        mean, rstd, channel_mean, pixels, grid.blocks, eps, SPAN=grid.span, **grid.joint,
        num_warps=4 if grid.blocks <= 128 else 16,  # large maps have thousands of blocks, too many for registers
    )  # fmt: skip
    _group_norm_forward[grid.of_tiles](
        x1, other, added, added.stride(0), weight, bias, mean, rstd, y, pixels, grid.tiles, **grid.norm, num_warps=WARPS
    )
    return y, mean, rstd, channel_mean


def backward(
    dy: Tensor, extras: tuple[Tensor | None, ...], silu: bool, x1: Tensor, x2: Tensor | None, weight: Tensor,
    bias: Tensor, shift: Tensor | None, mean: Tensor, rstd: Tensor, channel_mean: Tensor, keep_columns: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of both maps, weight, bias and shift (any tensor without one).

    `extras` are added to the gradients: two to the first map's, one to the second's. `keep_columns` keeps the column
    sums of the first for `reduce.column_sums`: the bias of the layer that made this map needs them.
    """
    grid = _Grid(x1, x2, shift, mean.shape[1], silu)
    n, channels, pixels, groups = grid.images, grid.channels, grid.pixels, mean.shape[1]
    other, added = (x1 if x2 is None else x2), (x1 if shift is None else shift)
    new: dict[str, Any] = {"dtype": torch.float32, "device": x1.device}
    image_sums = torch.empty(n, 2, channels, **new)  # of dz * xhat, and of dz
    dshift = torch.empty(0, device=x1.device) if shift is None else shift.new_empty(shift.shape)
    dx1 = torch.empty_like(x1)
    dx2 = torch.empty_like(x2) if x2 is not None else None
    columns = torch.empty(n, grid.tiles, x1.shape[-1], **new) if keep_columns else None
    inputs = dy, x1, other, added, added.stride(0), weight, bias, mean, rstd
    sums, products = torch.empty(2, n, grid.blocks, channels, **new).unbind()
    _group_norm_backward_blocks[grid.of_blocks](
        *inputs, sums, products, pixels, grid.blocks, **grid.norm, **grid.per_block, num_warps=WARPS
    )
    mean_dz, mean_product = torch.empty(2, n, groups, **new).unbind()
    _group_norm_backward_groups[(n, groups)](
        sums, products, weight, mean, rstd, channel_mean, image_sums, mean_dz, mean_product, dshift,
        pixels, grid.blocks, **grid.joint, num_warps=4 if grid.blocks <= 128 else 16,
    )  # fmt: skip
    _group_norm_backward[grid.of_tiles](
        *inputs, mean_dz, mean_product, *(x1 if e is None else e for e in extras),
        dx1, dx1 if dx2 is None else dx2, sums if columns is None else columns, pixels, grid.tiles,
        **grid.norm, **{f"EXTRA{i}": e is not None for i, e in enumerate(extras, 1)}, COLUMNS=keep_columns,
        num_warps=WARPS,
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
        *gradients, dshift = backward(dy.contiguous(), (*first, last), ctx.silu, *ctx.saved_tensors, keep_columns=True)
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
