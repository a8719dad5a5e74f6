"""What the telemetry tests share: settings, tables of a run, small captures, a GPU that obeys the test."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.config import TelemetryConfig
from inpaint_bench.telemetry.client import Sidecar
from inpaint_bench.telemetry.nvml import FieldValue, MemoryInfo, NvmlError, Utilization
from inpaint_bench.telemetry.recording import save

CAPTURE = "h200-synthetic"


def settings(**changes: Any) -> TelemetryConfig:
    return TelemetryConfig(**{"name": "test", "source": "replay", "capture": CAPTURE, **changes})


def start(run_dir: Path, **changes: Any) -> Sidecar:
    return Sidecar.start(run_dir, "r-test", [], settings(**changes))


def pid_of(sidecar: Sidecar) -> int:
    assert sidecar._process is not None
    return sidecar._process.pid


def rows(run_dir: Path, table: str) -> pl.DataFrame:
    """All parts of a table, in order of time; polars sees no file whose name starts with a dot."""
    files = sorted((run_dir / table).glob("part-*.parquet"))
    return pl.concat([pl.read_parquet(file) for file in files]).sort("t_mono_ns")


def part_schema(run_dir: Path, table: str) -> pa.Schema:
    return pq.read_schema(next((run_dir / table).glob("part-*.parquet")))


def leftovers(run_dir: Path) -> list[str]:
    """Temporary files and journals."""
    return [str(path.relative_to(run_dir)) for path in run_dir.rglob(".*") if path.is_file()]


def small_capture(path: Path, energy: Sequence[int], loop_from_ms: float = 0.0) -> Path:
    """100 ms per answer of the energy counter, and nothing else."""
    series = {
        "t_ms": [100 * i for i in range(len(energy))],
        "code": [0] * len(energy),
        "value": list(energy),
    }
    facts = {key: {"t_ms": [0], "code": [0], "value": [key]} for key in ("driver_version", "nvml_version", "name")}
    meta = {"synthetic": True, "duration_ms": 100 * len(energy), "loop_from_ms": loop_from_ms}
    save(path, meta, {"field:83:0": series, **facts})
    return path


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


class FakeGpus:
    """An Nvml whose GPUs fail as told: `fail[uuid][call]` is the code of a call, "*" of all calls."""

    def __init__(self, num_gpus: int) -> None:
        self.known = [uuid(index) for index in range(num_gpus)]
        self.fail: dict[str, dict[str, int]] = {name: {} for name in self.known}
        self.asked: list[tuple[str, Any]] = []
        self.opened = 0

    def _do(self, handle: str, call: str, value: Any) -> Any:
        self.asked.append((handle, call))
        code = self.fail[handle].get(call) or self.fail[handle].get("*")
        if code:
            raise NvmlError(code, call)
        return value

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None: ...

    def driver_version(self) -> str:
        return "999.0"

    def nvml_version(self) -> str:
        return "13.999.0"

    def uuids(self) -> list[str]:
        return self.known

    def device(self, uuid: str) -> str:
        if uuid not in self.known:
            raise NvmlError(6, "device")
        return str(self._do(uuid, "device", uuid))

    def uuid(self, handle: str) -> str:
        return handle

    def fields(self, handle: str, ids: Sequence[tuple[int, int]]) -> list[FieldValue]:
        self._do(handle, "fields", None)
        answers = []
        for field_id, scope in ids:
            self.asked.append((handle, (field_id, scope)))
            code = self.fail[handle].get(f"{field_id}:{scope}", 0)
            answers.append(FieldValue(code, None if code else time.monotonic_ns() // 1_000_000))
        return answers

    def utilization(self, handle: str) -> Utilization:
        return Utilization(*self._do(handle, "utilization", (50, 5)))

    def memory(self, handle: str) -> MemoryInfo:
        return MemoryInfo(*self._do(handle, "memory", (8 << 30, 1 << 30, 2 << 30, 5 << 30)))

    def mig_mode(self, handle: str) -> int:
        return int(self._do(handle, "mig_mode", 0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda handle: self._do(handle, name, 1)
