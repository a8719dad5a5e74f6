"""telemetry.json and the metadata of the parts: what the sidecar was told, what it did and what that cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from inpaint_bench.core.environment import boot_id
from inpaint_bench.core.records import DeviceReport, StorageReport, StreamReport, TelemetryReport
from inpaint_bench.core.schema import PRODUCER, SCHEMA_VERSION
from inpaint_bench.telemetry.devices import DeviceState
from inpaint_bench.telemetry.sampling.sampler import Ticker
from inpaint_bench.telemetry.sampling.streams import FAST, GPM, GPM_MAX_HZ, STREAMS

from .spec import SidecarSpec

if TYPE_CHECKING:
    from .process import SidecarProcess


def stream_rates(spec: SidecarSpec) -> dict[str, float]:
    """Return the rate of each stream in Hz. gpm has that of slow, at most what leaves it a window."""
    return {"fast": spec.fast_hz, "slow": spec.slow_hz, "gpm": min(spec.slow_hz, GPM_MAX_HZ)}


def part_metadata(spec: SidecarSpec, source: str, driver: str, nvml: str) -> dict[str, dict[str, str]]:
    """Return the schema metadata of each table's parts."""
    common = {
        "schema_version": str(SCHEMA_VERSION),
        "producer": PRODUCER,
        "run_id": spec.run_id,
        "source": source,
        "driver": driver,
        "nvml": nvml,
        "boot_id": boot_id() or "unknown",
        "clock": "CLOCK_MONOTONIC",
    }
    metadata = {"events": common}
    for stream in STREAMS:
        ids = [f"{item.column}={item.id}/{item.scope}" for item in stream.fields]
        ids += [f"{item.column}={item.id}" for item in stream.gpm]
        metadata[stream.table] = {
            **common,
            "period_ms": f"{1000 / stream_rates(spec)[stream.name]:g}",
            "fields": " ".join(ids) + (" (GPM metric)" if stream is GPM else " (NVML field/scope)"),
        }
    metadata[FAST.table]["energy_scope"] = "gpu_board"
    return metadata


def build_report(sidecar: SidecarProcess, status: str, reason: str | None = None) -> TelemetryReport:
    """Return telemetry.json as of now, starting from what is fixed; `reason` is why the sidecar ended."""
    ended = status != "running"
    return msgspec.structs.replace(
        sidecar.identity,
        status=status,
        reason=reason,
        updated_unix_ns=time.time_ns(),
        ended_unix_ns=time.time_ns() if ended else None,
        ended_mono_ns=time.monotonic_ns() if ended else None,
        devices=[_device_report(device) for device in sidecar.sampler.devices],
        streams={name: _stream_report(ticker) for name, ticker in sidecar.sampler.tickers.items()},
        dcgm=sidecar.dcgm.report() if sidecar.dcgm else None,
        tables=sidecar.tables.counts(),
        storage=StorageReport(errors=sidecar.tables.errors, error=sidecar.tables.error),
        problems=list(sidecar.problems),
        problems_omitted=sidecar.problems_omitted,
        cpu_s=round(time.process_time(), 3),
        max_rss_mib=_peak_rss_mib(),
    )


def _stream_report(ticker: Ticker) -> StreamReport:
    return StreamReport(
        hz=1e9 / ticker.period_ns, ticks_due=ticker.due, ticks_done=ticker.done, ticks_skipped=ticker.skipped
    )


def _device_report(device: DeviceState) -> DeviceReport:
    errors: dict[str, dict[str, int]] = {}
    absent: list[str] = []
    for reader in device.readers.values():
        absent += sorted(reader.absent)
        for (column, code), count in sorted(reader.errors.items()):
            if column not in reader.absent:
                errors.setdefault(column, {})[str(code)] = count
    return DeviceReport(
        **msgspec.structs.asdict(device.facts),
        power_limit_last_w=device.power_limit_w,
        lost=device.lost,
        absent=absent,
        errors=errors,
        health_start=device.health_start,
        health_end=device.health_end,
        processes=device.processes.report(),
        xids=device.xids.report(),
    )


def _peak_rss_mib() -> float | None:
    # Not getrusage: its maximum also holds the parent's, from before exec.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return round(int(peak) / 1024, 1) if peak else None
