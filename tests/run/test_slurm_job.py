"""A run that is told to end: why, as slurmctld has it, and back in the queue where the site allows it.

The same on real Slurm: tests/faults.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import Reason
from inpaint_bench.core.signals import Terminated
from inpaint_bench.run import slurm_job, worker

from .support import compose

# What `scontrol show job` of Slurm 22.05 prints of a job whose process has just been signalled.
RUNS = """JobId=7 ArrayJobId=5 ArrayTaskId=2 JobName=x
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-11-21T19:05:00 EndTime=2026-11-21T19:15:00 Deadline=N/A
   PreemptEligibleTime=2026-11-21T19:05:00 PreemptTime=None
   Comment=was too long, Reason=TimeLimit
"""
TAKEN = RUNS.replace("PreemptTime=None", "PreemptTime=2026-11-21T19:07:16")
TAKEN_BEFORE = RUNS.replace("PreemptTime=None", "PreemptTime=2026-11-21T19:04:16")
TIME_UP = RUNS.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit")
STOPPED = RUNS.replace("RUNNING", "COMPLETING")
QUEUED = STOPPED.replace("Restarts=0", "Restarts=1")
REQUEUES = ("site.requeue.request=true", "site.connect.method=slurm")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A scontrol that gives one answer to `show` and notes what else it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)

    def answers(show: str, requeue: int = 0, silent: bool = False) -> Path:
        asked = tmp_path / "asked"
        refusal = "echo 'requeue is disabled' >&2; " if requeue else ""
        other = f'echo "$@" >> {asked}; {refusal}exit {requeue}'
        (folder / "show.txt").write_text(show)
        case = "exit 1" if silent else f"case $1 in show) cat {folder}/show.txt;; *) {other};; esac"
        (folder / "scontrol").write_text(f"#!/bin/sh\n{case}\n")
        (folder / "scontrol").chmod(0o755)
        return asked

    return answers


def ended(
    run_dir: Path, *overrides: str, by: int = signal.SIGTERM, at: int = 3, phase: str = "update", train: bool = True
) -> dict[str, Any]:
    """The manifest of a run that a signal meets in a step."""
    steps = "workload.train_steps=24" if train else "workload.measure_steps=24"
    config = compose("workload.module=tests.run.support", "workload.learning_rate=0.01", steps, *overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_SIGNAL", f"{at}:{int(by)}:{phase}")
        with pytest.raises(Terminated):
            worker.run(config, run_dir, [])
    manifest: dict[str, Any] = read_json(run_dir / "manifest.json")
    return manifest


class TestWhatSlurmctldSays:
    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            (RUNS, None),
            (TAKEN, Reason.PREEMPTED),
            (TAKEN_BEFORE, None),
            (TIME_UP, Reason.TIMEOUT),
            (TIME_UP.replace("PreemptTime=None", "PreemptTime=2026-11-21T19:04:16"), Reason.TIMEOUT),
            (STOPPED, Reason.CANCELLED),
        ],
    )
    def test_is_the_reason(self, scontrol: Callable[..., Path], said: str, reason: Reason | None) -> None:
        scontrol(said)
        assert slurm_job.query() == slurm_job.TerminationCause(reason=reason)

    def test_may_be_that_it_is_in_the_queue_again(
        self, scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = scontrol(QUEUED)
        assert slurm_job.query() == slurm_job.TerminationCause(reason=Reason.PREEMPTED, requeued=True)
        assert slurm_job.requeue() is None
        assert not asked.exists(), "a second time would cost it a start"
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # that was this start
        assert slurm_job.query() == slurm_job.TerminationCause(reason=Reason.CANCELLED)

    def test_is_not_asked_outside_of_slurm(
        self, scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scontrol(TAKEN)
        monkeypatch.delenv("SLURM_JOB_ID")
        assert slurm_job.query() is None

    def test_is_not_made_up_where_it_does_not_answer(self, scontrol: Callable[..., Path]) -> None:
        scontrol(TAKEN, silent=True)
        assert slurm_job.query() is None


class TestAPreemptedRun:
    def test_is_closed_and_then_requeued_by_its_array_task(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        asked = scontrol(TAKEN)
        left = ended(tmp_path / "run", *REQUEUES)
        assert (left["status"], left["reason"]) == ("interrupted", "preempted")
        assert left["message"] == "received SIGTERM; resumes from step-00000004; requeued"
        assert left["slurm"]["requeued"] is True
        assert asked.read_text() == "requeue 5_2\n"

    def test_names_rerun_where_the_site_does_not_requeue(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        asked = scontrol(TAKEN)
        left = ended(tmp_path / "run")
        assert left["reason"] == "preempted"
        assert left["message"].endswith("; resubmit it with `rerun`")
        assert not asked.exists()

    def test_tells_that_slurm_refused(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        scontrol(TAKEN, requeue=1)
        left = ended(tmp_path / "run", *REQUEUES)
        assert left["slurm"]["requeued"] is False
        assert left["message"].endswith("it could not be requeued (requeue is disabled), resubmit it with `rerun`")

    @pytest.mark.parametrize(("signal_there", "reason"), [("SIGTERM", "preempted"), ("null", "cancelled")])
    def test_is_one_by_its_signal_where_nobody_can_be_asked_and_the_site_gives_a_grace(
        self, scontrol: Callable[..., Path], tmp_path: Path, signal_there: str, reason: str
    ) -> None:
        scontrol("", silent=True)
        left = ended(tmp_path / "run", f"site.preempt.signal={signal_there}", "site.preempt.grace_s=300")
        assert left["reason"] == reason
        assert ("slurmctld could not be asked" in left["message"]) == (reason == "preempted")


def test_a_run_that_was_cancelled_is_not_requeued(scontrol: Callable[..., Path], tmp_path: Path) -> None:
    asked = scontrol(STOPPED)
    assert ended(tmp_path / "run", *REQUEUES)["reason"] == "cancelled"
    assert not asked.exists()


def test_a_run_that_is_cancelled_while_it_closes_stays_so(scontrol: Callable[..., Path]) -> None:
    """Slurm would requeue it all the same."""
    asked = scontrol(STOPPED)
    assert slurm_job.requeue() == "it was cancelled"
    assert not asked.exists()


class TestATimeLimit:
    @pytest.mark.parametrize(("by", "said"), [(signal.SIGTERM, TIME_UP), (signal.SIGUSR2, RUNS)])
    def test_requeues_a_training_that_got_further(
        self, scontrol: Callable[..., Path], tmp_path: Path, by: signal.Signals, said: str
    ) -> None:
        asked = scontrol(said)
        left = ended(tmp_path / "run", *REQUEUES, by=by)
        assert (left["status"], left["reason"]) == ("interrupted", "timeout")
        assert left["message"] == f"received {by.name}; resumes from step-00000004; requeued"
        assert left["slurm"]["requeued"] is True
        assert asked.read_text() == "requeue 5_2\n"

    def test_does_not_requeue_one_that_got_no_further_than_the_start_before_it(
        self, scontrol: Callable[..., Path], tmp_path: Path
    ) -> None:
        asked = scontrol(TIME_UP)
        run_dir = tmp_path / "run"
        ended(run_dir, *REQUEUES)
        assert len(asked.read_text().splitlines()) == 1
        # the signal comes while the first step is awaited, which is finished: without one there is nothing to save
        left = ended(run_dir, *REQUEUES, "workload.validate_every=4", at=4, phase="validation")
        assert left["reason"] == "timeout"
        assert len(asked.read_text().splitlines()) == 1

    def test_requeues_no_more_often_than_it_may(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        asked = scontrol(TIME_UP)
        for at in (3, 6, 9):
            left = ended(tmp_path / "run", *REQUEUES, "rerun.timeout.requeues=2", at=at)
        assert len(asked.read_text().splitlines()) == 2
        assert left["message"] == "received SIGTERM; resumes from step-00000010"

    @pytest.mark.parametrize("where", [(), ("site.requeue.request=true",), (*REQUEUES, "rerun.timeout.requeues=0")])
    def test_is_left_to_rerun_where_nobody_requeues(
        self, scontrol: Callable[..., Path], tmp_path: Path, where: tuple[str, ...]
    ) -> None:
        asked = scontrol(TIME_UP)
        left = ended(tmp_path / "run", *where)
        assert (left["reason"], left["message"]) == ("timeout", "received SIGTERM; resumes from step-00000004")
        assert not asked.exists()

    def test_ends_a_benchmark(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        asked = scontrol(TIME_UP)
        assert ended(tmp_path / "run", *REQUEUES, train=False)["reason"] == "timeout"
        assert not asked.exists()
