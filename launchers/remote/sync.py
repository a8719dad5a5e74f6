"""Results of a sweep: which files are copied from another machine, and how they get into the sweep that launched them.

Copied are closed parts, JSON, logs and pictures; never a pickle, a checkpoint, weights, a link or a special file. The
manifest of a run comes last, so a run that looks complete is complete. An attempt that contradicts the sweep is left
out with the reason. The next transfer copies only what is new, also after a broken connection.
"""

import io
import os
import re
import shlex
import stat
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replacing
from inpaint_bench.core.schema import (
    CHECKPOINTS,
    CODE,
    JOBS,
    JOURNAL_NAME,
    MANIFEST,
    SCHEDULER,
    TELEMETRY,
    TRACKING_FILES,
    WINDOWS,
)
from launchers.sweep.attempt import Attempt
from launchers.sweep.ledger import Ledger, PointRecord

from .client import RemoteSweep, SweepReply
from .ssh import UnreachableError

LOGS = "logs"  # where logs of another machine's jobs are put: `jobs` holds scripts and takes nothing from outside
PART = ".parquet"
SUFFIXES = (PART, ".json", ".arrows", ".png", ".yaml", ".log", ".out", ".err", ".csv")
NOT_COPIED = (CHECKPOINTS, TRACKING_FILES, "weights")  # folders of a run directory
SUMMARIES = (MANIFEST, WINDOWS, TELEMETRY, SCHEDULER)  # they count other files, so they are copied last
BATCH_BYTES = 32 << 20  # in memory at once
MIN_BYTES_PER_S = 100_000  # of a connection that is not given up
_PLAIN_PATH = re.compile(r"[\w.+=,@/-]{1,240}", re.ASCII)


class ResultFile(NamedTuple):
    """A file that may be copied, as it was when it was listed."""

    path: str  # in the sweep directory that it is copied to
    size: int
    mtime_s: int


@dataclass(kw_only=True)
class CollectReport:
    """Outcome of a transfer."""

    new: list[ResultFile] = field(default_factory=list)
    num_unchanged: int = 0  # files
    num_open: int = 0  # runs
    left_out: list[str] = field(default_factory=list)  # files, and attempts that contradict the sweep, and why

    def __str__(self) -> str:
        size, runs = sum(file.size for file in self.new), {owner_of(file.path) for file in self.new}
        number = sum(not str(owner).startswith(f"{LOGS}/") for owner in runs)
        text = f"{pluralize(len(self.new), 'new file')} of {pluralize(number, 'run')}, {size:,} bytes"
        text = (text if self.new else "nothing new") + f"; {self.num_unchanged:,} unchanged"
        return text + (f"; {pluralize(self.num_open, 'run')} not ended, so without manifest" if self.num_open else "")


def list_files(remote: RemoteSweep) -> list[ResultFile]:
    """Return the plain files of the sweep directory at the site. Raises UnreachableError."""
    pruned = " -o ".join(f"-name {shlex.quote(name)}" for name in NOT_COPIED)
    # By default find follows no link.
    find = f"find . -ignore_readdir_race '(' -path ./{CODE} -o {pruned} ')' -prune -o -type f -printf '%s %T@ %P\\0'"
    done = remote.connection.run_login(f"cd {shlex.quote(remote.root)} && {find}")
    files = []
    try:
        if done.returncode:
            raise ValueError(remote.connection.why_failed(done))
        for entry in done.stdout.decode(errors="replace").split("\0")[:-1]:
            size, mtime, path = entry.split(" ", 2)
            files.append(ResultFile(_moved(path, JOBS, LOGS), int(size), int(float(mtime))))
    except ValueError as error:
        raise UnreachableError(f"{remote.site.name}: its files cannot be listed ({error})") from None
    return files


def owner_of(path: str) -> str | None:
    """Return the run directory, or the logs of the job, that a result file belongs to; None for another file."""
    if log := re.fullmatch(rf"({LOGS}/[\w-]+/\d+_\d+)_[\w.-]+\.(out|err)", path, re.ASCII):
        return log[1]
    point, attempt, *parts = path.split("/") if path.count("/") > 1 else ("", "")
    # A file that is still being written has a hidden name. So have journals, which a killed run leaves.
    hidden = any(part.startswith(".") and part != ".hydra" and not JOURNAL_NAME.fullmatch(part) for part in parts)
    copied = parts and not hidden and parts[0] not in NOT_COPIED and path.endswith(SUFFIXES)
    return f"{point}/{attempt}" if copied else None


