"""The checks every 30 s: co-tenants on our GPUs, and the power limit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from inpaint_bench.core.records import CoTenant
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX
from inpaint_bench.telemetry.sources.periodic import PeriodicChecks
from inpaint_bench.telemetry.sources.xid import XidMonitor
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeNvml, rows, small_capture, start, uuid

NOBODY = 2**22 + 7  # above the largest pid that Linux gives


class Rig:
    def __init__(self, nvml: FakeNvml) -> None:
        self.reported: list[tuple[str, str, str | None]] = []
        self.devices = open_devices(nvml, nvml.gpus)
        xids = XidMonitor(nvml, self.devices, self._report)
        self.checks = PeriodicChecks(nvml, self.devices, os.getpid(), xids, self._report)

    def _report(self, kind: str, detail: str, gpu_uuid: str | None = None) -> None:
        self.reported.append((kind, detail, gpu_uuid))


@pytest.mark.skipif(os.getpid() == 1, reason="the co-tenant of the test is pid 1")
def test_co_tenant_is_reported_once_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._in_initial_namespace", lambda: True)
    nvml = FakeNvml(2)
    nvml.processes = [os.getpid(), 1]
    rig = Rig(nvml)
    for _ in range(3):
        rig.checks.run()
    name = Path("/proc/1/comm").read_text().strip()
    assert rig.reported == [("co_tenant", f"pid 1 {name}", uuid(0)), ("co_tenant", f"pid 1 {name}", uuid(1))]
    report = rig.devices[0].processes.report()
    assert report.verdict == "co_tenant"
    assert report.co_tenants == [CoTenant(1, name)]
    assert report.checks == 3


def test_refused_process_list_gives_no_verdict_but_a_reason() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["compute_processes"] = 4
    rig = Rig(nvml)
    rig.checks.run()
    report = rig.devices[0].processes.report()
    assert (report.verdict, report.reason, report.failed, rig.reported) == (None, "no_permission", 1, [])


def test_another_pid_namespace_makes_the_verdict_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._in_initial_namespace", lambda: False)
    nvml = FakeNvml(1)
    nvml.processes = [NOBODY]
    rig = Rig(nvml)
    rig.checks.run()
    report = rig.devices[0].processes.report()
    assert (report.verdict, report.unknown_pids, rig.reported) == ("unknown", [NOBODY], [])


def test_at_most_a_hundred_co_tenants_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._in_initial_namespace", lambda: True)
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._is_alive", lambda pid: True)
    nvml = FakeNvml(1)
    rig = Rig(nvml)
    for turn in range(13):
        nvml.processes = list(range(NOBODY + 10 * turn, NOBODY + 10 * turn + 10))
        rig.checks.run()
    assert len(rig.reported) == 100
    assert rig.devices[0].processes.report().num_co_tenants == 130


def test_internal_error_of_a_check_is_reported_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unusual /proc must stop neither the checks nor the closing of the run's parts."""

    def broken(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/1")

    rig = Rig(FakeNvml(1))
    monkeypatch.setattr("inpaint_bench.telemetry.sources.periodic.classify", broken)
    for _ in range(3):
        rig.checks.run()
    processes = rig.devices[0].processes
    assert processes.failed == 3
    assert processes.report().verdict is None
    assert "Permission denied" in str(processes.report().reason)
    assert [(kind, gpu) for kind, _, gpu in rig.reported] == [("check_failed", uuid(0))]


def test_checks_run_at_the_start_and_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("inpaint_bench.telemetry.sources.periodic.time", clock)
    nvml = FakeNvml(1)
    rig = Rig(nvml)
    checks = []
    for now_s in (1000.0, 1000.1, 1029.9, 1030.0, 1059.9, 1095.0):  # noqa: B007 - read by the clock
        rig.checks.run_if_due()
        checks.append(nvml.calls.count((uuid(0), "compute_processes")))
    assert checks == [1, 1, 1, 2, 2, 3]


def test_every_change_of_the_power_limit_is_reported_with_both_values() -> None:
    """Through the real adapter, starting from the limit that the device was described with."""
    with driver() as (fake, nvml, handle):
        devices = open_devices(nvml, [handle])
        reported: list[tuple[str, str, str | None]] = []
        report = lambda *event: reported.append(event)  # noqa: E731
        checks = PeriodicChecks(nvml, devices, os.getpid(), XidMonitor(nvml, devices, report), report)
        checks.run()
        assert reported == []
        fake.power_limit_mw = 450_500
        checks.run()
        checks.run()
        fake.fail["nvmlDeviceGetEnforcedPowerLimit"] = 999
        checks.run()
        del fake.fail["nvmlDeviceGetEnforcedPowerLimit"]
        fake.power_limit_mw = 700_000
        checks.run()
    assert reported == [("power_limit", "700 W to 450.5 W", handle), ("power_limit", "450.5 W to 700 W", handle)]


def test_unsupported_power_limit_is_no_change() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["power_limit_mw"] = 3
    rig = Rig(nvml)
    rig.checks.run()
    assert (rig.reported, rig.devices[0].power_limit_w) == ([], None)


def test_power_limit_that_is_first_given_later_is_no_change() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["power_limit_mw"] = 999
    rig = Rig(nvml)
    rig.checks.run()
    nvml.fail[uuid(0)].clear()
    rig.checks.run()
    assert (rig.reported, rig.devices[0].power_limit_w) == ([], 0.001)


def test_sidecar_writes_a_co_tenant_and_a_power_limit_change_as_events(tmp_path: Path) -> None:
    path = small_capture(
        tmp_path / f"shared{SUFFIX}",
        [0] * 50,
        compute_processes={0: ["ours", "foreign"]},
        power_limit_mw={0: 700_000, 200: 500_000},
    )
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.4)
    report = sidecar.stop()
    events = rows(tmp_path / "run", "events")
    detail = events.select("kind", "detail").rows()
    assert detail == [("co_tenant", "pid -2 in the capture"), ("power_limit", "700 W to 500 W")]
    (device,) = report.devices
    assert device.processes.verdict == "co_tenant"
    assert device.processes.checks == 2  # at the start and at the end
    assert (device.power_limit_w, device.power_limit_last_w) == (700, 500)


def test_capture_without_processes_gives_no_verdict(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"old{SUFFIX}", [0] * 50)
    (device,) = start(tmp_path / "run", capture=str(path)).stop().devices
    assert (device.processes.verdict, device.processes.reason) == (None, "not_in_capture")
