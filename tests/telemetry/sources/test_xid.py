"""Xids: heard, counted, and never a reason to crash or to end late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest

from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.api import Nvml, NvmlError, Xid
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX
from inpaint_bench.telemetry.nvml.reinit_barrier import Gate
from inpaint_bench.telemetry.sampling.sampler import Sampler
from inpaint_bench.telemetry.sampling.streams import FAST
from inpaint_bench.telemetry.sources.xid import WAIT_MS, XidWatch
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeGpus, rows, small_capture, start, uuid


class Rig:
    def __init__(self, gpus: FakeGpus) -> None:
        self.gpus = gpus
        self.told: list[tuple[str, str, str | None]] = []
        self.gate = Gate()
        self.devices = open_devices(cast(Nvml, gpus), gpus.known)
        self.watch = XidWatch(cast(Nvml, gpus), self.devices, self.gate, self._hear)

    def _hear(self, kind: str, detail: str, gpu_uuid: str | None) -> None:
        self.told.append((kind, detail, gpu_uuid))

    def account(self, index: int = 0) -> dict[str, Any]:
        return self.devices[index].xids.account()


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_xid_is_told_with_its_number_and_its_gpu() -> None:
    rig = Rig(FakeGpus(2))
    rig.gpus.xids = [Xid(uuid(1), 79), Xid(None, 999)]
    rig.watch.start()
    _until(lambda: len(rig.told) == 2)
    assert rig.watch.stop()
    assert rig.told == [("xid", "79", uuid(1)), ("xid", "999", None)]
    assert rig.account(0) == {"count": 0, "reason": None, "numbers": {}}
    assert rig.account(1) == {"count": 1, "reason": None, "numbers": {"79": 1}}


@pytest.mark.parametrize(("code", "reason"), [(3, "not_supported"), (4, "no_permission"), (13, "driver_too_old")])
def test_where_it_is_not_offered_the_count_is_null_and_the_thread_ends(code: int, reason: str) -> None:
    rig = Rig(FakeGpus(1))
    rig.gpus.fail[uuid(0)]["watch_xids"] = code
    rig.watch.start()
    _until(lambda: not rig.watch._thread.is_alive())
    assert rig.account() == {"count": None, "reason": reason, "numbers": {}}
    assert ("", "free_events") in rig.gpus.asked


def test_a_gpu_that_does_not_offer_it_does_not_silence_the_others() -> None:
    rig = Rig(FakeGpus(2))
    rig.gpus.fail[uuid(0)]["watch_xids"] = 3
    rig.gpus.xids = [Xid(uuid(1), 48)]
    rig.watch.start()
    _until(lambda: bool(rig.told))
    assert rig.watch.stop()
    assert (rig.account(0)["count"], rig.account(1)["count"]) == (None, 1)


def test_a_failure_that_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FakeGpus(1))
    rig.watch._backoff_s = 0.01
    rig.gpus.fail[uuid(0)]["watch_xids"] = 999
    rig.watch.start()
    _until(lambda: rig.account()["reason"] == "error")
    rig.gpus.fail[uuid(0)].clear()
    _until(lambda: rig.account() == {"count": 0, "reason": None, "numbers": {}})
    assert rig.watch.stop()


def test_a_storm_is_counted_in_full_and_told_a_hundred_times() -> None:
    rig = Rig(FakeGpus(1))
    rig.gpus.xids = [Xid(uuid(0), 31)] * 250
    rig.watch.start()
    _until(lambda: not rig.gpus.xids)
    assert rig.watch.stop()
    assert len(rig.told) == 100
    assert rig.account()["numbers"] == {"31": 250}


def test_after_nvml_was_opened_anew_the_gpus_are_registered_anew() -> None:
    rig = Rig(FakeGpus(1))
    rig.watch.start()
    _until(lambda: (uuid(0), "watch_xids") in rig.gpus.asked)
    with rig.gate.closed():
        assert rig.gate._inside == 0
    _until(lambda: rig.gpus.asked.count((uuid(0), "watch_xids")) == 2)
    assert ("", "free_events") not in rig.gpus.asked  # the old set went with the old NVML
    assert rig.watch.stop()


def test_nvml_is_not_closed_under_a_thread_that_is_inside() -> None:
    gpus = FakeGpus(1)
    nvml, gate, order = cast(Nvml, gpus), Gate(), []
    gpus.open = lambda: order.append("open")  # type: ignore[method-assign]
    events: list[dict[str, Any]] = []
    sampler = Sampler(nvml, open_devices(nvml, gpus.known), "nvml", lambda table, row: events.append(row), gate)
    inside = threading.Event()

    def call() -> None:
        with gate.calling():
            inside.set()
            time.sleep(0.2)
            order.append("left")

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait()
    sampler._reopen_at_s = 0.0
    sampler.sample(FAST, 0)
    thread.join()
    assert order == ["left", "open"]
    assert events[0]["kind"] == "nvml_reopened"


def test_a_thread_that_nvml_holds_is_left_behind_in_time() -> None:
    rig = Rig(FakeGpus(1))
    free = threading.Event()
    rig.gpus.next_xid = lambda events, timeout_ms: free.wait(10)  # type: ignore[method-assign,assignment,return-value]
    rig.watch.start()
    _until(lambda: (uuid(0), "watch_xids") in rig.gpus.asked)
    began = time.monotonic()
    assert not rig.watch.stop()
    assert time.monotonic() - began < 0.7
    free.set()


def test_the_adapter_tells_a_timeout_from_an_xid_and_from_a_failure() -> None:
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


def test_a_sidecar_writes_an_xid_as_an_event_and_ends_within_a_second(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"xid{SUFFIX}", [0] * 50, xids={0: None, 200: 79})
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.6)
    began = time.monotonic()
    account = sidecar.stop()
    assert time.monotonic() - began < 1.0
    events = rows(tmp_path / "run", "events")
    assert events.select("kind", "detail").rows() == [("xid", "79")]
    assert account["devices"][0]["xids"] == {"count": 1, "reason": None, "numbers": {"79": 1}}
    assert account["problems"] == ["xid: 79"]


def test_a_capture_without_xids_has_a_null_and_its_reason(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"none{SUFFIX}", [0] * 50)
    (device,) = start(tmp_path / "run", capture=str(path)).stop()["devices"]
    assert device["xids"] == {"count": None, "reason": "not_in_capture", "numbers": {}}
