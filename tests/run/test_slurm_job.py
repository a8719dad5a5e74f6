"""Why slurmctld terminates a run, and whether it requeues itself.

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
RUNNING = """JobId=7 ArrayJobId=5 ArrayTaskId=2 JobName=x
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-11-21T19:05:00 EndTime=2026-11-21T19:15:00 Deadline=N/A
   PreemptEligibleTime=2026-11-21T19:05:00 PreemptTime=None
   Comment=was too long, Reason=TimeLimit
"""
PREEMPTED = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-21T19:07:16")
PREEMPTED_EARLIER = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-21T19:04:16")
TIME_LIMIT = RUNNING.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit")
COMPLETING = RUNNING.replace("RUNNING", "COMPLETING")
REQUEUED = COMPLETING.replace("Restarts=0", "Restarts=1")
REQUEUES = ("site.requeue.request=true", "site.connect.method=slurm")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A scontrol that prints a fixed job record for `show` and logs other commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)

    def install(show: str, requeue: int = 0, silent: bool = False) -> Path:
        log = tmp_path / "log"
        refusal = "echo 'requeue is disabled' >&2; " if requeue else ""
        other = f'echo "$@" >> {log}; {refusal}exit {requeue}'
        (folder / "show.txt").write_text(show)
        case = "exit 1" if silent else f"case $1 in show) cat {folder}/show.txt;; *) {other};; esac"
        (folder / "scontrol").write_text(f"#!/bin/sh\n{case}\n")
        (folder / "scontrol").chmod(0o755)
        return log

    return install


def ended(
    run_dir: Path, *overrides: str, by: int = signal.SIGTERM, at: int = 3, phase: str = "update", train: bool = True
) -> dict[str, Any]:
    """Return the manifest of a run that receives a signal in a step."""
    steps = "workload.train_steps=24" if train else "workload.measure_steps=24"
    config = compose("workload.module=tests.run.support", "workload.learning_rate=0.01", steps, *overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_SIGNAL", f"{at}:{int(by)}:{phase}")
        with pytest.raises(Terminated):
            worker.run(config, run_dir, [])
    manifest: dict[str, Any] = read_json(run_dir / "manifest.json")
    return manifest


def test_scontrol_asks_the_cluster_of_its_node_whatever_the_shell_had(
    scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scontrol("")
    program = tmp_path / "bin" / "scontrol"
    program.write_text(f"#!/bin/sh\nenv > {tmp_path / 'environment'}\n")
    monkeypatch.setenv("SLURM_CLUSTERS", "far")
    monkeypatch.setenv("SLURM_CONF", "/near/slurm.conf")
    assert slurm_job.query() is not None
    environment = (tmp_path / "environment").read_text()
    assert "SLURM_CLUSTERS" not in environment
    assert "SLURM_CONF=/near/slurm.conf" in environment


class TestTerminationCause:
    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            (RUNNING, None),
            (PREEMPTED, Reason.PREEMPTED),
            (PREEMPTED_EARLIER, None),
            (TIME_LIMIT, Reason.TIMEOUT),
            (TIME_LIMIT.replace("PreemptTime=None", "PreemptTime=2026-11-21T19:04:16"), Reason.TIMEOUT),
            (COMPLETING, Reason.CANCELLED),
        ],
    )
    def test_follows_from_the_job_record(
        self, scontrol: Callable[..., Path], record: str, reason: Reason | None
    ) -> None:
        scontrol(record)
        assert slurm_job.query() == slurm_job.TerminationCause(reason=reason)

    def test_of_a_job_that_slurm_requeued_is_preemption(
        self, scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = scontrol(REQUEUED)
        assert slurm_job.query() == slurm_job.TerminationCause(reason=Reason.PREEMPTED, requeued=True)
        assert slurm_job.requeue() is None
        assert not log.exists(), "a second time would cost it a start"
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # that was this start
        assert slurm_job.query() == slurm_job.TerminationCause(reason=Reason.CANCELLED)

    def test_is_unknown_outside_of_slurm(self, scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
        scontrol(PREEMPTED)
        monkeypatch.delenv("SLURM_JOB_ID")
        assert slurm_job.query() is None

    def test_is_unknown_where_slurmctld_does_not_respond(self, scontrol: Callable[..., Path]) -> None:
        scontrol(PREEMPTED, silent=True)
        assert slurm_job.query() is None


class TestPreemption:
    def test_run_is_closed_and_then_requeued_by_its_array_task(
        self, scontrol: Callable[..., Path], tmp_path: Path
    ) -> None:
        log = scontrol(PREEMPTED)
        left = ended(tmp_path / "run", *REQUEUES)
        assert (left["status"], left["reason"]) == ("interrupted", "preempted")
        assert left["message"] == "received SIGTERM; resumes from step-00000004; requeued"
        assert left["slurm"]["requeued"] is True
        assert log.read_text() == "requeue 5_2\n"

    def test_message_names_rerun_where_the_site_does_not_requeue(
        self, scontrol: Callable[..., Path], tmp_path: Path
    ) -> None:
        log = scontrol(PREEMPTED)
        left = ended(tmp_path / "run")
        assert left["reason"] == "preempted"
        assert left["message"].endswith("; resubmit it with `rerun`")
        assert not log.exists()

    def test_refused_requeue_is_recorded(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        scontrol(PREEMPTED, requeue=1)
        left = ended(tmp_path / "run", *REQUEUES)
        assert left["slurm"]["requeued"] is False
        assert left["message"].endswith("it could not be requeued (requeue is disabled), resubmit it with `rerun`")

    @pytest.mark.parametrize(("site_signal", "reason"), [("SIGTERM", "preempted"), ("null", "cancelled")])
    def test_is_inferred_from_the_signal_where_slurmctld_does_not_respond(
        self, scontrol: Callable[..., Path], tmp_path: Path, site_signal: str, reason: str
    ) -> None:
        scontrol("", silent=True)
        left = ended(tmp_path / "run", f"site.preempt.signal={site_signal}", "site.preempt.grace_s=300")
        assert left["reason"] == reason
        assert ("slurmctld could not be asked" in left["message"]) == (reason == "preempted")


def test_cancelled_run_is_not_requeued(scontrol: Callable[..., Path], tmp_path: Path) -> None:
    log = scontrol(COMPLETING)
    assert ended(tmp_path / "run", *REQUEUES)["reason"] == "cancelled"
    assert not log.exists()


def test_run_cancelled_while_it_closes_is_not_requeued(scontrol: Callable[..., Path]) -> None:
    """Regression: Slurm would requeue it."""
    log = scontrol(COMPLETING)
    assert slurm_job.requeue() == "it was cancelled"
    assert not log.exists()


class TestTimeLimit:
    @pytest.mark.parametrize(("by", "record"), [(signal.SIGTERM, TIME_LIMIT), (signal.SIGUSR2, RUNNING)])
    def test_training_that_made_progress_is_requeued(
        self, scontrol: Callable[..., Path], tmp_path: Path, by: signal.Signals, record: str
    ) -> None:
        log = scontrol(record)
        left = ended(tmp_path / "run", *REQUEUES, by=by)
        assert (left["status"], left["reason"]) == ("interrupted", "timeout")
        assert left["message"] == f"received {by.name}; resumes from step-00000004; requeued"
        assert left["slurm"]["requeued"] is True
        assert log.read_text() == "requeue 5_2\n"

    def test_training_without_progress_is_not_requeued(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        log = scontrol(TIME_LIMIT)
        run_dir = tmp_path / "run"
        ended(run_dir, *REQUEUES)
        assert len(log.read_text().splitlines()) == 1
        # the signal comes while the first step is awaited, which is finished: without one there is nothing to save
        left = ended(run_dir, *REQUEUES, "workload.validate_every=4", at=4, phase="validation")
        assert left["reason"] == "timeout"
        assert len(log.read_text().splitlines()) == 1

    def test_number_of_requeues_is_limited(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        log = scontrol(TIME_LIMIT)
        for at in (3, 6, 9):
            left = ended(tmp_path / "run", *REQUEUES, "rerun.timeout.requeues=2", at=at)
        assert len(log.read_text().splitlines()) == 2
        assert left["message"] == "received SIGTERM; resumes from step-00000010"

    @pytest.mark.parametrize("where", [(), ("site.requeue.request=true",), (*REQUEUES, "rerun.timeout.requeues=0")])
    def test_training_is_not_requeued_where_the_site_does_not_allow_it(
        self, scontrol: Callable[..., Path], tmp_path: Path, where: tuple[str, ...]
    ) -> None:
        log = scontrol(TIME_LIMIT)
        left = ended(tmp_path / "run", *where)
        assert (left["reason"], left["message"]) == ("timeout", "received SIGTERM; resumes from step-00000004")
        assert not log.exists()

    def test_benchmark_is_not_requeued(self, scontrol: Callable[..., Path], tmp_path: Path) -> None:
        log = scontrol(TIME_LIMIT)
        assert ended(tmp_path / "run", *REQUEUES, train=False)["reason"] == "timeout"
        assert not log.exists()
