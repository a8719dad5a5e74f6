"""Which AdamW runs."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from inpaint_bench.models.assembly import ADAMW, Assembly

from .base import Effective, Lever, Machine

if TYPE_CHECKING:
    from .observation import Running, Seen


class Optimizer(Lever):
    field = "optimizer"

    def available(self, machine: Machine) -> str | None:
        if machine.recipe.optimizer != "adamw_8bit":
            return None
        if machine.recipe.cuda_graph:
            return "bitsandbytes counts its steps on the host, which a CUDA graph cannot follow"
        if machine.recipe.channels_last:
            return "bitsandbytes makes every weight contiguous when it updates it, which undoes channels_last"
        if find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed: pip install 'inpaint-bench[adam8bit]'"
        try:
            import_module("bitsandbytes.optim")
        except (ImportError, OSError, RuntimeError) as error:
            return f"bitsandbytes cannot be imported: {error}"
        return None

    def apply(self, assembly: Assembly) -> None:
        name = assembly.recipe.optimizer

        def make(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            if name == "adamw_8bit":
                from bitsandbytes.optim import AdamW8bit

                return [AdamW8bit(parameters, lr=lr, **ADAMW)]
            fused = name == "adamw_fused"
            return [torch.optim.AdamW(parameters, lr=lr, foreach=False, fused=fused, **ADAMW)]

        assembly.optimizers = make

    def verify(self, workload: Running, seen: Seen) -> Effective:
        one = workload.optimizers[0]
        kind = f"{type(one).__module__.split('.')[0]}.{type(one).__name__}"
        fused, foreach = one.defaults.get("fused"), one.defaults.get("foreach")
        kernels = seen.count("fused_adam|FusedAdam|kOptimizer|optimizer_update_8bit|OptimizerStatic8bit")
        moments = _moments(one)
        text = (
            f"{kind}, fused={fused}, foreach={foreach}, moments {moments}; "
            f"{kernels} fused optimiser kernels or operators in a step"
        )
        name = workload.bench.recipe.optimizer
        # bitsandbytes keeps moments of fewer than 4096 elements in fp32, and says nothing of it.
        active = {"adamw_8bit": "uint8" in moments, "adamw_fused": bool(fused)}.get(name, not fused and not foreach)
        return Effective(effective={"class": kind, "fused": fused, "foreach": foreach}, active=active, evidence=text)


def _moments(optimizer: torch.optim.Optimizer) -> str:
    """Types of the moments as they lie in memory, with their shares: `98.7 % uint8, 1.3 % float32`."""
    counts: Counter[str] = Counter()
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq", "state1", "state2"):
            if name in state:
                counts[str(state[name].dtype).removeprefix("torch.")] += state[name].numel()
    shares = [f"{100 * count / counts.total():.1f} % {name}" for name, count in counts.most_common()]
    return ", ".join(shares) or "not made yet"
