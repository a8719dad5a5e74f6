"""What the telemetry tests share: settings, tables of a run, small captures, a GPU that obeys the test."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core.config import TelemetryConfig
from inpaint_bench.telemetry.client import Sidecar
from inpaint_bench.telemetry.nvml.api import (
    EccErrors,
    FieldValue,
    GpmWindow,
    MemoryInfo,
    NvmlError,
    RemappedRows,
    Utilization,
    Xid,
)
from inpaint_bench.telemetry.nvml.capture_file import PACKAGED, SUFFIX, save

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


def small_capture(path: Path, energy: Sequence[int], loop_from_ms: float = 0.0, **more: Mapping[int, Any]) -> Path:
    """100 ms per answer of the energy counter, and `more`: for a call its values by the ms since the start."""
    series = {
        "t_ms": [100 * i for i in range(len(energy))],
        "code": [0] * len(energy),
        "value": list(energy),
    }
    facts = {key: {"t_ms": [0], "code": [0], "value": [key]} for key in ("driver_version", "nvml_version", "name")}
    meta = {"synthetic": True, "duration_ms": 100 * len(energy), "loop_from_ms": loop_from_ms}
    for call, values in more.items():
        facts[call] = {"t_ms": list(values), "code": [0] * len(values), "value": list(values.values())}
    save(path, meta, {"field:83:0": series, **facts})
    return path


def hurried(name: str, times: float, folder: Path) -> Path:
    """A packaged capture that plays so many times faster: the same answers, sooner."""
    content = json.loads(gzip.decompress((PACKAGED / f"{name}{SUFFIX}").read_bytes()))
    for series in content["calls"].values():
        series["t_ms"] = [t_ms / times for t_ms in series["t_ms"]]
    for key in {"duration_ms", "loop_from_ms"} & content["meta"].keys():
        content["meta"][key] /= times
    path = folder / f"{name}{SUFFIX}"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
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
        self.processes: list[int] = []
        self.xids: list[Xid] = []  # to be told, one per wait
        self._gpm_reads: dict[str, int] = {}

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

    def gpm(self, handle: str, ids: Sequence[int]) -> GpmWindow | None:
        self._do(handle, "gpm", None)
        self._gpm_reads[handle] = self._gpm_reads.get(handle, 0) + 1
        if self._gpm_reads[handle] == 1:
            return None
        codes = [self.fail[handle].get(f"gpm:{metric}", 0) for metric in ids]
        answers = [FieldValue(c, None if c else float(metric)) for c, metric in zip(codes, ids, strict=True)]
        return GpmWindow(1000.0, answers)

    def ecc_volatile(self, handle: str) -> EccErrors:
        return EccErrors(*self._do(handle, "ecc_volatile", (0, 0)))

    def ecc_aggregate(self, handle: str) -> EccErrors:
        return EccErrors(*self._do(handle, "ecc_aggregate", (4, 0)))

    def remapped_rows(self, handle: str) -> RemappedRows:
        return RemappedRows(*self._do(handle, "remapped_rows", (0, 0, 0, 0)))

    def compute_processes(self, handle: str) -> list[int]:
        return list(self._do(handle, "compute_processes", self.processes))

    def event_set(self) -> list[str]:
        return []

    def watch_xids(self, events: list[str], handle: str) -> None:
        self._do(handle, "watch_xids", None)
        events.append(handle)

    def next_xid(self, events: list[str], timeout_ms: int) -> Xid | None:
        if self.xids:
            return self.xids.pop(0)
        time.sleep(min(timeout_ms, 10) / 1000)
        return None

    def free_events(self, events: list[str]) -> None:
        self.asked.append(("", "free_events"))

    def mig_mode(self, handle: str) -> int:
        return int(self._do(handle, "mig_mode", 0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda handle: self._do(handle, name, 1)
