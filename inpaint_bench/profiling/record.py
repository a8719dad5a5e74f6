"""Record the kernels of a call with torch.profiler; on a CPU its operators."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity, profile

from inpaint_bench.core.errors import UserError

from .kernel_times import KernelEvent

# As PyTorch sets them where it makes CUDA graphs itself.
ATTACHED = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}


def keep_profiler_attached() -> None:
    """Leave the profiler attached to CUDA for the rest of the process: a CUDA graph does not survive the detaching."""
    os.environ |= ATTACHED


def record(call: Callable[[], object], device: torch.device, trace: Path | None = None) -> list[KernelEvent]:
    """Return the kernels of `call`; on a CPU its operators, each with the time of its own.

    `trace`: file for the trace, compressed where its name ends in .gz. Raises UserError where nothing was recorded.
    """
    cuda = device.type == "cuda"
    synchronize(device)
    # Only what runs on the device: recording the host's operators too would delay the launches.
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        call()
        synchronize(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events = [event for event in profiler.events() or [] if _is_work(event, cuda)]
    if not events:
        raise UserError("the profiler recorded nothing: is another profiler active, or are counters locked?")
    return [
        KernelEvent(
            name=event.name,
            start_us=event.time_range.start,
            # gloo works in threads of its own, whose operators have no time of the processor.
            end_us=event.time_range.end
            if cuda or event.name.startswith("gloo:")
            else event.time_range.start + event.self_cpu_time_total,
        )
        for event in events
    ]


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Return to the GPU what nothing uses any more, also what reference cycles held."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _is_work(event: FunctionEvent, cuda: bool) -> bool:
    """Tell whether an event is a kernel; on a CPU, an operator. A range such as Optimizer.step contains kernels."""
    if not cuda:
        return event.device_type == DeviceType.CPU
    annotation = getattr(event, "is_user_annotation", False) or event.name.startswith(("Optimizer.", "ProfilerStep"))
    return event.device_type == DeviceType.CUDA and not annotation
