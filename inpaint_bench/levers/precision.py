"""How numbers are rounded: autocast, TF32, and the type of the trained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from inpaint_bench.models.assembly import ADAMW, Assembly, plain_adamw
from inpaint_bench.models.bf16_adamw import Bf16AdamW
from inpaint_bench.models.precision import DTYPES, pin_fp32

from .base import Effective, Lever, Machine

if TYPE_CHECKING:
    from .observation import Running, Seen


class Autocast(Lever):
    field = "precision"

    def available(self, machine: Machine) -> str | None:
        recipe = machine.recipe
        if recipe.precision == "fp16" and recipe.cuda_graph:
            return "fp16's loss scaling asks the device for a value in every step, which a CUDA graph cannot"
        return None

    def apply(self, assembly: Assembly) -> None:
        name = assembly.recipe.precision
        assembly.autocast = None if name == "fp32" else DTYPES[name]

    def verify(self, workload: Running, seen: Seen) -> Effective:
        wanted = DTYPES[workload.bench.recipe.precision]
        if seen.prediction is None:
            text = "the step is one CUDA graph, the UNet's output cannot be looked at"
            return Effective(effective=None, active=None, evidence=seen.problem or text)
        found = seen.prediction
        text = f"the UNet's output is {_name(found)}; {seen.count('bf16|bfloat')} kernels name bf16"
        return Effective(effective=_name(found), active=found == wanted, evidence=text)


class Tf32(Lever):
    field = "tf32"

    def available(self, machine: Machine) -> str | None:
        if not machine.cuda or torch.cuda.get_device_capability(machine.device) < (8, 0):
            return "TF32 needs an NVIDIA GPU of the Ampere generation or later"
        return None

    def apply(self, assembly: Assembly) -> None:
        assembly.fp32 = pin_fp32(True)

    def verify(self, workload: Running, seen: Seen) -> Effective:
        matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        text = f"matmul {matmul}, convolution {conv}; {seen.count('tf32|s1688')} kernels name tf32"
        return Effective(effective={"matmul": matmul, "conv": conv}, active=matmul and conv, evidence=text)


class Weights(Lever):
    """bf16 weights run without autocast: norms take and give bf16, their sums stay fp32 inside the kernel."""

    field = "weights"

    def available(self, machine: Machine) -> str | None:
        recipe = machine.recipe
        if recipe.precision == "fp16":
            return "bf16 weights and fp16 autocast exclude each other"
        if recipe.optimizer != "adamw":
            return f"bf16 weights bring their own AdamW, optimizer={recipe.optimizer} cannot be asked for beside it"
        return None

    def apply(self, assembly: Assembly) -> None:
        stochastic = assembly.recipe.weights == "bf16_stochastic"
        nn.Module.to(assembly.nets.unet, torch.bfloat16)  # diffusers' own `to` warns of modules that it has none of
        assembly.input_dtype = torch.bfloat16
        assembly.autocast = torch.bfloat16  # of the frozen networks and the location encoder, which stay fp32

        def adamw(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            narrow = [p for p in parameters if p.dtype == torch.bfloat16]
            wide = [p for p in parameters if p.dtype != torch.bfloat16]
            own = Bf16AdamW(narrow, lr=lr, stochastic=stochastic, **ADAMW)
            return [own, *(plain_adamw(wide, lr) if wide else [])]

        assembly.optimizers = adamw

    def verify(self, workload: Running, seen: Seen) -> Effective:
        kinds = sorted({_name(p.dtype) for p in workload.assembly.nets.unet.parameters()})
        first = workload.optimizers[0]
        moments = _name(first.buffers["exp_avg"].dtype) if isinstance(first, Bf16AdamW) else "fp32"
        text = f"UNet parameters {', '.join(kinds)}, moments {moments}, optimiser {type(first).__name__}"
        return Effective(effective=", ".join(kinds), active=kinds == ["bf16"], evidence=text)


def _name(dtype: torch.dtype) -> str:
    return next((name for name, one in DTYPES.items() if one == dtype), str(dtype))
