"""Examines a real GPU for `doctor gpu`: which values it gives, what the calls cost, how often power and energy change.

Polls three fields faster than any run does, then records the GPU at the sidecar's rates; values and costs are those of
the recorded calls. Only reads, and needs no root.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.driver import Driver, DriverError, Handle
from inpaint_bench.telemetry.sampling.devices import open_devices
from inpaint_bench.telemetry.sampling.streams import FAST, STREAMS, WINDOW

from .api import error_text, gpu_uuid, null_reason
from .capture_file import Capture, Series, field_key, gpm_key
from .real import RealNvml
from .recorder import record

POLL_INTERVAL_S: Final = 0.005

# Key of a capture file -> the columns that it feeds.
_COLUMNS: Final = {
    **{field_key(item.name): item.column for stream in STREAMS for item in stream.fields},
    **{query.name: ", ".join(query.columns) for stream in STREAMS for query in stream.queries},
    **{gpm_key(item.name): item.column for stream in STREAMS for item in stream.gpm},
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
    median_us: float | None
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

    device: Device
    calls: list[CallFinding]
    updates: dict[str, UpdatePeriod]  # by column
    capture: Capture


def examine_gpu(uuid: str | None, seconds: float) -> GpuFindings:
    """Examine a GPU of this machine; without a UUID, the only one.

    Raises DriverError; ValueError for an unknown UUID, a GPU in MIG mode, or a choice that is left open.
    """
    with RealNvml() as nvml:
        if uuid is None and not (uuids := nvml.uuids()):
            raise ValueError("NVML lists no GPU that this process may open")
        if uuid is None and len(uuids) > 1:
            raise ValueError(f"there are {len(uuids)} GPUs; choose one with --uuid: {', '.join(uuids)}")
        uuid = uuids[0] if uuid is None else gpu_uuid(uuid)
        (device,) = open_devices(nvml, [uuid])
        polling_s = 0.15 * min(seconds, 20.0)  # a longer examination records longer
        updates = update_periods(nvml, device.handle, polling_s)
        capture = record(nvml, uuid, seconds - polling_s)
    calls = [_call_finding(key, series) for key, series in capture.calls.items()]
    return GpuFindings(device=device.facts, calls=calls, updates=updates, capture=capture)


def update_periods(nvml: Driver, handle: Handle, seconds: float) -> dict[str, UpdatePeriod]:
    """Measure how often the fields of the fast stream change, by polling them every 5 ms."""
    names = [item.name for item in FAST.fields]
    times_ns: list[int] = []
    polls: list[list[float]] = []  # [polls, fields]
    start_ns = time.monotonic_ns()
    while (now_ns := time.monotonic_ns()) - start_ns < seconds * 1e9:
        times_ns.append(now_ns)
        try:
            # A zero between two values would be two changes that the card never made.
            polls.append([result.value or np.nan for result in nvml.fields(handle, names)])
        except DriverError:
            polls.append([np.nan] * len(names))
        # Deadlines from the start: the duration of a poll does not lengthen the interval.
        time.sleep(max(0.0, start_ns + len(polls) * POLL_INTERVAL_S * 1e9 - time.monotonic_ns()) / 1e9)
    columns = np.array(polls).T
    return {item.column: _update_period(np.array(times_ns), x) for item, x in zip(FAST.fields, columns, strict=True)}


def _update_period(times_ns: np.ndarray, values: np.ndarray) -> UpdatePeriod:
    """Return the period of changes among the polled values, [polls]; a failed poll is NaN."""
    valid = ~np.isnan(values)
    changed_ns = times_ns[valid][1:][np.diff(values[valid]) != 0]
    median_ms = round(float(np.median(np.diff(changed_ns))) / 1e6, 1) if len(changed_ns) > 1 else None
    return UpdatePeriod(polls=len(values), failed=int((~valid).sum()), changes=len(changed_ns), median_ms=median_ms)


def _call_finding(key: str, series: Series) -> CallFinding:
    num_valid = series.codes.count(0)
    # One valid result shows that the call is available; the others are in num_calls less num_valid.
    missing_code = 0 if num_valid else series.codes[-1]
    us = series.us
    return CallFinding(
        call=key,
        feeds=_COLUMNS.get(key, key),
        num_calls=len(series.codes),
        num_valid=num_valid,
        missing=null_reason(missing_code).value if missing_code else None,
        error=error_text(missing_code) if missing_code else None,
        median_us=round(float(np.median(us)), 1) if us else None,
        max_us=max(us, default=None),
    )
