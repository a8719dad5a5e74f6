"""Which processes are ours, which are co-tenants, and which are unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from inpaint_bench.telemetry.sampling.devices import GpuProcesses, classify
from tests.telemetry.nvml.fake_pynvml import driver

WORKER = 100


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Make a /proc of 1 -> 50 (shell) -> 100 (worker) -> 101 -> 102; 1 -> 200, whose name imitates our child's stat."""
    for pid, parent, name in ((1, 0, "init"), (50, 1, "sh"), (100, 50, "python"), (101, 100, "python")):
        _process(tmp_path, pid, parent, name)
    _process(tmp_path, 102, 101, "python")
    _process(tmp_path, 200, 1, "a) S 100 (b")
    return tmp_path


def _process(proc: Path, pid: int, parent: int, name: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
    (proc / str(pid) / "comm").write_text(f"{name}\n")


def test_worker_and_its_descendants_are_ours_and_all_others_are_co_tenants(proc: Path) -> None:
    classes = classify([100, 102, 200, 50], WORKER, proc, in_initial_namespace=True)
    assert classes.co_tenants == {200: "a) S 100 (b", 50: "sh"}
    assert (classes.unknown, classes.complete) == (set(), True)


def test_ids_of_another_pid_namespace_are_unknown(proc: Path) -> None:
    """In a container NVML may give the host's ids: 200 is then not the process that we see under 200."""
    classes = classify([200, 70000], WORKER, proc, in_initial_namespace=False)
    assert (classes.co_tenants, classes.unknown, classes.complete) == ({}, {200, 70000}, False)


def test_co_tenant_is_found_in_a_container_whose_ids_are_our_own(proc: Path) -> None:
    classes = classify([100, 200, 70000], WORKER, proc, in_initial_namespace=False)
    assert classes.co_tenants == {200: "a) S 100 (b"}
    assert classes.unknown == {70000}


def test_list_of_only_our_processes_proves_nothing_in_a_container(proc: Path) -> None:
    """The driver leaves out whoever has no id in the caller's pid namespace: a neighbour's container is not listed."""
    for in_initial_namespace, verdict in ((False, "unknown"), (True, "alone")):
        classes = classify([100, 101], WORKER, proc, in_initial_namespace=in_initial_namespace)
        assert (classes.co_tenants, classes.unknown) == ({}, set())
        assert GpuProcesses(checks=1, complete=classes.complete).report().verdict == verdict


def test_thousands_of_processes_are_counted_and_a_hundred_listed() -> None:
    known = GpuProcesses(checks=1, co_tenants=dict.fromkeys(range(5000)), unknown=set(range(9000, 9500)))
    report = known.report()
    assert (report.num_co_tenants, len(report.co_tenants)) == (5000, 100)
    assert (report.num_unknown, len(report.unknown_pids)) == (500, 100)


def test_ended_process_is_ignored_and_a_hidden_one_has_no_name(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, signal: int) -> None:
        raise PermissionError if pid == 777 else ProcessLookupError

    monkeypatch.setattr("inpaint_bench.telemetry.sampling.devices.os.kill", kill)
    classes = classify([776, 777, 0], WORKER, proc, in_initial_namespace=True)
    assert (classes.co_tenants, classes.unknown) == ({777: None}, {0})


def test_real_nvml_returns_process_ids_and_falls_back_to_the_older_call() -> None:
    with driver() as (fake, nvml, handle):
        fake.pids = [7, 8]
        assert nvml.compute_processes(handle) == [7, 8]
        assert "nvmlDeviceGetComputeRunningProcesses_v2" not in fake.called
    with driver() as (fake, nvml, handle):
        fake.pids = [9]
        fake.fail["nvmlDeviceGetComputeRunningProcesses"] = 13
        assert nvml.compute_processes(handle) == [9]
