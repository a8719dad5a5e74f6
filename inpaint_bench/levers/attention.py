"""Which of PyTorch's attention kernels the UNet runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.attention import SDPBackend, sdpa_kernel

from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Machine, Verification
from .observe import unet_kernels

if TYPE_CHECKING:
    from .observe import StepObservation

# cuDNN's backward pass takes head dimensions up to 128; SD 1.5 has 160 too, which needs another backend.
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
    """The backend of scaled_dot_product_attention."""

    field = "attention"

    def available(self, machine: Machine) -> str | None:
        name, recipe = machine.recipe.attention, machine.recipe
        if recipe.grad_checkpoint:
            return "grad_checkpoint recomputes activations outside the choice of a kernel: use one of the two"
        if name == "math" or (name == "flash" and not machine.cuda):
            return None  # the CPU has both
        if not machine.cuda:
            return f"{name} attention needs a GPU"
        if name in ("flash", "cudnn") and recipe.precision == "fp32" and recipe.weights == "fp32":
            return f"{name} attention needs 16-bit inputs"
        return None

    def apply(self, components: StepComponents) -> None:
        backends = BACKENDS[components.recipe.attention]
        components.attention_kernels = lambda: sdpa_kernel(backends, set_priority=True)

    def verify(self, observed: StepObservation) -> Verification:
        unet = unet_kernels(observed)
        if unet.problem:
            return Verification(None, None, unet.problem)
        counts = {name: unet.count(pattern) for name, pattern in KERNELS.items()}
        text = "kernels by name in a forward pass of the UNet: " + ", ".join(f"{k} {n}" for k, n in counts.items())
        name = observed.recipe.attention
        allowed = {name, "flash"} if name == "cudnn" else {name}
        active = counts[name] > 0 and not any(n for kind, n in counts.items() if kind not in allowed)
        return Verification(counts, active, text)