def copy_results(
    ledger: Ledger,
    reply: SweepReply,
    files: Iterable[ResultFile],
    fetch: Callable[[Sequence[ResultFile]], None],
    *,
    site: str,
) -> CollectReport:
    """Fetch the new files of the attempts in a reply. Raises UserError, and what `fetch` raises.

    `site` is the one that was queried, whose attempts alone may be copied. `files` were listed after the reply.
    """
    sweep_id, folder, report = ledger.sweep.sweep_id, ledger.folder.resolve(), CollectReport()
    if reply.sweep_id != sweep_id:
        raise UserError(f"this is sweep {sweep_id}, and these are results of {reply.sweep_id}")
    by_owner, records = defaultdict(list), ledger.points()
    for file in files:
        if not (owner := owner_of(file.path)) or _PLAIN_PATH.fullmatch(file.path):
            by_owner[owner].append(file)
        else:
            report.left_out.append(f"{file.path!a}: a file with such a name is not copied")
    for attempt in reply.records:
        label, reason = f"point {attempt.point}, attempt {attempt.attempt}", _conflict(attempt, records, site)
        listed = [*by_owner[attempt.subdir], *by_owner[f"{LOGS}/{attempt.group}/{attempt.job_id}"]]
        # While a run goes on, its manifest may count parts that are closed only after they were listed.
        copied = (PART, ".out", ".err") if attempt.is_open else SUFFIXES
        listed = [file for file in listed if file.path.endswith(copied)]
        new = [file for file in listed if not _is_here(folder / file.path, file)]
        for target in (folder / file.path for file in new if not reason):
            if target.parent.resolve() != target.parent:
                raise UserError(f"{target.parent}: leads elsewhere by a link; nothing is written there")
            if target.suffix == PART and target.exists():
                reason = f"{target}: this closed part differs from the one to be copied"
        if reason:
            report.left_out.append(f"{label}: {reason}")
            continue
        report.new += new
        report.num_unchanged += len(listed) - len(new)
        report.num_open += attempt.is_open
    if report.new:
        summaries = {f"{owner_of(file.path)}/{name}" for file in report.new for name in SUMMARIES}
        fetch(sorted(report.new, key=lambda file: file.path in summaries))
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


def _conflict(attempt: Attempt, records: Mapping[int, PointRecord], source: str) -> str | None:
    """Return why an attempt cannot be one of this sweep; None if nothing contradicts it."""
    record = records.get(attempt.point)
    if record is None:
        return "this sweep has no such point"
    known = next((a for a in record.attempts if a.attempt == attempt.attempt), None)
    site = known.site if known else record.site
    if not attempt.site == source == site:
        return f"it was sent to {site}, and these results are from {source if source != site else attempt.site}"
    if known is None:
        return "it was not submitted from here; rsync its run directory and merge both"
    if known.run_id != attempt.run_id:
        return f"it has another run id here ({known.run_id})"
    return None if attempt.in_slurm else "it did not run in Slurm"


def fetch_over_ssh(remote: RemoteSweep, files: Iterable[ResultFile], folder: Path) -> None:
    """Fetch results in this order, in tar archives of some BATCH_BYTES. Raises UnreachableError and OSError."""
    batches: dict[int, dict[str, ResultFile]] = defaultdict(dict)  # by the path at the site
    total = 0
    for file in files:
        batches[total // BATCH_BYTES][_moved(file.path, LOGS, JOBS)] = file
        total += file.size
    for batch in batches.values():
        # A journal may have become a part since it was listed.
        script = f"cd {shlex.quote(remote.root)} || exit 2; exec tar -c -f - --ignore-failed-read --null -T -"
        timeout_s = 3 * remote.site.connect.timeout_s + sum(file.size for file in batch.values()) / MIN_BYTES_PER_S
        done = remote.connection.run_login(script, stdin="\0".join(batch).encode(), timeout_s=timeout_s)
        try:
            if done.returncode not in (0, 1):  # 1: a file grew in the meantime
                raise tarfile.ReadError(remote.connection.why_failed(done))
            with tarfile.open(fileobj=io.BytesIO(done.stdout), mode="r:") as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isreg() and member.name in batch else None
                    if content is not None:
                        target = folder / batch[member.name].path
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with replacing(target) as out:
                            out.write(content.read())
                            out.flush()
                            os.utime(out.fileno(), (member.mtime, member.mtime))
        except tarfile.TarError as error:
            raise UnreachableError(f"{remote.site.name}: results cannot be copied ({error})") from None


def _moved(path: str, source: str, target: str) -> str:
    """Return a path with another top folder if it lies in `source`."""
    return f"{target}/{path.removeprefix(f'{source}/')}" if path.startswith(f"{source}/") else path
