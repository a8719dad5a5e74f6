"""Whether Slurm takes this job's node for another job, and how the job gets back into the queue.

Slurm ends a job that is pre-empted with the signal that also ends one whose time is up or that was cancelled; only
slurmctld knows which it is. A job that then closes within its grace has ended for Slurm: it is requeued only where it
asks for that itself, before it ends.
"""

from __future__ import annotations

import os
import re
import subprocess

TIMEOUT_S = 10.0  # of one question; the shortest grace known is Slurm's KillWait, 30 s


def under_way() -> bool:
    """Whether this job is being pre-empted. False outside of Slurm, and where slurmctld does not answer."""
    answer = _scontrol("show", "job", os.environ.get("SLURM_JOB_ID", ""))
    return answer.returncode == 0 and re.search(r"\bPreemptTime=(?!None\b)\S", answer.stdout) is not None


def requeue() -> str | None:
    """Back into the queue, under the same job id. None, or why Slurm refused; it ends this process soon after."""
    answer = _scontrol("requeue", _job_id())
    return None if answer.returncode == 0 else answer.stderr.strip() or f"exit code {answer.returncode}"


def _job_id() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    if not arguments[-1]:
        return subprocess.CompletedProcess(command, 1, "", "not in a Slurm job")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
