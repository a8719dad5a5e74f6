"""How numbers are rounded and weights are updated: autocast, TF32, types of the weights, AdamW variants, EMA."""

from collections import Counter
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.levers import RecipeConfig
from inpaint_bench.kernels.adamw import FlatAdamW, SplitMasterAdamW, split
from inpaint_bench.models.execution import DTYPES, Execution
from inpaint_bench.models.optimizers import ADAMW, Bf16AdamW
from inpaint_bench.models.parallel.sharding import own_optimizer
from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Observation, Phase, Verification, convolutions

EMA_DECAY = 0.9999


class Autocast(Lever[Execution]):
    """The type that autocast computes in."""

    field, phase = "precision", Phase.WEIGHTS

    def apply(self, execution: Execution) -> None:
        name = execution.recipe.precision
        execution.autocast_dtype = None if name == "fp32" else DTYPES[name]

    def verify(self, observed: Observation[Execution]) -> Verification:
        if "unet" not in observed.execution.calls:
            seen = convolutions(observed.execution).outputs
            names = ", ".join(f"{count} {_name(dtype)}" for dtype, count in seen.items())
            return Verification(", ".join(map(_name, seen)), f"types of what convolutions return: {names}")
        dtype = observed.outputs.get("unet")
        if dtype is None:
            cause = "the step is one CUDA graph" if observed.execution.cuda_graph else "it is called in parts"
            text = f"{cause}, the UNet's output cannot be inspected"
            return Verification(None, observed.problem or text, None)
        text = f"the UNet's output is {_name(dtype)}; {observed.count('bf16|bfloat')} kernels name bf16"
        return Verification(_name(dtype), text)


class Tf32(Lever[Execution]):
    """TF32 for matmuls and convolutions that stay fp32, or for the convolutions alone."""

    fields, phase = ("tf32", "tf32_convolutions"), Phase.WEIGHTS

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "TF32 needs an NVIDIA GPU of the Ampere generation or later"
        return None

    def verify(self, observed: Observation[Execution]) -> Verification:
        matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        # CUTLASS names TF32 kernels by the shape of their tensor-core instruction: s1688.
        text = f"matmul {matmul}, convolution {conv}; {observed.count('tf32|s1688')} kernels name tf32"
        return Verification({"matmul": matmul, "conv": conv}, text)


