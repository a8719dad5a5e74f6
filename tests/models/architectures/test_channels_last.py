"""diffusers' UNets in channels_last: every convolution reads it, and what they compute is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from inpaint_bench.kernels import dispatch
from inpaint_bench.models.architectures import channels_last

SMALL = {"in_channels": 9, "cross_attention_dim": 32, "norm_num_groups": 4}
DOWN, UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
SHAPES: dict[str, dict[str, Any]] = {  # blocks and layers of the models, with fewer channels
    "sd15": {"block_out_channels": (8, 16, 32, 32), "attention_head_dim": 4},
    "sd2": {
        "block_out_channels": (8, 16, 32, 32), "attention_head_dim": (1, 2, 4, 4), "use_linear_projection": True,
    },
    "sdxl": {
        "block_out_channels": (8, 16, 32), "attention_head_dim": (1, 2, 4), "use_linear_projection": True,
        "down_block_types": ("DownBlock2D", DOWN, DOWN), "up_block_types": (UP, UP, "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 3),
    },
}  # fmt: skip
PYTORCHS = F.group_norm


def norm_of_a_gpu(x: Tensor, *more: Any) -> Tensor:
    """Return PyTorch's GroupNorm as it lays it out on a GPU."""
    return PYTORCHS(x.contiguous(), *more)


def kernel(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float, silu: bool) -> tuple[Tensor]:
    assert not silu
    return (PYTORCHS(x.movedim(-1, 1), groups, weight, bias, eps).movedim(1, -1).contiguous(),)


def inputs(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 9, 16, 16), torch.randint(0, 1000, (batch,)), torch.randn(batch, 5, 32)


def a_pass(unet: Any, batch: int, layout: torch.memory_format) -> tuple[list[bool], list[Tensor]]:
    """Return whether each convolution read channels_last, the prediction, and the gradients."""
    seen: list[bool] = []

    def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0].is_contiguous(memory_format=torch.channels_last))

    hooks = [m.register_forward_pre_hook(look) for m in unet.modules() if isinstance(m, nn.Conv2d)]
    unet.to(memory_format=layout).zero_grad()
    sample, steps, text = inputs(batch)
    out = unet(sample.contiguous(memory_format=layout), steps, text, return_dict=False)[0]
    out.square().mean().backward()
    for hook in hooks:
        hook.remove()
    return seen, [out.detach(), *(p.grad.clone() for p in unet.parameters())]


def build(name: str) -> Any:
    torch.manual_seed(0)
    return UNet2DConditionModel(**SMALL | SHAPES[name]).train()


@pytest.mark.parametrize(
    ("name", "batch", "plain", "of"), [("sd15", 2, 7, 98), ("sd2", 2, 2, 66), ("sdxl", 2, 2, 51), ("sd15", 64, 4, 98)]
)
def test_every_convolution_reads_it_as_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: int, plain: int, of: int
) -> None:
    unet, names = build(name), list(build(name).state_dict())
    _, expected = a_pass(unet, batch, torch.contiguous_format)
    monkeypatch.setattr(F, "group_norm", norm_of_a_gpu)
    seen, _ = a_pass(unet, batch, torch.channels_last)
    assert (sum(seen), len(seen)) == (plain, of)

    channels_last.keep_layout(unet)
    monkeypatch.setattr(channels_last, "use_triton", lambda _: True)
    monkeypatch.setattr(channels_last, "group_norm", kernel)
    seen, found = a_pass(unet, batch, torch.channels_last)
    assert all(seen)
    assert len(seen) == of + (3 if batch == 64 else 0)  # it upsamples two parts
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm() + 1e-7
    assert all(module.training for module in unet.modules())
    assert list(unet.state_dict()) == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ndim", [4, 3])  # of a convolution, and in the VAE's attention
def test_norm_keeps_layout_and_types(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ndim: int) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "interpret", True)
    norm = nn.GroupNorm(8, 32)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias)
    pixels = torch.randn(2, 6, 5, 32) if ndim == 4 else torch.randn(2, 30, 32)
    x = pixels.movedim(-1, 1).to(dtype)
    plain = x.float().clone().requires_grad_()  # autocast on a GPU makes it so
    expected = norm(plain)
    expected.square().sum().backward()
    channels_last.keep_layout(norm)
    kept = x.clone().requires_grad_()
    with torch.autocast("cpu", enabled=dtype != torch.float32):
        found = norm(kept)
    found.square().sum().backward()
    assert found.dtype == torch.float32
    assert found.stride() == kept.grad.stride() == x.stride()
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(kept.grad, plain.grad.to(dtype), rtol=1e-2, atol=1e-4)


def test_torch_compile_makes_one_graph_of_it() -> None:
    unet = build("sd15")
    channels_last.keep_layout(unet)
    expected = unet(*inputs(2), return_dict=False)[0]
    compiled: Any = torch.compile(unet, backend="eager", dynamic=False, fullgraph=True)
    assert torch.allclose(compiled(*inputs(2), return_dict=False)[0], expected, atol=1e-6)
