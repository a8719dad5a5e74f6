"""Cross-attention to a text and, through a gate, to location tokens behind it: one kernel forward, one backward.

    y = softmax(q k_text) v_text + gate * softmax(q k_location) v_location

Both softmaxes share one matrix of scores, and both products with the values are one product with the weighted sum of
the two probability matrices. One program holds all keys (77 and a few), so nothing is saved but the inputs.

The keys lie in a tile of 64, which are all text, and one of 32. The columns of a head lie in one tile, or in two if
the next power of two is far above: names of tiles end with `a` or `b` for the keys, and with 1 or 2 for the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .dispatch import cdiv, jit, largest_power_of_two_divisor, tl, triton, use_triton
from .reduce import sum_partials

FIRST_KEYS, OTHER_KEYS = 64, 32  # keys in each of the two tiles
# By size of a head and by measurement (benchmarks/README.md): queries of a tile, warps, columns of the first tile, and
# forward the tiles of a program,
FORWARD = {40: (64, 4, 64, 4), 80: (64, 4, 64, 1), 160: (64, 4, 128, 1)}
# backward the parts into which the queries of one head are divided.
BACKWARD = {40: (64, 4, 64, 4), 80: (128, 8, 128, 1), 160: (128, 8, 128, 4)}


@jit
def _load(start, rows, inside, row, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Load rows in two tiles of columns. Where D2 is 0 the first holds all, and nothing is done with the second."""
    c1 = tl.arange(0, D1)
    at = start + rows.to(tl.int64)[:, None] * row
    first = tl.load(at + c1[None, :], mask=inside[:, None] & (c1 < D)[None, :], other=0.0)
    second = first
    if D2 > 0:
        c2 = D1 + tl.arange(0, D2)
        second = tl.load(at + c2[None, :], mask=inside[:, None] & (c2 < D)[None, :], other=0.0)
    return first, second


