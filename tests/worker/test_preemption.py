"""A run that is told to end: pre-empted or not, as slurmctld says, and back in the queue where the site allows it.

The same on real Slurm, three times in a row: tests/faults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench import preemption
from inpaint_bench.files import read_json

ROOT = Path(__file__).parents[2]
# What `scontrol show job` of Slurm 22.05 prints of a job within its grace, and of one that nobody wants out.
TAKEN = (
    "JobId=7 JobName=x\n   JobState=SIGNALING Reason=None\n   PreemptEligibleTime=T PreemptTime=2026-11-21T19:07:16\n"
)
LEFT = "JobId=7 JobName=x\n   JobState=RUNNING Reason=None\n   PreemptEligibleTime=T PreemptTime=None\n"
CHILD = (
    "import sys, torch; torch.set_num_threads(1); from pathlib import Path; from inpaint_bench.worker import run;"
    "from tests.worker.support import compose; run(compose(*sys.argv[2:]), Path(sys.argv[1]), [])"
)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A scontrol that gives one answer to `show` and notes what else it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")

    def answers(show: str, requeue: int = 0) -> Path:
        asked = tmp_path / "asked"
        refusal = "echo 'requeue is disabled' >&2; " if requeue else ""
        other = f'echo "$@" >> {asked}; {refusal}exit {requeue}'
        (folder / "show.txt").write_text(show)
        (folder / "scontrol").write_text(f"#!/bin/sh\ncase $1 in show) cat {folder}/show.txt;; *) {other};; esac\n")
        (folder / "scontrol").chmod(0o755)
        return asked

    return answers


def ended(run_dir: Path, *overrides: str) -> dict:
    """The manifest of a training that SIGTERM meets in its third step."""
    training = ("workload.module=tests.worker.support", "workload.learning_rate=0.01", "workload.train_steps=24")
    environment = {**os.environ, "TINY_SIGNAL": f"3:{int(signal.SIGTERM)}:update"}
    command = [sys.executable, "-c", CHILD, str(run_dir), *training, *overrides]
    child = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, check=False)
    assert child.returncode == 143
    return read_json(run_dir / "manifest.json")


def test_only_slurmctld_tells_a_preemption_from_another_end(scontrol, monkeypatch):
    scontrol(TAKEN)
    assert preemption.under_way()
    scontrol(LEFT)
    assert not preemption.under_way()
    monkeypatch.delenv("SLURM_JOB_ID")
    scontrol(TAKEN)
    assert not preemption.under_way()


def test_a_preempted_run_is_closed_and_then_requeued_by_its_array_task(scontrol, tmp_path):
    asked = scontrol(TAKEN)
    left = ended(tmp_path / "run", "site.requeue.request=true")
    assert (left["status"], left["reason"]) == ("interrupted", "preempted")
    assert left["message"] == "received SIGTERM; it goes on from step-00000004; it was requeued"
    assert left["slurm"]["requeued"] is True
    assert asked.read_text() == "requeue 5_2\n"


def test_where_the_site_does_not_requeue_rerun_is_named(scontrol, tmp_path):
    asked = scontrol(TAKEN)
    left = ended(tmp_path / "run")
    assert left["reason"] == "preempted"
    assert left["message"].endswith("; `rerun` sends it again")
    assert not asked.exists()


def test_a_requeue_that_slurm_refuses_is_told(scontrol, tmp_path):
    scontrol(TAKEN, requeue=1)
    left = ended(tmp_path / "run", "site.requeue.request=true")
    assert left["slurm"]["requeued"] is False
    assert left["message"].endswith("it could not be requeued (requeue is disabled), `rerun` sends it again")


def test_a_run_that_was_cancelled_is_not_requeued(scontrol, tmp_path):
    asked = scontrol(LEFT)
    assert ended(tmp_path / "run", "site.requeue.request=true")["reason"] == "cancelled"
    assert not asked.exists()
