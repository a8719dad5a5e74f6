"""How numbers are rounded and weights are updated: autocast, TF32, types of the weights, AdamW variants, EMA."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from inpaint_bench.kernels.adamw import SplitMasterAdamW
from inpaint_bench.models.components import StepComponents
from inpaint_bench.models.networks import DTYPES
from inpaint_bench.models.optimizers import ADAMW, Bf16AdamW, baseline_adamw
from inpaint_bench.models.parallel.sharding import own_optimizer

from .base import Lever, Verification

if TYPE_CHECKING:
    from inpaint_bench.core.config.bench import BenchConfig

    from .observe import StepObservation

EMA_DECAY = 0.9999


class Autocast(Lever):
    """The type that autocast computes in."""

    field = "precision"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.precision == "fp16" and bench.recipe.cuda_graph:
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

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            return "TF32 needs an NVIDIA GPU of the Ampere generation or later"
        return None

    def verify(self, observed: StepObservation) -> Verification:
        matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        # CUTLASS names TF32 kernels by the shape of their tensor-core instruction: s1688.
        text = f"matmul {matmul}, convolution {conv}; {observed.count('tf32|s1688')} kernels name tf32"
        return Verification({"matmul": matmul, "conv": conv}, matmul and conv, text)


class Weights(Lever):
    """bf16 weights, without autocast around them: norms take and give bf16, their sums stay fp32 in the kernel.

    half, beneath LoRA, only stores the frozen networks so: autocast stays, as in diffusers' script.
    """

    field = "weights"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.weights == "half":
            if not bench.recipe.lora_rank:
                return (
                    "without fp32 masters small updates are lost: it is for making images (workload=sd_inference), and "
                    "for weights that LoRA freezes (recipe.lora_rank=4)"
                )
            return "precision=fp32 has no half" if bench.recipe.precision == "fp32" else None
        if bench.recipe.precision == "fp16":
            return "bf16 weights and fp16 autocast exclude each other"
        if bench.recipe.optimizer != "adamw":
            return f"bf16 weights have an AdamW of their own, which excludes optimizer={bench.recipe.optimizer}"
        return None

    def apply(self, components: StepComponents) -> None:
        kind = components.recipe.weights
        if kind == "half":
            networks = components.networks
            for network in (networks.unet, networks.vae, networks.text_encoder):
                nn.Module.to(network, DTYPES[components.recipe.precision])
            return
        nn.Module.to(components.networks.unet, torch.bfloat16)  # diffusers' own `to` warns about modules it lacks
        components.unet_dtype = torch.bfloat16
        components.autocast_dtype = torch.bfloat16  # of the frozen networks and the location encoder, which stay fp32

        def make_optimizers(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            # The location encoder stays fp32, and is updated as in the baseline.
            narrow = [p for p in parameters if p.dtype == torch.bfloat16]
            wide = [p for p in parameters if p.dtype != torch.bfloat16]
            first = (
                SplitMasterAdamW(narrow, lr=lr, **ADAMW)
                if kind == "bf16_split"
                else Bf16AdamW(narrow, lr=lr, stochastic=kind == "bf16_stochastic")
            )
            return [first, *(baseline_adamw(wide, lr) if wide else [])]

        components.make_optimizers = make_optimizers

    def verify(self, observed: StepObservation) -> Verification:
        named = observed.components.networks.unet.named_parameters()
        types = sorted({_name(p.dtype) for name, p in named if ".lora_" not in name})
        expected = observed.recipe.precision if observed.recipe.weights == "half" else "bf16"
        first = observed.step.optimizers[0]
        buffers = first.buffers if isinstance(first, Bf16AdamW | SplitMasterAdamW) else {}
        moments = _name(buffers["exp_avg"].dtype) if buffers else "fp32"
        text = f"UNet parameters {', '.join(types)}, moments {moments}, optimizer {type(first).__name__}"
        return Verification(", ".join(types), types == [expected], text)


class Optimizer(Lever):
    """PyTorch's AdamW as a loop or fused, or bitsandbytes' with 8-bit moments."""

    field = "optimizer"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.optimizer != "adamw_8bit":
            return None
        if bench.recipe.cuda_graph:
            return "bitsandbytes counts its steps on the host, which a CUDA graph cannot replay"
        if bench.recipe.channels_last:
            return "bitsandbytes makes every weight contiguous when it updates it, which undoes channels_last"
        if find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed: pip install 'inpaint-bench[adam8bit]'"
        try:
            # Importing it loads a CUDA library, which may not fit this machine.
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
        optimizer = own_optimizer(observed.step.optimizers[0])
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


class Ema(Lever):
    """An exponential moving average of the weights."""

    field = "ema"

    def apply(self, components: StepComponents) -> None:
        components.ema_decay = EMA_DECAY

    def verify(self, observed: StepObservation) -> Verification:
        ema = observed.step.ema
        if ema is None:
            return Verification(None, False, "there is no average of the weights")
        moved = any((a != p).any().item() for a, p in zip(ema.tensors, observed.step.parameters, strict=True))
        text = f"decay {ema.decay}, the average {'differs from' if moved else 'equals'} the weights"
        return Verification(ema.decay, moved, text)


def _name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def _moment_types(optimizer: torch.optim.Optimizer) -> str:
    """Return the types of the moments in memory, with their shares: `98.7 % uint8, 1.3 % float32`."""
    counts: Counter[str] = Counter()
    for state in own_optimizer(optimizer).state.values():
        # PyTorch's names, then bitsandbytes'.
        for name in ("exp_avg", "exp_avg_sq", "state1", "state2"):
            if name in state:
                counts[str(state[name].dtype).removeprefix("torch.")] += state[name].numel()
    shares = [f"{100 * count / counts.total():.1f} % {name}" for name, count in counts.most_common()]
    return ", ".join(shares) or "not allocated yet"
