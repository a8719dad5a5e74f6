"""Resolve the state of an attempt from three sources: Slurm, the manifest, the Parquet parts.

`resolve_attempt_state` is the only function that does so; status, rerun, wait and merge call it. Its message names a
source that is missing, and both of two that contradict each other.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import msgspec

from .records import ManifestHead, TableCounts, read_record, write_record
from .schema import MANIFEST, NODE, NODE_NAME, SCHEDULER, TELEMETRY, PointState, Reason, Status

# Slurm's job states in the long form of sacct and squeue. A state that is not named here counts as running.
COMPLETED = "COMPLETED"
QUEUED_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"}
)
FAILURE_REASONS = {
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
# Slurm may still requeue a job after the other states of FAILURE_REASONS.
FINAL_STATES = frozenset({COMPLETED, "FAILED", "TIMEOUT", "DEADLINE", "CANCELLED", "OUT_OF_MEMORY"})
# Three states of our own.
RENAMED = "RENAMED"  # squeue lists the job under another name: it may be a new start of it, or another job
PROCESS_EXITED = "PROCESS_EXITED"  # a local process that has exited; only its manifest says how
LEFT_QUEUE = "LEFT_QUEUE"  # squeue no longer lists the job, and sacct, which knows how it ended, did not answer

# The worker rewrites the manifest every few seconds while steps run, but building and compiling take minutes.
STALE_MANIFEST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SchedulerState:
    """State of one job as the scheduler reports it."""

    state: str | None  # None: it does not know the job (any more)
    detail: str = ""  # pending reason, exit code, nodes
    nodes: str = ""  # as Slurm lists them: gpua[001,017]
    raw: str = field(default="", compare=False)  # the scheduler's own output, with the command that printed it
    start_unix: float | None = field(default=None, compare=False)  # expected while the job is pending
    end_unix: float | None = field(default=None, compare=False)  # by the time limit, while the job has not ended
    time_limit_s: float | None = field(default=None, compare=False)

    @property
    def ended(self) -> bool:
        """Return whether the job has ended, for now or for good."""
        return self.state == COMPLETED or self.state in FAILURE_REASONS

    @property
    def final(self) -> bool:
        """Return whether the job has ended and Slurm will not requeue it."""
        return self.state in FINAL_STATES

    def save(self, run_dir: Path) -> None:
        """Write the state of an ended job beside the manifest, where possible: Slurm purges its record in time."""
        if self.ended and run_dir.is_dir() and self.load(run_dir) != self:
            with suppress(OSError):
                write_record(run_dir / SCHEDULER, {"state": self.state, "detail": self.detail, "nodes": self.nodes})

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        """Read what `save` wrote; None if the file is missing or damaged."""
        try:
            saved = read_record(run_dir / SCHEDULER, cls, follow_links=False)
        except (ValueError, OSError):
            return None
        raw = ", ".join(filter(None, (saved.state, saved.detail))) if saved else ""
        return saved and replace(saved, raw=f"{SCHEDULER}: {raw}")


@dataclass(frozen=True, kw_only=True)
class RunArtifacts:
    """Files that an attempt has left in its run directory."""

    manifest: ManifestHead | None = None
    damage: str | None = None  # why the manifest cannot be read
    sidecar_status: str | None = None  # status in telemetry.json: "complete" if every part was closed
    missing_parts: str | None = None  # parts that telemetry.json counts and that do not exist
    run_dir_exists: bool = True  # else there is no manifest either
    manifest_age_s: float | None = None  # since the manifest was last written, by the file system's time

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """Read the artifacts of a run directory. Never raises: an unreadable manifest is reported as `damage`."""
        path = run_dir / MANIFEST
        try:
            manifest = read_record(path, ManifestHead, follow_links=False)
            if manifest is None:
                return cls(run_dir_exists=run_dir.is_dir())
            age_s = max(0.0, time.time() - path.stat().st_mtime)
            nodes = [path for path in run_dir.glob(NODE.format("*")) if NODE_NAME.fullmatch(path.name)]
            status: str | None = "complete"
            missing = None
            # Of several nodes the first whose sidecar did not complete decides.
            for folder in (run_dir, *sorted(path for path in nodes if not path.is_symlink())):
                report = read_record(folder / TELEMETRY, _SidecarReport, follow_links=False) or _SidecarReport()
                status = report.status if status == "complete" else status
                if manifest.status == Status.COMPLETED:
                    missing = missing or _missing_parts(folder, report.tables)
        except ValueError as error:
            return cls(damage=str(error))
        except OSError as error:
            return cls(damage=f"{error.filename}: {error.strerror}")
        return cls(manifest=manifest, sidecar_status=status, missing_parts=missing, manifest_age_s=age_s)


class _SidecarReport(msgspec.Struct):
    """The part of telemetry.json that is read here; lenient, as ManifestHead."""

    status: str | None = None
    tables: dict[str, TableCounts] = {}


def _missing_parts(run_dir: Path, tables: dict[str, TableCounts]) -> str | None:
    """Describe the first table with fewer parts on disk than the sidecar closed. An earlier writer may leave more."""
    for table, counts in tables.items():
        present = sum(1 for _ in (run_dir / table).glob("part-*.parquet")) if counts.parts else 0
        if present < counts.parts:
            return f"only {present} of {counts.parts} parts of {table} exist"
    return None


@dataclass(frozen=True, kw_only=True)
class AttemptState:
    """State of an attempt, the reason if it did not complete, and a message for people."""

    state: PointState
    reason: Reason | None = None
    message: str = ""


def resolve_attempt_state(
    *,
    submitted: bool,
    refused: str | None,
    cancelled: bool,
    scheduler: SchedulerState | None,
    artifacts: RunArtifacts,
    no_answer_reason: str = "the scheduler did not answer",
) -> AttemptState:
    """Resolve the state of one attempt, without reading anything else.

    `refused` is sbatch's error message. `scheduler` is None if the scheduler was not queried or did not answer, for
    `no_answer_reason`.
    """
    if refused and not submitted:
        return _failed(Reason.NEVER_STARTED, refused)
    # Without a job id the attempt may have run all the same, if its launcher died inside sbatch: a manifest shows that.
    if not submitted and artifacts.manifest is None:
        if cancelled:
            return _failed(Reason.CANCELLED, "cancelled before it was submitted")
        return AttemptState(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message="not submitted")
    # Of a failed, queued or running job Slurm outweighs the manifest, which a killed worker leaves at "running".
    state = scheduler.state if scheduler else None
    if scheduler and state in FAILURE_REASONS:
        return _from_failed_job(FAILURE_REASONS[state], scheduler, artifacts, cancelled)
    if scheduler and state in QUEUED_STATES:
        return AttemptState(state=PointState.QUEUED, message=scheduler.detail)
    if scheduler and state == RENAMED and not (artifacts.manifest and artifacts.manifest.status == Status.COMPLETED):
        return AttemptState(state=PointState.UNKNOWN, message=scheduler.detail)
    # RUNNING, COMPLETING, STAGE_OUT and whatever else a newer Slurm reports.
    if scheduler and state not in (None, COMPLETED, PROCESS_EXITED, LEFT_QUEUE, RENAMED):
        return _from_running_job(scheduler, artifacts)
    # The job has ended, Slurm has purged it, or its state is not known.
    missing_answer = no_answer_reason if scheduler is None else None
    if scheduler and state in (LEFT_QUEUE, RENAMED):
        missing_answer = scheduler.detail
    if artifacts.manifest is None:
        return _without_manifest(state, artifacts, cancelled, missing_answer)
    # The manifest is that of the previous start: the next one has not written its own yet.
    if scheduler is None and artifacts.manifest.slurm and artifacts.manifest.slurm.requeued:
        return AttemptState(state=PointState.UNKNOWN, message=f"requeued; {missing_answer}")
    return _from_manifest(artifacts.manifest, state, artifacts, missing_answer)


def _from_failed_job(
    reason: Reason, scheduler: SchedulerState, artifacts: RunArtifacts, cancelled: bool
) -> AttemptState:
    """Resolve a job that did not succeed according to Slurm; the manifest may know why."""
    manifest, detail = artifacts.manifest, scheduler.detail
    if manifest and manifest.status == Status.COMPLETED:
        message = f"the manifest says completed, the scheduler {scheduler.state} ({detail})"
        return _failed(reason, message.removesuffix(" ()"))
    # Slurm itself ended the job (TIMEOUT, NODE_FAIL, ...), so its reason outweighs the one in the manifest.
    if reason is not Reason.APP_ERROR:
        return _failed(reason, f"{detail} {artifacts.damage or _progress(manifest)}".strip())
    if artifacts.damage:
        return _failed(Reason.LOST, f"{artifacts.damage} ({detail})")
    if manifest is None:
        return _failed(Reason.NEVER_STARTED, f"the job failed, and {_missing(artifacts)} ({detail})")
    # The worker had no time to write how it ended, for example after SIGKILL.
    if manifest.status == Status.RUNNING:
        lost = f"its process died ({detail}); {_progress(manifest)}".removesuffix("; ")
        return _failed(Reason.CANCELLED if cancelled else Reason.LOST, lost)
    return _failed(_reason(manifest), manifest.message or detail)


def _from_running_job(scheduler: SchedulerState, artifacts: RunArtifacts) -> AttemptState:
    manifest = artifacts.manifest
    if manifest is None:
        message = artifacts.damage or "job started, no manifest yet"
    elif manifest.status != Status.RUNNING:
        message = f"the manifest says {manifest.status}, the scheduler still {scheduler.state}"
    else:
        message = (_progress(manifest) or "preparing its workload") + _staleness(artifacts)
    return AttemptState(state=PointState.RUNNING, message=message)


def _without_manifest(
    state: str | None, artifacts: RunArtifacts, cancelled: bool, missing_answer: str | None
) -> AttemptState:
    # Without an answer of Slurm nothing but a recorded cancellation decides.
    if missing_answer is not None and (artifacts.damage or not cancelled):
        message = f"{missing_answer}, and {artifacts.damage or _missing(artifacts)}"
        return AttemptState(state=PointState.UNKNOWN, message=message)
    if artifacts.damage:
        return _failed(Reason.LOST, artifacts.damage)
    if cancelled:
        return _failed(Reason.CANCELLED, "")
    if state == PROCESS_EXITED:
        return _failed(Reason.NEVER_STARTED, "its process exited before the workload started; see its log in jobs/")
    reported = f"the scheduler says {state}, but" if state else "Slurm does not know the job, and"
    return _failed(Reason.LOST, f"{reported} {_missing(artifacts)}")


def _from_manifest(
    manifest: ManifestHead, state: str | None, artifacts: RunArtifacts, missing_answer: str | None
) -> AttemptState:
    """Resolve by the manifest: Slurm reports COMPLETED, has purged the job or did not answer."""
    manifest_only = ""
    if missing_answer is not None or state is None:
        manifest_only = f"from the manifest only ({missing_answer or 'Slurm has purged the job'})"
    if manifest.status == Status.COMPLETED:
        # A run without all of its telemetry is no measurement, unless it was launched with telemetry=none.
        requested = manifest.telemetry is None or manifest.telemetry.source != "none"
        if requested and (status := artifacts.sidecar_status) != "complete":
            sidecar = f"ended with status {status}" if status else "never started"
            return _failed(Reason.TELEMETRY_INCOMPLETE, f"the sidecar {sidecar}")
        if artifacts.missing_parts:
            return _failed(Reason.TELEMETRY_INCOMPLETE, f"the manifest says completed, but {artifacts.missing_parts}")
        return AttemptState(state=PointState.COMPLETED, message=manifest_only)
    if manifest.status != Status.RUNNING:
        message = manifest.message or ""
        # A job whose workload failed exits non-zero, so the two contradict each other.
        if state == COMPLETED:
            message = f"{message} (the scheduler says {state}, the manifest {manifest.status})".strip()
        return _failed(_reason(manifest), message)
    if missing_answer is None:
        message = f"process exited without writing a final status; {_progress(manifest)}".removesuffix("; ")
        return _failed(Reason.LOST, message)
    # Slurm does not answer: as long as the manifest is rewritten, its worker is alive.
    stale = _staleness(artifacts)
    if state == LEFT_QUEUE or stale:
        return AttemptState(state=PointState.UNKNOWN, message=f"the manifest says running{stale}; {missing_answer}")
    return AttemptState(state=PointState.RUNNING, message=f"{_progress(manifest)} {manifest_only}".strip())


def _missing(artifacts: RunArtifacts) -> str:
    return "there is no manifest" if artifacts.run_dir_exists else "there is no run directory"


def _staleness(artifacts: RunArtifacts) -> str:
    """Return the age of a manifest that is not rewritten any more, else nothing."""
    age_s = artifacts.manifest_age_s or 0.0
    return f", manifest last written {age_s / 60:.0f} min ago" if age_s > STALE_MANIFEST_S else ""


def _reason(manifest: ManifestHead) -> Reason:
    """Return the manifest's reason; APP_ERROR for a reason that only a later version knows."""
    try:
        return Reason(manifest.reason or Reason.APP_ERROR)
    except ValueError:
        return Reason.APP_ERROR


def _failed(reason: Reason, message: str) -> AttemptState:
    return AttemptState(state=PointState.FAILED, reason=reason, message=message)


def _progress(manifest: ManifestHead | None) -> str:
    if manifest is None or manifest.progress is None:
        return ""
    return f"step {manifest.progress.step} of {manifest.progress.steps_total or '?'}"
