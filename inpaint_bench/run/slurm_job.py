"""This job as slurmctld knows it: why it is being terminated, and how it requeues itself.

Slurm ends a pre-empted job with the signal that also ends one at its time limit or one that was cancelled; only
slurmctld knows which it is. To Slurm 22.05, a job that exits within its grace period has finished: it is requeued only
if it asks for that before it exits. 24.11 and 26.05 requeue it anyway.
"""

import os
import re
import subprocess
from dataclasses import dataclass

from inpaint_bench.core import child
from inpaint_bench.core.schema import Reason

SCONTROL_TIMEOUT_S = 10.0  # well within the shortest grace period, Slurm's KillWait of 30 s
TIME_LIMIT_REASONS = ("TimeLimit", "DeadLine")  # Slurm's codes for a job that ran out of time


@dataclass(frozen=True, kw_only=True)
class TerminationCause:
    """Why slurmctld terminates this job. No reason: to Slurm it keeps running, and the signal came otherwise."""

    reason: Reason | None
    requeued: bool = False  # by Slurm itself


def query() -> TerminationCause | None:
    """Ask slurmctld why it terminates this job. None outside of Slurm, and if slurmctld does not respond."""
    code, shown, _ = _scontrol("show", "job", os.environ.get("SLURM_JOB_ID", ""))
    if code != 0:
        return None
    fields: dict[str, str] = {}
    # Values that contain spaces are cut at the first space; none of them is needed here.
    for name, value in re.findall(r"(\w+)=(\S*)", shown):
        fields.setdefault(name, value)  # the first: a user's comment, printed last, may look like a field
    # Slurm has requeued the job already: it counts more restarts than this process was started with.
    if int(fields.get("Restarts", "0")) > int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        return TerminationCause(reason=Reason.PREEMPTED, requeued=True)
    # PreemptTime may be that of an earlier start.
    if fields.get("PreemptTime", "None") != "None" and fields["PreemptTime"] >= fields.get("StartTime", ""):
        return TerminationCause(reason=Reason.PREEMPTED)
    if fields.get("Reason") in TIME_LIMIT_REASONS:
        return TerminationCause(reason=Reason.TIMEOUT)
    # Ending, but neither pre-empted nor out of time: scancel.
    cancelled = fields.get("JobState") in ("COMPLETING", "CANCELLED")
    return TerminationCause(reason=Reason.CANCELLED if cancelled else None)


def requeue() -> str | None:
    """Requeue this job under its job id; Slurm ends the process soon after. Return None, or why it was not possible."""
    cause = query()
    if cause and cause.requeued:
        return None
    if cause and cause.reason is Reason.CANCELLED:  # Slurm would requeue even that
        return "it was cancelled"
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # A task by array and number: one task of an array has the array's own job id, which would requeue all of them.
    code, _, refusal = _scontrol("requeue", f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", ""))
    return None if code == 0 else refusal.strip() or f"exit code {code}"


def _scontrol(*arguments: str) -> tuple[int, str, str]:
    if not arguments[-1]:
        return 1, "", "not in a Slurm job"
    # On its node the local cluster is the job's own; a shell may have left the name of another one.
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_CLUSTERS"}
    environment["SLURM_TIME_FORMAT"] = "standard"  # ISO 8601, which sorts by time
    try:
        done = child.run(["scontrol", *arguments], env=environment, timeout_s=SCONTROL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
