"""Resolve the state of an attempt from three sources: Slurm, the manifest, the Parquet parts.

`resolve_attempt_state` is the only function that does so; status, rerun, wait and merge call it. Its message names a
source that is missing, and both of two that contradict each other.
"""

import errno
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Self

import msgspec

from .console import share
from .files import names_in, try_twice
from .records import ManifestHead, TableCounts, read_record, write_record
from .schema import MANIFEST, NODE_NAME, SCHEDULER, SCHEMA_VERSION, TELEMETRY, WINDOWS, PointState, Reason, Status

COMPLETED = "COMPLETED"
# States of our own, beside Slurm's.
RENAMED = "RENAMED"  # squeue lists the job under another name: it may be a new start of it, or another job
PROCESS_EXITED = "PROCESS_EXITED"  # a local process that has exited; only its manifest says how
LEFT_QUEUE = "LEFT_QUEUE"  # squeue no longer lists the job, and sacct, which knows how it ended, did not answer
DROPPED = "DROPPED"  # Slurm lists the rest of the array without this task: it was cancelled before its start


@dataclass(frozen=True)
class JobState:
    """What a job state of Slurm means. The advice, if there is any, may contain {site}, {job} and {one_job}."""

    phase: PointState
    explanation: str = ""
    advice: str = ""
    reason: Reason | None = None  # why the job has ended
    final: bool = True  # else Slurm may requeue a job that has ended


_Q, _R, _F = PointState.QUEUED, PointState.RUNNING, PointState.FAILED
RELEASE = "`scontrol release {job}` at {site}; its log and `scontrol show job {one_job}` show why"
# https://slurm.schedmd.com/job_state_codes.html, Slurm 22.05 to 26.05; any other state is unknown.
JOB_STATES = {
    "PENDING": JobState(_Q),
    **dict.fromkeys(("CONFIGURING", "POWER_UP_NODE"), JobState(_Q, "its nodes are booting or being configured")),
    **dict.fromkeys(("REQUEUED", "REQUEUE_FED", "EXPEDITING"), JobState(_Q, "is being requeued")),
    "RECONFIG_FAIL": JobState(_Q, "its node could not be configured, and it is requeued"),
    **dict.fromkeys(("REQUEUE_HOLD", "SPECIAL_EXIT"), JobState(_Q, "was requeued and is held", RELEASE)),
    "LAUNCH_FAILED": JobState(_Q, "could not be started on its node", RELEASE),
    "RESV_DEL_HOLD": JobState(_Q, "is held because its reservation was deleted", "cancel it and `rerun`"),
    "SUSPENDED": JobState(_Q, "is suspended by the site and continues later"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "UPDATE_DB"), JobState(_R)),
    **dict.fromkeys(("RESIZING", "SIGNALING", "STAGE_OUT"), JobState(_R, "Slurm is at work on it")),
    "STOPPED": JobState(_R, "was stopped by a signal and keeps its GPUs", "`scancel --signal=CONT` continues it"),
    "REVOKED": JobState(PointState.UNKNOWN, "another cluster runs it", "`squeue --me --federation` shows where"),
    COMPLETED: JobState(PointState.COMPLETED),
    "FAILED": JobState(_F, reason=Reason.APP_ERROR),
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), JobState(_F, reason=Reason.TIMEOUT)),
    "CANCELLED": JobState(_F, reason=Reason.CANCELLED),
    "OUT_OF_MEMORY": JobState(_F, reason=Reason.OOM_HOST),
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), JobState(_F, reason=Reason.NODE_FAIL, final=False)),
    "PREEMPTED": JobState(_F, reason=Reason.PREEMPTED, final=False),
}
_UNKNOWN = JobState(PointState.UNKNOWN, "Slurm gives it a state that is not known here")

# Errors of what lies at a path. After any other error of the system it is not known what lies there.
_WRONG_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.EFBIG, errno.ENAMETOOLONG)
# A signal ended a job: sacct's "0:12", "140:0" of a shell, "12:0" of SIGUSR2 in Slurm 24.11.
_BY_SIGNAL = re.compile(r"\d+:[1-9]\d*|(10|12|129|1[3-9]\d):0")
ALIVE_S = 300.0  # a process that has written a file since then is alive
# The worker rewrites the manifest every few seconds while steps run, but building and compiling take minutes.
STALE_MANIFEST_S = 600.0
GONE_S = 86400.0  # a process of another machine that has written no file since then is gone


