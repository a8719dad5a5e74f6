"""While a command still submits: `cancel` beside it, and a Slurm that takes an array without saying so.

Nothing runs: the partition is down, so that what was submitted waits and can be counted.
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

from .support import ROOT, WORKLOAD, nothing_to_send, reasons, told
from .test_submitting import held, launching, records

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
    return set(reasons(folder, capsys)) == {("failed", "cancelled")}


def test_cancel_stops_what_a_launch_sends_after_it_looked(testbed: Bed, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "sweep"
    sends = launching(folder, *ONE_BY_ONE)
    testbed.wait(lambda: len(records(folder, "submitted")) >= 3, what="three of 16 arrays to be submitted")
    assert app.main(["cancel", str(folder)]) == 0
    assert "Another command is submitting from this sweep" in capsys.readouterr().out
    words, _ = sends.communicate(timeout=100)
    assert sends.returncode == 0, words
    assert len(records(folder, "submitted")) == 16
    assert held(testbed, "delta", folder) == 0
    testbed.wait(lambda: all_cancelled(folder, capsys), what="sacct to hear of it")


def test_over_ssh_cancel_stops_what_is_sent_there_though_the_launch_here_was_killed(
    login_nodes: LoginNodes, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "sweep"
    words = [*over_ssh.words(login_nodes), *ONE_BY_ONE, f"hydra.sweep.dir={folder}"]
    command = [sys.executable, "-m", "inpaint_bench.launch", "-m", *words]
    nothing = subprocess.DEVNULL
    sends = subprocess.Popen(command, cwd=ROOT, stdout=nothing, stderr=nothing)

    def begun() -> bool:
        return (folder / "sweep.json").exists() and len(over_ssh.jobs(login_nodes, folder)) >= 3

    login_nodes.bed.wait(begun, what="three of 16 arrays to be submitted there")
    sends.kill()
    sends.wait()
    assert len(over_ssh.jobs(login_nodes, folder)) < 16, "it was killed too late to show anything"
    assert app.main(["cancel", str(folder)]) == 0
    assert over_ssh.jobs(login_nodes, folder) == []
    login_nodes.bed.wait(lambda: all_cancelled(folder, capsys), what="sacct to hear of it")
    assert len(told(folder, capsys)) == 16


def test_an_array_that_slurm_took_without_saying_so_is_found_and_not_sent_again(
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
    assert "It may have been taken none the less" in capsys.readouterr().out
    assert held(testbed, "delta", folder) == 1
    assert reasons(folder, capsys) == [("queued", None), ("failed", "never_started")]
    assert app.main(["rerun", str(folder)]) == 0
    assert held(testbed, "delta", folder) == 2
    assert [point["attempt"] for point in told(folder, capsys)] == [1, 2]
    assert nothing_to_send(folder, capsys)
