"""Self-attention against a softmax in float64; FlashAttention-4 only where a Hopper GPU and its package are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inpaint_bench.kernels.self_attention import flash4_attention, replace_attention, self_attention, unavailable_reason
from inpaint_bench.models.networks import build_networks
from tests.run.support import bench

HEADS = 8
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def outputs_and_gradient(qkv: Tensor, weights: Tensor, flash4: bool) -> tuple[Tensor, Tensor]:
    leaf = qkv.clone().requires_grad_()
    out = self_attention(leaf, HEADS, flash4=flash4)
    out.backward(weights)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def softmax_attention(qkv: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    leaf = qkv.double().requires_grad_()
    q, k, v = leaf.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    out = ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1) @ v
    out = out.transpose(1, 2).flatten(2)
    out.backward(weights.double())
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def test_pytorch_attention_equals_a_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 12, 3 * HEADS * 5, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, 12, HEADS * 5, generator=generator, dtype=torch.float64)
    for computed, exact in zip(
        outputs_and_gradient(qkv, weights, flash4=False), softmax_attention(qkv, weights), strict=True
    ):
        assert relative_error(computed, exact) < 1e-12


NO_FLASH4 = unavailable_reason(GPU)
needs_flash4 = pytest.mark.skipif(NO_FLASH4 is not None, reason=f"runs FlashAttention-4: {NO_FLASH4}")
SHAPES = [(4096, 40), (1024, 80), (256, 160), (64, 160)]  # pixels and head dimensions of SD 1.5's UNet


@needs_flash4
@pytest.mark.parametrize(("pixels", "head"), SHAPES)
def test_flash_attention_4_and_its_gradients_are_right(pixels: int, head: int) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    qkv = torch.randn(2, pixels, 3 * HEADS * head, generator=generator, device=GPU).bfloat16()
    weights = torch.randn(2, pixels, HEADS * head, generator=generator, device=GPU).bfloat16()
    out, gradient = outputs_and_gradient(qkv, weights, flash4=True)
    exact, exact_gradient = softmax_attention(qkv, weights)
    assert relative_error(out, exact) < 0.005  # bf16; 0.0024 seen
    for part, exact_part in zip(gradient.chunk(3, 2), exact_gradient.chunk(3, 2), strict=True):
        assert relative_error(part, exact_part) < 0.005


@needs_flash4
@pytest.mark.parametrize(("pixels", "head"), SHAPES)
def test_flash_attention_4_writes_nothing_outside_its_buffers(
    pixels: int, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, mark = 1 << 16, 0x5A
    empty, buffers = torch.empty, []

    def guarded(*sizes: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = sizes[0] if isinstance(sizes[0], tuple) else sizes
        size = math.prod(shape)
        buffer = empty(size + 2 * guard, dtype=dtype, device=device)
        buffer.view(torch.uint8).fill_(mark)
        buffers.append((buffer[:guard], buffer[guard + size :]))
        return buffer[guard : guard + size].view(shape)

    qkv = torch.randn(2, pixels, 3 * HEADS * head, device=GPU).bfloat16()
    weights = torch.randn(2, pixels, HEADS * head, device=GPU).bfloat16()
    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", lambda t: guarded(*t.shape, dtype=t.dtype, device=t.device))
    outputs_and_gradient(qkv, weights, flash4=True)
    monkeypatch.undo()
    assert len(buffers) >= 4
    for sides in buffers:
        for side in sides:
            assert bool((side.view(torch.uint8) == mark).all())


def by_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's attention, called as FlashAttention-4 is: tokens before heads."""
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2)


@pytest.mark.parametrize("model", ["tiny_flux_fill", "tiny_flux2", "tiny_sd35"])
def test_every_layer_of_a_transformer_calls_the_function_it_is_given(model: str) -> None:
    workload = "finetune_text2image" if model == "tiny_sd35" else "finetune_inpaint"
    networks = build_networks(bench(f"model={model}", f"workload={workload}").model, torch.device("cpu"), inputs=(4, 9))
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, networks.input_channels, 8, 8, generator=generator)
    states = torch.randn(2, networks.state_rows, networks.state_width, generator=generator)
    inputs = sample, torch.tensor([3, 700]), states
    with torch.no_grad():
        expected, shapes = networks.unet(*inputs)[0], []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            shapes.append(query.shape)
            return by_head(query, key, value)

        kinds = [type(processor) for processor in networks.unet.attn_processors.values()]
        replace_attention(networks.unet, attend)
        replaced = {type(processor) for processor in networks.unet.attn_processors.values()}
        assert len(replaced) == len(set(kinds)) < len(kinds)  # a class per layer would be compiled per layer
        assert torch.allclose(networks.unet(*inputs)[0], expected, atol=1e-6)
    # FLUX: one double block and two single ones; SD 3.5: three blocks, one of which attends twice. 16 tokens and texts;
    # FLUX.2: 16 of the masked image too, and no pooled text.
    own = 1 if model == "tiny_sd35" else 0
    assert len(shapes) == 3 + own
    tokens = 32 + networks.state_rows if model == "tiny_flux2" else 16 + networks.state_rows - 1
    assert shapes.count((2, tokens, 2, 16)) == 3


@needs_flash4
@pytest.mark.parametrize("head", [64, 128])
def test_flash_attention_4_of_transformers_is_an_operator_with_right_gradients(head: int) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    qkv = torch.randn(3, 2, 1536, 24, head, generator=generator, device=GPU).bfloat16()
    weights = torch.randn(2, 1536, 24, head, generator=generator, device=GPU).bfloat16()

    def gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = qkv.to(dtype).requires_grad_()
        out = attend(*leaf)
        return out.detach(), torch.autograd.grad(out, leaf, weights.to(dtype))[0]

    expected = gradients(by_head, torch.float32)
    compiled = torch.compile(flash4_attention, fullgraph=True, dynamic=False)
    for attend in (flash4_attention, compiled):
        for ours, exact in zip(gradients(attend, torch.bfloat16), expected, strict=True):
            assert relative_error(ours, exact.double()) < 0.01
    leaves = tuple(part.detach().clone().requires_grad_() for part in qkv)
    torch.library.opcheck(torch.ops.inpaint_bench.flash4_attention.default, leaves)


def test_flash_attention_4_of_transformers_has_shapes_without_running() -> None:
    """What torch.compile asks of an operator, forward and backward."""
    query, key, value = (
        torch.empty(2, 24, 3, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    operator = torch.ops.inpaint_bench.flash4_attention
    attend = torch.compile(lambda *qkv: operator(*qkv)[0], backend="aot_eager", fullgraph=True)
    out = attend(query, key, value)
    assert (out.shape, out.dtype, out.is_contiguous()) == (query.shape, torch.bfloat16, True)
    for gradient in torch.autograd.grad(out.sum(), (query, key, value)):
        assert (gradient.shape, gradient.dtype) == (query.shape, torch.bfloat16)
