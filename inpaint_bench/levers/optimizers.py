"""Which AdamW runs."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from inpaint_bench.models.optimizers import ADAMW
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Machine, Verification

if TYPE_CHECKING:
    from .observe import StepObservation


class Optimizer(Lever):
    """PyTorch's AdamW as a loop or fused, or bitsandbytes' with 8-bit moments."""

    field = "optimizer"

    def available(self, machine: Machine) -> str | None:
        if machine.recipe.optimizer != "adamw_8bit":
            return None
        if machine.recipe.cuda_graph:
            return "bitsandbytes counts its steps on the host, which a CUDA graph cannot replay"
        if machine.recipe.channels_last:
            return "bitsandbytes makes every weight contiguous when it updates it, which undoes channels_last"
        if find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed: pip install 'inpaint-bench[adam8bit]'"
        try:
            import_module("bitsandbytes.optim")
        except (ImportError, OSError, RuntimeError) as error:
            return f"bitsandbytes cannot be imported: {error}"
        return None

    def apply(self, components: StepComponents) -> None:
        name = components.recipe.optimizer

        def make_optimizers(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            if name == "adamw_8bit":
                from bitsandbytes.optim import AdamW8bit

                return [AdamW8bit(parameters, lr=lr, **ADAMW)]
            return [torch.optim.AdamW(parameters, lr=lr, foreach=False, fused=name == "adamw_fused", **ADAMW)]

        components.make_optimizers = make_optimizers

    def verify(self, observed: StepObservation) -> Verification:
        optimizer = observed.step.optimizers[0]
        kind = f"{type(optimizer).__module__.split('.')[0]}.{type(optimizer).__name__}"
        fused, foreach = optimizer.defaults.get("fused"), optimizer.defaults.get("foreach")
        kernels = observed.count("fused_adam|FusedAdam|kOptimizer|optimizer_update_8bit|OptimizerStatic8bit")
        moments = _moment_types(optimizer)
        text = (
            f"{kind}, fused={fused}, foreach={foreach}, moments {moments}; "
            f"{kernels} fused optimizer kernels or operators in a step"
        )
        # bitsandbytes silently keeps moments of fewer than 4096 elements in fp32.
        active = {"adamw_8bit": "uint8" in moments, "adamw_fused": bool(fused)}
        effective = {"class": kind, "fused": fused, "foreach": foreach}
        return Verification(effective, active.get(observed.recipe.optimizer, not fused and not foreach), text)


def _moment_types(optimizer: torch.optim.Optimizer) -> str:
    """Return the types of the moments in memory, with their shares: `98.7 % uint8, 1.3 % float32`."""
    counts: Counter[str] = Counter()
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq", "state1", "state2"):
            if name in state:
                counts[str(state[name].dtype).removeprefix("torch.")] += state[name].numel()
    shares = [f"{100 * count / counts.total():.1f} % {name}" for name, count in counts.most_common()]
    return ", ".join(shares) or "not allocated yet"
