"""Self-attention over a fused query-key-value projection: PyTorch's, or FlashAttention-4 on Hopper.

In transformers queries, keys and values are apart, and FlashAttention-4 is an operator of PyTorch, so that a block that
is compiled stays one graph.

FlashAttention-4 pads SD 1.5's head dimension of 40 to 48 on Hopper, where every other kernel pads to 64. But up to a
head dimension of 128 two helper kernels of its backward pass (4.0.0b36) round the head dimension to 32, where the main
one rounds to 16: dQ is silently wrong. They are given 16 here (see `_corrected`); beyond 128 its own choice is right.
It writes dQ, dK and dV into one gradient of the projection.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import autocast_dtype, cdiv, jit, tl, use_triton

CHECKED_VERSION = "4.0.0b36"
CAPABILITY = 9  # compute capability 9.x, Hopper
LARGEST_ROUNDED_HEAD = 128  # up to which the main kernel rounds the head dimension to 16


def unavailable_reason(device: torch.device) -> str | None:
    """Return why FlashAttention-4 cannot run on the device, None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return "FlashAttention-4 was checked on Hopper GPUs only (compute capability 9)"
    try:
        installed = version("flash-attn-4")
        _interface()
    except PackageNotFoundError:
        return "flash-attn-4 is not installed: pip install 'inpaint-bench[flash4]'"
    except (ImportError, OSError, RuntimeError) as error:
        return f"flash-attn-4 cannot be imported ({error})"
    if installed != CHECKED_VERSION:
        return f"flash-attn-4 {installed} is installed; its gradients were checked with {CHECKED_VERSION} only"
    return None


@functools.cache
def _interface() -> Any:
    # It reads at import whether and where it keeps compiled kernels: cache.py has said so.
    import flash_attn.cute.interface

    return flash_attn.cute.interface


@functools.cache
def _with_corrected_rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a helper of the backward pass so that it rounds the head dimension to 16, as the main kernel does.

    The first helper copies O and dO in rows of the largest power of two that divides the rounded head dimension of the
    values. Rows of 16 columns are more rows than a tile has at a head dimension of 80, and their sums would be written
    behind the end of a buffer. So it is told another one, which rounds to the next multiple of 32 and differs from it:
    then it reads the columns that the tensors really have.
    """
    parameters = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        bound.arguments["hdim_multiple_of"] = 16
        if size := bound.arguments.get("head_dim_v"):
            bound.arguments["head_dim_v"] = -(-size // 32) * 32 - 8
        return function(*bound.args, **bound.kwargs)

    return functools.update_wrapper(call, function)  # the helpers keep their compiled kernels as attributes


@contextmanager
def _corrected(interface: Any, size: int) -> Iterator[None]:
    """Make the helpers of the backward pass agree with its main kernel on the rounded head dimension."""
    names = ("_bwd_preprocess", "_bwd_postprocess_convert") if size <= LARGEST_ROUNDED_HEAD else ()
    original = {name: getattr(interface, name) for name in names}
    for name, function in original.items():
        setattr(interface, name, _with_corrected_rounding(function))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(interface, name, function)


class _FlashAttention4(torch.autograd.Function):
    """FlashAttention-4 over [N, S, 3, H, D] as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(2)
        out, lse = _interface()._flash_attn_fwd(q, k, v, softmax_scale=q.shape[-1] ** -0.5, return_lse=True)[:2]
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        qkv, out, lse = ctx.saved_tensors
        q, k, v = qkv.unbind(2)
        dqkv = torch.empty_like(qkv)
        dq, dk, dv = dqkv.unbind(2)
        interface, size = _interface(), q.shape[-1]
        with _corrected(interface, size):
            interface._flash_attn_bwd(
                q, k, v, out, dout.contiguous(), lse, softmax_scale=size**-0.5, dq=dq, dk=dk, dv=dv
            )
        return dqkv


def self_attention(qkv: Tensor, heads: int, *, flash4: bool = False) -> Tensor:
    """Attend within each image: [N, S, 3C], queries, keys and values side by side -> [N, S, C].

    `flash4` calls FlashAttention-4; else PyTorch chooses its kernel (`torch.nn.attention.sdpa_kernel`).
    """
    split = qkv.unflatten(2, (3, heads, -1))  # [N, S, 3, H, D]
    if flash4:
        out: Tensor = _FlashAttention4.apply(split)
        return out.flatten(2)
    q, k, v = split.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


# --- transformers --------------------------------------------------------------------------------

HEADS = (64, 128)  # dimensions of heads: SD 3.5's and FLUX's, of which FlashAttention-4 rounds none


@torch.library.custom_op("inpaint_bench::flash4_attention", mutates_args=(), device_types="cuda")
def _flash4(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _interface()._flash_attn_fwd(q, k, v, softmax_scale=q.shape[-1] ** -0.5, return_lse=True)[:2]
    return out, lse


@_flash4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    count, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(count, heads, length, dtype=torch.float32)


@torch.library.custom_op("inpaint_bench::flash4_attention_backward", mutates_args=(), device_types="cuda")
def _flash4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5
    _interface()._flash_attn_bwd(q, k, v, out, dout.contiguous(), lse, softmax_scale=scale, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@_flash4_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_flash4.register_autograd(
    lambda ctx, dout, _: _flash4_backward(dout, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def flash4_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by FlashAttention-4: [N, S, H, D] each -> [N, S, H, D], in autocast's type if it is on."""
    assert query.shape[-1] in HEADS
    out: Tensor = _flash4(*(t.to(autocast_dtype(value)) for t in (query, key, value)))[0]
    return out


def replace_attention(transformer: Any, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Let the layers of a transformer of diffusers attend by a function of [N, S, H, D] queries, keys and values.

    Their processors stay what they are, but find this function under the names of those that they call: FLUX's calls
    diffusers' own, SD 3's that of PyTorch, with heads before tokens. FLUX's finds `rotate` too.
    """

    def heads_first(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return attend(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2)

    replaced = {
        "dispatch_attention_fn": lambda query, key, value, **_: attend(query, key, value),
        "F": SimpleNamespace(scaled_dot_product_attention=heads_first),
        "apply_rotary_emb": rotate,
    }

    def changed(kind: type) -> Any:
        call: Any = kind.__call__
        names = {**call.__globals__, **replaced}
        names.pop("__name__", None)  # by which torch.compile would look up the module's own
        function = FunctionType(call.__code__, names, call.__name__, call.__defaults__)
        return type(kind.__name__, (kind,), {"__call__": function})

    processors: dict[str, Any] = transformer.attn_processors
    # A class per layer would be compiled per layer, up to PyTorch's limit, and the layers beyond it not at all.
    kinds = {kind: changed(kind) for kind in {type(processor) for processor in processors.values()}}
    transformer.set_attn_processor({name: kinds[type(processor)]() for name, processor in processors.items()})


# --- rotary position embeddings of queries and keys ----------------------------------------------

# As an operator, which torch.compile leaves whole in its graph. Inductor joins them with the norms of queries and keys
# to one kernel, which takes longer than both apart: 314 us for 8 x 1,540 tokens of FLUX on an H200, where reading and
# writing both maps take 75.
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


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.inverse = inputs[3]


_rotated.register_autograd(
    lambda ctx, dy: (_rotated(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None), setup_context=_save_angles
)


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
