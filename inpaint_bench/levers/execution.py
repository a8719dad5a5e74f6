"""How the networks are executed: layout, kernels, recomputation, micro-batches, torch.compile, CUDA graph."""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.kernels import ATTENTION_LIBRARIES, KernelClass
from inpaint_bench.kernels import linear
from inpaint_bench.kernels.self_attention import flash4_attention, replace_attention, unavailable_reason
from inpaint_bench.models.architectures import flow
from inpaint_bench.models.architectures.base import own_blocks
from inpaint_bench.models.architectures.channels_last import keep_layout
from inpaint_bench.models.execution import DTYPES, Execution
from inpaint_bench.models.training_step import StepComponents

from .base import GRAPH_LAUNCH, KERNEL_LAUNCH, Lever, Observation, Phase, Verification, convolutions, unet_kernels

# cuDNN's backward pass takes head dimensions up to 128; SD 1.5 has 160 too, which needs another backend.
ATTENTION_BACKENDS = {
    "math": [SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
}


class ChannelsLast(Lever[Execution]):
    """NHWC, which the layers of diffusers' UNet and VAE keep: the share of convolutions that read it is reported."""

    field = "channels_last"

    def apply(self, execution: Execution) -> None:
        execution.memory_format = execution.channels_last
        for network in execution.modules.values():
            network.to(memory_format=execution.channels_last)  # type: ignore[call-overload]
            keep_layout(network)

    def verify(self, observed: Observation[Execution]) -> Verification:
        execution = observed.execution
        seen = convolutions(execution)
        share = round(seen.channels_last / seen.total, 3) if seen.total else None
        layout = str(execution.channels_last).removeprefix("torch.")
        where = "UNet" if "unet" in execution.calls else "network"
        text = f"{seen.channels_last} of {seen.total} convolution inputs are {layout} in the eager {where}"
        if observed.kernels:
            text += f"; {observed.layout_copies} layout conversions by cuDNN in a step"
        return Verification(share, text, None if share is None else True)


class CudnnBenchmark(Lever[Execution]):
    """cuDNN measures its algorithms for every new shape and takes the fastest."""

    field = "cudnn_benchmark"

    def verify(self, observed: Observation[Execution]) -> Verification:
        enabled = bool(torch.backends.cudnn.benchmark)
        return Verification(enabled, "torch.backends.cudnn.benchmark read back")


class CudnnBenchmarkLimit(Lever[Execution]):
    """How many plans cuDNN measures for a new shape: the first ten of those it offers, or all."""

    field = "cudnn_benchmark_limit"

    def verify(self, observed: Observation[Execution]) -> Verification:
        limit = torch.backends.cudnn.benchmark_limit
        return Verification(limit, "torch.backends.cudnn.benchmark_limit read back; 0: all plans")


class Attention(Lever[Execution]):
    """The backend of scaled_dot_product_attention in the UNet.

    With flash4, FLUX's rotary embeddings have a kernel of their own too.
    """

    field = "attention"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return unavailable_reason(device) if bench.recipe.attention == "flash4" else None

    def apply(self, execution: Execution) -> None:
        if execution.recipe.attention == "flash4":
            unet = execution.networks.unet
            if hasattr(unet, "flash4"):  # the channels-last UNet
                unet.flash4 = True
            else:
                replace_attention(unet, flash4_attention)
            return
        backends = ATTENTION_BACKENDS[execution.recipe.attention]
        # A new context at each call: one can be entered only once. set_priority: in the order of the list.
        execution.attention_kernels = lambda: sdpa_kernel(backends, set_priority=True)

    def verify(self, observed: Observation[Execution]) -> Verification:
        execution = observed.execution
        encodes = not isinstance(execution, StepComponents) or execution.encodes or execution.encodes_texts
        # In a step without encoders all attention is the UNet's. Compiled code for a CPU names no operators.
        from_step = not encodes and (observed.cuda or observed.recipe.compile == "none")
        unet = observed if from_step else unet_kernels(observed)
        if unet.problem:
            return Verification(None, unet.problem, None)
        counts = {
            name: unet.count_class(KernelClass.ATTENTION, library) for name, library in ATTENTION_LIBRARIES.items()
        }
        part = "a step" if from_step else "a forward pass of the UNet"
        text = f"kernels by name in {part}: " + ", ".join(f"{k} {n}" for k, n in counts.items())
        # The channels-last UNet has cross-attention of wide heads that is not scaled_dot_product_attention.
        plain = counts["math"] and observed.recipe.attention != "math" and observed.recipe.unet != "nhwc"
        return Verification(counts, text, not plain)


class Linears(Lever[Execution]):
    """FP8 products of the linear layers. On a CPU they are emulated."""

    field = "linears"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return linear.unavailable_reason(device)

    def apply(self, execution: Execution) -> None:
        networks = execution.networks
        for network in networks.architecture.blocks(networks.unet) or [networks.unet]:
            linear.convert(network)

    def verify(self, observed: Observation[Execution]) -> Verification:
        kinds = Counter(type(layer) for layer in observed.execution.networks.unet.modules())
        frozen, trained = kinds[linear.FrozenFp8Linear], kinds[linear.TrainedFp8Linear]
        text = f"{frozen} frozen and {trained} trained layers"
        if observed.problem or not observed.cuda:
            seen = None if observed.cuda else True
            return Verification(frozen + trained, observed.problem or f"{text}, emulated", seen)
        products = observed.count("_scaled_mm|e4m3")
        return Verification(frozen + trained, f"{text}; {products} FP8 products in a step", products > 0)


class GradCheckpoint(Lever[Execution]):
    """Activations of the UNet are recomputed in the backward pass; of a transformer by block, compiled with it."""

    field = "grad_checkpoint"

    def apply(self, execution: Execution) -> None:
        unet, recipe = execution.networks.unet, execution.recipe
        blocks = execution.networks.architecture.blocks(unet)
        if not blocks:
            unet.enable_gradient_checkpointing()
            return
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing random in a block
        if recipe.checkpoint_keeps == "products":
            settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
        elif recipe.compile == "none":  # the recomputation runs outside of the choice of a kernel
            settings["context_fn"] = lambda: (nullcontext(), execution.attention_kernels())
        for block in blocks:
            block.forward = partial(_checkpointed, block.forward, settings)

    def verify(self, observed: Observation[Execution]) -> Verification:
        unet = observed.execution.networks.unet
        blocks = observed.execution.networks.architecture.blocks(unet)
        enabled = all(isinstance(block.forward, partial) for block in blocks)
        if not blocks:
            enabled = bool(unet.is_gradient_checkpointing)
        passes, runs = observed.calls["unet"], observed.calls["block"]
        # Compiled or replayed code calls no module: then only the flag is known.
        active = runs > passes if runs else enabled
        text = f"gradient checkpointing is set {enabled}; the last block ran {runs} times in {passes} UNet passes"
        return Verification(enabled, text, active)


def _checkpointed(forward: Callable[..., Any], settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block, in a frame of ours: PyTorch compiles no frame of its own, and `checkpoint` within one."""
    return checkpoint(forward, *args, **kwargs, **settings)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return that what linear layers and attention compute is kept, whatever their kernel."""
    name = operator.name()
    kept = name in ("aten::mm", "aten::addmm", "aten::_scaled_mm") or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class CheckpointKeeps(Lever[Execution]):
    """What gradient checkpointing does not compute again. `grad_checkpoint` applies it."""

    field = "checkpoint_keeps"

    def verify(self, observed: Observation[Execution]) -> Verification:
        blocks = own_blocks(observed.execution.networks.unet)
        found = [block.forward.args[1].get("context_fn") for block in blocks if isinstance(block.forward, partial)]
        count = sum(isinstance(f, partial) and f.args == (_keep_products,) for f in found)
        text = f"{count} of {len(blocks)} blocks keep the results of linear layers and attention"
        return Verification(count, text, count == len(blocks))


class Accumulate(Lever[Execution]):
    """Gradients are accumulated over micro-batches."""

    field = "accumulate"

    def apply(self, execution: Execution) -> None:
        execution.micro_batches = execution.recipe.accumulate

    def verify(self, observed: Observation[Execution]) -> Verification:
        main = next(iter(observed.execution.calls))
        calls = observed.calls[main]
        text = f"{calls} {'UNet' if main == 'unet' else main} passes in a step"
        return Verification(calls or None, text, True if calls else None)


class ForceLayout(Lever[Execution]):
    """Let inductor lay out convolutions channels_last.

    By itself it does not: `decide_layout_opt` leaves a network with one narrowing convolution alone, and this UNet has
    many (torch/_inductor/graph.py, 2.11 to 2.15).
    """

    field, phase = "force_layout", Phase.WRAPPERS

    def verify(self, observed: Observation[Execution]) -> Verification:
        enabled = bool(torch._inductor.config.force_layout_optimization)
        text = f"inductor's switch read back; {observed.layout_copies} layout conversions by cuDNN in a step"
        return Verification(enabled, text)


class DependentLaunch(Lever[Execution]):
    """Let each Triton kernel of inductor start while the one before it ends (Hopper and later)."""

    field, phase = "pdl", Phase.WRAPPERS

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "programmatic dependent launch needs compute capability 9 (Hopper) or later"
        known = hasattr(torch._inductor.config.triton, "enable_pdl")
        return None if known else f"inductor of PyTorch {torch.__version__} has no programmatic dependent launch"

    def verify(self, observed: Observation[Execution]) -> Verification:
        enabled = bool(torch._inductor.config.triton.enable_pdl)
        return Verification(enabled, "inductor's switch read back")


def _reset_compiler(device: torch.device) -> None:
    """Forget what this process compiled: only what follows is counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if device.type == "cpu":
        # Seen with 2.13: with it, gradients of a UNet below its first skip are off by half on a CPU.
        torch._inductor.config.layout_optimization = False


class Compile(Lever[Execution]):
    """torch.compile of the UNet and the VAE's part, each one graph. The text encoder is 0.3 % of a step.

    Each block of a transformer is one graph; its GELU and adapters are written in another form.
    """

    field, phase = "compile", Phase.WRAPPERS

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.compile == "tensorrt":
            known = find_spec("torch_tensorrt")
            return None if known else "Torch-TensorRT is not installed: pip install 'inpaint-bench[tensorrt]'"
        if device.type == "cuda" and find_spec("triton") is None:
            return "torch.compile needs Triton on a GPU, which is not installed"
        if device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            return "torch.compile needs a C++ compiler on the CPU, none is on the PATH"
        return None

    def apply(self, execution: Execution) -> None:
        recipe = execution.recipe
        _reset_compiler(execution.device)
        if recipe.compile == "blocks":
            unet = execution.networks.unet
            for block in (blocks := execution.networks.architecture.blocks(unet)):
                flow.rewrite(block)
                block.compile(dynamic=False)
            if not blocks:
                unet.compile_repeated_blocks(dynamic=False)
            return
        if recipe.compile.startswith("max-autotune"):
            # Wheels of CUDA 13.0 bring a ptxas that only inductor's compiling processes use (pytorch#163988). With
            # Triton's, this process would find none of what they stored, and compile each kernel again to time it.
            import_module("torch._inductor.runtime.compile_tasks")._set_triton_ptxas_path()
        # dynamic=False, because the shapes of a step never change within a run.
        options: dict[str, Any] = {"mode": recipe.compile, "dynamic": False}
        if recipe.compile == "tensorrt":
            import_module("torch_tensorrt")  # registers its backend
            settings = {"enabled_precisions": {DTYPES[recipe.precision]}}
            options = {"dynamic": False, "backend": "torch_tensorrt", "options": settings}
        for role, network in execution.calls.items():
            if isinstance(network, nn.Module):  # not what has kernels of its own
                execution.calls[role] = torch.compile(network, **options)

    def verify(self, observed: Observation[Execution]) -> Verification:
        counters = torch._dynamo.utils.counters
        graphs, breaks = int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())
        text = f"{graphs} graphs, {breaks} graph breaks; {observed.count('triton')} Triton kernels in a step"
        return Verification({"graphs": graphs, "breaks": breaks}, text)


class CudaGraph(Lever[Execution]):
    """The whole step as one CUDA graph, or each stage of making images."""

    field, phase = "cuda_graph", Phase.WRAPPERS

    def apply(self, execution: Execution) -> None:
        execution.cuda_graph = True
        if not isinstance(execution, StepComponents):
            return
        make_optimizers = execution.make_optimizers

        def make_capturable(*args: Any) -> list[torch.optim.Optimizer]:
            optimizers = make_optimizers(*args)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                # The step count must be on the device: a number on the host would stay as it was at the capture.
                if "capturable" in group:  # PyTorch's own; Bf16AdamW keeps its step on the device anyway
                    group["capturable"] = True
            return optimizers

        execution.make_optimizers = make_capturable

    def verify(self, observed: Observation[Execution]) -> Verification:
        executed = observed.execution.graphs
        captured = bool(executed) and all(graph.captured for graph in executed)
        graphs, kernels = observed.launches(GRAPH_LAUNCH), observed.launches(KERNEL_LAUNCH)
        text = f"captured {captured}; {graphs} graph launches and {kernels} kernel launches in a step"
        return Verification(captured, observed.problem or text)
