"""AdamW on bf16 weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inpaint_bench.kernels.adamw import round_stochastically
from inpaint_bench.models import optimizers
from inpaint_bench.models.optimizers import ADAMW, Bf16AdamW


def parameters(*shapes: tuple[int, ...], layout: torch.memory_format = torch.contiguous_format) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random).bfloat16() for shape in shapes]
    return [nn.Parameter(one.to(memory_format=layout) if one.ndim == 4 else one) for one in made]


def test_stochastic_rounding_is_unbiased_and_off_by_one_unit_at_most() -> None:
    value = torch.full((200_000,), 1.0 + 0.3 * 2**-7)  # three tenths of the way to the next bf16
    rounded = round_stochastically(value).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(rounded.mean() - value[0]) < 4 * 2**-7 * (0.21 / 200_000) ** 0.5


def test_master_weights_follow_fp32_adamw() -> None:
    shapes = ((4, 3, 3, 3), (7,), (5, 2))
    narrow = parameters(*shapes, layout=torch.channels_last)
    wide = [nn.Parameter(p.detach().float().clone(memory_format=torch.preserve_format)) for p in narrow]
    ours = Bf16AdamW(narrow, lr=1e-2, stochastic=False, **ADAMW)
    theirs = torch.optim.AdamW(wide, lr=1e-2, weight_decay=1e-2)
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        for p, q in zip(narrow, wide, strict=True):
            p.grad = torch.randn(p.shape, generator=random).bfloat16()
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    masters = ours.buffers["master"].split([p.numel() for p in narrow])
    for master, q, p in zip(masters, wide, narrow, strict=True):
        laid = master.clone().as_strided(p.shape, p.stride())  # in the order of the parameter's memory
        assert torch.allclose(laid, q, rtol=1e-5, atol=1e-7)
        assert torch.equal(p, laid.bfloat16())


def test_small_updates_accumulate_with_stochastic_rounding() -> None:
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = Bf16AdamW([weight], lr=1e-5, stochastic=True, **{**ADAMW, "weight_decay": 0.0})
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = 1 - weight.float().mean().item()
    assert abs(moved - 200 * 1e-5) < 2e-4  # each step moves by the rate; nearest would not move at all


def test_gradients_that_are_kept_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two losses in a step, and buffers that no launch takes whole."""
    monkeypatch.setattr(optimizers, "CHUNK", 5)
    both = [parameters((4, 3), (7,)), parameters((4, 3), (7,))]
    kept, plain = (
        Bf16AdamW(given, lr=1e-2, stochastic=False, keeps_gradients=keeps, **ADAMW)
        for given, keeps in zip(both, (True, False), strict=True)
    )
    places: set[int] = set()
    for _ in range(3):
        for given, optimizer in zip(both, (kept, plain), strict=True):
            for factor in (1.0, 0.5):
                (factor * sum(p.square().sum() for p in given)).backward()
            optimizer.step()
            optimizer.zero_grad()
        places |= {p.grad.data_ptr() for p in both[0] if p.grad is not None}
    assert len(places) == 2, "the same memory in every step"
    assert all(p.grad is None for p in both[1])
    for name, buffer in kept.buffers.items():
        assert torch.equal(buffer, plain.buffers[name])
    assert all(torch.equal(p, q) for p, q in zip(*both, strict=True))