@jit
def _load_all(start, a, b, K, row, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Load the four tiles of a head's keys or values."""
    a_1, a_2 = _load(start, a, a < K, row, D, D1, D2)
    b_1, b_2 = _load(start, b, b < K, row, D, D1, D2)
    return a_1, a_2, b_1, b_2


@jit
def _store(start, first, second, rows, inside, row, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    c1 = tl.arange(0, D1)
    at = start + rows.to(tl.int64)[:, None] * row
    tl.store(at + c1[None, :], first.to(start.dtype.element_ty), mask=inside[:, None] & (c1 < D)[None, :])
    if D2 > 0:
        c2 = D1 + tl.arange(0, D2)
        tl.store(at + c2[None, :], second.to(start.dtype.element_ty), mask=inside[:, None] & (c2 < D)[None, :])


@jit
def _over_columns(x_1, x_2, y_1, y_2, D2: tl.constexpr):
    """Multiply x by y transposed, over all columns."""
    product = tl.dot(x_1, tl.trans(y_1))
    if D2 > 0:
        product = tl.dot(x_2, tl.trans(y_2), product)
    return product


@jit
def _softmaxes(s_a, s_b, is_text, is_location, scale2):
    """Softmax of unscaled scores over the text keys and, apart from it, over the location keys; zero for padding."""
    text_max = tl.maximum(tl.max(s_a, axis=1), tl.max(tl.where(is_text, s_b, -1.0e30), axis=1))[:, None]
    location_max = tl.max(tl.where(is_location, s_b, -1.0e30), axis=1)[:, None]
    p_a = tl.exp2((s_a - text_max) * scale2)
    p_b = tl.exp2((s_b - tl.where(is_text, text_max, location_max)) * scale2)
    p_b = tl.where(is_text | is_location, p_b, 0.0)
    text_sum = tl.sum(p_a, axis=1) + tl.sum(tl.where(is_text, p_b, 0.0), axis=1)
    location_sum = tl.maximum(tl.sum(tl.where(is_location, p_b, 0.0), axis=1), 1.0e-30)
    share = tl.where(is_text, (1.0 / text_sum)[:, None], (1.0 / location_sum)[:, None])
    return p_a * (1.0 / text_sum)[:, None], p_b * share


@jit
def _cross_attention_forward(
    q, kv, gate, y, S, K, TEXT, q_row, kv_row, scale,
    H: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    head, split, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    image = image.to(tl.int64)
    a, b = tl.arange(0, K1), K1 + tl.arange(0, K2)
    is_text, is_location = (b < TEXT)[None, :], ((b >= TEXT) & (b < K))[None, :]
    keys = kv + image * K * kv_row + head * D
    k_a1, k_a2, k_b1, k_b2 = _load_all(keys, a, b, K, kv_row, D, D1, D2)
    v_a1, v_a2, v_b1, v_b2 = _load_all(keys + H * D, a, b, K, kv_row, D, D1, D2)
    strength, scale2 = tl.load(gate).to(tl.float32), scale * 1.4426950408889634  # log2(e)
    queries = q + image * S * q_row + head * D
    out = y + image * S * (H * D) + head * D
    for tile in range(TILES):
        m = (split * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        q_1, q_2 = _load(queries, m, m < S, q_row, D, D1, D2)
        s_a, s_b = _over_columns(q_1, q_2, k_a1, k_a2, D2), _over_columns(q_1, q_2, k_b1, k_b2, D2)
        p_a, p_b = _softmaxes(s_a, s_b, is_text, is_location, scale2)
        p_a, p_b = p_a.to(q_1.dtype), (p_b * tl.where(is_text, 1.0, strength)).to(q_1.dtype)
        y_1 = tl.dot(p_b, v_b1, tl.dot(p_a, v_a1))
        y_2 = y_1
        if D2 > 0:
            y_2 = tl.dot(p_b, v_b2, tl.dot(p_a, v_a2))
        _store(out, y_1, y_2, m, m < S, H * D, D, D1, D2)


@jit
def _cross_attention_backward(
    q, kv, gate, dy, dq, dkv, dgate, S, K, TEXT, q_row, kv_row, scale,
    H: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Write dq, and each program's sums of dkv and dgate: [splits, N, K, 2, H, D] and [splits, N, H]."""
    head, split, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    image = image.to(tl.int64)
    a, b = tl.arange(0, K1), K1 + tl.arange(0, K2)
    is_text, is_location = (b < TEXT)[None, :], ((b >= TEXT) & (b < K))[None, :]
    keys = kv + image * K * kv_row + head * D
    k_a1, k_a2, k_b1, k_b2 = _load_all(keys, a, b, K, kv_row, D, D1, D2)
    v_a1, v_a2, v_b1, v_b2 = _load_all(keys + H * D, a, b, K, kv_row, D, D1, D2)
    strength, scale2 = tl.load(gate).to(tl.float32), scale * 1.4426950408889634  # log2(e)
    WIDTH2: tl.constexpr = D2 if D2 > 0 else 16
    dk_a1, dk_a2 = tl.zeros([K1, D1], tl.float32), tl.zeros([K1, WIDTH2], tl.float32)
    dk_b1, dk_b2 = tl.zeros([K2, D1], tl.float32), tl.zeros([K2, WIDTH2], tl.float32)
    dv_a1, dv_a2 = tl.zeros([K1, D1], tl.float32), tl.zeros([K1, WIDTH2], tl.float32)
    dv_b1, dv_b2 = tl.zeros([K2, D1], tl.float32), tl.zeros([K2, WIDTH2], tl.float32)
    dstrength = tl.zeros([BLOCK_M], tl.float32)
    queries = q + image * S * q_row + head * D
    out = image * S * (H * D) + head * D
    for tile in range(TILES):
        m = (split * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        q_1, q_2 = _load(queries, m, m < S, q_row, D, D1, D2)
        dy_1, dy_2 = _load(dy + out, m, m < S, H * D, D, D1, D2)
        s_a, s_b = _over_columns(q_1, q_2, k_a1, k_a2, D2), _over_columns(q_1, q_2, k_b1, k_b2, D2)
        p_a, p_b = _softmaxes(s_a, s_b, is_text, is_location, scale2)
        dp_a, dp_b = _over_columns(dy_1, dy_2, v_a1, v_a2, D2), _over_columns(dy_1, dy_2, v_b1, v_b2, D2)
        product = p_b * dp_b
        dlocation = tl.sum(tl.where(is_location, product, 0.0), axis=1)
        dtext = tl.sum(p_a * dp_a, axis=1) + tl.sum(tl.where(is_text, product, 0.0), axis=1)
        dstrength += dlocation
        p_b = p_b * tl.where(is_text, 1.0, strength)
        ds_a = (p_a * (dp_a - dtext[:, None]) * scale).to(q_1.dtype)
        ds_b = (p_b * (dp_b - tl.where(is_text, dtext[:, None], dlocation[:, None])) * scale).to(q_1.dtype)
        p_a, p_b = p_a.to(q_1.dtype), p_b.to(q_1.dtype)
        dq_1 = tl.dot(ds_b, k_b1, tl.dot(ds_a, k_a1))
        dq_2 = dq_1
        # In this order most stays in registers: with two tiles the gradient of q is stored first, else last.
        if D2 > 0:
            dq_2 = tl.dot(ds_b, k_b2, tl.dot(ds_a, k_a2))
            _store(dq + out, dq_1, dq_2, m, m < S, H * D, D, D1, D2)
        dv_a1 = tl.dot(tl.trans(p_a), dy_1, dv_a1)
        if D2 > 0:
            dv_a2 = tl.dot(tl.trans(p_a), dy_2, dv_a2)
        dv_b1 = tl.dot(tl.trans(p_b), dy_1, dv_b1)
        if D2 > 0:
            dv_b2 = tl.dot(tl.trans(p_b), dy_2, dv_b2)
        dk_a1 = tl.dot(tl.trans(ds_a), q_1, dk_a1)
        if D2 > 0:
            dk_a2 = tl.dot(tl.trans(ds_a), q_2, dk_a2)
        dk_b1 = tl.dot(tl.trans(ds_b), q_1, dk_b1)
        if D2 > 0:
            dk_b2 = tl.dot(tl.trans(ds_b), q_2, dk_b2)
        if D2 == 0:
            _store(dq + out, dq_1, dq_2, m, m < S, H * D, D, D1, D2)
    sums = split * tl.num_programs(2) + image
    dkeys = dkv + sums * K * (2 * H * D) + head * D
    dvalues = dkeys + H * D
    _store(dkeys, dk_a1, dk_a2, a, a < K, 2 * H * D, D, D1, D2)
    _store(dkeys, dk_b1, dk_b2, b, b < K, 2 * H * D, D, D1, D2)
    _store(dvalues, dv_a1, dv_a2, a, a < K, 2 * H * D, D, D1, D2)
    _store(dvalues, dv_b1, dv_b2, b, b < K, 2 * H * D, D, D1, D2)
    tl.store(dgate + sums * H + head, tl.sum(dstrength))


class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, gate: Tensor, heads: int, text: int) -> Tensor:
        n, s, channels = q.shape
        size = channels // heads
        y = torch.empty(n, s, channels, dtype=q.dtype, device=q.device)
        queries, warps, columns, tiles = _chosen(FORWARD, size)
        _cross_attention_forward[(heads, cdiv(s, queries * tiles), n)](
            q, kv, gate, y, s, kv.shape[1], text, q.stride(1), kv.stride(1), size**-0.5,
            H=heads, D=size, TILES=tiles, BLOCK_M=queries, **_tiles(size, columns), num_warps=warps, num_stages=1,
        )  # fmt: skip
        ctx.save_for_backward(q, kv, gate)
        ctx.heads, ctx.text = heads, text
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, kv, gate = ctx.saved_tensors
        n, s, channels = q.shape
        keys, heads = kv.shape[1], ctx.heads
        size = channels // heads
        queries, warps, columns, splits = _chosen(BACKWARD, size)
        tiles = cdiv(s, queries)
        splits = largest_power_of_two_divisor(tiles, splits)
        dq = torch.empty(n, s, channels, dtype=q.dtype, device=q.device)
        dkv = torch.empty(splits, n, keys, 2 * channels, dtype=torch.float32, device=q.device)
        dgate = torch.empty(splits, n * heads, dtype=torch.float32, device=q.device)
        _cross_attention_backward[(heads, splits, n)](
            q, kv, gate, dy.contiguous(), dq, dkv, dgate, s, keys, ctx.text, q.stride(1), kv.stride(1), size**-0.5,
            H=heads, D=size, TILES=tiles // splits, BLOCK_M=queries, **_tiles(size, columns),
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        dkv = sum_partials(dkv.flatten(1), kv.dtype).view(kv.shape)
        return dq, dkv, dgate.sum().to(gate.dtype).reshape(gate.shape), None, None


def _tiles(size: int, columns: int) -> dict[str, int]:
    """Return the sizes of the tiles: of the keys, and of a head's columns with at most `columns` in the first."""
    first = min(columns, triton.next_power_of_2(size))
    second = max(16, triton.next_power_of_2(size - first)) if size > first else 0
    return {"K1": FIRST_KEYS, "K2": OTHER_KEYS, "D1": first, "D2": second}


def _chosen(choices: Mapping[int, tuple[int, ...]], size: int) -> tuple[int, ...]:
    """Return the choice for the smallest size of a head that is not below `size`."""
    return choices[min(known for known in choices if known >= size)]


def cross_attention_reference(q: Tensor, kv: Tensor, gate: Tensor, heads: int, text: int) -> Tensor:
    """Compute what `cross_attention` does as matrix products and softmaxes."""
    query = q.unflatten(2, (heads, -1)).transpose(1, 2)
    key, value = kv.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
    share = [scores[..., :text].softmax(-1)]
    if text < kv.shape[1]:
        share.append(gate.to(scores.dtype) * scores[..., text:].softmax(-1))
    return (torch.cat(share, dim=-1) @ value).transpose(1, 2).flatten(2)


def cross_attention(q: Tensor, kv: Tensor, gate: Tensor, heads: int, text: int) -> Tensor:
    """Attend from q [N, S, C] to keys and values [N, K, 2C], of which the first `text` are text, the others location.

    Heads lie side by side in C. `gate` is one number. Returns [N, S, C]. The last dimension must be contiguous.
    """
    fits = text >= FIRST_KEYS and kv.shape[1] <= FIRST_KEYS + OTHER_KEYS and 32 <= q.shape[2] // heads <= max(BACKWARD)
    if use_triton(q) and fits:
        return _CrossAttention.apply(q, kv, gate, heads, text)
    return cross_attention_reference(q, kv, gate, heads, text)
