"""Profile the workload after its last window, into the table `kernel_times` and traces of the run directory.

The kernels of a call are recorded with torch.profiler, on a CPU its operators. A profile that fails leaves a sentence
in the manifest: what was measured before it stays valid.
"""

import gc
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity, profile

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError, first_line
from inpaint_bench.core.kernels import IDLE, KernelClass, classify
from inpaint_bench.core.records import Communication, ProfileFacts
from inpaint_bench.core.schema import KERNEL_TIMES, TRACES, file_metadata
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.storage.parts import PartWriter

WARM_CALLS = 3  # before the profiled one: at idle the clocks are higher than under load
MAX_KERNEL_NAME = 500  # characters; names of templates are longer
MAX_TRACE_BYTES = 32 * 2**20  # compressed; a step of an SD 1.5 training takes about one
# As PyTorch sets them when it makes CUDA graphs itself.
ATTACHED = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}

log = logging.getLogger(__name__)


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


def profile_calls(
    bench: BenchConfig, run_dir: Path, run_id: str, calls: Iterable[ProfiledCall], device: torch.device
) -> ProfileFacts:
    """Profile every call and return what was written. Raises nothing that a device refuses."""
    facts = ProfileFacts(profiler=bench.profiler)
    rows = PartWriter(run_dir / KERNEL_TIMES, SCHEMAS[KERNEL_TIMES], file_metadata(run_id), bench.telemetry.part_s)
    try:
        for call in calls:
            try:
                _profile_call(call, run_dir, device, rows, facts)
            # torch.cuda.OutOfMemoryError is a RuntimeError: an eager step needs memory beside that of a CUDA graph.
            except (RuntimeError, UserError) as error:
                facts.problems.append(f"{call.name}: {first_line(error)}")
    except (RuntimeError, UserError) as error:
        facts.problems.append(f"calls to profile could not be prepared: {first_line(error)}")
    if not facts.calls and not facts.problems:
        facts.problems.append(f"workload={bench.workload.name} names no call to profile")
    try:
        rows.close()
    except OSError as error:
        facts.problems.append(f"{KERNEL_TIMES} could not be written: {error}")
    for problem in facts.problems:
        log.warning("profile: %s", problem)
    return facts


def _profile_call(
    call: ProfiledCall, run_dir: Path, device: torch.device, rows: PartWriter, facts: ProfileFacts
) -> None:
    for _ in range(WARM_CALLS if device.type == "cuda" else 1):
        call.work()
    synchronize(device)
    trace = run_dir / TRACES / f"{re.sub(r'[^a-z0-9]+', '-', call.name.lower())}.json.gz"
    with suppress(OSError):  # the profiler says that it cannot write there
        trace.parent.mkdir(exist_ok=True)
    events = record(call.work, device, trace)
    for kernel in kernel_totals(events):
        rows.append(
            call=call.name,
            measured=call.measured,
            kind=kernel.kind.value,
            detail=kernel.detail,
            kernel=kernel.name[:MAX_KERNEL_NAME],
            launches=kernel.launches,
            ms=kernel.ms,
        )
    if device.type == "cuda":
        gaps = idle_gaps(events)
        idle_ms = sum(gap.us for gap in gaps) / 1e3
        rows.append(
            call=call.name, measured=call.measured, kind=IDLE, detail="", kernel="", launches=len(gaps), ms=idle_ms
        )
    if exchanged := communication(events):
        if device.type != "cuda":
            exchanged.exposed_ms = None  # operators have a length there, but their own part of it no place
        facts.communication[call.name] = exchanged
    facts.calls.append(call.name)
    size = trace.stat().st_size if trace.exists() else 0
    if 0 < size <= MAX_TRACE_BYTES:
        facts.traces.append(str(trace.relative_to(run_dir)))
    else:
        trace.unlink(missing_ok=True)
        reason = f"{size:,} bytes; the limit is {MAX_TRACE_BYTES:,}" if size else "it could not be written"
        facts.problems.append(f"{call.name}: no trace is kept ({reason})")


# --- sums ----------------------------------------------------------------------------------------


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
    """Return how long communication ran, and how much of that without another kernel; None if there was none."""
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

    `trace`: file for the trace, compressed if its name ends in .gz. Raises UserError if nothing was recorded.
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
