"""Which of PyTorch's attention kernels the UNet runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from inpaint_bench.models.assembly import Assembly

from .base import Effective, Lever, Machine
from .observe import unet_kernels

if TYPE_CHECKING:
    from .observation import Running, Seen

# cuDNN's backward pass takes heads of at most 128; SD 1.5 has 160 too, which must have somewhere to go.
BACKENDS = {
    "math": [SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
}
KERNELS = {
    "flash": "flash_(fwd|bwd)|flash::|flash_attention",
    "cudnn": "cudnn.*(sdpa|flash|fprop|bprop)|sdpa.*cudnn",
    "efficient": "fmha_cutlass|efficient_attention|AttentionKernel",
    "math": "softmax",
}


class Attention(Lever):
    field = "attention"

    def available(self, machine: Machine) -> str | None:
        name, recipe = machine.recipe.attention, machine.recipe
        if recipe.grad_checkpoint:
            return "grad_checkpoint computes activations again outside the choice of a kernel; take one of the two"
        if name == "math" or (name == "flash" and not machine.cuda):
            return None  # the processor has both
        if not machine.cuda:
            return f"{name} attention needs a GPU"
        if name in ("flash", "cudnn") and recipe.precision == "fp32" and recipe.weights == "fp32":
            return f"{name} attention needs 16-bit inputs"
        return None

    def apply(self, assembly: Assembly) -> None:
        chosen = BACKENDS[assembly.recipe.attention]

        def context() -> AbstractContextManager[Any]:
            return sdpa_kernel(chosen, set_priority=True)

        assembly.attention = context

    def verify(self, workload: Running, seen: Seen) -> Effective:
        own = unet_kernels(workload)
        if own.problem:
            return Effective(effective=None, active=None, evidence=own.problem)
        found = {name: own.count(pattern) for name, pattern in KERNELS.items()}
        text = "kernels by name in a forward pass of the UNet: " + ", ".join(f"{name} {n}" for name, n in found.items())
        asked = workload.bench.recipe.attention
        allowed = {asked, "flash"} if asked == "cudnn" else {asked}
        active = found[asked] > 0 and not any(n for name, n in found.items() if name not in allowed)
        return Effective(effective=found, active=active, evidence=text)
