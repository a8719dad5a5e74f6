"""This job as slurmctld has it: why it is being ended, and how it gets back into the queue.

Slurm ends a job that is pre-empted with the signal that also ends one whose time is up or that was cancelled; only
slurmctld knows which it is. A job that then closes within its grace has ended for Slurm: it is requeued only where it
asks for that itself, before it ends.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

from inpaint_bench.core.schema import Reason

TIMEOUT_S = 10.0  # of one question; the shortest grace known is Slurm's KillWait, 30 s
TIME_UP = ("TimeLimit", "DeadLine")  # Slurm's reasons of a job that it ends because of the time


@dataclass(frozen=True, kw_only=True)
class Word:
    """Why slurmctld ends this job. No reason: for Slurm it runs on, and the signal was a warning or somebody's own."""

    reason: Reason | None
    requeued: bool = False  # Slurm has put it back into the queue itself


def ask() -> Word | None:
    """None outside of Slurm, and where slurmctld does not answer."""
    answer = _scontrol("show", "job", os.environ.get("SLURM_JOB_ID", ""))
    if answer.returncode != 0:
        return None
    facts: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S*)", answer.stdout):
        facts.setdefault(name, value)  # a comment at the end of the answer may look like a fact
    if int(facts.get("Restarts", "0")) > int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        return Word(reason=Reason.PREEMPTED, requeued=True)
    if _preempted(facts):
        return Word(reason=Reason.PREEMPTED)
    if facts.get("Reason") in TIME_UP:
        return Word(reason=Reason.TIMEOUT)
    return Word(reason=Reason.CANCELLED if facts.get("JobState") in ("COMPLETING", "CANCELLED") else None)


def requeue() -> str | None:
    """Back into the queue, under the same job id. None, or why not; Slurm ends this process soon after."""
    word = ask()
    if word and word.requeued:
        return None
    if word and word.reason is Reason.CANCELLED:  # Slurm would requeue it all the same
        return "it was cancelled"
    answer = _scontrol("requeue", _job_id())
    return None if answer.returncode == 0 else answer.stderr.strip() or f"exit code {answer.returncode}"


def _preempted(facts: dict[str, str]) -> bool:
    """In this start of the job: the time of an earlier pre-emption may still stand there."""
    taken, started = facts.get("PreemptTime", "None"), facts.get("StartTime", "")
    return taken != "None" and taken >= started


def _job_id() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    if not arguments[-1]:
        return subprocess.CompletedProcess(command, 1, "", "not in a Slurm job")
    standard = os.environ | {"SLURM_TIME_FORMAT": "standard"}  # ISO 8601, which sorts by time
    try:
        return subprocess.run(command, env=standard, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
