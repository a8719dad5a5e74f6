"""The kernels of GroupNorm, which group_norm.py launches. Maps and names are as described there.

A block is some pixels of one image: BLOCK_P, or TILES times as many.
"""

from __future__ import annotations

from .dispatch import jit, tl


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
    """Write the gradients of both maps: of the first with extra1 and extra2 added, of the second with extra3.

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
