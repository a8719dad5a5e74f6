"""Examines a real GPU for `doctor gpu`: which values it gives, what the calls cost, how often power and energy change.

Polls three fields faster than any run does, then records the GPU: every result that the sidecar would get, at its
rates, for replay (`--out`). Values and costs are those of the recorded calls. Only reads, and needs no root.

Return code, value and duration of each call are kept, failures included; of a process list, neither ids nor their
number. The GPU should be busy meanwhile: what is recorded is what replay plays.
"""

import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np

from inpaint_bench.core.config.bench import TelemetryConfig
from inpaint_bench.core.records import Device
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.telemetry.driver import CounterWindow, Driver, DriverError, Handle, Value
from inpaint_bench.telemetry.report import CaptureMeta
from inpaint_bench.telemetry.sampling.checks import GpuChecks
from inpaint_bench.telemetry.sampling.devices import open_devices
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import FAST, STREAMS, WINDOW, stream_rates

from .real import FIELDS, RealNvml, error_text, gpu_uuid, null_reason
from .replay import FORMAT, Capture, Series, field_key, gpm_key

HZ: Final = stream_rates(TelemetryConfig(name="nvml"))
T = TypeVar("T")


class NvmlRecorder:
    """A driver that passes every call on to another one and records the results in `calls`."""

    def __init__(self, inner: Driver) -> None:
        self.calls: dict[str, Series] = {}
        self._inner = inner
        self._start_ns = time.monotonic_ns()

    @property
    def elapsed_ms(self) -> float:
        return round((time.monotonic_ns() - self._start_ns) / 1e6, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # opening, closing, versions and UUIDs are not recorded, nor are Xids

    def query(self, handle: Handle, name: str) -> Any:
        """Record the result of a query under its name."""
        return self._call(name, lambda: self._inner.query(handle, name))

    def fields(self, handle: Handle, names: Sequence[str]) -> list[Value]:
        """Record the duration of the call, and every field under its own key."""
        key = "fields:" + ",".join("{}:{}".format(*FIELDS[name]) for name in names)
        t_ms, keys = self.elapsed_ms, [field_key(name) for name in names]
        try:
            # The call's own series has the durations; the values are in the series of the fields.
            results = self._call(key, lambda: self._inner.fields(handle, names), keep_value=False)
        except DriverError as error:
            self._append_all(keys, t_ms, [Value(None, error)] * len(keys))
            raise
        self._append_all(keys, t_ms, results)
        return results

    def counters(self, handle: Handle, names: Sequence[str]) -> CounterWindow | None:
        """Record the length of the window, and every metric under its own key."""
        t_ms, start_ns, keys = self.elapsed_ms, time.monotonic_ns(), [gpm_key(name) for name in names]
        try:
            window = self._inner.counters(handle, names)
        except DriverError as error:
            self._append_all(["gpm_window_ms", *keys], t_ms, [Value(None, error)] * (1 + len(keys)))
            raise
        # A read without a window gives nothing to replay: the replay's own first read has none either.
        if window is not None:
            self._append("gpm_window_ms", t_ms, 0, round(window.window_ms, 1), _us_since(start_ns))
            self._append_all(keys, t_ms, window.values)
        return window

    def compute_processes(self, handle: Handle) -> list[int]:
        """Record whether there is a process list."""
        return self._call("compute_processes", lambda: self._inner.compute_processes(handle), keep_value=False)

    def watch_xids(self, handle: Handle) -> None:
        """Record whether Xids can be watched for."""
        self._call("xids", lambda: self._inner.watch_xids(handle))

    def _call(self, key: str, call: Callable[[], T], keep_value: bool = True) -> T:
        t_ms, start_ns = self.elapsed_ms, time.monotonic_ns()
        try:
            value = call()
        except DriverError as error:
            self._append(key, t_ms, error.code, None, _us_since(start_ns))
            raise
        self._append(key, t_ms, 0, value if keep_value else None, _us_since(start_ns))
        return value

    def _append_all(self, keys: Sequence[str], t_ms: float, results: Sequence[Value]) -> None:
        for key, result in zip(keys, results, strict=True):
            self._append(key, t_ms, result.error.code if result.error else 0, result.value, result.latency_us or None)

    def _append(self, key: str, t_ms: float, code: int, value: Any, us: float | None = None) -> None:
        series = self.calls.setdefault(key, Series(t_ms=[], code=[], value=[], us=[]))
        series.t_ms.append(t_ms)
        series.codes.append(code)
        series.value.append(value)
        if us is not None:
            series.us.append(us)


def _us_since(start_ns: int) -> float:
    return round((time.monotonic_ns() - start_ns) / 1000, 1)


def record(nvml: Driver, uuid: str, seconds: float) -> Capture:
    """Record a GPU for some time. Raises DriverError if it cannot be opened, ValueError for an unknown UUID or MIG."""
    recorder = NvmlRecorder(nvml)
    recorded = cast(Driver, recorder)
    driver, nvml_version = nvml.driver_version(), nvml.library_version()
    # Added by hand: the recorder passes the calls for both versions on unrecorded.
    recorder.calls |= {"driver_version": Series([0], 0, [driver]), "nvml_version": Series([0], 0, [nvml_version])}
    devices = open_devices(recorded, [uuid])
    # The calls of the sidecar (process.py), so that the recording holds what a sidecar would query.
    checks = GpuChecks(recorded, devices, os.getpid(), lambda *_: None)
    checks.start()
    sampler = Sampler(recorded, devices, "nvml", lambda *_: None, HZ)
    end_ns = time.monotonic_ns() + round(seconds * 1e9)
    while time.monotonic_ns() < end_ns:
        sampler.sample_due()
        checks.run_if_due()
        time.sleep(max(0, min(end_ns, sampler.next_ns) - time.monotonic_ns()) / 1e9)
    checks.finish()
    meta = CaptureMeta(
        gpu=devices[0].facts.name,
        driver=driver,
        recorded_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        tool=f"{PRODUCER} doctor gpu",
        synthetic=False,
        duration_ms=recorder.elapsed_ms,
    )
    return Capture(format=FORMAT, meta=meta, calls=recorder.calls)


POLL_INTERVAL_S: Final = 0.005

# Key of a capture file -> the columns that it feeds.
_COLUMNS: Final = {
    **{field_key(item.name): item.columns[0] for stream in STREAMS for item in stream.fields},
    **{query.name: ", ".join(query.columns) for stream in STREAMS for query in stream.queries},
    **{gpm_key(item.name): item.columns[0] for stream in STREAMS for item in stream.gpm},
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
    return {
        item.columns[0]: _update_period(np.array(times_ns), x) for item, x in zip(FAST.fields, columns, strict=True)
    }


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
