"""AdamW for the baseline and for bf16 weights, and the state of any optimizer as tensors by name.

PyTorch's fused AdamW wants weights, gradients and moments of one type. `Bf16AdamW` has fp32 master weights, or bf16
moments and stochastically rounded updates. Its weights are views into one flat buffer, so that the whole update is a
single elementwise kernel: 32 bytes moved per parameter with masters and 18 with stochastic rounding, against 28 of
fused fp32 AdamW, which pays 6 more for autocast's casts.

Stochastic rounding adds uniform bits below the last one that bf16 keeps: right on average, where rounding to nearest
would lose every update smaller than half a unit in the last place (at a learning rate of 1e-5: most).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from inpaint_bench.kernels.adamw import FlatAdamW, adam, master, round_stochastically

from .parallel import sharding

# torch.optim.AdamW's own defaults, written out: they are part of what is measured.
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def baseline_adamw(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    """Return the baseline's AdamW. foreach on a GPU and the loop elsewhere is PyTorch's own choice, pinned here."""
    foreach = any(parameter.is_cuda for parameter in parameters)
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


CHUNK = 2**30  # parameters of a launch: inductor numbers elements with 32 bits, and FLUX has 12e9


class Bf16AdamW(FlatAdamW):
    """AdamW over bf16 parameters. `stochastic=False` keeps fp32 masters and moments; `low` as in SplitMasterAdamW.

    With `keeps_gradients` autograd adds to gradients that stay, as views of the buffer that the kernel reads; else it
    allocates each in every step, and they are copied: a second copy of all of them, 24 GB with FLUX.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, stochastic: bool, keeps_gradients: bool = False,
        low: Sequence[Tensor | None] = (), **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(parameters, **settings)
        self.stochastic, self.keeps_gradients = stochastic, keeps_gradients
        self._grad = torch.empty_like(self._flat)
        self._grad_views = self._views(self._grad)
        count, device = len(self._flat), self._flat.device
        dtype = torch.bfloat16 if stochastic else torch.float32
        # In the order of the kernel's arguments, `step` last: they are passed by position.
        self.buffers = {
            "exp_avg": torch.zeros(count, dtype=dtype, device=device),
            "exp_avg_sq": torch.zeros(count, dtype=dtype, device=device),
            "step": torch.zeros((), dtype=torch.float32, device=device),  # a tensor: a CUDA graph reads it anew
        }
        if not stochastic:
            self.buffers["master"] = self._flat.float()
            for view, p, part in zip(self._views(self.buffers["master"]), self._parameters, low, strict=False):
                if part is not None:
                    view.copy_(master(p.detach(), part))
        kernel: Callable[..., None] = _update_stochastic if stochastic else _update_master
        # On a GPU one kernel instead of a dozen passes; on the CPU compiling would not pay.
        self._kernel = torch.compile(kernel, dynamic=False) if device.type == "cuda" else kernel

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        assert closure is None
        pairs = list(zip(self._grad_views, self._parameters, strict=True))
        if copied := [(view, p.grad) for view, p in pairs if p.grad is not view]:
            views, gradients = zip(*copied, strict=True)
            torch._foreach_copy_(views, gradients)  # the kernel reads them as one buffer
        settings, step = self._begin_step(), self.buffers["step"]
        buffers = [self._flat, self._grad, *(buffer for buffer in self.buffers.values() if buffer is not step)]
        for parts in zip(*(buffer.split(CHUNK) for buffer in buffers), strict=True):
            self._kernel(*parts, step, **settings)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those that are kept become zero."""
        if not self.keeps_gradients:
            super().zero_grad(set_to_none)
            return
        self._grad.zero_()
        for p, view in zip(self._parameters, self._grad_views, strict=True):
            p.grad = view


def _update_master(
    flat: Tensor, grad: Tensor, m: Tensor, v: Tensor, master: Tensor, step: Tensor, **settings: float
) -> None:
    value, new_m, new_v = adam(master, grad.float(), m, v, step, **settings)
    master.copy_(value)
    m.copy_(new_m)
    v.copy_(new_v)
    flat.copy_(value)


def _update_stochastic(flat: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor, **settings: float) -> None:
    value, new_m, new_v = adam(flat.float(), grad.float(), m.float(), v.float(), step, **settings)
    flat.copy_(round_stochastically(value))
    m.copy_(round_stochastically(new_m))
    v.copy_(round_stochastically(new_v))


# --- checkpoints ---------------------------------------------------------------------------------


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state, without the parameters, as tensors by name."""
    if isinstance(optimizer, FlatAdamW):
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
    if isinstance(optimizer, FlatAdamW):
        for name, buffer in optimizer.buffers.items():
            buffer.copy_(tensors[name])
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        if parameters[int(number)].is_meta:
            continue  # belongs to another rank
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
