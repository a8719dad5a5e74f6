"""Cross-attention to a text and, through a gate, to location tokens behind it: one kernel forward, one backward.

    y = softmax(q k_text) v_text + gate * softmax(q k_location) v_location

Both softmaxes share one matrix of scores, and both products with the values are one product with the weighted sum of
the two probability matrices. All keys (77 and a few) fit one tile, so nothing is saved but the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import cdiv, jit, largest_power_of_two_divisor, tl, triton, use_triton

LARGEST_HEAD = 80  # beyond it the backward kernel's sums no longer fit the registers
# Queries of a tile, parts into which the queries of one head are divided, warps: by measurement on an H200.
FORWARD = {"queries": 32, "warps": 4}
BACKWARD = {
    64: {"queries": 128, "splits": 2, "warps": 8},
    128: {"queries": 32, "splits": 1, "warps": 8},
}  # by padded head


@jit
def _probabilities(scores, is_text, is_location):
    """Softmax over the text keys and, apart from it, over the location keys; zero for padding."""
    # One exponential per score: each is shifted by the largest of its own kind.
    text_max = tl.max(tl.where(is_text, scores, -1.0e30), axis=1)
    location_max = tl.max(tl.where(is_location, scores, -1.0e30), axis=1)
    weight = tl.exp(scores - tl.where(is_text, text_max[:, None], location_max[:, None]))
    weight = tl.where(is_text | is_location, weight, 0.0)
    text_sum = tl.sum(tl.where(is_text, weight, 0.0), axis=1)
    location_sum = tl.maximum(tl.sum(weight, axis=1) - text_sum, 1.0e-30)
    return weight * tl.where(is_text, (1.0 / text_sum)[:, None], (1.0 / location_sum)[:, None])


@jit
def _cross_attention_forward(
    q, kv, gate, y, S, K, TEXT, q_row, kv_row, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    image, head = tl.program_id(1) // H, tl.program_id(1) % H
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    key, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    q_at = (image.to(tl.int64) * S + m)[:, None] * q_row + head * D + d[None, :]
    q_inside = (m[:, None] < S) & (d[None, :] < D)
    kv_at = (image.to(tl.int64) * K + key)[:, None] * kv_row + head * D + d[None, :]
    kv_inside = (key[:, None] < K) & (d[None, :] < D)
    query = tl.load(q + q_at, mask=q_inside, other=0.0)
    keys = tl.load(kv + kv_at, mask=kv_inside, other=0.0)
    values = tl.load(kv + kv_at + H * D, mask=kv_inside, other=0.0)
    scores = tl.dot(query, tl.trans(keys)) * scale
    is_text, is_location = (key < TEXT)[None, :], ((key >= TEXT) & (key < K))[None, :]
    joint = _probabilities(scores, is_text, is_location) * tl.where(is_text, 1.0, tl.load(gate).to(tl.float32))
    out = tl.dot(joint.to(values.dtype), values)
    y_at = (image.to(tl.int64) * S + m)[:, None] * (H * D) + head * D + d[None, :]
    tl.store(y + y_at, out.to(y.dtype.element_ty), mask=q_inside)


@jit
def _cross_attention_backward(
    q, kv, gate, dy, dq, dkv, dgate, S, K, TEXT, q_row, kv_row, scale,
    H: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write dq, and each program's sums of dkv and dgate: [splits, N, K, 2, H, D] and [splits, N * H]."""
    split, row = tl.program_id(0), tl.program_id(1)
    image, head = row // H, row % H
    key, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    kv_at = (image.to(tl.int64) * K + key)[:, None] * kv_row + head * D + d[None, :]
    kv_inside = (key[:, None] < K) & (d[None, :] < D)
    keys = tl.load(kv + kv_at, mask=kv_inside, other=0.0)
    values = tl.load(kv + kv_at + H * D, mask=kv_inside, other=0.0)
    is_text, is_location = (key < TEXT)[None, :], ((key >= TEXT) & (key < K))[None, :]
    share = tl.where(is_text, 1.0, tl.load(gate).to(tl.float32))
    dkeys = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dvalues = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dstrength = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(TILES):
        m = (split * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < S) & (d[None, :] < D)
        q_at = (image.to(tl.int64) * S + m)[:, None] * q_row + head * D + d[None, :]
        y_at = (image.to(tl.int64) * S + m)[:, None] * (H * D) + head * D + d[None, :]
        query = tl.load(q + q_at, mask=inside, other=0.0)
        gradient = tl.load(dy + y_at, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(keys)) * scale
        p = _probabilities(scores, is_text, is_location)
        dp = tl.dot(gradient, tl.trans(values))
        product = dp * p
        dtext = tl.sum(tl.where(is_text, product, 0.0), axis=1)
        dlocation = tl.sum(product, axis=1) - dtext
        dstrength += dlocation
        joint = p * share
        ds = joint * (dp - tl.where(is_text, dtext[:, None], dlocation[:, None])) * scale
        ds, joint = ds.to(query.dtype), joint.to(query.dtype)
        dvalues += tl.dot(tl.trans(joint), gradient)
        dkeys += tl.dot(tl.trans(ds), query)
        tl.store(dq + y_at, tl.dot(ds, keys).to(dq.dtype.element_ty), mask=inside)
    images = tl.num_programs(1) // H
    out = ((split * images + image).to(tl.int64) * K + key)[:, None] * (2 * H * D) + head * D + d[None, :]
    tl.store(dkv + out, dkeys, mask=kv_inside)
    tl.store(dkv + out + H * D, dvalues, mask=kv_inside)
    tl.store(dgate + split * tl.num_programs(1) + row, tl.sum(dstrength))


