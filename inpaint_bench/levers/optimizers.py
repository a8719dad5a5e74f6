"""Which AdamW runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..workloads.assembly import ADAMW, Assembly
from .lever import Effective, Lever, Machine

if TYPE_CHECKING:
    from ..workloads.finetune_inpaint import FinetuneInpaint
    from .observe import Seen


class Optimizer(Lever):
    field = "optimizer"

    def available(self, machine: Machine) -> str | None:
        if machine.recipe.optimizer != "adamw_8bit":
            return None
        if not machine.cuda:
            return "8-bit AdamW needs a GPU"
        if find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed: pip install 'inpaint-bench[adam8bit]'"
        if machine.recipe.cuda_graph:
            return "bitsandbytes counts its steps on the host, which a CUDA graph cannot follow"
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

    def verify(self, workload: FinetuneInpaint, seen: Seen) -> Effective:
        one = workload.optimizers[0]
        kind = f"{type(one).__module__.split('.')[0]}.{type(one).__name__}"
        fused, foreach = one.defaults.get("fused"), one.defaults.get("foreach")
        kernels = seen.count("fused_adam|FusedAdam|kOptimizer|optimizer_update_8bit|OptimizerStatic8bit")
        text = f"{kind}, fused={fused}, foreach={foreach}; {kernels} fused optimiser kernels or operators in a step"
        name = workload.bench.recipe.optimizer
        active = {"adamw_8bit": "bitsandbytes" in kind, "adamw_fused": bool(fused)}.get(name, not fused and not foreach)
        return Effective(effective={"class": kind, "fused": fused, "foreach": foreach}, active=active, evidence=text)
