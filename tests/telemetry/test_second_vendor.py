"""What a second vendor adds is one folder: the sidecar samples a GPU of it without any other line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inpaint_bench.core.records import read_record
from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry import process
from inpaint_bench.telemetry.driver import CounterWindow, DriverError, Source, Value, Xid
from inpaint_bench.telemetry.report import SidecarSpec, TelemetryReport, XidReport

from .support import leftovers, rows, settings

NAME = "ACME-7"
ABSENT = DriverError("acme_read", "no such sensor (ACME code E42)", Null.NOT_SUPPORTED, 42)
READINGS = {"power_instant_mw": 250_000, "energy_mj": 1_000_000, "temp_mem_c": 61}
QUERIES: dict[str, Any] = {"name": "ACME Accelerator", "memory": (64 << 30, 1 << 30, 3 << 30, 60 << 30), "mig_mode": 0}


class AcmeDriver:
    """A driver with a power sensor, an energy counter, a thermometer and nothing else."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def driver_version(self) -> str:
        return "7.1"

    def library_version(self) -> str:
        return "acme-3"

    def uuids(self) -> list[str]:
        return [NAME]

    def device(self, uuid: str) -> str:
        return uuid

    def uuid(self, handle: str) -> str:
        return handle

    def query(self, handle: str, name: str) -> Any:
        if name not in QUERIES:
            raise ABSENT
        return QUERIES[name]

    def fields(self, handle: str, names: Sequence[str]) -> list[Value]:
        return [Value(READINGS[name]) if name in READINGS else Value(None, ABSENT) for name in names]

    def counters(self, handle: str, names: Sequence[str]) -> CounterWindow | None:
        raise ABSENT

    def compute_processes(self, handle: str) -> list[int]:
        return [os.getpid()]

    def watch_xids(self, handle: str) -> None:
        raise ABSENT

    def next_xid(self) -> Xid | None:
        return None


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ModuleType("inpaint_bench.telemetry.acme")
    folder.open_source = lambda spec: Source("acme", AcmeDriver(), spec.uuids)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, folder.__name__, folder)


@pytest.mark.usefixtures("vendor")
def test_gpu_of_a_second_vendor_fills_the_parquet_parts_and_names_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings(source="acme", capture=None)
    spec = SidecarSpec(run_id="r-1", run_dir=str(tmp_path), settings=wanted, parent=os.getppid(), uuids=[NAME])
    monkeypatch.setattr(process, "send", lambda message: None)  # stdout is the test's
    monkeypatch.setattr(process, "wait_for_stop", lambda *_: "SIGTERM")
    assert process.SidecarProcess(spec).run() == 0
    fast, slow = (rows(tmp_path, f"samples_{name}") for name in ("fast", "slow"))
    assert fast["source"].unique().to_list() == ["acme"]
    assert fast["gpu_uuid"].unique().to_list() == [NAME]
    assert fast.select("power_instant_w", "energy_mj").unique().rows() == [(250.0, 1_000_000)]
    assert (slow["temp_mem_c"][0], slow["vram_total_mib"][0]) == (61, 65536)
    assert fast["nulls"][0] == "gpu_util_pct=not_supported;mem_active_pct=not_supported;power_avg1s_w=not_supported"
    assert rows(tmp_path, "samples_gpm")["nulls"][0].count("=not_supported") == 9
    report = read_record(tmp_path / "telemetry.json", TelemetryReport)
    assert report is not None
    (device,) = report.devices
    assert (report.status, report.source, report.driver, device.name) == ("complete", "acme", "7.1", "ACME Accelerator")
    assert device.xids == XidReport(count=None, reason="not_supported")
    assert device.errors["power_avg1s_w"] == {"42": len(fast)}
    assert leftovers(tmp_path) == []
