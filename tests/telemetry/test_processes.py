"""Who is ours, who is a co-tenant, and who cannot be told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import cast

import pytest

from inpaint_bench.telemetry.devices import open_devices
from inpaint_bench.telemetry.gate import Gate
from inpaint_bench.telemetry.nvml import Nvml
from inpaint_bench.telemetry.processes import ProcessWatch, tell_apart
from inpaint_bench.telemetry.recording import SUFFIX

from .binding import driver
from .support import FakeGpus, rows, small_capture, start, uuid

WORKER = 100
NOBODY = 2**22 + 7  # above the largest pid that Linux gives


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """1 -> 50 (shell) -> 100 (worker) -> 101 -> 102; 1 -> 200 (a stranger whose name is a trap)."""
    for pid, parent, name in ((1, 0, "init"), (50, 1, "sh"), (100, 50, "python"), (101, 100, "python")):
        _process(tmp_path, pid, parent, name)
    _process(tmp_path, 102, 101, "python")
    _process(tmp_path, 200, 1, "a) 100 (b")
    return tmp_path


def _process(proc: Path, pid: int, parent: int, name: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
    (proc / str(pid) / "comm").write_text(f"{name}\n")


def test_the_worker_and_its_descendants_are_ours_and_everyone_else_is_not(proc: Path) -> None:
    found = tell_apart([100, 102, 200, 50], WORKER, proc, outside=True)
    assert found.ours == {100, 102}
    assert found.strangers == {200: "a) 100 (b", 50: "sh"}
    assert (found.unknown, found.trusted) == (frozenset(), True)


def test_ids_of_another_namespace_are_unknown_and_nobodys_guilt(proc: Path) -> None:
    """In a container NVML may give the host's ids: 200 is then not the process that we see under 200."""
    found = tell_apart([200, 70000], WORKER, proc, outside=False)
    assert (found.strangers, found.unknown, found.trusted) == ({}, {200, 70000}, False)


def test_in_a_container_whose_ids_are_right_a_stranger_is_told(proc: Path) -> None:
    found = tell_apart([100, 200, 70000], WORKER, proc, outside=False)
    assert found.strangers == {200: "a) 100 (b"}
    assert (found.unknown, found.trusted) == ({70000}, True)


def test_an_empty_list_proves_something_outside_of_containers_only(proc: Path) -> None:
    assert tell_apart([], WORKER, proc, outside=True).trusted
    assert not tell_apart([], WORKER, proc, outside=False).trusted


def test_a_process_that_has_ended_is_nobody_and_a_hidden_one_has_no_name(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, signal: int) -> None:
        raise PermissionError if pid == 777 else ProcessLookupError

    monkeypatch.setattr("inpaint_bench.telemetry.processes.os.kill", kill)
    found = tell_apart([776, 777, 0], WORKER, proc, outside=True)
    assert (found.strangers, found.unknown) == ({777: None}, {0})


class TestWatch:
    def _watch(self, gpus: FakeGpus, every_s: float = 30.0) -> tuple[ProcessWatch, list[tuple[str, str, str | None]]]:
        told: list[tuple[str, str, str | None]] = []
        nvml = cast(Nvml, gpus)
        self.devices = open_devices(nvml, gpus.known)
        report = lambda kind, detail, gpu_uuid=None: told.append((kind, detail, gpu_uuid))  # noqa: E731
        return ProcessWatch(nvml, self.devices, os.getpid(), Gate(), report, every_s), told

    @pytest.mark.skipif(os.getpid() == 1, reason="the stranger is pid 1")
    def test_a_co_tenant_is_told_once_per_gpu_however_often_it_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inpaint_bench.telemetry.processes._outside", lambda: True)
        gpus = FakeGpus(2)
        gpus.processes = [os.getpid(), 1]
        watch, told = self._watch(gpus)
        for _ in range(3):
            watch.check()
        name = Path("/proc/1/comm").read_text().strip()
        assert told == [("co_tenant", f"pid 1 {name}", uuid(0)), ("co_tenant", f"pid 1 {name}", uuid(1))]
        account = self.devices[0].processes.account()
        assert account["verdict"] == "co_tenant"
        assert account["co_tenants"] == [{"pid": 1, "name": name}]
        assert account["checks"] == 3

    def test_no_list_is_no_verdict_but_a_reason(self) -> None:
        gpus = FakeGpus(1)
        gpus.fail[uuid(0)]["compute_processes"] = 4
        watch, told = self._watch(gpus)
        watch.check()
        account = self.devices[0].processes.account()
        assert (account["verdict"], account["reason"], account["failed"], told) == (None, "no_permission", 1, [])

    def test_a_namespace_that_is_not_ours_makes_the_verdict_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inpaint_bench.telemetry.processes._outside", lambda: False)
        gpus = FakeGpus(1)
        gpus.processes = [NOBODY]
        watch, told = self._watch(gpus)
        watch.check()
        account = self.devices[0].processes.account()
        assert (account["verdict"], account["unknown_pids"], told) == ("unknown", [NOBODY], [])

    def test_it_looks_at_the_start_at_intervals_and_at_the_end(self) -> None:
        gpus = FakeGpus(1)
        watch, _ = self._watch(gpus, every_s=0.1)
        watch.start()
        time.sleep(0.35)
        assert watch.stop()
        asked = gpus.asked.count((uuid(0), "compute_processes"))
        assert 4 <= asked <= 6
        time.sleep(0.15)
        assert gpus.asked.count((uuid(0), "compute_processes")) == asked


def test_the_adapter_gives_process_ids_and_falls_back_to_the_older_call() -> None:
    with driver() as (fake, nvml, handle):
        fake.pids = [7, 8]
        assert nvml.compute_processes(handle) == [7, 8]
        assert "nvmlDeviceGetComputeRunningProcesses_v2" not in fake.asked
    with driver() as (fake, nvml, handle):
        fake.pids = [9]
        fake.fail["nvmlDeviceGetComputeRunningProcesses"] = 13
        assert nvml.compute_processes(handle) == [9]


@pytest.mark.skipif(os.getpid() == 1, reason="there is no stranger")
def test_a_sidecar_tells_of_a_co_tenant_once(tmp_path: Path) -> None:
    stranger = os.getppid()
    pids = {0: [os.getpid(), stranger]}
    path = small_capture(tmp_path / f"shared{SUFFIX}", [0] * 50, compute_processes=pids)
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(0.3)
    account = sidecar.stop()
    name = Path(f"/proc/{stranger}/comm").read_text().strip()
    events = rows(tmp_path / "run", "events")
    assert events.select("kind", "detail").rows() == [("co_tenant", f"pid {stranger} {name}")]
    (device,) = account["devices"]
    assert device["processes"]["verdict"] == "co_tenant"
    assert device["processes"]["checks"] == 2  # at the start and at the end


def test_a_capture_without_processes_gives_no_verdict(tmp_path: Path) -> None:
    (device,) = start(tmp_path).stop()["devices"]
    assert (device["processes"]["verdict"], device["processes"]["reason"]) == (None, "not_in_capture")
