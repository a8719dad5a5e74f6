"""Linear layers in FP8, emulated on the CPU, against the layers they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from inpaint_bench.kernels import linear

ROUNDING = 0.045  # relative error of a product whose operands have three bits behind the first


def relative(ours: Tensor | None, right: Tensor | None) -> float:
    assert ours is not None
    assert right is not None
    return float((ours.detach().float() - right.float()).norm() / right.detach().float().norm())


def results(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y, x.grad


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_products_and_gradients_are_rounded_and_no_more(trained: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 96, bias=False)).to(torch.bfloat16).requires_grad_(trained)
    with torch.no_grad():  # rows of very different sizes, as one scale for the whole weight would not bear
        network[0].weight[:48] *= 1e-4
    x, dy = torch.randn(2, 5, 64).bfloat16(), torch.randn(2, 5, 96).bfloat16()
    right = results(network, x, dy)
    gradient = network[0].weight.grad
    network.zero_grad()
    assert linear.convert(network) == 1
    ours = results(network, x, dy)
    assert 0.01 < relative(ours[0], right[0]) < ROUNDING
    assert 0.01 < relative(ours[1], right[1]) < ROUNDING
    assert relative(ours[0][..., :48], right[0][..., :48]) < ROUNDING
    if trained:
        assert relative(network[0].weight.grad, gradient) == 0
    else:
        assert sum(b.nbytes for b in network.buffers()) == 64 * 96 + 4 * 96
        assert not list(network.parameters())


def test_layers_that_fp8_does_not_suit_are_left_alone() -> None:
    network = nn.ModuleDict({"narrow": nn.Linear(20, 32), "adapters": nn.ModuleDict({"default": nn.Linear(32, 32)})})
    assert linear.convert(network) == 0
