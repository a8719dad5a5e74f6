"""torch.compile, and the whole step as a CUDA graph."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Machine, Verification

if TYPE_CHECKING:
    from .observe import StepObservation


class Compile(Lever):
    """The UNet and the VAE's encoder, each one graph of fixed shapes. The text encoder is 0.3 % of a step."""

    field = "compile"

    def available(self, machine: Machine) -> str | None:
        if machine.cuda and find_spec("triton") is None:
            return "torch.compile needs Triton on a GPU, which is not installed"
        if not machine.cuda and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            return "torch.compile needs a C++ compiler on the CPU, none is on the PATH"
        if machine.recipe.cuda_graph and machine.recipe.compile in ("reduce-overhead", "max-autotune"):
            return f"compile={machine.recipe.compile} makes CUDA graphs of its own, cuda_graph cannot enclose them"
        return None

    def apply(self, components: StepComponents) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if components.device.type == "cpu":
            # Seen with 2.13: with it, gradients of a UNet below its first skip are off by half on a CPU.
            torch._inductor.config.layout_optimization = False
        options: dict[str, Any] = {"mode": components.recipe.compile, "dynamic": False}
        components.unet = torch.compile(components.networks.unet, **options)
        components.vae_encoder = torch.compile(components.networks.vae.encoder, **options)

    def verify(self, observed: StepObservation) -> Verification:
        counters = torch._dynamo.utils.counters
        graphs = int(counters["stats"]["unique_graphs"])
        breaks = sum(counters["graph_break"].values())
        text = f"{graphs} graphs, {breaks} graph breaks; {observed.count('triton')} Triton kernels in a step"
        return Verification({"graphs": graphs, "breaks": breaks}, graphs > 0, text)


class CudaGraph(Lever):
    """The whole step as one CUDA graph."""

    field = "cuda_graph"

    def available(self, machine: Machine) -> str | None:
        return None if machine.cuda else "CUDA graphs need a GPU"

    def apply(self, components: StepComponents) -> None:
        components.cuda_graph = True
        make_optimizers = components.make_optimizers

        def make_capturable(*args: Any) -> list[torch.optim.Optimizer]:
            optimizers = make_optimizers(*args)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    if "capturable" in group:  # PyTorch's own; Bf16AdamW keeps its step on the device anyway
                        group["capturable"] = True
            return optimizers

        components.make_optimizers = make_capturable

    def verify(self, observed: StepObservation) -> Verification:
        from .observe import GRAPH_LAUNCH, KERNEL_LAUNCH

        captured = observed.step.graph is not None and observed.step.graph.captured
        graphs, kernels = observed.launches(GRAPH_LAUNCH), observed.launches(KERNEL_LAUNCH)
        text = f"captured {captured}; {graphs} graph launches and {kernels} kernel launches in a step"
        return Verification(captured, captured, observed.problem or text)
