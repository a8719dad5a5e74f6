"""Profile the workload after its last window, into the table `kernel_times` and traces of the run directory.

A profile that fails leaves a sentence in the manifest: what was measured before it stays valid.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.kernels import IDLE
from inpaint_bench.core.records import ProfileFacts
from inpaint_bench.core.schema import KERNEL_TIMES, TRACES, file_metadata
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.storage.parts import PartWriter

from .kernel_times import ProfiledCall, communication, idle_gaps, kernel_totals, record, synchronize

WARM_CALLS = 3  # before the profiled one: at idle the clocks are higher than under load
MAX_KERNEL_NAME = 500  # characters; names of templates are longer
MAX_TRACE_BYTES = 32 * 2**20  # compressed; a step of an SD 1.5 training takes about one

log = logging.getLogger(__name__)


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
                facts.problems.append(f"{call.name}: {str(error).splitlines()[0]}")
    except (RuntimeError, UserError) as error:
        facts.problems.append(f"calls to profile could not be prepared: {str(error).splitlines()[0]}")
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
