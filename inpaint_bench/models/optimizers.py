"""AdamW for the baseline and for bf16 weights, and the state of any optimizer as tensors by name.

PyTorch's fused AdamW wants weights, gradients and moments of one type. `Bf16AdamW` has fp32 master weights, or bf16
moments and stochastically rounded updates. Its weights are views into one flat buffer, so that the whole update is a
single elementwise kernel: 32 bytes moved per parameter with masters and 18 with stochastic rounding, against 28 of
fused fp32 AdamW, which pays 6 more for autocast's casts.

Stochastic rounding adds uniform bits below the last one that bf16 keeps: right on average, where rounding to nearest
would lose every update smaller than half a unit in the last place (at a learning rate of 1e-5: most).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from inpaint_bench.kernels.adamw import SplitMasterAdamW

from .parallel import sharding

# torch.optim.AdamW's own defaults, written out: they are part of what is measured.
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

Kernel = Callable[..., None]


def baseline_adamw(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    """Return the baseline's AdamW. foreach on a GPU and the loop elsewhere is PyTorch's own choice, pinned here."""
    foreach = parameters[0].device.type == "cuda"
    return [torch.optim.AdamW(parameters, lr=lr, foreach=foreach, fused=False, **ADAMW)]


class EMA:
    """Exponential moving average of the trained weights, in fp32: ema = decay * ema + (1 - decay) * weights."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters: list[Tensor] = list(parameters)
        self.tensors = [p.detach().float().clone(memory_format=torch.preserve_format) for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        current = [p.detach() if p.dtype == torch.float32 else p.detach().float() for p in self._parameters]
        torch._foreach_lerp_(self.tensors, current, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in place of the trained weights within the block."""
        trained = [p.detach().clone(memory_format=torch.preserve_format) for p in self._parameters]
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self.tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, trained)


class Bf16AdamW(torch.optim.Optimizer):
    """AdamW over bf16 parameters. `stochastic=False` keeps fp32 masters and moments."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        stochastic: bool,
        betas: tuple[float, float] = ADAMW["betas"],
        eps: float = ADAMW["eps"],
        weight_decay: float = ADAMW["weight_decay"],
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.stochastic = stochastic
        (group,) = self.param_groups
        params: list[nn.Parameter] = group["params"]
        if any(p.dtype != torch.bfloat16 for p in params):
            raise ValueError("every parameter must be bf16")
        device = params[0].device
        count = sum(p.numel() for p in params)
        self._flat = torch.empty(count, dtype=torch.bfloat16, device=device)
        self._grad = torch.empty_like(self._flat)
        self._grad_views = _views_like(params, self._grad)
        _move_into(params, self._flat)
        dtype = torch.bfloat16 if stochastic else torch.float32
        # In the order of the kernel's arguments: `step` passes them by position.
        self.buffers: dict[str, Tensor] = {
            "exp_avg": torch.zeros(count, dtype=dtype, device=device),
            "exp_avg_sq": torch.zeros(count, dtype=dtype, device=device),
            "step": torch.zeros((), dtype=torch.float32, device=device),  # a tensor: a CUDA graph reads it anew
        }
        if not stochastic:
            self.buffers["master"] = self._flat.float()
        kernel: Kernel = _update_stochastic if stochastic else _update_master
        # On a GPU one kernel instead of a dozen passes; on the CPU compiling would not pay.
        self._kernel = torch.compile(kernel, dynamic=False) if device.type == "cuda" else kernel

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        assert closure is None
        (group,) = self.param_groups
        # autograd allocates each gradient by itself; the kernel reads them as one buffer.
        torch._foreach_copy_(self._grad_views, [p.grad for p in group["params"]])
        self.buffers["step"] += 1
        beta1, beta2 = group["betas"]
        self._kernel(
            self._flat,
            self._grad,
            *self.buffers.values(),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            decay=group["weight_decay"],
        )


def _views_like(params: list[nn.Parameter], flat: Tensor) -> list[Tensor]:
    """Return consecutive views of `flat` with the parameters' shapes and strides."""
    views, start = [], 0
    for p in params:
        views.append(flat[start : start + p.numel()].as_strided(p.shape, p.stride(), flat.storage_offset() + start))
        start += p.numel()
    return views


@torch.no_grad()
def _move_into(params: list[nn.Parameter], flat: Tensor) -> None:
    """Make the parameters views of `flat`, keeping values and strides."""
    for p, view in zip(params, _views_like(params, flat), strict=True):
        view.copy_(p)
        p.data = view


def _adam(
    value: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, *, lr: float, beta1: float, beta2: float,
    eps: float, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute one AdamW update in fp32: new value, first and second moment."""
    m = m + (grad - m) * (1 - beta1)
    v = v * beta2 + grad * grad * (1 - beta2)
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    # Weight decay acts on the value itself, not on the gradient: the W in AdamW.
    value = value * (1 - lr * decay) - lr / bias1 * m / ((v / bias2).sqrt() + eps)
    return value, m, v


def _update_master(
    flat: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, master: Tensor, **settings: float
) -> None:
    value, new_m, new_v = _adam(master, grad.float(), m, v, step, **settings)
    master.copy_(value)
    m.copy_(new_m)
    v.copy_(new_v)
    flat.copy_(value)


def _update_stochastic(flat: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, **settings: float) -> None:
    value, new_m, new_v = _adam(flat.float(), grad.float(), m.float(), v.float(), step, **settings)
    flat.copy_(round_stochastically(value))
    m.copy_(round_stochastically(new_m))
    v.copy_(round_stochastically(new_v))


def round_stochastically(value: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with odds such that the mean is the value. Not for NaN or infinity."""
    # bf16 is the upper half of fp32: add noise to the lower 16 bits, then clear them (-65536 is 0xFFFF0000).
    bits = value.view(torch.int32)
    noise = torch.randint_like(bits, 0, 1 << 16)
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()


# --- checkpoints ---------------------------------------------------------------------------------


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state, without the parameters, as tensors by name."""
    if isinstance(optimizer, Bf16AdamW | SplitMasterAdamW):
        return dict(optimizer.buffers)
    return {
        f"{number}.{name}": sharding.for_checkpoint(value) if isinstance(value, Tensor) else torch.tensor(value)
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in _flatten(values)
    }


def _flatten(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a parameter's state. bitsandbytes nests its quantised state to hide it from FSDP; it loads it flat too."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


@torch.no_grad()
def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore what `state_tensors` returned."""
    if isinstance(optimizer, Bf16AdamW | SplitMasterAdamW):
        for name, buffer in optimizer.buffers.items():
            buffer.copy_(tensors[name])
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        # Integers were plain numbers (bitsandbytes' step); PyTorch's own step is a float tensor and stays one.
        plain = value.ndim == 0 and not value.is_floating_point()
        state.setdefault(int(number), {})[name] = (
            int(value) if plain else sharding.own_part(parameters[int(number)], value)
        )
    # Parameter groups as configured here, state as saved.
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        sharding.load_state(optimizer, state)
    else:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    # Saved tensors are contiguous, and a fused kernel walks moments in the order of the weight's memory.
    for parameter, values in sharding.own_optimizer(optimizer).state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
