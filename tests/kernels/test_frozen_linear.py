"""Frozen weights in 8 and 4 bits: how far they are from 16 bits, what the backward pass keeps, what is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.kernels.linear import FrozenLinear, nf4_levels

# Largest relative error of normal weights, and the bytes of a weight: 1 and a scale of a row; 1/2 and 2/64 of a scale.
BOUNDS = {"fp8": (0.04, 1 + 2 / 512), "nf4": (0.11, 0.5 + 2 / 64)}


def layer() -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(512, 256).bfloat16().requires_grad_(False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def error(expected: Tensor, actual: Tensor) -> float:
    return float((expected.float() - actual.float()).norm() / expected.float().norm())


def kept(function: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return result and gradient, and the bytes that are kept for the backward pass."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(x)
    (gradient,) = torch.autograd.grad(result.float().square().sum(), x)
    return result, gradient, sum(saved.values())


@pytest.mark.parametrize("kind", BOUNDS)
def test_weights_shrink_and_stay_close(kind: str) -> None:
    linear, (bound, size) = layer(), BOUNDS[kind]
    with torch.no_grad():
        linear.weight[3] = 0.0  # has no scale
    stored = FrozenLinear(linear, kind)
    assert error(linear.weight, stored.weight) < bound
    assert not stored.weight[3].any()
    assert stored.stored_bytes == size * linear.weight.numel()
    x = torch.randn(8, 512).bfloat16().requires_grad_()
    result, gradient, num_bytes = kept(stored, x)
    expected = F.linear(x, stored.weight, linear.bias)
    assert torch.equal(result, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected.float().square().sum(), x)[0])
    assert error(linear(x), result) < bound
    assert num_bytes < stored.stored_bytes + 3000, "not the dequantised weights"
    with torch.autocast("cpu", torch.bfloat16):
        assert stored(x.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.faults
def test_a_compiled_block_keeps_no_dequantised_weights(kind: str) -> None:
    stored = FrozenLinear(layer(), kind)
    block = nn.Sequential(nn.LayerNorm(512).bfloat16().requires_grad_(False), stored, nn.GELU())
    x = torch.randn(8, 512).bfloat16().requires_grad_()
    eager, compiled = kept(block, x), kept(torch.compile(block, fullgraph=True, dynamic=False), x)
    assert error(eager[1], compiled[1]) < 0.01
    assert compiled[2] < stored.stored_bytes + 40_000 < layer().weight.nbytes


def test_levels_are_those_of_the_paper() -> None:
    """Of its appendix E, to three decimals."""
    levels = [round(value, 3) for value in nf4_levels().tolist()]
    assert levels[:8] == [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0]
    assert levels[8:] == [0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]
