"""Files of a sweep that are copied between machines: closed parts, JSON, logs and pictures of its attempts.

Never a pickle, a checkpoint or weights. Links and special files are not copied either.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from inpaint_bench.core.schema import CHECKPOINTS, JOBS, MANIFEST, SCHEDULER, TELEMETRY, WINDOWS
from inpaint_bench.telemetry.storage.journal import is_journal
from launchers.sweep.ledger import Attempt, PointRecord

from .messages import AttemptReply, ResultFile, SweepReply

LOGS = "logs"  # where logs of another machine's jobs are put: `jobs` holds pickles and takes nothing from outside
SUMMARIES = (MANIFEST, WINDOWS, TELEMETRY, SCHEDULER)  # copied after all other files
SUFFIXES = (".parquet", ".json", ".arrows", ".png", ".yaml", ".log", ".out", ".err", ".csv")
NOT_COPIED = (CHECKPOINTS, "weights")  # folders of a run directory


def list_results(folder: Path, points: Iterable[PointRecord], open_points: Collection[int], reply: SweepReply) -> None:
    """Add every attempt with its result files to a reply.

    Only parts and logs are listed of the last attempt of a point in `open_points`: its other files still change.
    """
    for record in points:
        for attempt in record.attempts:
            is_open = record.num in open_points and attempt is record.last
            files = []
            for path, source in _candidates(folder, attempt):
                if not is_result(path, attempt) or (is_open and not path.endswith((".parquet", ".out", ".err"))):
                    continue
                try:
                    status = source.lstat()
                    if stat.S_ISREG(status.st_mode):
                        entry = {"path": path, "size": status.st_size, "mtime_s": int(status.st_mtime)}
                        files.append(msgspec.convert(entry, ResultFile))
                except FileNotFoundError:
                    pass
                except msgspec.ValidationError:
                    reply.skipped.append(f"{path!a}: a file with such a name is not copied")
            reply.attempts.append(AttemptReply.of(attempt, is_open=is_open, files=files))


def is_result(path: str, attempt: Attempt | AttemptReply) -> bool:
    """Return whether a path in the sweep directory is a file of this attempt that may be copied."""
    run_dir = f"{attempt.point}/attempt-{attempt.attempt}/"
    if path.startswith(run_dir):
        parts = path.removeprefix(run_dir).split("/")
        # A file that is still being written has a hidden name. So have journals, which a killed run leaves.
        hidden = any(part.startswith(".") and part != ".hydra" and not is_journal(part) for part in parts)
        return not hidden and parts[0] not in NOT_COPIED and path.endswith(SUFFIXES)
    log = re.fullmatch(rf"{LOGS}/([\w-]+)/(\d+_\d+)_[\w.-]+\.(out|err)", path, re.ASCII)
    return log is not None and (log[1], log[2]) == (attempt.group, attempt.job_id)


def is_summary(path: str) -> bool:
    """Return whether a file sums up its run directory. It must not be there before the files that it counts."""
    return path.count("/") == 2 and path.rpartition("/")[2] in SUMMARIES


def source_path(path: str) -> str:
    """Return where a result lies in the sweep directory of the machine that ran it."""
    return path.replace(f"{LOGS}/", f"{JOBS}/", 1) if path.startswith(f"{LOGS}/") else path


def is_here(path: Path, file: ResultFile, *, or_newer: bool = False) -> bool:
    """Return whether `path` is a plain file of the listed size and time of modification, or a newer one.

    Closed parts are never rewritten, so their size is enough.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    mtime_s, is_part = int(status.st_mtime), path.suffix == ".parquet"
    if or_newer and not is_part and mtime_s > file.mtime_s:
        return True
    return status.st_size == file.size and (is_part or mtime_s == file.mtime_s)


def _candidates(folder: Path, attempt: Attempt) -> Iterator[tuple[str, Path]]:
    """Yield files of an attempt, by the path that they are copied to."""
    if attempt.job_id:
        for path in sorted((folder / JOBS / attempt.group).glob(f"{attempt.job_id}_*")):
            yield f"{LOGS}/{attempt.group}/{path.name}", path
    for parent, folders, names in os.walk(folder / attempt.subdir):
        folders[:] = [name for name in folders if name not in NOT_COPIED]
        for path in (Path(parent, name) for name in sorted(names)):
            yield path.relative_to(folder).as_posix(), path
