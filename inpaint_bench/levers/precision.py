"""How numbers are rounded: autocast, TF32, and the type of the trained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from inpaint_bench.models.networks import DTYPES, set_fp32_precision
from inpaint_bench.models.optimizers import Bf16AdamW, baseline_adamw
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Machine, Verification

if TYPE_CHECKING:
    from .observe import StepObservation


class Autocast(Lever):
    """The type that autocast computes in."""

    field = "precision"

    def available(self, machine: Machine) -> str | None:
        if machine.recipe.precision == "fp16" and machine.recipe.cuda_graph:
            return "fp16's loss scaling reads a value from the device in every step, which a CUDA graph cannot"
        return None

    def apply(self, components: StepComponents) -> None:
        name = components.recipe.precision
        components.autocast_dtype = None if name == "fp32" else DTYPES[name]

    def verify(self, observed: StepObservation) -> Verification:
        dtype = observed.prediction_dtype
        if dtype is None:
            text = "the step is one CUDA graph, the UNet's output cannot be inspected"
            return Verification(None, None, observed.problem or text)
        text = f"the UNet's output is {_name(dtype)}; {observed.count('bf16|bfloat')} kernels name bf16"
        return Verification(_name(dtype), dtype == DTYPES[observed.recipe.precision], text)


class Tf32(Lever):
    """TF32 for matmuls and convolutions that stay fp32."""

    field = "tf32"

    def available(self, machine: Machine) -> str | None:
        if not machine.cuda or torch.cuda.get_device_capability(machine.device) < (8, 0):
            return "TF32 needs an NVIDIA GPU of the Ampere generation or later"
        return None

    def apply(self, components: StepComponents) -> None:
        components.fp32_precision = set_fp32_precision(tf32=True)

    def verify(self, observed: StepObservation) -> Verification:
        matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        text = f"matmul {matmul}, convolution {conv}; {observed.count('tf32|s1688')} kernels name tf32"
        return Verification({"matmul": matmul, "conv": conv}, matmul and conv, text)


class Weights(Lever):
    """bf16 weights, without autocast around them: norms take and give bf16, their sums stay fp32 in the kernel."""

    field = "weights"

    def available(self, machine: Machine) -> str | None:
        recipe = machine.recipe
        if recipe.precision == "fp16":
            return "bf16 weights and fp16 autocast exclude each other"
        if recipe.optimizer != "adamw":
            return f"bf16 weights have an AdamW of their own, which excludes optimizer={recipe.optimizer}"
        return None

    def apply(self, components: StepComponents) -> None:
        stochastic = components.recipe.weights == "bf16_stochastic"
        nn.Module.to(components.networks.unet, torch.bfloat16)  # diffusers' own `to` warns about modules it lacks
        components.unet_dtype = torch.bfloat16
        components.autocast_dtype = torch.bfloat16  # of the frozen networks and the location encoder, which stay fp32

        def make_optimizers(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            narrow = [p for p in parameters if p.dtype == torch.bfloat16]
            wide = [p for p in parameters if p.dtype != torch.bfloat16]
            return [Bf16AdamW(narrow, lr=lr, stochastic=stochastic), *(baseline_adamw(wide, lr) if wide else [])]

        components.make_optimizers = make_optimizers

    def verify(self, observed: StepObservation) -> Verification:
        types = sorted({_name(p.dtype) for p in observed.components.networks.unet.parameters()})
        first = observed.step.optimizers[0]
        moments = _name(first.buffers["exp_avg"].dtype) if isinstance(first, Bf16AdamW) else "fp32"
        text = f"UNet parameters {', '.join(types)}, moments {moments}, optimizer {type(first).__name__}"
        return Verification(", ".join(types), types == ["bf16"], text)


def _name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))