class Weights(Lever[Execution]):
    """bf16 weights, without autocast around them: norms take and give bf16, their sums stay fp32 in the kernel.

    half makes images so. Beneath LoRA it only stores the frozen networks so: autocast stays, as in diffusers' script.
    """

    field, phase = "weights", Phase.WEIGHTS

    def apply(self, execution: Execution) -> None:
        kind = execution.recipe.weights
        if kind == "half":
            dtype = DTYPES[execution.recipe.precision]
            for network in execution.modules.values():
                nn.Module.to(network, dtype)
            trains = isinstance(execution, StepComponents)
            if dtype != torch.float32 and not (trains and execution.networks.architecture.autocast):
                # Under autocast norms return fp32.
                execution.dtype = dtype
                execution.autocast_dtype = execution.autocast_dtype if trains else None
            return
        assert isinstance(execution, StepComponents)
        unet, low = execution.networks.unet, {}
        if kind in ("bf16_split", "bf16_master"):
            # Masters begin at the fp32 weights: from rounded ones most would stay for some steps and then move at once.
            for p in unet.parameters():
                p.data, low[p] = split(p.detach().float())
        nn.Module.to(unet, torch.bfloat16)  # diffusers' own `to` warns about modules it lacks
        execution.dtype = torch.bfloat16
        execution.autocast_dtype = torch.bfloat16  # for the frozen networks and the location encoder, which stay fp32

        # For a small network a second copy is cheaper than adding to gradients that stay. DDP has buffers of its own.
        keeps_gradients = execution.networks.architecture.large and execution.bench.ranks == 1

        def make_optimizers(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            # The location encoder stays fp32. On a GPU its update is one kernel too, not a dozen of each layer.
            narrow = [p for p in parameters if p.dtype == torch.bfloat16]
            wide = [p for p in parameters if p.dtype != torch.bfloat16]
            settings = {"low": [low.pop(p, None) for p in narrow], "lr": lr, **ADAMW}
            first = (
                SplitMasterAdamW(narrow, **settings)
                if kind == "bf16_split"
                else Bf16AdamW(
                    narrow, stochastic=kind == "bf16_stochastic", keeps_gradients=keeps_gradients, **settings
                )
            )
            if not wide:
                return [first]
            return [first, torch.optim.AdamW(wide, lr=lr, foreach=False, fused=wide[0].is_cuda, **ADAMW)]

        execution.make_optimizers = make_optimizers

    def verify(self, observed: Observation[Execution]) -> Verification:
        execution = observed.execution
        named = execution.networks.unet.named_parameters()
        types = sorted({_name(p.dtype) for name, p in named if ".lora_" not in name})
        expected = observed.recipe.precision if observed.recipe.weights == "half" else "bf16"
        text = f"UNet parameters {', '.join(types)}"
        if isinstance(execution, StepComponents):
            first = execution.optimizers[0]
            buffers = first.buffers if isinstance(first, FlatAdamW) else {}
            moments = _name(buffers["exp_avg"].dtype) if buffers else "fp32"
            text += f", moments {moments}, optimizer {type(first).__name__}"
        return Verification(", ".join(types), text, types == [expected])


class Encoders(Lever[StepComponents]):
    """Frozen networks in the type of the precision, without autocast around them. A text encoder with LoRA is not."""

    field, phase = "encoders", Phase.WEIGHTS

    def apply(self, execution: StepComponents) -> None:
        execution.encoder_dtype = DTYPES[execution.recipe.precision]
        for role in self._roles(execution.recipe):
            nn.Module.to(getattr(execution.networks, role), execution.encoder_dtype)

    @staticmethod
    def _roles(recipe: RecipeConfig) -> tuple[str, ...]:
        return ("vae",) if recipe.lora_text_encoder else ("vae", "text_encoder")

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        networks, roles = observed.execution.networks, self._roles(observed.recipe)
        types = {role: sorted({_name(p.dtype) for p in getattr(networks, role).parameters()}) for role in roles}
        called = {"vae": "vae_encoder", "text_encoder": "text_encoder"}
        outputs = {
            called[role]: _name(observed.outputs[called[role]]) for role in roles if called[role] in observed.outputs
        }
        text = f"weights {types}, outputs {outputs or 'not observed'}"
        return Verification({**types, "outputs": outputs}, text)


class Ema(Lever[StepComponents]):
    """An exponential moving average of the weights."""

    field, phase = "ema", Phase.STEP

    def apply(self, execution: StepComponents) -> None:
        execution.ema_decay = EMA_DECAY

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        ema = observed.execution.ema
        if ema is None:
            return Verification(None, "there is no average of the weights", False)
        moved = any((a != p).any().item() for a, p in zip(ema.tensors, observed.execution.trained, strict=True))
        text = f"decay {ema.decay}, the average {'differs from' if moved else 'equals'} the weights"
        return Verification(ema.decay, text, moved)


class Optimizer(Lever[StepComponents]):
    """PyTorch's AdamW as a loop or fused, or bitsandbytes' with 8-bit moments."""

    field, phase = "optimizer", Phase.STEP

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.optimizer != "adamw_8bit":
            return None
        if find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed: pip install 'inpaint-bench[adam8bit]'"
        try:
            # Importing it loads a CUDA library, which may not fit this machine.
            import_module("bitsandbytes.optim")
        except (ImportError, OSError, RuntimeError) as error:
            return f"bitsandbytes cannot be imported: {error}"
        return None

    def apply(self, execution: StepComponents) -> None:
        name = execution.recipe.optimizer

        def make_optimizers(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
            if name == "adamw_8bit":
                from bitsandbytes.optim import AdamW8bit

                return [AdamW8bit(parameters, lr=lr, **ADAMW)]
            return [torch.optim.AdamW(parameters, lr=lr, foreach=False, fused=name == "adamw_fused", **ADAMW)]

        execution.make_optimizers = make_optimizers

    def verify(self, observed: Observation[StepComponents]) -> Verification:
        optimizer = own_optimizer(observed.execution.optimizers[0])
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
        return Verification(effective, text, active.get(observed.recipe.optimizer, not fused and not foreach))


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
