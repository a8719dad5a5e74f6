"""Copies results of another machine into the sweep that requested them.

An attempt is in the ledger before its first file is here, and its manifest comes last, so that a run that looks
complete is complete. An attempt that contradicts what the sweep knows is left out with the reason. The next transfer
copies only what is new, also after a broken connection.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replace_bytes
from inpaint_bench.core.schema import JOBS
from launchers.sweep.events import Cancelled, Planned, PlannedAttempt, Refused, Submitted
from launchers.sweep.ledger import Ledger, PointRecord

from .archive import ArchiveError, read_archive
from .client import RemoteSweep
from .messages import ARCHIVE_FOLLOWS, AttemptReply, ResultFile, SweepReply
from .results import LOGS, is_here, is_result, is_summary
from .ssh import UnreachableError, last_lines

LOCK_TIMEOUT_S = 60.0  # for a command that is submitting

Fetch = Callable[[Sequence[str]], None]  # copies files, by path


@dataclass(kw_only=True)
class Report:
    """Outcome of a transfer."""

    new: list[ResultFile] = field(default_factory=list)
    num_unchanged: int = 0  # files
    num_open: int = 0  # runs
    left_out: dict[tuple[int, int], str] = field(default_factory=dict)  # attempts that contradict the sweep, and why

    def __str__(self) -> str:
        runs = {file.path.split("/")[0] for file in self.new if not file.path.startswith(LOGS)}
        size = sum(file.size for file in self.new)
        text = f"{pluralize(len(self.new), 'new file')} of {pluralize(len(runs), 'run')}, {size:,} bytes"
        text = (text if self.new else "nothing new") + f"; {self.num_unchanged:,} unchanged"
        return text + (f"; {pluralize(self.num_open, 'run')} not ended, so without manifest" if self.num_open else "")


def copy_results(ledger: Ledger, reply: SweepReply, fetch: Fetch, *, site: str | None) -> Report:
    """Record the attempts of a reply and fetch their new files. Raises UserError, and what `fetch` raises.

    `site` is the one that was asked over ssh, whose attempts alone may be copied; None for an archive, which may be
    older than what is here.
    """
    sweep_id, folder = ledger.sweep.sweep_id, ledger.folder.resolve()
    if reply.sweep_id != sweep_id:
        raise UserError(f"this is sweep {sweep_id}, and these are results of {reply.sweep_id}")
    report = Report()
    for attempt in _record(reply.attempts, ledger, site, report):
        new = [file for file in attempt.files if not is_here(folder / file.path, file, or_newer=site is None)]
        for target in (folder / file.path for file in new):
            if target.parent.resolve() != target.parent:
                raise UserError(f"{target.parent}: leads elsewhere by a link; nothing is written there")
            if target.suffix == ".parquet" and target.exists():
                report.left_out[attempt.key] = f"{target}: this closed part differs from the one to be copied"
        if attempt.key not in report.left_out:
            report.new += new
            report.num_unchanged += len(attempt.files) - len(new)
            report.num_open += attempt.is_open
    if report.new:
        fetch(sorted((file.path for file in report.new), key=is_summary))
    return report


def fetch_over_ssh(remote: RemoteSweep, rsync: str | None, paths: Sequence[str], folder: Path) -> None:
    """Fetch results by rsync or, where either side has none, as a tar stream. Raises UnreachableError."""
    if not (rsync and shutil.which("rsync")):
        _fetch_tar(remote, paths, folder)
        return
    logs = [path.removeprefix(f"{LOGS}/") for path in paths if path.startswith(f"{LOGS}/")]
    summaries = [path for path in paths if is_summary(path)]
    others = [path for path in paths if not path.startswith(f"{LOGS}/") and not is_summary(path)]
    options = ("--omit-dir-times", "--partial-dir=.partial", "--ignore-missing-args", f"--rsync-path={rsync}")
    for source, target, names in ((f"{JOBS}/", folder / LOGS, logs), ("", folder, others), ("", folder, summaries)):
        if names:
            os.sync()  # the parts are on the disk before a manifest says that they are complete
            site = f"{remote.connection.host}:{remote.root}/{source}"
            stdin = "\0".join(names).encode()
            remote.connection.rsync(*options, "--from0", "--files-from=-", site, str(target), stdin=stdin)


def _fetch_tar(remote: RemoteSweep, paths: Sequence[str], folder: Path) -> None:
    command = remote.connection.command(remote.agent_command("read"))
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as err:
        request.write(msgspec.json.encode(paths))
        request.seek(0)
        with subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE, stderr=err) as process:
            assert process.stdout is not None
            try:
                next((line for line in process.stdout if line == ARCHIVE_FOLLOWS), None)
                extract(process.stdout, paths, folder)
            except ArchiveError as error:
                err.seek(0)
                raise UnreachableError(f"{remote.site.name}: {error} {last_lines(err.read())}".strip()) from None


def extract(archive: IO[bytes], paths: Collection[str], folder: Path) -> None:
    """Extract these files of an archive into `folder`. Raises ArchiveError."""
    requested = frozenset(paths)

    def receive(name: str, content: bytes, mtime_s: float) -> None:
        if name in requested:
            replace_bytes(folder / name, content)
            os.utime(folder / name, (mtime_s, mtime_s))

    read_archive(archive, receive)


def _record(attempts: Sequence[AttemptReply], ledger: Ledger, site: str | None, report: Report) -> list[AttemptReply]:
    """Return the attempts to be copied, each of them in the ledger; the report gets the others.

    The overrides of a point stay as this sweep has them, because `rerun` executes them.
    """
    sites, records, accepted = ledger.sweep.sites, ledger.points(), []
    launched = {spec.point: spec for spec in ledger.sweep.points}
    recorded = {(a.point, a.attempt) for record in records.values() for a in record.attempts}
    is_new = any(attempt.key not in recorded for attempt in attempts)
    # A `rerun` must not give the number of a new attempt to another one meanwhile.
    with ledger.lock(timeout_s=LOCK_TIMEOUT_S) if is_new else nullcontext():
        records = ledger.points()
        for attempt in attempts:
            if reason := _conflict(attempt, records, sites, site):
                report.left_out[attempt.key] = reason
                continue
            accepted.append(attempt)
            record, keys = records[attempt.point], [attempt.key]
            if any(known.attempt == attempt.attempt for known in record.attempts):
                continue
            spec = msgspec.structs.replace(
                launched[attempt.point],
                overrides=record.overrides,
                gpu=record.gpu,
                batch=record.batch,
                site=attempt.site,
            )
            ledger.append(
                Planned(
                    group=attempt.group,
                    job_name=attempt.job_name,
                    site=attempt.site,
                    carried=site is None,
                    attempts=[PlannedAttempt.of(spec, attempt=attempt.attempt, run_id=attempt.run_id)],
                )
            )
            if attempt.job_id:
                ledger.append(Submitted(group=attempt.group, job_id=attempt.job_id, attempts=keys))
            if attempt.refused:
                ledger.append(Refused(group=attempt.group, attempts=keys, message=attempt.refused))
            if attempt.cancelled:
                ledger.append(Cancelled(attempts=keys))
    return accepted


def _conflict(
    attempt: AttemptReply, records: Mapping[int, PointRecord], sites: Mapping[str, Any], source: str | None
) -> str | None:
    """Return why an attempt cannot be one of this sweep; None where nothing contradicts it."""
    record = records.get(attempt.point)
    if record is None:
        return "this sweep has no such point"
    known = next((a for a in record.attempts if a.attempt == attempt.attempt), None)
    site = known.site if known else record.site
    if attempt.site != site or (source and source != site):
        return f"it was sent to {site}, and these results are from {source or attempt.site}"
    if known and not known.carried and sites[site]["connect"]["method"] != "ssh":
        return "it was submitted from this sweep directory, so there is nothing to copy"
    if known and known.run_id != attempt.run_id:
        return f"it has another run id here ({known.run_id})"
    if not all(is_result(file.path, attempt) for file in attempt.files):
        return "it lists files that are not results"
    if source and not attempt.in_slurm:
        return "it did not run in Slurm"
    return None
