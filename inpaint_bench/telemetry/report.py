"""telemetry.json and the metadata of the parts: what the sidecar was told, what it did and what that cost."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from inpaint_bench.core.environment import boot_id
from inpaint_bench.core.records import CaptureSource, DeviceReport, StorageReport, StreamReport, TelemetryReport
from inpaint_bench.core.schema import PRODUCER, SCHEMA_VERSION
from inpaint_bench.telemetry.devices import DeviceState
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import FAST, GPM, GPM_MAX_HZ, STREAMS
from inpaint_bench.telemetry.storage.sidecar_tables import SidecarTables

from .spec import SidecarSpec

if TYPE_CHECKING:
    from inpaint_bench.telemetry.sources.dcgm import DcgmMonitor

_MAX_PROBLEMS: Final = 200  # a disk that fails now and then causes thousands in a week; `events` has each one


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
        "clock": "CLOCK_MONOTONIC",
    }
    if boot := boot_id():
        common["boot_id"] = boot
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


class ReportBuilder:
    """Builds telemetry.json at any moment of a run from the parts of the sidecar."""

    def __init__(
        self,
        spec: SidecarSpec,
        driver: str,
        nvml: str,
        capture: CaptureSource | None,
        source: str,
        sampler: Sampler,
        tables: SidecarTables,
        dcgm: DcgmMonitor | None = None,
    ) -> None:
        self._fixed: dict[str, Any] = {
            "run_id": spec.run_id,
            "source": source,
            "driver": driver,
            "nvml": nvml,
            "capture": capture,
            "boot_id": boot_id(),
            "host": platform.node(),
            "pid": os.getpid(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "started_unix_ns": time.time_ns(),
            "started_mono_ns": time.monotonic_ns(),
            "part_s": spec.part_s,
            "journal_s": spec.journal_s,
        }
        self._sampler = sampler
        self._tables = tables
        self._dcgm = dcgm
        self._problems: list[str] = []
        self._problems_omitted = 0

    def add_problem(self, sentence: str) -> bool:
        """Keep a problem for the report; return False from the 201st on, which are only counted."""
        if len(self._problems) >= _MAX_PROBLEMS:
            self._problems_omitted += 1
            return False
        self._problems.append(sentence)
        return True

    def build(self, status: str, reason: str | None = None) -> TelemetryReport:
        """Return the report as of now; `reason` is why the sidecar ended."""
        ended = status != "running"
        return TelemetryReport(
            status=status,
            reason=reason,
            **self._fixed,
            updated_unix_ns=time.time_ns(),
            ended_unix_ns=time.time_ns() if ended else None,
            ended_mono_ns=time.monotonic_ns() if ended else None,
            devices=[_device_report(device) for device in self._sampler.devices],
            streams={stream.name: self._stream_report(stream.name) for stream in STREAMS},
            dcgm=self._dcgm.report() if self._dcgm else None,
            tables=self._tables.counts(),
            storage=StorageReport(errors=self._tables.errors, error=self._tables.error),
            problems=list(self._problems),
            problems_omitted=self._problems_omitted,
            cpu_s=round(time.process_time(), 3),
            max_rss_mib=_peak_rss_mib(),
        )

    def _stream_report(self, name: str) -> StreamReport:
        ticker, durations = self._sampler.tickers[name], self._sampler.durations[name]
        return StreamReport(
            hz=1e9 / ticker.period_ns,
            ticks_due=ticker.due,
            ticks_done=ticker.done,
            ticks_skipped=ticker.skipped,
            read_us_p50=durations.quantile_us(0.5),
            read_us_p99=durations.quantile_us(0.99),
            read_us_max=round(durations.max_us, 1),
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
