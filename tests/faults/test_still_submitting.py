"""While a command still submits: `cancel` beside it, and an array that Slurm accepts without an answer.

Nothing runs: the partition is down, so submitted jobs wait and can be counted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from tests.launchers import over_ssh
from tests.testbed.bed import Bed
from tests.testbed.ssh import LoginNodes

from .support import ROOT, WORKLOAD, nothing_to_submit, reasons, status_points
from .test_submitting import queued_tasks

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("delta_waits"),
]

ONE_BY_ONE = ("gpu=h200", "seed=range(0,16)", "sites.delta.limits.max_array_size=1")  # the last six take 6 s
CUT_OFF = """#!/bin/sh
{sbatch} "$@" > /dev/null
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""


@pytest.fixture(autouse=True)
def _reach(testbed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def all_cancelled(folder: Path, capsys: Any) -> bool:
    """Return whether every point is cancelled."""
    return set(reasons(folder, capsys)) == {("failed", "cancelled")}


def test_cancel_over_ssh_also_stops_jobs_of_a_launch_that_was_killed_here(
    login_nodes: LoginNodes, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "sweep"
    overrides = [
        *over_ssh.overrides(login_nodes),
        *ONE_BY_ONE,
        "workload.min_measure_s=120",
        f"hydra.sweep.dir={folder}",
    ]
    command = [sys.executable, "-m", "inpaint_bench.launch", "-m", *overrides]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdout=nothing, stderr=nothing)

    def three_submitted() -> bool:
        return (folder / "sweep.json").exists() and len(over_ssh.queued_jobs(login_nodes, folder)) >= 3

    login_nodes.bed.wait(three_submitted, what="three of 16 arrays to be submitted there")
    process.kill()
    process.wait()
    assert len(over_ssh.queued_jobs(login_nodes, folder)) < 16, "it was killed too late to show anything"
    assert app.main(["cancel", str(folder)]) == 0
    assert over_ssh.queued_jobs(login_nodes, folder) == []
    login_nodes.bed.wait(lambda: all_cancelled(folder, capsys), what="sacct to record it")
    assert len(status_points(folder, capsys)) == 16


def test_array_that_slurm_accepted_without_an_answer_is_found_and_not_submitted_again(
    testbed: Bed, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, program = tmp_path / "sweep", tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(CUT_OFF.format(sbatch=shutil.which("sbatch")))
    program.chmod(0o755)
    two = ["gpu=h200", "seed=0,1", "sites.delta.limits.max_array_size=1", f"hydra.sweep.dir={folder}"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(program.parent), prepend=":")
        assert launch.main(["-m", *WORKLOAD, *two]) == 1
    assert "Slurm may have accepted it nevertheless" in capsys.readouterr().out
    assert queued_tasks(testbed, "delta", folder) == 1
    assert reasons(folder, capsys) == [("queued", None), ("failed", "never_started")]
    assert app.main(["rerun", str(folder)]) == 0
    assert queued_tasks(testbed, "delta", folder) == 2
    assert [point["attempt"] for point in status_points(folder, capsys)] == [1, 2]
    assert nothing_to_submit(folder, capsys)
