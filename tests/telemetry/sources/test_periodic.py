"""What is looked at every 30 s: who else computes on our GPUs, and the power limit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import cast

import pytest

from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.nvml.api import Nvml
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX
from inpaint_bench.telemetry.nvml.reinit_barrier import Gate
from inpaint_bench.telemetry.sources.periodic import Rounds
from tests.telemetry.nvml.fake_pynvml import driver
from tests.telemetry.support import FakeGpus, rows, small_capture, start, uuid

NOBODY = 2**22 + 7  # above the largest pid that Linux gives


class Rig:
    def __init__(self, gpus: FakeGpus, every_s: float = 30.0) -> None:
        self.told: list[tuple[str, str, str | None]] = []
        nvml = cast(Nvml, gpus)
        self.devices = open_devices(nvml, gpus.known)
        report = lambda kind, detail, gpu_uuid=None: self.told.append((kind, detail, gpu_uuid))  # noqa: E731
        self.rounds = Rounds(nvml, self.devices, os.getpid(), Gate(), report, every_s)


@pytest.mark.skipif(os.getpid() == 1, reason="the stranger is pid 1")
def test_a_co_tenant_is_told_once_per_gpu_however_often_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._outside", lambda: True)
    gpus = FakeGpus(2)
    gpus.processes = [os.getpid(), 1]
    rig = Rig(gpus)
    for _ in range(3):
        rig.rounds.check()
    name = Path("/proc/1/comm").read_text().strip()
    assert rig.told == [("co_tenant", f"pid 1 {name}", uuid(0)), ("co_tenant", f"pid 1 {name}", uuid(1))]
    account = rig.devices[0].processes.account()
    assert account["verdict"] == "co_tenant"
    assert account["co_tenants"] == [{"pid": 1, "name": name}]
    assert account["checks"] == 3


def test_no_list_is_no_verdict_but_a_reason() -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)]["compute_processes"] = 4
    rig = Rig(gpus)
    rig.rounds.check()
    account = rig.devices[0].processes.account()
    assert (account["verdict"], account["reason"], account["failed"], rig.told) == (None, "no_permission", 1, [])


def test_a_namespace_that_is_not_ours_makes_the_verdict_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._outside", lambda: False)
    gpus = FakeGpus(1)
    gpus.processes = [NOBODY]
    rig = Rig(gpus)
    rig.rounds.check()
    account = rig.devices[0].processes.account()
    assert (account["verdict"], account["unknown_pids"], rig.told) == ("unknown", [NOBODY], [])


def test_co_tenants_that_come_and_go_without_end_are_told_a_hundred_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._outside", lambda: True)
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._exists", lambda pid: True)
    gpus = FakeGpus(1)
    rig = Rig(gpus)
    for turn in range(13):
        gpus.processes = list(range(NOBODY + 10 * turn, NOBODY + 10 * turn + 10))
        rig.rounds.check()
    assert len(rig.told) == 100
    assert rig.devices[0].processes.account()["num_co_tenants"] == 130


def test_a_look_that_fails_by_our_own_fault_is_told_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc that refuses in a way nobody knew must not stop the looking, nor the closing of the run's parts."""

    def broken(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/1")

    gpus = FakeGpus(1)
    rig = Rig(gpus, every_s=0.02)
    with monkeypatch.context() as patch:
        patch.setattr("inpaint_bench.telemetry.sources.periodic.tell_apart", broken)
        rig.rounds.start()
        time.sleep(0.1)
        assert rig.rounds._thread.is_alive()
        assert rig.rounds.stop()
    processes = rig.devices[0].processes
    assert processes.failed >= 3
    assert processes.account()["verdict"] is None
    assert "Permission denied" in str(processes.account()["reason"])
    assert [(kind, gpu) for kind, _, gpu in rig.told] == [("rounds", uuid(0))]


def test_it_looks_at_the_start_at_intervals_and_at_the_end() -> None:
    gpus = FakeGpus(1)
    rig = Rig(gpus, every_s=0.1)
    rig.rounds.start()
    time.sleep(0.35)
    assert rig.rounds.stop()
    asked = gpus.asked.count((uuid(0), "compute_processes"))
    assert 4 <= asked <= 6
    time.sleep(0.15)
    assert gpus.asked.count((uuid(0), "compute_processes")) == asked


def test_a_power_limit_that_changes_is_told_each_time_with_both_values() -> None:
    """Through the adapter, from the limit that the device was described with."""
    with driver() as (fake, nvml, handle):
        devices = open_devices(nvml, [handle])
        told: list[tuple[str, str, str | None]] = []
        rounds = Rounds(nvml, devices, os.getpid(), Gate(), lambda *event: told.append(event))
        rounds.check()
        assert told == []
        fake.power_limit_mw = 450_500
        rounds.check()
        rounds.check()
        fake.fail["nvmlDeviceGetEnforcedPowerLimit"] = 999
        rounds.check()
        del fake.fail["nvmlDeviceGetEnforcedPowerLimit"]
        fake.power_limit_mw = 700_000
        assert rounds.stop()  # at the end too
    assert told == [("power_limit", "700 W to 450.5 W", handle), ("power_limit", "450.5 W to 700 W", handle)]


def test_a_limit_that_the_card_does_not_give_changes_nothing() -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)]["power_limit_mw"] = 3
    rig = Rig(gpus)
    rig.rounds.check()
    assert (rig.told, rig.devices[0].power_limit_w) == ([], None)


def test_a_limit_that_is_given_only_later_is_no_change() -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)]["power_limit_mw"] = 999
    rig = Rig(gpus)
    rig.rounds.check()
    gpus.fail[uuid(0)].clear()
    rig.rounds.check()
    assert (rig.told, rig.devices[0].power_limit_w) == ([], 0.001)


def test_a_sidecar_tells_of_a_co_tenant_and_of_another_power_limit_once(tmp_path: Path) -> None:
    path = small_capture(
        tmp_path / f"shared{SUFFIX}",
        [0] * 50,
        compute_processes={0: ["ours", "foreign"]},
        power_limit_mw={0: 700_000, 200: 500_000},
    )
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.4)
    account = sidecar.stop()
    events = rows(tmp_path / "run", "events")
    told = events.select("kind", "detail").rows()
    assert told == [("co_tenant", "pid -2 in the capture"), ("power_limit", "700 W to 500 W")]
    (device,) = account["devices"]
    assert device["processes"]["verdict"] == "co_tenant"
    assert device["processes"]["checks"] == 2  # at the start and at the end
    assert (device["power_limit_w"], device["power_limit_last_w"]) == (700, 500)


def test_a_capture_without_processes_gives_no_verdict(tmp_path: Path) -> None:
    path = small_capture(tmp_path / f"old{SUFFIX}", [0] * 50)
    (device,) = start(tmp_path / "run", capture=str(path)).stop()["devices"]
    assert (device["processes"]["verdict"], device["processes"]["reason"]) == (None, "not_in_capture")
