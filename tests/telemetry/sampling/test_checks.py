"""Checks beside the samples: co-tenants, power limits, Xids and error counters, none of which may end a run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from inpaint_bench.core.records import read_record
from inpaint_bench.telemetry.driver import RECOVERY_ACTIONS, Xid
from inpaint_bench.telemetry.nvml.real import NvmlError
from inpaint_bench.telemetry.report import CoTenant, GpuHealth, TelemetryReport, XidReport
from inpaint_bench.telemetry.sampling.checks import GpuChecks, read_health, worsened
from inpaint_bench.telemetry.sampling.devices import open_devices
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeNvml, start, uuid

NO_PROCESS = 2**22 + 7  # above the largest pid that Linux gives
COUNTERS: dict[str, Any] = {
    "ecc_corrected_volatile": 3,
    "ecc_uncorrected_volatile": 0,
    "ecc_corrected_aggregate": 7,
    "ecc_uncorrected_aggregate": 2,
    "remapped_rows_corrected": 1,
    "remapped_rows_uncorrected": 2,
    "remapped_rows_pending": 0,
    "remapped_rows_failed": 0,
    "pcie_replays": 5,
    "recovery_action": "gpu_reset",
}


class Rig:
    def __init__(self, nvml: FakeNvml) -> None:
        self.nvml = nvml
        self.reported: list[tuple[str, str, str | None]] = []
        self.devices = open_devices(nvml, nvml.gpus)
        self.checks = GpuChecks(nvml, self.devices, os.getpid(), self._report)

    def _report(self, kind: str, detail: str, gpu_uuid: str | None = None) -> None:
        self.reported.append((kind, detail, gpu_uuid))

    def xids(self, index: int = 0) -> XidReport:
        return self.devices[index].xids

    def times_watched(self, index: int = 0) -> int:
        return self.nvml.calls.count((uuid(index), "watch_xids"))


@pytest.mark.skipif(os.getpid() == 1, reason="the co-tenant of the test is pid 1")
def test_co_tenant_is_reported_once_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sampling.devices._in_initial_namespace", lambda: True)
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


def test_at_most_a_hundred_co_tenants_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sampling.devices._in_initial_namespace", lambda: True)
    monkeypatch.setattr("inpaint_bench.telemetry.sampling.devices._is_alive", lambda pid: True)
    nvml = FakeNvml(1)
    rig = Rig(nvml)
    for turn in range(13):
        nvml.processes = list(range(NO_PROCESS + 10 * turn, NO_PROCESS + 10 * turn + 10))
        rig.checks.run()
    assert len(rig.reported) == 100
    assert rig.devices[0].processes.report().num_co_tenants == 130


def test_internal_error_of_a_check_is_reported_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unusual /proc must stop neither the checks nor the closing of the run's parts."""

    def broken(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/1")

    rig = Rig(FakeNvml(1))
    monkeypatch.setattr("inpaint_bench.telemetry.sampling.checks.classify", broken)
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
    monkeypatch.setattr("inpaint_bench.telemetry.sampling.checks.time", clock)
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
        checks = GpuChecks(nvml, devices, os.getpid(), report)
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


def test_power_limit_that_is_first_given_later_is_no_change() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["power_limit_mw"] = 999
    rig = Rig(nvml)
    rig.checks.run()
    nvml.fail[uuid(0)].clear()
    rig.checks.run()
    assert (rig.reported, rig.devices[0].power_limit_w) == ([], 0.001)


def test_xid_is_reported_with_its_number_and_gpu() -> None:
    rig = Rig(FakeNvml(2))
    rig.nvml.xids = [Xid(uuid(1), 79), Xid(None, 999)]
    rig.checks.watch_xids()
    rig.checks.poll_xids()
    assert rig.reported == [("xid", "79", uuid(1)), ("xid", "999", None)]
    assert rig.xids(0) == XidReport(count=0, reason=None, numbers={})
    assert rig.xids(1) == XidReport(count=1, reason=None, numbers={"79": 1})


@pytest.mark.parametrize(("code", "reason"), [(3, "not_supported"), (4, "no_permission"), (13, "driver_too_old")])
def test_unsupported_xids_give_a_null_count_and_are_not_retried(code: int, reason: str) -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.fail[uuid(0)]["watch_xids"] = code
    for _ in range(3):
        rig.checks.watch_xids()
        rig.checks.poll_xids()
    assert rig.xids() == XidReport(count=None, reason=reason, numbers={})
    assert rig.times_watched() == 1


def test_gpu_without_xids_does_not_affect_the_others() -> None:
    rig = Rig(FakeNvml(2))
    rig.nvml.fail[uuid(0)]["watch_xids"] = 3
    rig.nvml.xids = [Xid(uuid(1), 48)]
    rig.checks.watch_xids()
    rig.checks.poll_xids()
    assert (rig.xids(0).count, rig.xids(1).count) == (None, 1)


def test_transient_failure_is_retried() -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.fail[uuid(0)]["watch_xids"] = 999
    rig.checks.watch_xids()
    assert rig.xids().reason == "error"
    rig.nvml.fail[uuid(0)].clear()
    rig.checks.watch_xids()
    assert rig.xids() == XidReport(count=0, reason=None, numbers={})


def test_failed_poll_is_a_reason_and_watching_is_resumed() -> None:
    rig = Rig(FakeNvml(1))
    rig.checks.watch_xids()

    def fail() -> Xid | None:
        raise NvmlError(999, "nvmlEventSetWait_v2")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.nvml, "next_xid", fail)
        rig.checks.poll_xids()
    assert rig.xids() == XidReport(count=0, reason="error", numbers={})
    rig.nvml.xids = [Xid(uuid(0), 63)]
    rig.checks.watch_xids()
    rig.checks.poll_xids()
    assert rig.xids() == XidReport(count=1, reason=None, numbers={"63": 1})


