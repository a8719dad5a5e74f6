"""The truth about a point, from three witnesses: Slurm, the manifest, the sidecar's account of its parts.

One function; status, rerun, wait and analysis all ask it. A missing witness is said, never guessed round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contract import MANIFEST, SCHEDULER, TELEMETRY, PointState, Reason, Status
from .files import read_json, replace_json

# Slurm's states (sacct and squeue, long form). What is in none of these sets is still on its way.
SUCCESS = frozenset({"COMPLETED"})
QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"})
GONE = "GONE"  # not Slurm's: a local process that is no more; how it ended only its manifest knows
ENDED = {
    "FAILED": Reason.APP_ERROR,
    "TIMEOUT": Reason.TIMEOUT,
    "DEADLINE": Reason.TIMEOUT,
    "CANCELLED": Reason.CANCELLED,
    "REVOKED": Reason.CANCELLED,
    "NODE_FAIL": Reason.NODE_FAIL,
    "BOOT_FAIL": Reason.NODE_FAIL,
    "PREEMPTED": Reason.PREEMPTED,
    "OUT_OF_MEMORY": Reason.OOM_HOST,
}


@dataclass(frozen=True, kw_only=True)
class SchedulerWord:
    """What the scheduler says of one job. `state` None: it knows no such job (any more)."""

    state: str | None
    detail: str = ""  # pending reason, exit code, node

    def keep(self, run_dir: Path) -> None:
        """Write a last word beside the manifest, for readers that come when the scheduler has forgotten it."""
        if (self.state in ENDED or self.state in SUCCESS) and run_dir.is_dir() and self.kept(run_dir) != self:
            replace_json(run_dir / SCHEDULER, {"state": self.state, "detail": self.detail})

    @classmethod
    def kept(cls, run_dir: Path) -> SchedulerWord | None:
        try:
            value = read_json(run_dir / SCHEDULER)
        except ValueError:
            return None
        return cls(state=value["state"], detail=value["detail"]) if value else None


@dataclass(frozen=True, kw_only=True)
class Leavings:
    """What an attempt left in its run directory."""

    manifest: dict[str, Any] | None = None
    damaged: str | None = None  # the manifest cannot be read
    telemetry: str | None = None  # status in telemetry.json: whether every part was closed

    @classmethod
    def read(cls, run_dir: Path) -> Leavings:
        try:
            manifest = read_json(run_dir / MANIFEST)
            account = read_json(run_dir / TELEMETRY)
        except ValueError as error:
            return cls(damaged=str(error))
        telemetry = account.get("status") if account else None
        return cls(manifest=manifest, telemetry=telemetry)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    state: PointState
    reason: Reason | None = None
    message: str = ""


def verdict(
    *, submitted: bool, refused: str | None, cancelled: bool, scheduler: SchedulerWord | None, left: Leavings
) -> Verdict:
    """`scheduler` None: it was not asked or did not answer."""
    if refused and not submitted:
        return _failed(Reason.NEVER_STARTED, refused)
    if not submitted and left.manifest is None:
        if cancelled:
            return _failed(Reason.CANCELLED, "cancelled before it was submitted")
        return Verdict(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message="not submitted")
    state = scheduler.state if scheduler else None
    if state in ENDED:
        return _ended(ENDED[state], scheduler.detail if scheduler else "", left, cancelled)
    if state in QUEUED and scheduler:
        return Verdict(state=PointState.QUEUED, message=scheduler.detail)
    if state not in (None, GONE) and state not in SUCCESS:
        return Verdict(state=PointState.RUNNING, message=_progress(left.manifest))
    if left.damaged:
        return _failed(Reason.LOST, left.damaged)
    return _by_manifest(state, scheduler, left, cancelled)


def _by_manifest(state: str | None, scheduler: SchedulerWord | None, left: Leavings, cancelled: bool) -> Verdict:
    """Slurm says COMPLETED, has forgotten the job, or did not answer: the manifest decides."""
    manifest = left.manifest
    if manifest is None:
        if cancelled:
            return _failed(Reason.CANCELLED, "")
        if state == GONE:
            return _failed(Reason.NEVER_STARTED, "its process ended before the workload began; see its log in jobs/")
        if state in SUCCESS:
            return _failed(Reason.LOST, "the scheduler says COMPLETED, but there is no manifest")
        if scheduler is not None:
            return _failed(Reason.LOST, "the scheduler does not know the job, and it left nothing")
        return Verdict(state=PointState.UNKNOWN, message="the scheduler did not answer, and there is no manifest yet")
    match manifest["status"]:
        case Status.COMPLETED:
            if left.telemetry != "complete" and manifest["telemetry"]["source"] != "none":
                return _failed(Reason.TELEMETRY_INCOMPLETE, f"the sidecar ended as {left.telemetry or 'never started'}")
            return Verdict(state=PointState.COMPLETED)
        case Status.FAILED | Status.INTERRUPTED:
            return _failed(Reason(manifest["reason"] or Reason.APP_ERROR), manifest["message"] or "")
    if scheduler is None:
        return Verdict(state=PointState.RUNNING, message=f"{_progress(manifest)} (by its manifest alone)")
    return _failed(Reason.LOST, f"its process is gone without a word; {_progress(manifest)}")


def _ended(reason: Reason, detail: str, left: Leavings, cancelled: bool) -> Verdict:
    """Slurm says that the job did not succeed; the manifest may know better why."""
    manifest = left.manifest
    if reason is not Reason.APP_ERROR:
        return _failed(reason, detail if manifest is None else f"{detail} {_progress(manifest)}".strip())
    if manifest is None:
        return _failed(Reason.NEVER_STARTED, f"the job ended before the workload began ({detail})")
    if manifest["status"] == Status.COMPLETED:
        return _failed(Reason.APP_ERROR, f"the manifest says completed, the scheduler FAILED ({detail})")
    if manifest["status"] == Status.RUNNING:
        return _failed(
            Reason.CANCELLED if cancelled else Reason.LOST,
            f"its process died ({detail}); {_progress(manifest)}",
        )
    return _failed(Reason(manifest["reason"] or Reason.APP_ERROR), manifest["message"] or detail)


def _failed(reason: Reason, message: str) -> Verdict:
    return Verdict(state=PointState.FAILED, reason=reason, message=message)


def _progress(manifest: dict[str, Any] | None) -> str:
    progress = (manifest or {}).get("progress") or {}
    if progress.get("step") is None:
        return ""
    return f"step {progress['step']} of {progress.get('steps_total') or '?'}"
