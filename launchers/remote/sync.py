"""Results of a sweep: which files are copied between machines, and how they get into the sweep that requested them.

Copied are closed parts, JSON, logs and pictures; never a pickle, a checkpoint, weights, a link or a special file. An
attempt is in the ledger before its first file is here, and its manifest comes last, so a run that looks complete is
complete. An attempt that contradicts the sweep is left out with the reason. The next transfer copies only what is new,
also after a broken connection.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import to_record
from inpaint_bench.core.schema import (
    CHECKPOINTS,
    JOBS,
    JOURNAL_NAME,
    MANIFEST,
    SCHEDULER,
    TELEMETRY,
    TRACKING_FILES,
    WINDOWS,
)
from launchers.sweep.attempt import Attempt, AttemptKey, ResultFile
from launchers.sweep.events import Cancelled, Planned, Refused, Submitted
from launchers.sweep.ledger import Ledger, PointRecord

from .client import RemoteSweep, SweepReply

LOGS = "logs"  # where logs of another machine's jobs are put: `jobs` holds scripts and takes nothing from outside
PART = ".parquet"
SUFFIXES = (PART, ".json", ".arrows", ".png", ".yaml", ".log", ".out", ".err", ".csv")
NOT_COPIED = (CHECKPOINTS, TRACKING_FILES, "weights")  # folders of a run directory
SUMMARIES = (MANIFEST, WINDOWS, TELEMETRY, SCHEDULER)  # they count other files, so they are copied last
LOCK_TIMEOUT_S = 60.0  # for a command that is submitting


@dataclass(kw_only=True)
class CollectReport:
    """Outcome of a transfer."""

    new: list[ResultFile] = field(default_factory=list)
    num_runs: int = 0  # with new files
    num_unchanged: int = 0  # files
    num_open: int = 0  # runs
    left_out: dict[AttemptKey, str] = field(default_factory=dict)  # attempts that contradict the sweep, and why

    def __str__(self) -> str:
        size = sum(file.size for file in self.new)
        text = f"{pluralize(len(self.new), 'new file')} of {pluralize(self.num_runs, 'run')}, {size:,} bytes"
        text = (text if self.new else "nothing new") + f"; {self.num_unchanged:,} unchanged"
        return text + (f"; {pluralize(self.num_open, 'run')} not ended, so without manifest" if self.num_open else "")


def list_results(folder: Path, points: Iterable[PointRecord], open_points: Collection[int], reply: SweepReply) -> None:
    """Add every attempt with its result files to a reply. `open_points` are those whose last attempt has not ended."""
    for attempt, is_last in ((a, a is point.last) for point in points for a in point.attempts):
        is_open = is_last and attempt.point in open_points
        files = []
        for path, source in _candidates(folder, attempt):
            # While a run goes on, its manifest may count parts that are closed only after they were listed here.
            if not is_result(path, attempt) or (is_open and not path.endswith((PART, ".out", ".err"))):
                continue
            try:
                status = source.lstat()
                if stat.S_ISREG(status.st_mode):
                    entry = {"path": path, "size": status.st_size, "mtime_s": int(status.st_mtime)}
                    files.append(to_record(entry, ResultFile))
            except FileNotFoundError:  # a journal that has just become a part
                pass
            except msgspec.ValidationError:
                reply.skipped.append(f"{path!a}: a file with such a name is not copied")
        reply.attempts.append(reported(attempt, is_open=is_open, files=files))


def reported(attempt: Attempt, **content: Any) -> Attempt:
    """Return an attempt for a reply: with `content`, and without what it requests, which the asking machine knows."""
    return msgspec.structs.replace(attempt, overrides=None, gpu=None, batch=None, **content)


def _candidates(folder: Path, attempt: Attempt) -> Iterator[tuple[str, Path]]:
    """Yield files of an attempt, by the path that they are copied to."""
    if attempt.job_id:
        jobs = folder / JOBS / attempt.group
        for path in () if is_behind_link(folder, jobs) else sorted(jobs.glob(f"{attempt.job_id}_*")):
            yield f"{LOGS}/{attempt.group}/{path.name}", path
    run_dir = folder / attempt.subdir
    for parent, folders, names in () if is_behind_link(folder, run_dir) else os.walk(run_dir):
        folders[:] = [name for name in folders if name not in NOT_COPIED]
        for path in (Path(parent, name) for name in sorted(names)):
            yield path.relative_to(folder).as_posix(), path


def is_behind_link(folder: Path, path: Path) -> bool:
    """Return whether a link leads from `folder` to `path`: what lies behind it is not part of the sweep."""
    return path.resolve() != folder.resolve() / path.relative_to(folder)


def is_result(path: str, attempt: Attempt) -> bool:
    """Return whether a path in the sweep directory is a file of this attempt that may be copied."""
    run_dir = f"{attempt.subdir}/"
    if path.startswith(run_dir):
        parts = path.removeprefix(run_dir).split("/")
        # A file that is still being written has a hidden name. So have journals, which a killed run leaves.
        hidden = any(part.startswith(".") and part != ".hydra" and not JOURNAL_NAME.fullmatch(part) for part in parts)
        return not hidden and parts[0] not in NOT_COPIED and path.endswith(SUFFIXES)
    log = re.fullmatch(rf"{LOGS}/([\w-]+)/(\d+_\d+)_[\w.-]+\.(out|err)", path, re.ASCII)
    return log is not None and (log[1], log[2]) == (attempt.group, attempt.job_id)


def is_summary(path: str) -> bool:
    """Return whether a file sums up its run directory."""
    return path.count("/") == 2 and path.rpartition("/")[2] in SUMMARIES


def copy_results(
    ledger: Ledger, reply: SweepReply, fetch: Callable[[Sequence[str]], None], *, site: str
) -> CollectReport:
    """Record the attempts of a reply and fetch their new files. Raises UserError, and what `fetch` raises.

    `site` is the one that was queried, whose attempts alone may be copied.
    """
    sweep_id, folder, report = ledger.sweep.sweep_id, ledger.folder.resolve(), CollectReport()
    if reply.sweep_id != sweep_id:
        raise UserError(f"this is sweep {sweep_id}, and these are results of {reply.sweep_id}")
    for attempt in _record(reply.attempts, ledger, site, report):
        new = [file for file in attempt.files if not _is_here(folder / file.path, file)]
        for target in (folder / file.path for file in new):
            if target.parent.resolve() != target.parent:
                raise UserError(f"{target.parent}: leads elsewhere by a link; nothing is written there")
            if target.suffix == PART and target.exists():
                report.left_out[attempt.key] = f"{target}: this closed part differs from the one to be copied"
        if attempt.key not in report.left_out:
            report.new += new
            report.num_runs += any(not file.path.startswith(LOGS) for file in new)
            report.num_unchanged += len(attempt.files) - len(new)
            report.num_open += attempt.is_open
    if report.new:
        fetch(sorted((file.path for file in report.new), key=is_summary))
    return report


def _is_here(path: Path, file: ResultFile) -> bool:
    """Return whether `path` is a plain file of the listed size and time of modification."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    # Closed parts are never rewritten, so their size is enough.
    same_time = path.suffix == PART or int(status.st_mtime) == file.mtime_s
    return stat.S_ISREG(status.st_mode) and same_time and status.st_size == file.size


