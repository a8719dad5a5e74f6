"""Faults of the command on the login node: `status` shows what was submitted, and one `rerun` submits the rest.

Mostly nothing runs: the partitions are down, so submitted jobs wait and can be counted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from launchers.slurm import sbatch
from launchers.status.survey import poll_sweep
from launchers.sweep.ledger import Ledger
from tests.testbed.bed import Bed

from .support import ROOT, SHORT, WORKLOAD, nothing_to_submit, reasons, rerun_preview, status_points

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

DOWN_S = 60.0


@pytest.fixture(autouse=True)
def _waiting(testbed: Bed, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    partitions = [("delta", "gpuH200x8"), ("grace", "gpu-a40")]
    for site, partition in partitions:
        testbed.run(site, "scontrol", "update", f"partitionname={partition}", "state=down")
    try:
        yield
    finally:
        for site, partition in partitions:
            testbed.run(site, "scancel", "--me")
            testbed.run(site, "scontrol", "update", f"partitionname={partition}", "state=up")


def launching(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start a launch."""
    command = [sys.executable, "-m", "inpaint_bench.launch", "-m", *WORKLOAD, *overrides, f"hydra.sweep.dir={folder}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rerunning(folder: Path) -> subprocess.Popen[str]:
    """Start a rerun."""
    command = [sys.executable, "-m", "inpaint_bench", "rerun", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind from the complete lines of the ledger."""
    try:
        lines = (folder / "ledger.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def queued_tasks(bed: Bed, site: str, folder: Path) -> int:
    """Return how many tasks of the sweep squeue lists."""
    sweep_id = Ledger(folder).sweep.sweep_id
    names = bed.run(site, "squeue", "--me", "-h", "-r", "-o", "%j").stdout.split()
    return sum(name.startswith(f"inpaint-{sweep_id}-") for name in names)


def test_killed_launch_and_two_concurrent_reruns_submit_each_of_300_points_once(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "sweep"
    first = launching(folder, "gpu=h200", "seed=range(0,300)", "sites.delta.limits.max_array_size=20")
    testbed.wait(lambda: len(records(folder, "submitted")) >= 2, what="two of 15 arrays to be submitted")
    first.kill()
    first.wait()
    assert len(records(folder, "submitted")) < 15, "it was killed too late to show anything"
    states = Counter(point["state"] for point in status_points(folder, capsys))
    assert states == {"queued": queued_tasks(testbed, "delta", folder), "planned": 300 - states["queued"]}
    assert states["planned"] > 0

    both = [rerunning(folder), rerunning(folder)]
    outputs = [process.communicate(timeout=200)[0] for process in both]
    for process, output in zip(both, outputs, strict=True):
        refused = process.returncode == 2 and "another command is submitting" in output
        assert refused or process.returncode == 0, output
    assert queued_tasks(testbed, "delta", folder) == 300
    points = status_points(folder, capsys)
    assert {point["state"] for point in points} == {"queued"}
    assert len({point["job_id"] for point in points}) == 300
    assert app.main(["rerun", str(folder)]) == 0
    assert "Nothing to submit" in capsys.readouterr().out
    assert app.main(["cancel", str(folder)]) == 0
    assert queued_tasks(testbed, "delta", folder) == 0


def test_array_runs_although_its_launcher_died_before_sbatch_returned(
    testbed: Bed, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pickles of its points have their final names before sbatch is called."""
    folder = tmp_path / "sweep"

    def die(*arguments: Any, **options: Any) -> None:
        subprocess.run(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(sbatch, "subprocess", SimpleNamespace(run=die))
    assert launch.main(["-m", *WORKLOAD, "gpu=a40", "site=delta", SHORT, f"hydra.sweep.dir={folder}"]) == 130
    assert not records(folder, "submitted")
    assert status_points(folder, capsys)[0]["state"] in ("queued", "running")
    testbed.wait(lambda: status_points(folder, capsys)[0]["state"] == "completed", what="the array to end")
    assert [point["attempt"] for point in status_points(folder, capsys)] == [1]


def test_of_two_concurrent_launches_into_one_directory_one_submits(testbed: Bed, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "sweep"
    both = [launching(folder, "gpu=h200", "seed=0,1,2") for _ in range(2)]
    outputs = [process.communicate(timeout=100)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], outputs
    assert queued_tasks(testbed, "delta", folder) == 3
    assert [point["state"] for point in status_points(folder, capsys)] == ["queued"] * 3


def test_refused_array_is_submitted_by_rerun_with_a_corrected_override(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "sweep"
    wrong = launching(folder, "gpu=h200", "sites.delta.gpus.h200.partition=nowhere")
    assert "nvalid partition" in wrong.communicate(timeout=100)[0]
    assert wrong.returncode == 1
    (point,) = status_points(folder, capsys)
    assert (point["state"], point["reason"]) == ("failed", "never_started")
    assert "nvalid partition" in point["message"]
    assert app.main(["rerun", str(folder), "sites.delta.gpus.h200.partition=gpuH200x8"]) == 0
    assert queued_tasks(testbed, "delta", folder) == 1
    assert [point["state"] for point in status_points(folder, capsys)] == ["queued"]


def test_array_over_max_array_size_is_halved_and_the_rest_submitted_by_rerun(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    """A site file with a larger limit than Slurm's, then a corrected one."""
    (allowed,) = re.findall(r"MaxArraySize += (\d+)", testbed.run("delta", "scontrol", "show", "config").stdout)
    folder, points = tmp_path / "sweep", int(allowed) + 2
    large = f"sites.delta.limits.max_array_size={10 * points}"
    wrong = launching(folder, "gpu=h200", f"seed=range(0,{points})", f"max_points={points}", large)
    assert "nvalid job array specification" in wrong.communicate(timeout=300)[0]
    assert wrong.returncode == 1
    refused = [point for point in status_points(folder, capsys) if point["reason"] == "never_started"]
    assert queued_tasks(testbed, "delta", folder) == points // 2 == points - len(refused)
    assert all("nvalid job array specification" in point["message"] for point in refused)
    right = f"sites.delta.limits.max_array_size={allowed}"
    assert rerun_preview(folder, capsys, right).count("submitted with changes") == len(refused)
    assert app.main(["rerun", str(folder), right]) == 0
    assert queued_tasks(testbed, "delta", folder) == points
    assert len({point["job_id"].split("_")[0] for point in status_points(folder, capsys)}) == 2
    assert nothing_to_submit(folder, capsys)


def test_without_sacct_squeue_and_files_give_the_state_and_nothing_is_submitted_twice(
    testbed: Bed, tmp_path: Path, capsys: Any
) -> None:
    waits, runs = tmp_path / "waits", tmp_path / "runs"
    assert launching(waits, "gpu=h200", "seed=0,1").wait(100) == 0
    testbed.stop_accounting()
    try:
        names = "workload.name=fine,app_error"
        assert launching(runs, "gpu=a40", "site=delta", names, "workload.min_measure_s=12").wait(100) == 0
        sacct_results = set()

        def ended() -> bool:
            sweep = poll_sweep(Ledger.open(runs))
            sacct_results.update(reply.sacct for reply in sweep.replies.values())
            return all(point.state in ("completed", "failed") for point in sweep.points)

        testbed.wait(ended, what="two runs to end")
        assert any(result.startswith("did not answer") for result in sacct_results), sacct_results
        done = [("completed", None), ("failed", "app_error")]
        assert reasons(runs, capsys) == done
        assert reasons(waits, capsys) == [("queued", None)] * 2
        assert "left alone: --only app_error submits it" in rerun_preview(runs, capsys)
        assert nothing_to_submit(waits, capsys)
    finally:
        testbed.start_accounting()
    assert reasons(runs, capsys) == done
    assert app.main(["rerun", str(runs), "--only", "app_error", SHORT]) == 0
    testbed.wait(lambda: reasons(runs, capsys) == [("completed", None)] * 2, what="the second attempt to end")
    assert reasons(waits, capsys) == [("queued", None)] * 2


def test_slurmctld_down_for_a_minute_loses_and_duplicates_nothing(testbed: Bed, tmp_path: Path, capsys: Any) -> None:
    folder, before = tmp_path / "sweep", tmp_path / "before"
    assert launching(before, "gpu=a40", "seed=0,1").wait(100) == 0
    testbed.stop_controller("grace")
    down_s = time.monotonic()
    try:
        launch_process = launching(folder, "gpu=a40", "seed=0,1,2")
        # queued points are not known to be lost, so they are not submitted again
        assert {point["state"] for point in status_points(before, capsys)} <= {"queued", "unknown"}
        unknown = any(point["state"] == "unknown" for point in status_points(before, capsys))
        assert app.main(["rerun", str(before)]) == int(unknown)
        printed = capsys.readouterr()
        if unknown:
            assert "nothing was submitted: the state of 2 points is unknown" in printed.err
        else:
            assert "Nothing to submit" in printed.out
        time.sleep(max(0.0, DOWN_S - (time.monotonic() - down_s)))
    finally:
        testbed.start_controller("grace")
    output, _ = launch_process.communicate(timeout=200)
    states = {point["state"] for point in status_points(folder, capsys)}
    assert states == ({"queued"} if launch_process.returncode == 0 else {"failed"}), output
    assert queued_tasks(testbed, "grace", folder) == (3 if launch_process.returncode == 0 else 0)
    assert app.main(["rerun", str(folder)]) == 0
    assert queued_tasks(testbed, "grace", folder) == 3
    assert {point["state"] for point in status_points(folder, capsys)} == {"queued"}
    assert queued_tasks(testbed, "grace", before) == 2
