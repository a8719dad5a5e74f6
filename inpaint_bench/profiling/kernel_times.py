"""The kernels of one call, recorded with torch.profiler (on a CPU its operators): totals by name, and idle gaps."""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity, profile

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import KernelClass, classify
from inpaint_bench.core.records import Communication

# As PyTorch sets them where it makes CUDA graphs itself.
ATTACHED = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}


@dataclass(frozen=True, kw_only=True)
class ProfiledCall:
    """One step or call, as a profile shows it; `work` may be run any number of times."""

    name: str
    work: Callable[[], object]
    measured: bool = True  # false: the windows ran it in another way


class KernelEvent(msgspec.Struct, kw_only=True):
    """One kernel on the device; on a CPU the time of an operator without the operators that it calls."""

    name: str
    start_us: float
    end_us: float


class KernelTotal(msgspec.Struct, kw_only=True):
    """All launches of the kernels of one name."""

    name: str
    kind: KernelClass
    detail: str
    ms: float
    launches: int


class Gap(msgspec.Struct, kw_only=True):
    """Time in which no kernel ran, between two kernels."""

    us: float
    after: str
    before: str


def kernel_totals(events: Iterable[KernelEvent]) -> list[KernelTotal]:
    """Return the kernels by name, the heaviest first."""
    us: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for event in events:
        us[event.name] += event.end_us - event.start_us
        launches[event.name] += 1
    return [
        KernelTotal(name=name, kind=kind, detail=detail, ms=us[name] / 1e3, launches=launches[name])
        for name, (kind, detail) in ((name, classify(name)) for name in sorted(us, key=lambda name: (-us[name], name)))
    ]


def idle_gaps(events: Iterable[KernelEvent]) -> list[Gap]:
    """Return the stretches in which no kernel ran, the longest first. Kernels may overlap."""
    gaps, last = [], None
    for event in sorted(events, key=lambda event: event.start_us):
        if last is not None and event.start_us > last.end_us:
            gaps.append(Gap(us=event.start_us - last.end_us, after=last.name, before=event.name))
        if last is None or event.end_us > last.end_us:
            last = event
    return sorted(gaps, key=lambda gap: -gap.us)


def communication(events: Sequence[KernelEvent]) -> Communication | None:
    """Return how long communication ran, and how much of that without another kernel; None where there was none."""
    # At each time how many kernels of either kind begin, less those that end.
    changes: defaultdict[float, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:
        other = classify(event.name).kind is not KernelClass.COMMUNICATION
        changes[event.start_us][other] += 1
        changes[event.end_us][other] -= 1
    times = sorted(changes)
    total_us = exposed_us = 0.0
    communicating = computing = 0
    for start_us, end_us in pairwise(times):
        communicating += changes[start_us][0]
        computing += changes[start_us][1]
        if communicating:
            total_us += end_us - start_us
            exposed_us += 0 if computing else end_us - start_us
    if not total_us:
        return None
    return Communication(ms=total_us / 1e3, exposed_ms=exposed_us / 1e3, call_ms=(times[-1] - times[0]) / 1e3)


# --- recording -----------------------------------------------------------------------------------


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
