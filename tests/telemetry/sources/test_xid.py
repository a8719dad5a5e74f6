"""Xids: reported, counted, and never a reason to crash or to end late."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from inpaint_bench.core.records import XidReport
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.api import NvmlError, Xid
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX
from inpaint_bench.telemetry.nvml.recorder import HZ
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import FAST
from inpaint_bench.telemetry.sources.xid import XidMonitor
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeNvml, rows, small_capture, start, uuid


class Rig:
    def __init__(self, nvml: FakeNvml) -> None:
        self.nvml = nvml
        self.reported: list[tuple[str, str, str | None]] = []
        self.devices = open_devices(nvml, nvml.gpus)
        self.monitor = XidMonitor(nvml, self.devices, self._report)

    def _report(self, kind: str, detail: str, gpu_uuid: str | None) -> None:
        self.reported.append((kind, detail, gpu_uuid))

    def report(self, index: int = 0) -> XidReport:
        return self.devices[index].xids.report()

    def times_watched(self, index: int = 0) -> int:
        return self.nvml.calls.count((uuid(index), "watch_xids"))


def test_xid_is_reported_with_its_number_and_gpu() -> None:
    rig = Rig(FakeNvml(2))
    rig.nvml.xids = [Xid(uuid(1), 79), Xid(None, 999)]
    rig.monitor.watch()
    rig.monitor.poll()
    assert rig.reported == [("xid", "79", uuid(1)), ("xid", "999", None)]
    assert rig.report(0) == XidReport(count=0, reason=None, numbers={})
    assert rig.report(1) == XidReport(count=1, reason=None, numbers={"79": 1})


@pytest.mark.parametrize(("code", "reason"), [(3, "not_supported"), (4, "no_permission"), (13, "driver_too_old")])
def test_unsupported_xids_give_a_null_count_and_are_not_retried(code: int, reason: str) -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.fail[uuid(0)]["watch_xids"] = code
    for _ in range(3):
        rig.monitor.watch()
        rig.monitor.poll()
    assert rig.report() == XidReport(count=None, reason=reason, numbers={})
    assert rig.times_watched() == 1


def test_gpu_without_xids_does_not_affect_the_others() -> None:
    rig = Rig(FakeNvml(2))
    rig.nvml.fail[uuid(0)]["watch_xids"] = 3
    rig.nvml.xids = [Xid(uuid(1), 48)]
    rig.monitor.watch()
    rig.monitor.poll()
    assert (rig.report(0).count, rig.report(1).count) == (None, 1)


def test_transient_failure_is_retried() -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.fail[uuid(0)]["watch_xids"] = 999
    rig.monitor.watch()
    assert rig.report().reason == "error"
    rig.nvml.fail[uuid(0)].clear()
    rig.monitor.watch()
    assert rig.report() == XidReport(count=0, reason=None, numbers={})


def test_failed_poll_is_a_reason_and_watching_is_resumed() -> None:
    rig = Rig(FakeNvml(1))
    rig.monitor.watch()

    def fail() -> Xid | None:
        raise NvmlError(999, "nvmlEventSetWait_v2")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.nvml, "next_xid", fail)
        rig.monitor.poll()
    assert rig.report() == XidReport(count=0, reason="error", numbers={})
    rig.nvml.xids = [Xid(uuid(0), 63)]
    rig.monitor.watch()
    rig.monitor.poll()
    assert rig.report() == XidReport(count=1, reason=None, numbers={"63": 1})


def test_all_xids_are_counted_and_a_hundred_reported() -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.xids = [Xid(uuid(0), 31)] * 250
    rig.monitor.watch()
    rig.monitor.poll()
    assert len(rig.reported) == 100
    assert rig.report().numbers == {"31": 250}


def test_gpus_are_watched_anew_after_nvml_was_reopened() -> None:
    rig = Rig(FakeNvml(1))
    sampler = Sampler(rig.nvml, rig.devices, "nvml", lambda *_: None, HZ, rig.monitor.reopened)
    rig.monitor.watch()
    rig.monitor.watch()
    assert rig.times_watched() == 1
    sampler._reopen_at_s = 0.0
    sampler.sample(FAST, 0)
    assert (rig.nvml.opened, rig.times_watched()) == (1, 2)
    assert rig.report().reason is None


def test_lost_gpu_is_not_watched() -> None:
    rig = Rig(FakeNvml(1))
    rig.devices[0].lost = True
    rig.monitor.watch()
    rig.monitor.poll()
    assert rig.report() == XidReport(count=None, reason="gpu_lost", numbers={})


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


def test_sidecar_writes_an_xid_as_an_event_and_ends_within_a_second(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"xid{SUFFIX}", [0] * 50, xids={0: None, 200: 79})
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.6)
    stop_s = time.monotonic()
    report = sidecar.stop()
    assert time.monotonic() - stop_s < 1.0
    events = rows(tmp_path / "run", "events")
    assert events.select("kind", "detail").rows() == [("xid", "79")]
    assert report.devices[0].xids == XidReport(count=1, reason=None, numbers={"79": 1})
    assert report.problems == ["xid: 79"]


def test_capture_without_xids_has_a_null_count_and_its_reason(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"none{SUFFIX}", [0] * 50)
    (device,) = start(tmp_path / "run", capture=str(path)).stop().devices
    assert device.xids == XidReport(count=None, reason="not_in_capture", numbers={})
