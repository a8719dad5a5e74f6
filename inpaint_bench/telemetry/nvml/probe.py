"""Examines a real GPU for `doctor gpu`: which values it gives, what the calls cost, how often power and energy change.

Polls three fields faster than any run does, then records the GPU at the sidecar's rates; values and costs are those of
the recorded calls. Only reads, and needs no root.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.sampling.streams import FAST, STREAMS, WINDOW

from .api import Handle, Nvml, NvmlError, error_text, gpu_uuid, null_reason
from .capture_file import Capture, Series, field_key, gpm_key
from .recorder import record

POLL_INTERVAL_S: Final = 0.005
MIN_FOR_P99: Final = 100  # of fewer values, the 99th percentile is the maximum

# Key of a capture file -> the columns that it feeds.
_COLUMNS: Final = {
    **{field_key(item.id, item.scope): item.column for stream in STREAMS for item in stream.fields},
    **{query.name: ", ".join(query.columns) for stream in STREAMS for query in stream.queries},
    **{gpm_key(item.id): item.column for stream in STREAMS for item in stream.gpm},
    "gpm_window_ms": WINDOW,
}


@dataclass(frozen=True, kw_only=True)
class CallFinding:
    """How a GPU responded to one call, and what the call cost."""

    call: str  # key of the capture file
    feeds: str  # columns, or the call's own name
    num_calls: int
    num_valid: int
    missing: str | None  # why there is no valid result
    error: str | None  # NVML's return code for that
    p50_us: float | None
    p99_us: float | None  # None for fewer than 100 calls
    max_us: float | None


@dataclass(frozen=True, kw_only=True)
class UpdatePeriod:
    """How often a value changes. A value that stays equal over an update makes the period look longer."""

    polls: int
    failed: int  # return codes and zeros, which polling faster than every 50 ms is known to give
    changes: int
    median_ms: float | None


@dataclass(frozen=True, kw_only=True)
class GpuFindings:
    """The result of an examination."""

    driver: str
    nvml: str
    device: Device
    calls: list[CallFinding]
    updates: dict[str, UpdatePeriod]  # by column
    capture: Capture


def choose_gpu(nvml: Nvml, uuid: str | None) -> str:
    """Return the UUID to examine. Raises ValueError unless it is given or there is exactly one GPU."""
    if uuid is not None:
        return gpu_uuid(uuid)
    uuids = nvml.uuids()
    if not uuids:
        raise ValueError("NVML lists no GPU that this process may open")
    if len(uuids) > 1:
        raise ValueError(f"there are {len(uuids)} GPUs; choose one with --uuid: {', '.join(uuids)}")
    return uuids[0]


def probe(nvml: Nvml, uuid: str, seconds: float) -> GpuFindings:
    """Examine a GPU. Raises NvmlError; ValueError for an unknown UUID or a GPU in MIG mode."""
    (device,) = open_devices(nvml, [uuid])
    polling_s = 0.15 * min(seconds, 20.0)  # a longer examination records longer
    updates = update_periods(nvml, device.handle, polling_s)
    capture = record(nvml, uuid, seconds - polling_s)
    return GpuFindings(
        driver=nvml.driver_version(),
        nvml=nvml.nvml_version(),
        device=device.facts,
        calls=[_call_finding(key, series) for key, series in capture.calls.items()],
        updates=updates,
        capture=capture,
    )


def update_periods(nvml: Nvml, handle: Handle, seconds: float) -> dict[str, UpdatePeriod]:
    """Measure how often the fields of the fast stream change, by polling them every 5 ms."""
    start_ns = time.monotonic_ns()
    changes: dict[str, list[tuple[int, float]]] = {item.column: [] for item in FAST.fields}  # time, new value
    failed = dict.fromkeys(changes, 0)
    polls = 0
    while (now_ns := time.monotonic_ns()) - start_ns < seconds * 1e9:
        try:
            results = nvml.fields(handle, [(item.id, item.scope) for item in FAST.fields])
        except NvmlError:
            results = []
        polls += 1
        for index, (column, known) in enumerate(changes.items()):
            # A zero between two values would be two changes that the card never made.
            value = results[index].value if index < len(results) and results[index].code == 0 else None
            if not value:
                failed[column] += 1
            elif not known or known[-1][1] != value:
                known.append((now_ns, value))
        time.sleep(max(0.0, start_ns + polls * POLL_INTERVAL_S * 1e9 - time.monotonic_ns()) / 1e9)
    updates = {}
    for column, known in changes.items():
        changed_ns = [t_ns for t_ns, _ in known[1:]]  # the first value is no change
        periods_ms = [(after - before) / 1e6 for before, after in pairwise(changed_ns)]
        median_ms = round(statistics.median(periods_ms), 1) if periods_ms else None
        updates[column] = UpdatePeriod(polls=polls, failed=failed[column], changes=len(changed_ns), median_ms=median_ms)
    return updates


def _call_finding(key: str, series: Series) -> CallFinding:
    num_valid = series.codes.count(0)
    missing_code = 0 if num_valid else series.codes[-1]
    us = series.us
    return CallFinding(
        call=key,
        feeds=_COLUMNS.get(key, key),
        num_calls=len(series.codes),
        num_valid=num_valid,
        missing=null_reason(missing_code).value if missing_code else None,
        error=error_text(missing_code) if missing_code else None,
        p50_us=round(statistics.median(us), 1) if us else None,
        p99_us=p99(us),
        max_us=round(max(us), 1) if us else None,
    )


def p99(values: Sequence[float]) -> float | None:
    """Return the 99th percentile (nearest rank), None for fewer than 100 values."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if len(values) >= MIN_FOR_P99 else None
