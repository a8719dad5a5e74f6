"""The truth about a point, from three witnesses: Slurm, the manifest, the parts and the sidecar's account of them.

One function; status, rerun, wait and analysis all ask it. A missing witness is said, never guessed round, and where
two contradict each other the verdict names both.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_json, replace_json
from .schema import MANIFEST, SCHEDULER, TELEMETRY, PointState, Reason, Status

# Slurm's states (sacct and squeue, long form). What is in none of these sets is still on its way.
SUCCESS = frozenset({"COMPLETED"})
QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"})
GONE = "GONE"  # not Slurm's: a local process that is no more; how it ended only its manifest knows
LEFT = "LEFT"  # not Slurm's: squeue holds the job no more, and sacct, which knows how it ended, did not answer
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
# Last words that nothing takes back; after the others of ENDED Slurm may requeue the job by itself.
FINAL = SUCCESS | {"FAILED", "TIMEOUT", "DEADLINE", "CANCELLED", "OUT_OF_MEMORY"}

SILENT_S = 600.0  # a manifest is rewritten every few seconds while steps run; to build and compile takes minutes


@dataclass(frozen=True, kw_only=True)
class SchedulerWord:
    """What the scheduler says of one job. `state` None: it knows no such job (any more)."""

    state: str | None
    detail: str = ""  # pending reason, exit code, node
    said: str = field(default="", compare=False)  # in the scheduler's own words, with the command that gave them
    begins_unix: float | None = field(default=None, compare=False)  # as expected, of a job that waits; else begun
    ends_unix: float | None = field(default=None, compare=False)  # by its time limit, of a job that has not ended
    limit_s: float | None = field(default=None, compare=False)  # its time limit

    def keep(self, run_dir: Path) -> None:
        """Write a last word beside the manifest, for readers that come when the scheduler has forgotten it.

        A folder that takes no file (somebody else's sweep, a full disk) is left as it is.
        """
        if (self.state in ENDED or self.state in SUCCESS) and run_dir.is_dir() and self.kept(run_dir) != self:
            with suppress(OSError):
                replace_json(run_dir / SCHEDULER, {"state": self.state, "detail": self.detail})

    @classmethod
    def kept(cls, run_dir: Path) -> SchedulerWord | None:
        try:
            value: Any = read_json(run_dir / SCHEDULER)
            state, detail = value["state"], value["detail"]
            return cls(state=state, detail=detail, said=f"{SCHEDULER}: {', '.join(filter(None, (state, detail)))}")
        except (ValueError, OSError, KeyError, TypeError):  # none, or not whole
            return None


@dataclass(frozen=True, kw_only=True)
class Leavings:
    """What an attempt left in its run directory."""

    manifest: dict[str, Any] | None = None
    damaged: str | None = None  # the manifest cannot be read
    telemetry: str | None = None  # status in telemetry.json: whether every part was closed
    missing: str | None = None  # parts that telemetry.json tells of and that are not there
    exists: bool = True  # the run directory is there
    silent_s: float | None = None  # since the manifest was last written, by the file system's time

    @classmethod
    def read(cls, run_dir: Path) -> Leavings:
        """Never raises: what cannot be read is `damaged`."""
        path = run_dir / MANIFEST
        try:
            manifest = read_json(path)
            if manifest is None:
                return cls(exists=run_dir.is_dir())
            if (flaw := _flaw(manifest)) is not None:
                return cls(damaged=f"{path}: {flaw}")
            silent_s = max(0.0, time.time() - path.stat().st_mtime)
            account = read_json(run_dir / TELEMETRY)
        except (ValueError, OSError) as error:
            return cls(damaged=str(error))
        telemetry, missing = None, None
        if isinstance(account, dict):
            telemetry = account.get("status")
            if manifest["status"] == Status.COMPLETED:
                missing = _missing_parts(run_dir, account.get("tables"))
        return cls(manifest=manifest, telemetry=telemetry, missing=missing, silent_s=silent_s)


def _flaw(manifest: Any) -> str | None:
    if not isinstance(manifest, dict):
        return "not a manifest (it holds no fields)"
    if manifest.get("status") not in list(Status):
        return f"not a manifest of this version (status {manifest.get('status')!r})"
    return None


def _missing_parts(run_dir: Path, tables: Any) -> str | None:
    """A writer before this one may have left more; fewer than were closed are a loss."""
    if not isinstance(tables, dict):
        return None
    for table, counts in tables.items():
        closed = counts.get("parts", 0) if isinstance(counts, dict) else 0
        present = sum(1 for _ in (run_dir / table).glob("part-*.parquet")) if closed else 0
        if present < closed:
            return f"{present} of {closed} parts of {table} are there"
    return None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    state: PointState
    reason: Reason | None = None
    message: str = ""


def verdict(
    *,
    submitted: bool,
    refused: str | None,
    cancelled: bool,
    scheduler: SchedulerWord | None,
    left: Leavings,
    silence: str = "the scheduler did not answer",
) -> Verdict:
    """`scheduler` None: it was not asked or did not answer, which `silence` puts in words."""
    if refused and not submitted:
        return _failed(Reason.NEVER_STARTED, refused)
    if not submitted and left.manifest is None:
        if cancelled:
            return _failed(Reason.CANCELLED, "cancelled before it was submitted")
        return Verdict(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message="not submitted")
    state = scheduler.state if scheduler else None
    if state in ENDED:
        return _ended(ENDED[state], scheduler, left, cancelled)
    if state in QUEUED and scheduler:
        return Verdict(state=PointState.QUEUED, message=scheduler.detail)
    if state not in (None, GONE, LEFT) and state not in SUCCESS:
        return _running(left)
    if left.damaged:
        return _failed(Reason.LOST, left.damaged)
    return _by_manifest(scheduler, left, cancelled, silence)


def _running(left: Leavings) -> Verdict:
    """The scheduler says that it runs; the manifest may say more."""
    manifest, message = left.manifest, _progress(left.manifest) or "it builds its workload"
    if left.damaged:
        message = left.damaged
    elif manifest is None:
        message = "its workload has not begun"
    elif manifest["status"] != Status.RUNNING:
        message = f"its manifest says {manifest['status']}, the scheduler does not yet"
    elif left.silent_s and left.silent_s > SILENT_S:
        message = f"{message}, no word from it for {left.silent_s / 60:.0f} min"
    return Verdict(state=PointState.RUNNING, message=message)


def _by_manifest(scheduler: SchedulerWord | None, left: Leavings, cancelled: bool, silence: str) -> Verdict:
    """Slurm says COMPLETED, has forgotten the job, or did not answer: the manifest decides, and that is said."""
    manifest, state = left.manifest, scheduler.state if scheduler else None
    if manifest is None:
        return _nothing_left(scheduler, left, cancelled, silence)
    if scheduler is None or state == LEFT:
        alone = f"by its manifest alone: {scheduler.detail if scheduler else silence}"
    else:
        alone = "" if state else "by its manifest alone: the scheduler knows the job no more"
    if scheduler is None and part_of(manifest, "slurm").get("requeued"):
        return Verdict(state=PointState.UNKNOWN, message=f"it went back into the queue; {silence}")
    match manifest["status"]:
        case Status.COMPLETED:
            if left.telemetry != "complete" and part_of(manifest, "telemetry").get("source") != "none":
                return _failed(Reason.TELEMETRY_INCOMPLETE, f"the sidecar ended as {left.telemetry or 'never started'}")
            if left.missing:
                return _failed(Reason.TELEMETRY_INCOMPLETE, f"the manifest says completed, but {left.missing}")
            return Verdict(state=PointState.COMPLETED, message=alone)
        case Status.FAILED | Status.INTERRUPTED:
            message = str(manifest.get("message") or "")
            if state in SUCCESS:
                message = f"{message} (the scheduler says COMPLETED, the manifest {manifest['status']})".strip()
            return _failed(_reason(manifest), message)
    if scheduler is None or state == LEFT:
        quiet = left.silent_s is not None and left.silent_s > SILENT_S
        if quiet or state == LEFT:
            since = f", last written {left.silent_s / 60:.0f} min ago" if quiet and left.silent_s else ""
            why = scheduler.detail if scheduler else silence
            return Verdict(state=PointState.UNKNOWN, message=f"its manifest says running{since}; {why}")
        return Verdict(state=PointState.RUNNING, message=f"{_progress(manifest)} ({alone})".strip())
    return _failed(Reason.LOST, f"its process is gone without a word; {_progress(manifest)}".removesuffix("; "))


def _nothing_left(scheduler: SchedulerWord | None, left: Leavings, cancelled: bool, silence: str) -> Verdict:
    """There is no manifest."""
    state = scheduler.state if scheduler else None
    nothing = "there is no manifest" if left.exists else "there is no run directory (any more)"
    if cancelled:
        return _failed(Reason.CANCELLED, "")
    if state == GONE:
        return _failed(Reason.NEVER_STARTED, "its process ended before the workload began; see its log in jobs/")
    if state in SUCCESS:
        return _failed(Reason.LOST, f"the scheduler says COMPLETED, but {nothing}")
    if scheduler is not None and state is None:
        return _failed(Reason.LOST, f"the scheduler does not know the job, and {nothing}")
    return Verdict(state=PointState.UNKNOWN, message=f"{scheduler.detail if scheduler else silence}, and {nothing}")


def _ended(reason: Reason, scheduler: SchedulerWord | None, left: Leavings, cancelled: bool) -> Verdict:
    """Slurm says that the job did not succeed; the manifest may know better why."""
    manifest, detail = left.manifest, scheduler.detail if scheduler else ""
    state = scheduler.state if scheduler else None
    if manifest and manifest["status"] == Status.COMPLETED:
        return _failed(reason, f"the manifest says completed, the scheduler {state} ({detail})".replace(" ()", ""))
    if reason is not Reason.APP_ERROR:
        more = (left.damaged or "") if manifest is None else _progress(manifest)
        return _failed(reason, f"{detail} {more}".strip())
    if manifest is None:
        begun = left.damaged or ("the job ended before the workload began" if left.exists else "")
        return _failed(
            Reason.NEVER_STARTED if not left.damaged else Reason.LOST,
            f"{begun or 'the job failed, and there is no run directory (any more)'} ({detail})",
        )
    if manifest["status"] == Status.RUNNING:
        return _failed(
            Reason.CANCELLED if cancelled else Reason.LOST,
            f"its process died ({detail}); {_progress(manifest)}".removesuffix("; "),
        )
    return _failed(_reason(manifest), str(manifest.get("message") or detail))


def _reason(manifest: dict[str, Any]) -> Reason:
    """The manifest's, also where a later version gave one that this one does not know."""
    try:
        return Reason(manifest.get("reason") or Reason.APP_ERROR)
    except ValueError:
        return Reason.APP_ERROR


def _failed(reason: Reason, message: str) -> Verdict:
    return Verdict(state=PointState.FAILED, reason=reason, message=message)


def part_of(manifest: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """A field of the manifest that has fields itself; empty where it is null, missing or of another kind."""
    value = (manifest or {}).get(name)
    return value if isinstance(value, dict) else {}


def _progress(manifest: dict[str, Any] | None) -> str:
    progress = part_of(manifest, "progress")
    if progress.get("step") is None:
        return ""
    return f"step {progress['step']} of {progress.get('steps_total') or '?'}"
