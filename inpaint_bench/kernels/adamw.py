"""AdamW for bf16 weights in one launch, 18 bytes moved per parameter.

The fp32 master of a weight is kept as two halves: the bf16 weight itself, rounded to nearest, and the 16 bits that the
rounding took away. Together they are the fp32 number exactly, so the update is that of fp32 masters, at 2 bytes less
per pass than a separate master. Moments are bf16, rounded stochastically: rounded to nearest, a second moment with
beta2 = 0.999 would never change, for one step moves it by less than half of bf16's last place.

Per parameter: weight, low half, two moments and gradient read (10 bytes), the first four written (8 bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import Chunks
from .dispatch import cdiv, jit, tl, use_triton

CHUNK = 2048  # parameters of one program
WARPS = 8
ALIGN = 8  # parameters begin at multiples of 16 bytes


@jit
def _hash(x):
    """Mix 32 bits (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@jit
def _to_bf16(value, noise):
    """Round fp32 to bf16, up or down at random; `noise` holds 16 random bits. Returns the bf16's bits."""
    return ((value.to(tl.int32, bitcast=True) + noise) >> 16).to(tl.int16)


@jit
def _adamw_update(
    gradients, starts, counts, weights, low, first, second, step, lr, beta1, beta2, eps, decay, CHUNK: tl.constexpr,
    LR_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    gradient = tl.load(gradients + program).to(tl.pointer_type(tl.bfloat16))
    # Counted in eights, so that the compiler knows that 16 bytes at a time may be read and masked.
    start = tl.load(starts + program) * 8
    i = tl.arange(0, CHUNK)
    inside = i < tl.load(counts + program) * 8
    at = start + i
    g = tl.load(tl.multiple_of(gradient, 16) + i, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(weights + at, mask=inside, other=0).to(tl.int32)
    rest = tl.load(low + at, mask=inside, other=0).to(tl.int32)
    m = (tl.load(first + at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    v = (tl.load(second + at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    # The weight was rounded up if the top bit of the rest is set.
    bits = ((high - (rest < 0).to(tl.int32)) << 16) | (rest & 0xFFFF)
    value = bits.to(tl.float32, bitcast=True)
    count = tl.load(step)
    rate = tl.load(lr) if LR_IN_MEMORY else lr
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    bias1 = 1.0 - tl.exp2(count * tl.log2(beta1))
    bias2 = 1.0 - tl.exp2(count * tl.log2(beta2))
    value = value * (1.0 - rate * decay) - rate / bias1 * m / (tl.sqrt(v / bias2) + eps)
    bits = value.to(tl.int32, bitcast=True)
    tl.store(low + at, bits.to(tl.int16), mask=inside)
    tl.store(weights + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
    noise = _hash(at.to(tl.uint32) * 0x9E3779B1 + count.to(tl.int32).to(tl.uint32) * 0x7FEB352D)
    tl.store(first + at, _to_bf16(m, (noise & 0xFFFF).to(tl.int32)), mask=inside)
    tl.store(second + at, _to_bf16(v, (noise >> 16).to(tl.int32)), mask=inside)


class FlatAdamW(torch.optim.Optimizer):
    """AdamW over bf16 parameters, which become views of one flat buffer. Each begins at a multiple of `align`.

    The settings are lr, betas, eps and weight_decay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, align: int = 1, **settings: Any) -> None:
        super().__init__(parameters, settings)
        (group,) = self.param_groups
        self._parameters: list[nn.Parameter] = group["params"]
        self._offsets, total = [], 0
        for p in self._parameters:
            self._offsets.append(total)
            total += cdiv(p.numel(), align) * align
        self._flat = torch.zeros(total, dtype=torch.bfloat16, device=self._parameters[0].device)
        with torch.no_grad():
            for p, view in zip(self._parameters, self._views(self._flat), strict=True):
                view.copy_(p)
                p.data = view
        self.buffers: dict[str, Tensor] = {}  # the state, by name

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat buffer with the parameters' shapes and strides."""
        pairs = zip(self._parameters, self._offsets, strict=True)
        return [torch.as_strided(flat, p.shape, p.stride(), offset) for p, offset in pairs]

    def _begin_step(self) -> dict[str, Any]:
        """Count the step and return the settings of the update. The learning rate of a schedule is a tensor."""
        (group,) = self.param_groups
        self.buffers["step"] += 1
        beta1, beta2 = group["betas"]
        return {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"], "decay": group["weight_decay"]}


class SplitMasterAdamW(FlatAdamW):
    """AdamW over bf16 parameters with exact fp32 masters; see the module.

    `low` has for each parameter what `split` took away, or None if it was bf16 before; empty: all were.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, low: Sequence[Tensor | None] = (), **settings: Any
    ) -> None:
        super().__init__(parameters, align=ALIGN, **settings)
        device, total = self._flat.device, len(self._flat)
        self.buffers = {
            "low": torch.zeros(total, dtype=torch.int16, device=device),
            "exp_avg": torch.zeros(total, dtype=torch.bfloat16, device=device),
            "exp_avg_sq": torch.zeros(total, dtype=torch.bfloat16, device=device),
            "step": torch.zeros((), dtype=torch.float32, device=device),  # a tensor: a CUDA graph reads it anew
        }
        for view, part in zip(self._views(self.buffers["low"]), low, strict=False):
            if part is not None:
                view.copy_(part)
        self._chunks = Chunks([p.numel() for p in self._parameters], self._offsets, CHUNK, device)
        self._starts = (self._chunks.starts // ALIGN).to(torch.int32)
        self._counts = ((self._chunks.counts + ALIGN - 1) // ALIGN).to(torch.int32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        settings = self._begin_step()
        gradients = [_dense_like(p) for p in self._parameters]
        if not use_triton(self._flat):
            _update_reference(self._parameters, gradients, self._flat, self.buffers, **settings)
            return
        table = self._chunks.addresses(gradients)
        _adamw_update[(len(table),)](
            table, self._starts, self._counts, self._flat.view(torch.int16), self.buffers["low"],
            *(self.buffers[name].view(torch.int16) for name in ("exp_avg", "exp_avg_sq")), self.buffers["step"],
            **settings, CHUNK=CHUNK, LR_IN_MEMORY=isinstance(settings["lr"], Tensor), num_warps=WARPS,
        )  # fmt: skip


def _dense_like(p: nn.Parameter) -> Tensor:
    """Return the gradient with the parameter's own strides, so that both can be walked as flat memory."""
    gradient = p.grad
    assert gradient is not None
    if gradient.dtype == torch.bfloat16 and gradient.stride() == p.stride():
        return gradient
    p.grad = torch.empty_like(p).copy_(gradient)  # kept on the parameter: the kernel reads it later
    return p.grad


def _update_reference(
    parameters: list[nn.Parameter], gradients: list[Tensor], flat: Tensor, buffers: dict[str, Tensor], **settings: Any
) -> None:
    """Compute what the kernel does in plain PyTorch, with random bits of PyTorch's own."""
    for p, gradient in zip(parameters, gradients, strict=True):
        walk = slice(p.storage_offset(), p.storage_offset() + p.numel())  # where the flat buffers hold it
        g = torch.as_strided(gradient, (p.numel(),), (1,), gradient.storage_offset()).float()
        m, v = buffers["exp_avg"][walk].float(), buffers["exp_avg_sq"][walk].float()
        value, m, v = adam(master(flat[walk], buffers["low"][walk]), g, m, v, buffers["step"], **settings)
        flat[walk], buffers["low"][walk] = split(value)
        buffers["exp_avg"][walk] = round_stochastically(m)
        buffers["exp_avg_sq"][walk] = round_stochastically(v)


def adam(
    value: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, *, lr: float | Tensor, beta1: float,
    beta2: float, eps: float, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute one AdamW update in fp32: new value, first and second moment."""
    m = m + (grad - m) * (1 - beta1)
    v = v * beta2 + grad * grad * (1 - beta2)
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    # Weight decay acts on the value itself, not on the gradient: the W in AdamW.
    value = value * (1 - lr * decay) - lr / bias1 * m / ((v / bias2).sqrt() + eps)
    return value, m, v


def round_stochastically(value: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with odds such that the mean is the value. Not for NaN or infinity."""
    # bf16 is the upper half of fp32: add noise to the lower 16 bits, then clear them (-65536 is 0xFFFF0000).
    bits = value.view(torch.int32)
    noise = torch.randint_like(bits, 0, 1 << 16)
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into bf16, rounded to nearest, and the 16 bits that rounding takes away (int16)."""
    bits = value.view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def master(weights: Tensor, low: Tensor) -> Tensor:
    """Join what `split` returned. The weight was rounded up if the top bit of the low half is set."""
    rest = low.int()
    return (((weights.view(torch.int16).int() - (rest < 0).int()) << 16) | (rest & 0xFFFF)).view(torch.float32)
