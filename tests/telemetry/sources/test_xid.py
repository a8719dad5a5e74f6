"""Xids: reported, counted, and never a reason to crash or to end late."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from inpaint_bench.core.records import XidReport
from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.api import NvmlError, Xid
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX
from inpaint_bench.telemetry.nvml.recorder import HZ
from inpaint_bench.telemetry.nvml.reinit_barrier import NvmlReinitBarrier
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import FAST
from inpaint_bench.telemetry.sources.xid import WAIT_MS, XidMonitor
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeNvml, rows, small_capture, start, uuid, wait_until


class Rig:
    def __init__(self, nvml: FakeNvml) -> None:
        self.nvml = nvml
        self.reported: list[tuple[str, str, str | None]] = []
        self.barrier = NvmlReinitBarrier()
        self.devices = open_devices(nvml, nvml.gpus)
        self.monitor = XidMonitor(nvml, self.devices, self.barrier, self._report)

    def _report(self, kind: str, detail: str, gpu_uuid: str | None) -> None:
        self.reported.append((kind, detail, gpu_uuid))

    def report(self, index: int = 0) -> XidReport:
        return self.devices[index].xids.report()


def test_xid_is_reported_with_its_number_and_gpu() -> None:
    rig = Rig(FakeNvml(2))
    rig.nvml.xids = [Xid(uuid(1), 79), Xid(None, 999)]
    rig.monitor.start()
    wait_until(lambda: len(rig.reported) == 2)
    assert rig.monitor.stop()
    assert rig.reported == [("xid", "79", uuid(1)), ("xid", "999", None)]
    assert rig.report(0) == XidReport(count=0, reason=None, numbers={})
    assert rig.report(1) == XidReport(count=1, reason=None, numbers={"79": 1})


@pytest.mark.parametrize(("code", "reason"), [(3, "not_supported"), (4, "no_permission"), (13, "driver_too_old")])
def test_unsupported_xids_give_a_null_count_and_end_the_thread(code: int, reason: str) -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.fail[uuid(0)]["watch_xids"] = code
    rig.monitor.start()
    wait_until(lambda: not rig.monitor._thread.is_alive())
    assert rig.report() == XidReport(count=None, reason=reason, numbers={})
    assert ("", "free_events") in rig.nvml.calls


def test_gpu_without_xids_does_not_affect_the_others() -> None:
    rig = Rig(FakeNvml(2))
    rig.nvml.fail[uuid(0)]["watch_xids"] = 3
    rig.nvml.xids = [Xid(uuid(1), 48)]
    rig.monitor.start()
    wait_until(lambda: bool(rig.reported))
    assert rig.monitor.stop()
    assert (rig.report(0).count, rig.report(1).count) == (None, 1)


def test_transient_failure_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FakeNvml(1))
    rig.monitor._backoff_s = 0.01
    rig.nvml.fail[uuid(0)]["watch_xids"] = 999
    rig.monitor.start()
    wait_until(lambda: rig.report().reason == "error")
    rig.nvml.fail[uuid(0)].clear()
    wait_until(lambda: rig.report() == XidReport(count=0, reason=None, numbers={}))
    assert rig.monitor.stop()


def test_all_xids_are_counted_and_a_hundred_reported() -> None:
    rig = Rig(FakeNvml(1))
    rig.nvml.xids = [Xid(uuid(0), 31)] * 250
    rig.monitor.start()
    wait_until(lambda: not rig.nvml.xids)
    assert rig.monitor.stop()
    assert len(rig.reported) == 100
    assert rig.report().numbers == {"31": 250}


def test_gpus_are_registered_anew_after_nvml_was_reopened() -> None:
    rig = Rig(FakeNvml(1))
    rig.monitor.start()
    wait_until(lambda: (uuid(0), "watch_xids") in rig.nvml.calls)
    with rig.barrier.reinitializing():
        assert rig.barrier._callers == 0
    wait_until(lambda: rig.nvml.calls.count((uuid(0), "watch_xids")) == 2)
    assert ("", "free_events") not in rig.nvml.calls  # the old set went with the old NVML
    assert rig.monitor.stop()


def test_nvml_is_not_closed_while_a_thread_is_inside_a_call() -> None:
    nvml, barrier, order = FakeNvml(1), NvmlReinitBarrier(), []
    nvml.open = lambda: order.append("open")  # type: ignore[method-assign]
    events: list[dict[str, Any]] = []
    sampler = Sampler(nvml, open_devices(nvml, nvml.gpus), "nvml", lambda table, row: events.append(row), HZ, barrier)
    inside = threading.Event()

    def call() -> None:
        with barrier.calling():
            inside.set()
            time.sleep(0.2)
            order.append("returned")

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait()
    sampler._reopen_at_s = 0.0
    sampler.sample(FAST, 0)
    thread.join()
    assert order == ["returned", "open"]
    assert events[0]["kind"] == "nvml_reopened"


def test_thread_held_by_nvml_is_abandoned_in_time() -> None:
    rig = Rig(FakeNvml(1))
    free = threading.Event()
    rig.nvml.next_xid = lambda events, timeout_ms: free.wait(10)  # type: ignore[method-assign,assignment,return-value]
    rig.monitor.start()
    wait_until(lambda: (uuid(0), "watch_xids") in rig.nvml.calls)
    began = time.monotonic()
    assert not rig.monitor.stop()
    assert time.monotonic() - began < 0.7
    free.set()


def test_real_nvml_distinguishes_timeout_xid_and_failure() -> None:
    with driver() as (fake, nvml, handle):
        events = nvml.event_set()
        nvml.watch_xids(events, handle)
        assert events == [handle]
        assert nvml.next_xid(events, WAIT_MS) is None
        fake.events = [SimpleNamespace(device=handle, eventType=0x8, eventData=79)] * 2
        assert nvml.next_xid(events, WAIT_MS) == Xid(handle, 79)
        fake.fail["nvmlDeviceGetUUID"] = 15
        assert nvml.next_xid(events, WAIT_MS) == Xid(None, 79)
        fake.fail["nvmlEventSetWait_v2"] = 15
        with pytest.raises(NvmlError) as lost:
            nvml.next_xid(events, WAIT_MS)
        assert lost.value.code == 15
        nvml.free_events(events)
    assert pynvml.nvmlEventTypeXidCriticalError == 0x8
    assert {name for name, _ in pynvml.c_nvmlEventData_t._fields_} >= {"device", "eventType", "eventData"}


def test_sidecar_writes_an_xid_as_an_event_and_ends_within_a_second(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"xid{SUFFIX}", [0] * 50, xids={0: None, 200: 79})
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.6)
    began = time.monotonic()
    report = sidecar.stop()
    assert time.monotonic() - began < 1.0
    events = rows(tmp_path / "run", "events")
    assert events.select("kind", "detail").rows() == [("xid", "79")]
    assert report.devices[0].xids == XidReport(count=1, reason=None, numbers={"79": 1})
    assert report.problems == ["xid: 79"]


def test_capture_without_xids_has_a_null_count_and_its_reason(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"none{SUFFIX}", [0] * 50)
    (device,) = start(tmp_path / "run", capture=str(path)).stop().devices
    assert device.xids == XidReport(count=None, reason="not_in_capture", numbers={})