def _record(attempts: Sequence[Attempt], ledger: Ledger, site: str, report: CollectReport) -> list[Attempt]:
    """Return the attempts to be copied, each of them in the ledger; the report gets the others."""
    accepted = []
    specs = {spec.point: spec for spec in ledger.sweep.points}
    recorded = {(a.point, a.attempt) for record in ledger.points().values() for a in record.attempts}
    # The lock keeps a concurrent `rerun` from using the number of an attempt that is added here. It is not taken if
    # nothing is added, because a launch holds it for as long as its points run on this machine.
    is_new = any(attempt.key not in recorded for attempt in attempts)
    with ledger.lock(timeout_s=LOCK_TIMEOUT_S) if is_new else nullcontext():
        records = ledger.points()
        for attempt in attempts:
            if reason := _conflict(attempt, records, site):
                report.left_out[attempt.key] = reason
                continue
            accepted.append(attempt)
            record, keys = records[attempt.point], [attempt.key]
            if any(known.attempt == attempt.attempt for known in record.attempts):
                continue
            # The overrides stay as this sweep has them, because `rerun` composes and executes them.
            requested = msgspec.structs.replace(
                specs[attempt.point],
                overrides=record.overrides,
                gpu=record.gpu,
                batch=record.batch,
                site=attempt.site,
                attempt=attempt.attempt,
                run_id=attempt.run_id,
            )
            group, job_id = attempt.group, attempt.job_id
            ledger.append(Planned(group=group, job_name=attempt.job_name, site=attempt.site, attempts=[requested]))
            if job_id:
                ledger.append(Submitted(group=group, job_id=job_id, cluster=attempt.cluster, attempts=keys))
            if attempt.refused:
                ledger.append(Refused(group=group, attempts=keys, message=attempt.refused))
            if attempt.cancelled:
                ledger.append(Cancelled(attempts=keys))
    return accepted


def _conflict(attempt: Attempt, records: Mapping[int, PointRecord], source: str) -> str | None:
    """Return why an attempt cannot be one of this sweep; None if nothing contradicts it."""
    record = records.get(attempt.point)
    if record is None:
        return "this sweep has no such point"
    known = next((a for a in record.attempts if a.attempt == attempt.attempt), None)
    site = known.site if known else record.site
    if not attempt.site == source == site:
        return f"it was sent to {site}, and these results are from {source if source != site else attempt.site}"
    if known and known.run_id != attempt.run_id:
        return f"it has another run id here ({known.run_id})"
    if not all(is_result(file.path, attempt) for file in attempt.files):
        return "it lists files that are not results"
    return None if attempt.in_slurm else "it did not run in Slurm"


def fetch_over_ssh(remote: RemoteSweep, paths: Sequence[str], folder: Path) -> None:
    """Fetch results by rsync. Raises UnreachableError, and UserError if either side has no rsync."""
    if missing := remote.connection.missing_rsync():
        raise UserError(f"{missing}: install it, or copy {remote.connection.host}:{remote.root} here and merge both")
    logs = [path.removeprefix(f"{LOGS}/") for path in paths if path.startswith(f"{LOGS}/")]
    summaries = [path for path in paths if is_summary(path)]
    others = [path for path in paths if not path.startswith(f"{LOGS}/") and not is_summary(path)]
    # An interrupted file is kept in a hidden folder; under its own name it would look like a part that differs.
    options = ("--omit-dir-times", "--partial-dir=.partial", "--ignore-missing-args", "--from0", "--files-from=-")
    # Three calls, because rsync sorts the files of one call itself, and the summaries have to come last.
    for source, target, names in ((f"{JOBS}/", folder / LOGS, logs), ("", folder, others), ("", folder, summaries)):
        if names:
            os.sync()  # the parts are on the disk before a manifest says that they are complete
            site = f"{remote.connection.host}:{remote.root}/{source}"
            remote.connection.rsync(*options, site, str(target), stdin="\0".join(names).encode())
