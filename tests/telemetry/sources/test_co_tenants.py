"""Who is ours, who is a co-tenant, and who cannot be told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inpaint_bench.telemetry.sources.co_tenants import FOREIGN, OURS, REPLAYED, UNKNOWN, Processes, tell_apart
from tests.telemetry.nvml.fake_pynvml import driver

WORKER = 100


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """1 -> 50 (shell) -> 100 (worker) -> 101 -> 102; 1 -> 200 (a stranger whose name would make it our child)."""
    for pid, parent, name in ((1, 0, "init"), (50, 1, "sh"), (100, 50, "python"), (101, 100, "python")):
        _process(tmp_path, pid, parent, name)
    _process(tmp_path, 102, 101, "python")
    _process(tmp_path, 200, 1, "a) S 100 (b")
    return tmp_path


def _process(proc: Path, pid: int, parent: int, name: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
    (proc / str(pid) / "comm").write_text(f"{name}\n")


def test_the_worker_and_its_descendants_are_ours_and_everyone_else_is_not(proc: Path) -> None:
    found = tell_apart([100, 102, 200, 50], WORKER, proc, outside=True)
    assert found.ours == {100, 102}
    assert found.strangers == {200: "a) S 100 (b", 50: "sh"}
    assert (found.unknown, found.trusted) == (frozenset(), True)


def test_ids_of_another_namespace_are_unknown_and_nobodys_guilt(proc: Path) -> None:
    """In a container NVML may give the host's ids: 200 is then not the process that we see under 200."""
    found = tell_apart([200, 70000], WORKER, proc, outside=False)
    assert (found.strangers, found.unknown, found.trusted) == ({}, {200, 70000}, False)


def test_in_a_container_whose_ids_are_right_a_stranger_is_told(proc: Path) -> None:
    found = tell_apart([100, 200, 70000], WORKER, proc, outside=False)
    assert found.strangers == {200: "a) S 100 (b"}
    assert found.unknown == {70000}


def test_in_a_container_a_list_of_ours_alone_is_no_proof_that_we_were_alone(proc: Path) -> None:
    """The driver leaves out whoever has no id in the caller's pid namespace: a neighbour's container is not listed."""
    for outside, verdict in ((False, "unknown"), (True, "alone")):
        found = tell_apart([100, 101], WORKER, proc, outside=outside)
        assert (found.ours, found.strangers, found.unknown) == ({100, 101}, {}, frozenset())
        assert Processes(checks=1, trusted=found.trusted).verdict == verdict


def test_thousands_of_processes_are_counted_and_a_hundred_named() -> None:
    known = Processes(checks=1, strangers=dict.fromkeys(range(5000)), unknown=set(range(9000, 9500)))
    account = known.account()
    assert (account["num_co_tenants"], len(account["co_tenants"])) == (5000, 100)
    assert (account["num_unknown"], len(account["unknown_pids"])) == (500, 100)


def test_an_empty_list_proves_something_outside_of_containers_only(proc: Path) -> None:
    assert tell_apart([], WORKER, proc, outside=True).trusted
    assert not tell_apart([], WORKER, proc, outside=False).trusted


def test_a_process_that_has_ended_is_nobody_and_a_hidden_one_has_no_name(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, signal: int) -> None:
        raise PermissionError if pid == 777 else ProcessLookupError

    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants.os.kill", kill)
    found = tell_apart([776, 777, 0], WORKER, proc, outside=True)
    assert (found.strangers, found.unknown) == ({777: None}, {0})


def test_what_a_capture_keeps_of_processes_is_told_apart_as_it_was_recorded() -> None:
    """Ids that no process has, whatever this machine's /proc holds and in whatever namespace it is replayed."""
    for outside in (True, False):
        found = tell_apart([REPLAYED[OURS], REPLAYED[FOREIGN]], os.getpid(), outside=outside)
        assert (len(found.ours), found.strangers, found.trusted) == (1, {-2: "in the capture"}, True)
        found = tell_apart([REPLAYED[UNKNOWN]], os.getpid(), outside=outside)
        assert (found.strangers, found.unknown, found.trusted) == ({}, {-3}, False)


def test_the_adapter_gives_process_ids_and_falls_back_to_the_older_call() -> None:
    with driver() as (fake, nvml, handle):
        fake.pids = [7, 8]
        assert nvml.compute_processes(handle) == [7, 8]
        assert "nvmlDeviceGetComputeRunningProcesses_v2" not in fake.asked
    with driver() as (fake, nvml, handle):
        fake.pids = [9]
        fake.fail["nvmlDeviceGetComputeRunningProcesses"] = 13
        assert nvml.compute_processes(handle) == [9]