class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, gate: Tensor, heads: int, text: int) -> Tensor:
        n, s, channels = q.shape
        size = channels // heads
        y = torch.empty(n, s, channels, dtype=q.dtype, device=q.device)
        block_k, block_d = (max(16, triton.next_power_of_2(count)) for count in (kv.shape[1], size))
        blocks = {"BLOCK_K": block_k, "BLOCK_D": block_d}
        _cross_attention_forward[(cdiv(s, FORWARD["queries"]), n * heads)](
            q, kv, gate, y, s, kv.shape[1], text, q.stride(1), kv.stride(1), size**-0.5,
            H=heads, D=size, BLOCK_M=FORWARD["queries"], **blocks, num_warps=FORWARD["warps"],
        )  # fmt: skip
        ctx.save_for_backward(q, kv, gate)
        ctx.heads, ctx.text, ctx.blocks = heads, text, blocks
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, kv, gate = ctx.saved_tensors
        n, s, channels = q.shape
        keys, heads = kv.shape[1], ctx.heads
        size = channels // heads
        chosen = BACKWARD[64 if size <= 64 else 128]
        tiles = cdiv(s, chosen["queries"])
        splits = largest_power_of_two_divisor(tiles, chosen["splits"])
        dq = torch.empty(n, s, channels, dtype=q.dtype, device=q.device)
        dkv = torch.empty(splits, n, keys, 2 * channels, dtype=torch.float32, device=q.device)
        dgate = torch.empty(splits, n * heads, dtype=torch.float32, device=q.device)
        _cross_attention_backward[(splits, n * heads)](
            q, kv, gate, dy.contiguous(), dq, dkv, dgate, s, keys, ctx.text, q.stride(1), kv.stride(1), size**-0.5,
            H=heads, D=size, TILES=tiles // splits, BLOCK_M=chosen["queries"], **ctx.blocks, num_warps=chosen["warps"],
        )  # fmt: skip
        return dq, dkv.sum(0).to(kv.dtype), dgate.sum().to(gate.dtype).reshape(gate.shape), None, None


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
    if use_triton(q) and q.shape[2] // heads <= LARGEST_HEAD:
        return _CrossAttention.apply(q, kv, gate, heads, text)
    return cross_attention_reference(q, kv, gate, heads, text)
