"""How the networks of a workload run: as the baseline of the device, then as the levers of the recipe change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.levers import RecipeConfig

from .cuda_graph import CudaGraph

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(kw_only=True)
class Execution:
    """What levers change and read back. A new one is the baseline, to which PyTorch's global switches are set."""

    bench: BenchConfig
    device: torch.device
    networks: Any  # by role: a dict, or the `Networks` of Stable Diffusion
    # What a step calls, by role: these networks or parts of them, compiled or replaced perhaps. The first is the main.
    calls: dict[str, Callable[..., Any]]
    eager_pass: Callable[[], object]  # a small pass of the networks themselves, for levers to observe
    channels_last: torch.memory_format = torch.channels_last  # what the lever of this name means here
    memory_format: torch.memory_format = torch.contiguous_format
    attention_kernels: Callable[[], AbstractContextManager[Any]] = nullcontext
    autocast_dtype: torch.dtype | None = field(init=False)  # None: no autocast
    dtype: torch.dtype = torch.float32  # of the weights and floating-point inputs of the main network
    micro_batches: int = 1
    cuda_graph: bool = False
    graphs: Sequence[CudaGraph] = ()  # with `cuda_graph`
    fp32_precision: dict[str, str] = field(init=False)  # in effect for operations that stay fp32

    def __post_init__(self) -> None:
        self.autocast_dtype = torch.bfloat16 if self.device.type == "cuda" else None
        # This process may have applied other levers before: in a search for the batch, or another run.
        self.fp32_precision = set_switches(RecipeConfig())

    @property
    def recipe(self) -> RecipeConfig:
        return self.bench.recipe

    @property
    def compared_size(self) -> int:
        """Return the images of a micro-batch of the recipe, at which it is compared with the baseline."""
        return self.bench.batch_size // self.recipe.accumulate

    @property
    def modules(self) -> dict[str, nn.Module]:
        if isinstance(self.networks, dict):
            return self.networks
        return {role: getattr(self.networks, role) for role in ("unet", "vae", "text_encoder")}

    def facts(self) -> dict[str, Any]:
        """Return the recipe as `workload_facts` tell it."""
        names = ("precision", "tf32", "channels_last", "cudnn_benchmark")
        facts: dict[str, Any] = {name: getattr(self.recipe, name) for name in names}
        if "unet" in self.calls:
            facts["weights_precision"] = self.recipe.weights
        return {**facts, "fp32_precision": self.fp32_precision}

    def compile_s(self, first_pass_s: float) -> float | None:
        """Return the seconds of the first pass where it compiled."""
        return round(first_pass_s, 3) if self.recipe.compile != "none" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context. In a CUDA graph the cache of cast weights must not outlive the step."""
        dtype = self.autocast_dtype
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=not self.cuda_graph
        )

    def network_context(self) -> AbstractContextManager[Any]:
        """Return autocast as the main network needs it: off for 16-bit weights, where norms would return fp32."""
        return self.autocast() if self.dtype == torch.float32 else torch.autocast(self.device.type, enabled=False)


def set_switches(recipe: RecipeConfig) -> dict[str, str]:
    """Set all of PyTorch's global switches as the recipe says, whatever this process set before.

    `RecipeConfig()` is the baseline. Return what is in effect for operations that stay fp32.
    """
    torch.backends.cudnn.benchmark = recipe.cudnn_benchmark
    torch.backends.cudnn.benchmark_limit = recipe.cudnn_benchmark_limit
    torch._inductor.config.force_layout_optimization = recipe.force_layout
    if hasattr(torch._inductor.config.triton, "enable_pdl"):  # not in the oldest PyTorch that we support
        torch._inductor.config.triton.enable_pdl = recipe.pdl
    return set_fp32_precision(recipe.tf32)


def set_fp32_precision(tf32: bool) -> dict[str, str]:
    """Let fp32 matmuls and convolutions use TF32, or not. Return what is now in effect for each.

    Always set explicitly: PyTorch's default is fp32 matmuls beside TF32 convolutions. Only the older `allow_tf32`
    switches: they exist in every PyTorch we support. After the newer `fp32_precision` (2.9 and later) was set to
    "ieee" for cuDNN, reading `cudnn.allow_tf32` raises (seen with 2.13), and inductor's convolution templates read it.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return {
        "matmul": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "conv": "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
    }