@dataclass(frozen=True, kw_only=True)
class SchedulerState:
    """State of one job as the scheduler reports it."""

    state: str | None  # None: it does not know the job (any more)
    detail: str = ""  # pending reason, exit code, nodes
    nodes: str = ""  # as Slurm lists them: gpua[001,017]
    exit_code: str = ""  # as sacct prints it: the code, a colon, and the signal that ended the job or 0
    unlisted: bool = False  # sacct lists the job as not ended, and squeue's full list lacks it
    raw: str = field(default="", compare=False)  # the scheduler's own output, with the command that printed it
    start_unix: float | None = field(default=None, compare=False)  # expected while the job is pending
    end_unix: float | None = field(default=None, compare=False)  # by the time limit, while the job has not ended
    time_limit_s: float | None = field(default=None, compare=False)

    @property
    def ended(self) -> bool:
        """Return whether the job has ended, for now or for good."""
        return self.meaning.phase in (PointState.COMPLETED, PointState.FAILED)

    @property
    def final(self) -> bool:
        """Return whether the job has ended and Slurm will not requeue it."""
        return self.ended and self.meaning.final

    @property
    def meaning(self) -> JobState:
        return JOB_STATES.get(self.state or "", _UNKNOWN)

    @property
    def sentence(self) -> str:
        """Return what the state means and what the user has to do, if there is anything to say."""
        text = "; ".join(filter(None, (self.meaning.explanation, self.meaning.advice)))
        return text and f"{text} ({self.state})"

    def save(self, run_dir: Path) -> None:
        """Write the state of an ended job beside the manifest, if possible: Slurm purges its record in time."""
        if self.ended and run_dir.is_dir() and self.load(run_dir) != self:
            with suppress(OSError):
                saved = {name: getattr(self, name) for name in ("state", "detail", "nodes", "exit_code")}
                write_record(run_dir / SCHEDULER, saved)

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        """Read what `save` wrote; None if the file is missing or damaged."""
        try:
            saved = read_record(run_dir / SCHEDULER, cls, follow_links=False)
        except (ValueError, OSError):
            return None
        raw = ", ".join(filter(None, (saved.state, saved.detail))) if saved else ""
        # Earlier versions saved the exit code in the detail alone.
        code = saved and (saved.exit_code or "".join(re.findall(r"^exit code (\d+:\d+)", saved.detail)))
        # Only an end is saved. A state that is not known here may be one.
        if saved is None or saved.meaning.phase in (PointState.QUEUED, PointState.RUNNING):
            return None
        return replace(saved, exit_code=code or "", raw=f"{SCHEDULER}: {raw}")


@dataclass(frozen=True, kw_only=True)
class RunArtifacts:
    """Files that an attempt has left in its run directory."""

    manifest: ManifestHead | None = None
    damage: str | None = None  # why what lies there is no manifest
    unreadable: str | None = None  # why it is not known what lies there
    sidecar_status: str | None = None  # status in telemetry.json: "complete" if every part was closed
    missing_parts: str | None = None  # parts that telemetry.json counts and that do not exist
    run_dir_exists: bool = True  # else there is no manifest either
    manifest_age_s: float | None = None  # since the manifest was last written, by the file system's time
    sign_of_life: str = ""  # the file that was written within the last ALIVE_S, if that was asked for
    newest_age_s: float | None = None  # since any file was written; None: there is none, or that was not asked for

    @classmethod
    def read(cls, run_dir: Path, now_unix: float | None = None) -> Self:
        """Read the artifacts of a run directory. Never raises: what cannot be read is `damage` or `unreadable`."""
        path = run_dir / MANIFEST
        try:
            manifest = read_record(path, ManifestHead, follow_links=False)
            if manifest is None:
                exists = try_twice(run_dir.is_dir)
                lost = exists and WINDOWS in names_in(run_dir) and f"{path}: does not exist, though {WINDOWS} does"
                return cls(run_dir_exists=exists, damage=lost or None)
            age_s = (now_unix or time.time()) - try_twice(path.stat).st_mtime
            nodes = [run_dir / name for name in names_in(run_dir) if NODE_NAME.fullmatch(name)]
            status: str | None = "complete"
            missing = None
            # If there are several nodes, the first whose sidecar did not complete decides.
            for folder in (run_dir, *sorted(path for path in nodes if not path.is_symlink())):
                report = read_record(folder / TELEMETRY, _SidecarReport, follow_links=False) or _SidecarReport()
                status = report.status if status == "complete" else status
                if manifest.status == Status.COMPLETED:
                    missing = missing or _missing_parts(folder, report.tables)
        except ValueError as error:
            return cls(unreadable=f"{error}; a later version wrote it") if _is_later(path) else cls(damage=str(error))
        except OSError as error:
            return cls.of_error(error, path)
        return cls(manifest=manifest, sidecar_status=status, missing_parts=missing, manifest_age_s=age_s)

    @classmethod
    def of_error(cls, error: OSError, path: Path) -> Self:
        problem = f"{error.filename or path}: {error.strerror}"
        return cls(damage=problem) if error.errno in _WRONG_FILE else cls(unreadable=problem)

    def with_sign_of_life(self, run_dir: Path, logs: Iterable[Path], now_unix: float) -> Self:
        """Return the artifacts with the newest file in the run directory and among the logs. Never raises."""
        newest_unix, name = 0.0, ""
        try:
            for path in (*logs, *run_dir.rglob("*")):
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and path.name != SCHEDULER:  # which `status` writes
                        newest_unix, name = max((newest_unix, name), (status.st_mtime, path.name))
        except OSError as error:
            return replace(self, unreadable=self.of_error(error, run_dir).unreadable)
        age_s = now_unix - newest_unix
        return replace(self, sign_of_life=_just_written(name, age_s), newest_age_s=age_s if name else None)


