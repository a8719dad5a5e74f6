"""Two more steps, under the profiler, to see what a step is really made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import DeviceType, ProfilerActivity, profile

from .observation import Running, Seen

if TYPE_CHECKING:
    from inpaint_bench.data.samples import Batch


def observe(workload: Running) -> Seen:
    """Trains on two further batches."""
    workload.step(workload.next_batch())
    batch: Batch = workload.next_batch()
    seen = Seen(batch=batch)
    with _Taps(workload, seen):
        return _profiled(workload, seen, lambda: workload.step(batch))


def _profiled(workload: Running, seen: Seen, call: Callable[[], Any]) -> Seen:
    """`seen` with the kernels and host events of `call`, or with the reason why there are none."""
    activities = [ProfilerActivity.CPU]
    if workload.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    try:
        with profile(activities=activities) as profiler:
            call()
            if workload.device.type == "cuda":
                torch.cuda.synchronize()
    except RuntimeError as error:  # no permission to profile, or another profiler at work
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        seen.problem = f"the profiler did not run ({str(error).splitlines()[0]})"
        return seen
    for event in profiler.events() or []:
        where = seen.kernels if event.device_type == DeviceType.CUDA else seen.host
        where[event.name] += 1
    return seen


class _Taps:
    """Counts calls of the assembly's parts. A replayed graph calls none of them: then nothing is counted."""

    def __init__(self, workload: Running, seen: Seen) -> None:
        self._assembly, self._seen = workload.assembly, seen
        self._kept: dict[str, Callable[..., Any]] = {}
        self._block: Any = workload.assembly.nets.unet.down_blocks[0].resnets[0]

    def __enter__(self) -> None:
        for name in ("unet", "encoder", "text"):
            self._kept[name] = getattr(self._assembly, name)
            setattr(self._assembly, name, self._counted(name, self._kept[name]))
        self._hook = self._block.register_forward_pre_hook(self._count_block)

    def __exit__(self, *_: object) -> None:
        for name, function in self._kept.items():
            setattr(self._assembly, name, function)
        self._hook.remove()

    def _count_block(self, *_: Any) -> None:
        self._seen.calls["block"] += 1

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._seen.calls[name] += 1
            result = function(*args, **kwargs)
            if name == "unet":
                self._seen.prediction = result[0].dtype
            return result

        return call


def unet_forward(workload: Running) -> None:
    """One image through the eager UNet, in training mode."""
    assembly, device = workload.assembly, workload.device
    side = workload.bench.data.resolution_px // assembly.nets.downscale
    state = torch.randn(1, 9, side, side, device=device, dtype=assembly.input_dtype)
    width = assembly.nets.unet.config.cross_attention_dim
    length = assembly.nets.context_length + workload.bench.model.location_tokens
    text = torch.randn(1, length, width, device=device, dtype=assembly.input_dtype)
    times = torch.zeros(1, dtype=torch.long, device=device)
    with assembly.unet_cast(), assembly.attention():
        assembly.nets.unet(state.contiguous(memory_format=assembly.layout), times, text)


def unet_kernels(workload: Running) -> Seen:
    """Kernels and operators of a forward pass of the UNet alone: the frozen networks attend too, in their own way."""
    unet_forward(workload)
    return _profiled(workload, Seen(), lambda: unet_forward(workload))


@torch.no_grad()
def channels_last_inputs(workload: Running) -> tuple[int, int]:
    """(channels_last, all) inputs of the UNet's convolutions in a forward pass of one image.

    Maps of one pixel or one channel have both layouts and are not counted.
    """
    counts = [0, 0]

    def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        value = given[0]
        if value.shape[1] > 1 and value.shape[2] * value.shape[3] > 1:
            counts[0] += value.is_contiguous(memory_format=torch.channels_last)
            counts[1] += 1

    modules = workload.assembly.nets.unet.modules()
    hooks = [m.register_forward_pre_hook(look) for m in modules if isinstance(m, nn.Conv2d)]
    try:
        unet_forward(workload)
    finally:
        for hook in hooks:
            hook.remove()
    return counts[0], counts[1]
