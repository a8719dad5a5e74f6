"""How the networks of a workload run: as the baseline of the device, then as the levers of the recipe change it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.levers import RecipeConfig
from inpaint_bench.core.stages import stage

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class CudaGraph:
    """Runs `function` eagerly `warmup` times, captures it once, and replays it from then on.

    `function` takes tensors by name. It must not wait for the device, and may read nothing that changes but these
    tensors, parameters and `generator`. The warm-up calls and the first replay after the capture are ordinary calls:
    none is lost. A replay overwrites the result of the one before.
    """

    def __init__(self, function: Callable[..., Tensor], *, warmup: int, generator: Generator | None = None) -> None:
        self._function, self._generator, self._warmup = function, generator, warmup
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._inputs: dict[str, Tensor] = {}  # static: every replay reads these tensors
        self._result: Tensor | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Return what the function returns of inputs with the shapes of the first call.

        They are on the device. Once captured they may be in host memory: they are copied to where the graph reads them.
        """
        if self._graph is None:
            if self._calls < self._warmup:
                self._calls += 1
                return self.eager(**inputs)
            # A capture runs nothing: the replay below is the call with these inputs.
            with stage("capture"):
                self._capture(inputs)
        assert self._graph is not None
        assert self._result is not None
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._graph.replay()
        return self._result

    def eager(self, **inputs: Tensor) -> Tensor:
        """Run the function on the stream of the capture: allocations made there stay usable there."""
        # Each stream waits for the other: the inputs come from the current one, and the result is read there.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._function(**inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def close(self) -> None:
        """Release the graph. NCCL's communicator, if a collective was captured, is not destroyed before that."""
        if self._graph is not None:
            self._graph.reset()

    def _capture(self, inputs: dict[str, Tensor]) -> None:
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:  # else every replay would draw the numbers of the capture again
            graph.register_generator_state(self._generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._result = self._function(**self._inputs)
        self._graph = graph


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
    dtype: torch.dtype = torch.float32  # dtype of the weights and floating-point inputs of the main network
    micro_batches: int = 1
    cuda_graph: bool = False
    graphs: Sequence[CudaGraph] = ()  # with `cuda_graph`
    fp32_precision: dict[str, str] = field(init=False)  # in effect for operations that stay fp32

    def __post_init__(self) -> None:
        bf16 = self.device.type == "cuda" or self.bench.model.dtype == "bf16"
        self.autocast_dtype = torch.bfloat16 if bf16 else None
        # The lever attn_cudnn overrides this.
        torch.backends.cuda.enable_cudnn_sdp(
            isinstance(self.networks, dict) or self.networks.architecture.cudnn_attention
        )
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
        """Return the seconds of the first pass if it compiled."""
        return round(first_pass_s, 3) if self.recipe.compile != "none" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context.

        In a CUDA graph the cache of cast weights must not outlive the step, and with gradient checkpointing, which
        casts again, it would keep all of them: 22 GiB of FLUX.
        """
        dtype, recipe = self.autocast_dtype, self.recipe
        cached = not (self.cuda_graph or recipe.grad_checkpoint)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=cached)

    def network_context(self) -> AbstractContextManager[Any]:
        """Return autocast as the main network needs it: off for 16-bit weights, where norms would return fp32."""
        return self.autocast() if self.dtype == torch.float32 else torch.autocast(self.device.type, enabled=False)


class _Widened(TorchFunctionMode):
    """Within its block PyTorch's functions take fp32 in the place of 16 bits, and find no other type in a tensor.

    Weights stay as they are stored: a copy of all in fp32 would not fit beside those of a large network.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(
            Tensor, lambda x: x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, (args, kwargs or {})
        )
        return function(*args, **kwargs)


@contextmanager
def in_fp32(execution: Execution) -> Iterator[None]:
    """Compute in fp32 within the block, without autocast and whatever the type of the weights. Before the levers."""
    dtype, execution.autocast_dtype = execution.autocast_dtype, None
    narrow = any(p.dtype != torch.float32 for network in execution.modules.values() for p in network.parameters())
    try:
        with _Widened() if narrow else nullcontext():
            yield
    finally:
        execution.autocast_dtype = dtype


def set_switches(recipe: RecipeConfig) -> dict[str, str]:
    """Set all of PyTorch's global switches as the recipe says, whatever this process set before.

    `RecipeConfig()` is the baseline. Return what is in effect for operations that stay fp32.
    """
    torch.backends.cudnn.benchmark = recipe.cudnn_benchmark
    torch.backends.cudnn.benchmark_limit = recipe.cudnn_benchmark_limit
    torch._inductor.config.force_layout_optimization = recipe.force_layout
    if hasattr(torch._inductor.config.triton, "enable_pdl"):  # not in the oldest PyTorch that we support
        torch._inductor.config.triton.enable_pdl = recipe.pdl
    return set_fp32_precision(recipe.tf32, recipe.tf32 or recipe.tf32_convolutions)


def set_fp32_precision(matmul: bool, conv: bool) -> dict[str, str]:
    """Let fp32 matmuls and convolutions use TF32, or not. Return what is now in effect for each.

    Always set explicitly: PyTorch's default is fp32 matmuls beside TF32 convolutions. Only the older `allow_tf32`
    switches: they exist in every PyTorch we support. After the newer `fp32_precision` (2.9 and later) was set to
    "ieee" for cuDNN, reading `cudnn.allow_tf32` raises (seen with 2.13), and inductor's convolution templates read it.
    """
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = conv
    return {
        "matmul": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "conv": "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
    }
