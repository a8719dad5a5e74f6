"""torch.compile, and the whole step as a CUDA graph."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from inpaint_bench.models.assembly import Assembly

from .base import Effective, Lever, Machine

if TYPE_CHECKING:
    from .observation import Running, Seen


class Compile(Lever):
    """The UNet and the VAE's encoder, each one graph of fixed shapes. The text encoder is 0.3 % of a step."""

    field = "compile"

    def available(self, machine: Machine) -> str | None:
        if machine.cuda and find_spec("triton") is None:
            return "torch.compile needs Triton on a GPU, which is not installed"
        if not machine.cuda and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            return "torch.compile needs a C++ compiler on the processor, none is on the PATH"
        if machine.recipe.cuda_graph and machine.recipe.compile in ("reduce-overhead", "max-autotune"):
            return f"compile={machine.recipe.compile} makes CUDA graphs of its own, cuda_graph cannot enclose them"
        return None

    def apply(self, assembly: Assembly) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if assembly.device.type == "cpu":
            # Seen with 2.13: with it, gradients of a UNet below its first skip are off by half on a processor.
            torch._inductor.config.layout_optimization = False
        options: dict[str, Any] = {"mode": assembly.recipe.compile, "dynamic": False}
        assembly.unet = torch.compile(assembly.nets.unet, **options)
        assembly.encoder = torch.compile(assembly.nets.vae.encoder, **options)

    def verify(self, workload: Running, seen: Seen) -> Effective:
        counters = torch._dynamo.utils.counters
        graphs = int(counters["stats"]["unique_graphs"])
        breaks = sum(counters["graph_break"].values())
        kernels = seen.count("triton")
        text = f"{graphs} graphs, {breaks} graph breaks; {kernels} Triton kernels in a step"
        return Effective(effective={"graphs": graphs, "breaks": breaks}, active=graphs > 0, evidence=text)


class CudaGraph(Lever):
    field = "cuda_graph"

    def available(self, machine: Machine) -> str | None:
        return None if machine.cuda else "CUDA graphs need a GPU"

    def apply(self, assembly: Assembly) -> None:
        assembly.graph = True
        inner = assembly.optimizers

        def capturable(*args: Any) -> list[torch.optim.Optimizer]:
            made = inner(*args)
            for optimizer in made:
                for group in optimizer.param_groups:
                    if "capturable" in group:  # PyTorch's own; ours keeps its step on the device anyway
                        group["capturable"] = True
            return made

        assembly.optimizers = capturable

    def verify(self, workload: Running, seen: Seen) -> Effective:
        graphed = workload.graphed
        captured = graphed is not None and graphed.captured
        text = f"captured {captured}; in a step {seen.graph_launches} graph launches, {seen.launches} of kernels"
        return Effective(effective=captured, active=captured, evidence=seen.problem or text)
