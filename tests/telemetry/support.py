"""What the telemetry tests share: settings, tables of a run, small captures, an Nvml that fails on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core.config.bench import TelemetryConfig
from inpaint_bench.telemetry.client import SidecarClient
from inpaint_bench.telemetry.driver import CounterWindow, Value, Xid
from inpaint_bench.telemetry.nvml.real import NvmlError, nvml_value
from inpaint_bench.telemetry.nvml.replay import FORMAT, Capture, Series, save
from inpaint_bench.telemetry.report import CaptureMeta

CAPTURE = "h200-synthetic"
START_NS = time.monotonic_ns()


def settings(**changes: Any) -> TelemetryConfig:
    """Return the settings of a replay, with changes."""
    return TelemetryConfig(**{"name": "test", "source": "replay", "capture": CAPTURE, **changes})


def start(run_dir: Path, **changes: Any) -> SidecarClient:
    """Start a sidecar that replays a capture."""
    return SidecarClient(run_dir, "r-test", [], settings(**changes))


def pid_of(sidecar: SidecarClient) -> int:
    """Return the process id of a running sidecar."""
    assert sidecar._child is not None
    return sidecar._child.process.pid


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition; the machine may be busy."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.01)


def rows(run_dir: Path, table: str) -> pl.DataFrame:
    """Read all parts of a table, in order of time."""
    files = sorted((run_dir / table).glob("part-*.parquet"))
    return pl.concat([pl.read_parquet(file) for file in files]).sort("t_mono_ns")


def part_schema(run_dir: Path, table: str) -> pa.Schema:
    """Return the schema of a table's first part."""
    return pq.read_schema(next((run_dir / table).glob("part-*.parquet")))


def leftovers(run_dir: Path) -> list[str]:
    """Return the temporary files and journals of a run directory."""
    return [str(path.relative_to(run_dir)) for path in run_dir.rglob(".*") if path.is_file()]


def small_capture(path: Path, energy_mj: Sequence[int], loop_from_ms: float = 0.0, **calls: Mapping[int, Any]) -> Path:
    """Save a capture with a value of the energy counter every 100 ms; other `calls` are {t_ms: value}."""
    duration_ms = 100.0 * len(energy_mj)
    series = {"field:83:0": Series([100.0 * i for i in range(len(energy_mj))], 0, list(energy_mj))}
    series |= {key: Series([0], 0, [key]) for key in ("driver_version", "nvml_version", "name")}
    series |= {key: Series(list(values), 0, list(values.values())) for key, values in calls.items()}
    meta = CaptureMeta(synthetic=True, duration_ms=duration_ms, loop_from_ms=loop_from_ms)
    save(path, Capture(format=FORMAT, meta=meta, calls=series))
    return path


def uuid(index: int) -> str:
    """Return the UUID of a fake GPU."""
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


class FakeNvml:
    """An Nvml whose GPUs fail on demand: `fail[uuid][call]` is the code of a call, "*" of all calls."""

    def __init__(self, num_gpus: int) -> None:
        self.gpus = [uuid(index) for index in range(num_gpus)]
        self.fail: dict[str, dict[str, int]] = {name: {} for name in self.gpus}
        self.calls: list[tuple[str, Any]] = []
        self.opened = 0
        self.processes: list[int] = []
        self.xids: list[Xid] = []  # not yet returned
        self.values: dict[str, Any] = {
            "utilization": (50, 5),
            "memory": (8 << 30, 1 << 30, 2 << 30, 5 << 30),
            "ecc_volatile": (0, 0),
            "ecc_aggregate": (4, 0),
            "remapped_rows": (0, 0, 0, 0),
            "mig_mode": 0,
            "name": "NVIDIA H999",
            "pci_bus_id": "00000000:99:00.0",
            "vbios": "99.00.99",
        }
        self._gpm_reads: dict[str, int] = {}

    def _call(self, handle: str, call: str, value: Any = None) -> Any:
        self.calls.append((handle, call))
        code = self.fail[handle].get(call) or self.fail[handle].get("*")
        if code:
            raise NvmlError(code, call)
        return value

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None: ...

    def driver_version(self) -> str:
        return "999.0"

    def library_version(self) -> str:
        return "13.999.0"

    def uuids(self) -> list[str]:
        return self.gpus

    def device(self, uuid: str) -> str:
        if uuid not in self.gpus:
            raise NvmlError(6, "device")
        return str(self._call(uuid, "device", uuid))

    def uuid(self, handle: str) -> str:
        return handle

    def query(self, handle: str, name: str) -> Any:
        return self._call(handle, name, self.values.get(name, 1))

    def fields(self, handle: str, names: Sequence[str]) -> list[Value]:
        self._call(handle, "fields")
        results = []
        for name in names:
            self.calls.append((handle, name))
            # counts from the start of the tests: the machine's own clock would soon be a power that no card has
            value = 60 if name == "temp_mem_c" else (time.monotonic_ns() - START_NS) // 1_000_000
            results.append(nvml_value(self.fail[handle].get(name, 0), value, name))
        return results

    def counters(self, handle: str, names: Sequence[str]) -> CounterWindow | None:
        self._call(handle, "counters")
        self._gpm_reads[handle] = self._gpm_reads.get(handle, 0) + 1
        if self._gpm_reads[handle] == 1:
            return None
        return CounterWindow(1000.0, [nvml_value(self.fail[handle].get(name, 0), 10.0, name) for name in names])

    def compute_processes(self, handle: str) -> list[int]:
        return list(self._call(handle, "compute_processes", self.processes))

    def watch_xids(self, handle: str) -> None:
        self._call(handle, "watch_xids")

    def next_xid(self) -> Xid | None:
        return self.xids.pop(0) if self.xids else None