def test_all_xids_are_counted_and_a_hundred_reported() -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.xids = [Xid(uuid(0), 31)] * 250
    rig.checks.watch_xids()
    rig.checks.poll_xids()
    assert len(rig.reported) == 100
    assert rig.xids().numbers == {"31": 250}


def test_lost_gpu_is_not_watched() -> None:
    rig = Rig(FakeNvml(1))
    rig.devices[0].lost = True
    rig.checks.watch_xids()
    rig.checks.poll_xids()
    assert rig.xids() == XidReport(count=None, reason="gpu_lost", numbers={})


def test_real_nvml_distinguishes_no_event_xid_and_failure_and_frees_the_events() -> None:
    with driver() as (fake, nvml, handle):
        assert nvml.next_xid() is None  # nothing is watched
        nvml.watch_xids(handle)
        assert nvml.next_xid() is None
        fake.events = [SimpleNamespace(device=handle, eventType=0x8, eventData=79)] * 2
        assert nvml.next_xid() == Xid(handle, 79)
        fake.fail["nvmlDeviceGetUUID"] = 15
        assert nvml.next_xid() == Xid(None, 79)
        fake.fail["nvmlEventSetWait_v2"] = 15
        with pytest.raises(NvmlError) as lost:
            nvml.next_xid()
        assert lost.value.code == 15
        nvml.close()
        assert fake.called.index("nvmlEventSetFree") < fake.called.index("nvmlShutdown")
    assert pynvml.nvmlEventTypeXidCriticalError == 0x8
    assert {name for name, _ in pynvml.c_nvmlEventData_t._fields_} >= {"device", "eventType", "eventData"}


def test_every_counter_comes_from_its_own_call() -> None:
    with driver() as (_, nvml, handle):
        assert read_health(nvml, handle) == GpuHealth(**COUNTERS, nulls={})


def test_missing_counter_is_null_with_its_reason_and_affects_no_other() -> None:
    with driver() as (fake, nvml, handle):
        fake.fail = {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetRemappedRows": 4}
        fake.fields[230] = (3, 0)
        health = read_health(nvml, handle)
    assert health.pcie_replays == 5
    assert health.ecc_uncorrected_volatile is None
    assert health.nulls["ecc_uncorrected_volatile"] == "not_supported"
    assert health.nulls["remapped_rows_failed"] == "no_permission"
    assert health.nulls["recovery_action"] == "not_supported"
    assert {name for name in COUNTERS if getattr(health, name) is None} == health.nulls.keys()


def test_lost_gpu_has_a_reason_for_every_counter() -> None:
    nvml = FakeNvml(1)
    nvml.fail[uuid(0)]["*"] = 15
    health = read_health(nvml, uuid(0))
    assert health.nulls == dict.fromkeys(COUNTERS, "gpu_lost")
    assert worsened(GpuHealth(**COUNTERS), health) == []


@pytest.mark.parametrize(
    ("start", "end", "phrase"),
    [
        ({}, {}, None),
        ({}, {"ecc_corrected_volatile": 99, "pcie_replays": 50}, None),
        ({}, {"ecc_uncorrected_volatile": 2}, "2 new uncorrectable memory errors since the driver was loaded (0 to 2)"),
        ({}, {"ecc_uncorrected_aggregate": 1}, None),  # a counter that decreased is no new error
        ({"ecc_uncorrected_volatile": None}, {"ecc_uncorrected_volatile": 2}, None),
        ({}, {"remapped_rows_uncorrected": 3}, "1 new rows remapped after uncorrectable errors (2 to 3)"),
        ({}, {"remapped_rows_failed": 1}, "a row could not be remapped, during the run"),
        ({"remapped_rows_failed": 1}, {"remapped_rows_failed": 1}, "a row could not be remapped, before the run"),
    ],
)
def test_only_new_uncorrectable_errors_and_failed_remaps_are_reported(
    start: dict[str, int], end: dict[str, int], phrase: str | None
) -> None:
    before, after = (GpuHealth(**{**COUNTERS, **changes}) for changes in (start, end))
    assert worsened(before, after) == ([phrase] if phrase else [])


@pytest.mark.subprocess
def test_health_at_the_start_is_on_disk_during_the_run(tmp_path: Path) -> None:
    sidecar = start(tmp_path)
    running = read_record(tmp_path / "telemetry.json", TelemetryReport)
    assert running is not None
    (device,) = running.devices
    assert device.health_start is not None
    assert device.health_start.remapped_rows_failed == 0
    assert device.health_start.recovery_action == "none"
    assert device.health_end is None
    assert sidecar.stop().devices[0].health_end == device.health_start
    assert not hasattr(sidecar.devices[0], "health_start")  # the manifest gets what does not change


def test_recovery_actions_are_numbered_as_the_binding_does() -> None:
    prefix = "NVML_GPU_RECOVERY_ACTION_"
    binding = {name.removeprefix(prefix).lower(): v for name, v in vars(pynvml).items() if name.startswith(prefix)}
    assert binding.items() <= {name: number for number, name in enumerate(RECOVERY_ACTIONS)}.items()