def _just_written(name: str, age_s: float | None) -> str:
    if age_s is not None and age_s < -ALIVE_S:
        return f"{name} was written {-age_s:.0f} s after now by the file system's clock, so its age is not known"
    return f"{name} was written {max(0.0, age_s):.0f} s ago" if age_s is not None and age_s < ALIVE_S else ""


class _Version(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def _is_later(manifest: Path) -> bool:
    """Return whether a later version wrote a manifest that this one cannot read."""
    with suppress(ValueError, OSError):
        version = read_record(manifest, _Version, follow_links=False)
        return version is not None and version.schema_version > SCHEMA_VERSION
    return False


class _SidecarReport(msgspec.Struct):
    """The part of telemetry.json that is read here; lenient, as ManifestHead."""

    status: str | None = None
    tables: dict[str, TableCounts] = {}


def _missing_parts(run_dir: Path, tables: dict[str, TableCounts]) -> str | None:
    """Describe the first table with fewer parts on disk than the sidecar closed. An earlier writer may leave more."""
    for table, counts in tables.items():
        names = names_in(run_dir / table) if counts.parts else []
        present = sum(fnmatch(name, "part-*.parquet") for name in names)
        if present < counts.parts:
            return f"{table} has only {share(present, counts.parts, 'part')}"
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
    manifest, state = artifacts.manifest, scheduler.state if scheduler else None
    left_running = manifest is None or manifest.status == Status.RUNNING
    if refused and not submitted and left_running and not _just_written(MANIFEST, artifacts.manifest_age_s):
        return _failed(Reason.NEVER_STARTED, refused)
    phase = scheduler.meaning.phase if scheduler else None
    in_queue = scheduler and phase in (PointState.QUEUED, PointState.RUNNING) and not scheduler.unlisted
    if artifacts.unreadable and not in_queue:
        return AttemptState(state=PointState.UNKNOWN, message=artifacts.unreadable)
    # Without a job id the attempt may have run all the same, if its launcher died inside sbatch: a manifest shows that.
    if not submitted and manifest is None:
        if cancelled:
            return _failed(Reason.CANCELLED, "cancelled before it was submitted")
        return AttemptState(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message="not submitted")
    # squeue's full list is the authority on what has not ended; sacct may keep such a row for ever.
    ended = manifest is not None and manifest.status != Status.RUNNING
    alive = _just_written(MANIFEST, artifacts.manifest_age_s) or ("" if ended else artifacts.sign_of_life)
    if scheduler and scheduler.unlisted and not alive:
        message = f"squeue no longer lists it, and sacct still says {state} (see `sacctmgr show runawayjobs`)"
        if manifest is None:
            return _failed(Reason.CANCELLED if cancelled else Reason.LOST, f"{message}; {_missing(artifacts)}")
        gone = _from_manifest(manifest, None, artifacts, None)
        return replace(gone, message=message if gone.state is PointState.COMPLETED else f"{message}; {gone.message}")
    # If a job failed, is queued or runs, Slurm outweighs the manifest, which a killed worker leaves at "running".
    if scheduler and phase is PointState.FAILED:
        return _from_failed_job(scheduler, artifacts, cancelled)
    if scheduler and phase is PointState.QUEUED:
        return AttemptState(state=PointState.QUEUED, message=scheduler.detail)
    if scheduler and phase is PointState.RUNNING:
        return _from_running_job(scheduler, artifacts)
    # The job has ended, Slurm has purged it, or its state is not known.
    missing_answer = no_answer_reason if scheduler is None else None
    if scheduler and state not in (None, COMPLETED, PROCESS_EXITED, DROPPED):
        missing_answer = scheduler.detail if state in (RENAMED, LEFT_QUEUE) else scheduler.sentence
        if state != LEFT_QUEUE and not (manifest and manifest.status == Status.COMPLETED):
            return AttemptState(state=PointState.UNKNOWN, message=missing_answer)
    if scheduler and state in (None, DROPPED) and alive and not ended:
        return AttemptState(state=PointState.UNKNOWN, message=f"Slurm does not list it, but its {alive}")
    if scheduler and state == DROPPED and manifest is None:
        return _failed(Reason.CANCELLED, scheduler.detail)
    if manifest is None:
        return _without_manifest(state, artifacts, cancelled, missing_answer)
    # The manifest is that of the previous start: the next one has not written its own yet.
    if scheduler is None and manifest.slurm and manifest.slurm.requeued:
        return AttemptState(state=PointState.UNKNOWN, message=f"requeued; {missing_answer}")
    return _from_manifest(manifest, None if state == DROPPED else state, artifacts, missing_answer)


def _from_failed_job(scheduler: SchedulerState, artifacts: RunArtifacts, cancelled: bool) -> AttemptState:
    """Resolve a job that did not succeed according to Slurm; the manifest may know why."""
    manifest, detail, reason = artifacts.manifest, scheduler.detail, scheduler.meaning.reason or Reason.APP_ERROR
    if manifest and manifest.status == Status.COMPLETED:
        message = f"the manifest says completed, the scheduler {scheduler.state} ({detail})".removesuffix(" ()")
        completed = _from_manifest(manifest, COMPLETED, artifacts, None)
        # The last act of a worker is the final manifest, so the signal came after it, as to a process that hung then.
        by_signal = reason is Reason.APP_ERROR and _BY_SIGNAL.fullmatch(scheduler.exit_code)
        if completed.state is PointState.COMPLETED and (by_signal or reason in (Reason.TIMEOUT, Reason.CANCELLED)):
            return replace(completed, message=f"{message}: its process was ended after the run")
        return _failed(reason, message)
    # Slurm itself ended the job (TIMEOUT, NODE_FAIL, ...), so its reason outweighs the one in the manifest.
    if reason is not Reason.APP_ERROR:
        return _failed(reason, f"{detail} {artifacts.damage or _progress(manifest)}".strip())
    if artifacts.damage:
        return _failed(Reason.LOST, f"{artifacts.damage} ({detail})")
    if manifest is None:
        cause = ""
        if scheduler.exit_code == "0:53":
            cause = ": Slurm could not open its log; that node lacks the sweep directory, or may not write into it"
        return _failed(Reason.NEVER_STARTED, f"the job failed, and {_missing(artifacts)} ({detail}){cause}")
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
    message = "; ".join(filter(None, (artifacts.unreadable or message, scheduler.sentence)))
    return AttemptState(state=PointState.RUNNING, message=message)


def _without_manifest(
    state: str | None, artifacts: RunArtifacts, cancelled: bool, missing_answer: str | None
) -> AttemptState:
    # Without an answer of Slurm nothing but a recorded cancellation decides.
    if missing_answer is not None and (artifacts.damage or not cancelled):
        return AttemptState(state=PointState.UNKNOWN, message=f"{missing_answer}, and {_missing(artifacts)}")
    if artifacts.damage:
        return _failed(Reason.LOST, artifacts.damage)
    if cancelled:
        return _failed(Reason.CANCELLED, "")
    if state == PROCESS_EXITED:
        moved = "" if artifacts.run_dir_exists else f", or its files were moved or deleted ({_missing(artifacts)})"
        return _failed(
            Reason.NEVER_STARTED, f"its process exited before the workload started{moved}; see its log in jobs/"
        )
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
    return artifacts.damage or f"there is no {'manifest' if artifacts.run_dir_exists else 'run directory'}"


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
