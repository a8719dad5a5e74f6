"""The whole sidecar over NVIDIA's binding, whose driver calls are replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inpaint_bench.core.records import read_record
from inpaint_bench.telemetry.report import TelemetryReport, XidReport
from tests.telemetry.support import leftovers, rows, uuid

ROOT = Path(__file__).parents[3]
CHILD = """
import os, sys, threading
from types import SimpleNamespace
from inpaint_bench.telemetry import runtime
runtime.block_signals()
from inpaint_bench.telemetry import process
from tests.telemetry.nvml.fake_pynvml import driver
with driver() as (fake, nvml, handle):
    fake.pids = [os.getppid(), 1]
    fake.events = [SimpleNamespace(device=handle, eventType=8, eventData=63)]
    fake.metric_codes = {60: 3}
    def sicken():
        fake.ecc[1, 0] += 2
        fake.rows = (1, 2, 0, 1)
    threading.Timer(0.3, sicken).start()
    sys.exit(process.run_sidecar(sys.argv[1]))
"""


@pytest.mark.skipif(os.getpid() == 1, reason="the co-tenant of the test is pid 1")
def test_real_nvml_fills_tables_events_and_report(tmp_path: Path) -> None:
    settings = {"name": "nvml", "slow_hz": 5.0}
    spec = {"run_id": "r-1", "run_dir": str(tmp_path), "settings": settings, "uuids": [uuid(0)], "parent": os.getpid()}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(spec)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["type"] == "ready"
    time.sleep(1.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()

    gpm = rows(tmp_path, "samples_gpm")
    assert len(gpm) >= 4
    assert gpm["source"].unique().to_list() == ["nvml"]
    assert gpm["window_ms"].median() == pytest.approx(200, abs=10)
    assert gpm["tensor_active_pct"].unique().to_list() == [5.0]
    assert gpm["nulls"].unique().to_list() == ["nvlink_rx_mib_s=not_supported"]
    starts_ns = gpm["t_mono_ns"] - (gpm["window_ms"] * 1e6).cast(int)
    gaps_ms = (starts_ns[1:] - gpm["t_mono_ns"][:-1]) / 1e6
    assert gaps_ms.abs().max() < 20  # windows touch, but for how long a read takes

    events = rows(tmp_path, "events")
    reported = set(zip(events["kind"], events["detail"], strict=True))
    name = Path("/proc/1/comm").read_text().strip()
    assert reported == {
        ("xid", "63"),
        ("co_tenant", f"pid 1 {name}"),
        ("ecc", "2 new uncorrectable memory errors since the driver was loaded (0 to 2)"),
        ("ecc", "a row could not be remapped, during the run"),
    }
    report = read_record(tmp_path / "telemetry.json", TelemetryReport)
    assert report is not None
    (device,) = report.devices
    assert report.status == "complete"
    assert len(report.problems) == 4
    assert device.xids == XidReport(count=1, reason=None, numbers={"63": 1})
    assert device.processes.verdict == "co_tenant"
    assert device.health_start is not None
    assert device.health_end is not None
    assert device.health_start.remapped_rows_failed == 0
    assert device.health_end.remapped_rows_failed == 1
    assert leftovers(tmp_path) == []
