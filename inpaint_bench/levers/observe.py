"""Run two more steps, one of them under the profiler, to see what a step really consists of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import DeviceType, ProfilerActivity, profile

from inpaint_bench.core.kernel_names import KernelClass, classify
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.components import unet_inputs

if TYPE_CHECKING:
    from inpaint_bench.core.config.bench import RecipeConfig
    from inpaint_bench.data.loader import Batches
    from inpaint_bench.data.samples import Batch
    from inpaint_bench.models.components import StepComponents
    from inpaint_bench.models.training_step import TrainingStep

KERNEL_LAUNCH = re.compile(r"^(cuda|cu)LaunchKernel")
GRAPH_LAUNCH = re.compile(r"^cudaGraphLaunch")


@dataclass(kw_only=True)
class StepObservation:
    """A training step, its loader, and what was observed of one of its batches."""

    step: TrainingStep
    batches: Batches
    batch: Batch = field(default_factory=dict)  # as the loader returned it
    kernels: Counter[str] = field(default_factory=Counter)  # on the device, by name
    host_events: Counter[str] = field(default_factory=Counter)  # operators and runtime calls, by name
    calls: Counter[str] = field(default_factory=Counter)  # of unet, vae_encoder, text_encoder and the last block
    prediction_dtype: torch.dtype | None = None
    problem: str = ""  # why the profiler recorded nothing

    @property
    def components(self) -> StepComponents:
        """Return the components of the step."""
        return self.step.components

    @property
    def recipe(self) -> RecipeConfig:
        """Return the requested recipe."""
        return self.step.components.recipe

    def count(self, pattern: str) -> int:
        """Count the kernels whose name matches; on the CPU, the operators."""
        return sum(n for name, n in self._names() if re.search(pattern, name, re.IGNORECASE))

    def count_class(self, kind: KernelClass, detail: str) -> int:
        """Count the kernels of a class with this detail; on the CPU, the operators."""
        return sum(n for name, n in self._names() if classify(name) == (kind, detail))

    @property
    def layout_copies(self) -> int:
        """Return the number of cuDNN's layout conversions."""
        return self.count_class(KernelClass.LAYOUT, "cuDNN")

    def _names(self) -> Iterable[tuple[str, int]]:
        return (self.kernels or self.host_events).items()

    def launches(self, pattern: re.Pattern[str]) -> int:
        """Count the runtime calls whose name matches."""
        return sum(n for name, n in self.host_events.items() if pattern.match(name))


def observe(step: TrainingStep, batches: Batches) -> StepObservation:
    """Train on two more batches and return what was observed of the second."""
    step(next(batches))
    observed = StepObservation(step=step, batches=batches, batch=next(batches))
    with _counted_calls(observed):
        _profile(observed, lambda: step(observed.batch))
    return observed


def _profile(observed: StepObservation, call: Callable[[], Any]) -> None:
    """Record kernels and host events of `call`, or the reason why there are none."""
    cuda = observed.step.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.synchronize()
    calling = False
    try:
        # The device is idle when the profile begins and when it ends: it holds this call's kernels, and all of them.
        with profile(activities=activities) as profiler:
            calling = True
            call()
            if cuda:
                torch.cuda.synchronize()
            calling = False
    except RuntimeError as error:  # no permission to profile, or another profiler is active
        if calling:
            raise
        observed.problem = f"the profiler did not run ({str(error).splitlines()[0]})"
        return
    for event in profiler.events() or []:
        names = observed.kernels if event.device_type == DeviceType.CUDA else observed.host_events
        names[event.name] += 1


@contextmanager
def _counted_calls(observed: StepObservation) -> Iterator[None]:
    """Count calls of the networks within the block. A replayed CUDA graph calls none of them."""
    components = observed.components
    originals = {name: getattr(components, name) for name in ("unet", "vae_encoder", "text_encoder")}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            observed.calls[name] += 1
            result = function(*args, **kwargs)
            if name == "unet":
                observed.prediction_dtype = result[0].dtype
            return result

        return call

    def count_block(*_: Any) -> None:
        observed.calls["block"] += 1

    # Gradient checkpointing shows here: it runs a block once more in the backward pass. NhwcUNet excludes it. The last
    # one, because the backward pass may end before the first: at the first adapter.
    unet = components.networks.unet
    last_block = unet.resnets[-1] if isinstance(unet, NhwcUNet) else unet.up_blocks[-1].resnets[-1]
    hook = last_block.register_forward_pre_hook(count_block)
    for name, function in originals.items():
        setattr(components, name, counted(name, function))
    try:
        yield
    finally:
        hook.remove()
        for name, function in originals.items():
            setattr(components, name, function)


def unet_forward(components: StepComponents) -> None:
    """Run one image through the eager UNet, in training mode."""
    inputs = unet_inputs(components, 1, torch.Generator().manual_seed(0))
    with components.unet_context(), components.attention_kernels():
        components.networks.unet(*inputs)


def unet_kernels(observed: StepObservation) -> StepObservation:
    """Observe a forward pass of the UNet alone: the frozen networks have attention too, with kernels of their own."""
    # Not profiled: at a new shape cuDNN may first try algorithms, with kernels that no step runs.
    unet_forward(observed.components)
    unet_only = StepObservation(step=observed.step, batches=observed.batches)
    _profile(unet_only, lambda: unet_forward(observed.components))
    return unet_only


@torch.no_grad()
def channels_last_inputs(components: StepComponents) -> tuple[int, int]:
    """Count the inputs of the UNet's convolutions in a forward pass of one image: in channels_last, and all.

    Maps of one pixel or one channel have both layouts and are not counted.
    """
    counts = [0, 0]

    def count_layout(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        value = inputs[0]
        if value.shape[1] > 1 and value.shape[2] * value.shape[3] > 1:
            counts[0] += value.is_contiguous(memory_format=torch.channels_last)
            counts[1] += 1

    convolutions = [m for m in components.networks.unet.modules() if isinstance(m, nn.Conv2d)]
    hooks = [convolution.register_forward_pre_hook(count_layout) for convolution in convolutions]
    try:
        unet_forward(components)
    finally:
        for hook in hooks:
            hook.remove()
    return counts[0], counts[1]
