"""Examines a real GPU for `doctor gpu`: which calls it supports, what they cost, how often power and energy change.

Polls three fields faster than any run does, then records the GPU at the sidecar's rates; support and cost are those of
the recorded calls. Only reads, and needs no root.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.sampling.streams import FAST, STREAMS, WINDOW

from .api import Handle, Nvml, NvmlError, error_text, gpu_uuid, null_reason
from .capture_file import Capture, Series, field_key, gpm_key
from .recorder import record

POLL_INTERVAL_S: Final = 0.005
SECONDS: Final = (2.0, 3600.0)  # shortest and longest examination
MIN_FOR_P99: Final = 100  # of fewer values, the 99th percentile is the maximum


class CallFinding(msgspec.Struct, kw_only=True):
    """How a GPU responded to one call, and what the call cost."""

    call: str  # key of the capture file
    columns: list[str]  # that it feeds
    num_calls: int
    num_valid: int
    missing: str | None  # why there is no valid result
    error: str | None  # NVML's return code for that
    p50_us: float | None
    p99_us: float | None  # null for fewer than 100 calls
    max_us: float | None


class UpdatePeriod(msgspec.Struct, kw_only=True):
    """How often a value changes. A value that stays equal over an update makes the period look longer."""

    polls: int
    failed: int  # return codes and zeros, which polling faster than every 50 ms is known to give
    changes: int
    p10_ms: float | None
    median_ms: float | None
    p90_ms: float | None


class GpuFindings(msgspec.Struct, kw_only=True):
    """The result of an examination."""

    driver: str
    nvml: str
    device: Device
    calls: list[CallFinding]
    updates: dict[str, UpdatePeriod]  # by column
    recorded_s: float


def polling_s(seconds: float) -> float:
    """Return how much of an examination is polling: 3 of 20 s, and never more."""
    return 3.0 * min(seconds, 20.0) / 20.0


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


def probe(nvml: Nvml, uuid: str, seconds: float) -> tuple[GpuFindings, Capture]:
    """Examine a GPU; return the findings and the recording. Raises NvmlError; ValueError for an unknown UUID or MIG."""
    (device,) = open_devices(nvml, [uuid])
    updates = update_periods(nvml, device.handle, polling_s(seconds))
    capture = record(nvml, uuid, seconds - polling_s(seconds))
    findings = GpuFindings(
        driver=nvml.driver_version(),
        nvml=nvml.nvml_version(),
        device=device.facts,
        calls=[_call_finding(key, series) for key, series in capture.calls.items()],
        updates=updates,
        recorded_s=round(capture.meta.duration_ms / 1000, 1),
    )
    return findings, capture


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
            value = results[index].value if index < len(results) and results[index].code == 0 else None
            if not value:
                failed[column] += 1
            elif not known or known[-1][1] != value:
                known.append((now_ns, value))
        time.sleep(max(0.0, start_ns + polls * POLL_INTERVAL_S * 1e9 - time.monotonic_ns()) / 1e9)
    return {
        column: _update_period(polls, failed[column], [t_ns for t_ns, _ in known[1:]])  # the first value is no change
        for column, known in changes.items()
    }


def _update_period(polls: int, failed: int, changed_ns: Sequence[int]) -> UpdatePeriod:
    periods_ms = [(after - before) / 1e6 for before, after in pairwise(changed_ns)]
    p10, p50, p90 = (round(quantile(periods_ms, share), 1) if periods_ms else None for share in (0.1, 0.5, 0.9))
    return UpdatePeriod(polls=polls, failed=failed, changes=len(changed_ns), p10_ms=p10, median_ms=p50, p90_ms=p90)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile, which is one of the values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _call_finding(key: str, series: Series) -> CallFinding:
    failures = [code for code in series.codes if code != 0]
    last_error = failures[-1] if len(failures) == len(series.codes) else 0
    us = series.us
    return CallFinding(
        call=key,
        columns=_COLUMNS.get(key, []),
        num_calls=len(series.codes),
        num_valid=len(series.codes) - len(failures),
        missing=null_reason(last_error).value if last_error else None,
        error=error_text(last_error) if last_error else None,
        p50_us=round(quantile(us, 0.5), 1) if us else None,
        p99_us=round(quantile(us, 0.99), 1) if len(us) >= MIN_FOR_P99 else None,
        max_us=round(max(us), 1) if us else None,
    )


_COLUMNS: Final[dict[str, list[str]]] = {
    **{field_key(item.id, item.scope): [item.column] for stream in STREAMS for item in stream.fields},
    **{query.name: list(query.columns) for stream in STREAMS for query in stream.queries},
    **{gpm_key(item.id): [item.column] for stream in STREAMS for item in stream.gpm},
    "gpm_window_ms": [WINDOW],
}
