"""What of a sweep goes from the machine that ran it to the one that asked for it. `arrivals` puts it into place there.

Closed parts, JSON, logs, pictures: never a pickle, a checkpoint or weights. A run's manifest is read before its parts
are listed and sent after all of them, so that a run that looks complete is complete, however a transfer ends.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inpaint_bench.core.schema import CHECKPOINTS, JOBS, MANIFEST, SCHEDULER, TELEMETRY, WINDOWS
from inpaint_bench.telemetry.storage.journal import is_journal
from launchers.sweep.ledger import Attempt, PointRecord

from . import validate_reply
from .bundle import Content, Source, unfit
from .digests import Digests

RESULTS = "results"  # kind of a bundle
LOGS = "logs"  # of the jobs; where it lands, `jobs` holds pickles and takes nothing from outside
HEADS = (WINDOWS, TELEMETRY, SCHEDULER, MANIFEST)  # in the order in which they are put into place
SUFFIXES = (".parquet", ".json", ".arrows", ".png", ".yaml", ".log", ".out", ".err", ".csv")
REPLACED = (".json", ".yaml")  # as a whole, while a run goes on; the others are written once, or only grow
LEFT_THERE = (CHECKPOINTS, "weights")  # folders of a run directory

LOG = re.compile(rf"{LOGS}/([\w-]+)/[\w.-]+\.(out|err)", re.ASCII)
JOB = re.compile(r"(\d+_\d+)_")  # how a log's name begins


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """An attempt, and what of it travels."""

    facts: dict[str, Any]
    sources: list[Source]
    unfit: list[str] = field(default_factory=list)  # files that no bundle can hold, in a sentence each


def outgoing(folder: Path, records: Iterable[PointRecord], unfinished: Collection[int]) -> Iterator[Outgoing]:
    """Every attempt of a sweep, listed when its turn comes. `unfinished`: points whose last attempt has not ended.

    What a run replaces is held in memory, and nothing else of it: a log or a part is read when it is sent.
    """
    records = list(records)
    jobs = {attempt.job_id for record in records for attempt in record.attempts}
    logs: dict[str, dict[str | None, list[Source]]] = {}
    for record in records:
        for attempt in record.attempts:
            if attempt.group not in logs:
                logs[attempt.group] = _logs(folder, attempt.group, jobs)
            fit, refused = [], []
            for source in [
                *logs[attempt.group].pop(attempt.job_id, []),
                *logs[attempt.group].pop(None, []),
                *_run_files(folder, attempt.subdir, record.num in unfinished and attempt is record.last),
            ]:
                if why := unfit(source.path, _size(source)):
                    refused.append(why)
                else:
                    fit.append(source)
            yield Outgoing(facts=_facts(attempt), sources=fit, unfit=refused)


def contents(sources: Iterable[Source], digests: Digests, *, have: Mapping[str, Any] | None = None) -> list[Content]:
    """With sizes and checksums, less what the reader has (by path: size and SHA-256) and what has gone meanwhile."""
    found = []
    for source in sources:
        try:
            member = digests.of(source)
        except FileNotFoundError:
            continue
        if (have or {}).get(member.path) != [member.size, member.sha256]:
            found.append((source, member))
    return found


def head(sweep_id: str, runs: Sequence[Outgoing], made_unix: float) -> dict[str, Any]:
    """What a bundle of results says of itself. `made_unix`: when the sweep was looked at."""
    return {
        "kind": RESULTS,
        "sweep_id": sweep_id,
        "made_unix": round(made_unix, 3),
        "attempts": [run.facts for run in runs],
        "journals": [s.path for run in runs for s in run.sources if is_journal(s.path.rpartition("/")[2])],
    }


def travels(inner: str) -> bool:
    """No hidden file but the journal and Hydra's record: what a writer has not renamed yet is hidden."""
    *folders, name = inner.split("/")
    hidden = [part for part in (*folders, name) if part.startswith(".") and part != ".hydra" and not is_journal(part)]
    return not hidden and name.endswith(SUFFIXES)


def _facts(attempt: Attempt) -> dict[str, Any]:
    return {
        "point": attempt.point,
        "attempt": attempt.attempt,
        "run_id": attempt.run_id,
        "site": attempt.site,
        "group": attempt.group,
        "job_name": attempt.job_name,
        "job_id": attempt.job_id,
        "refused": validate_reply.line(attempt.refused),
        "cancelled": attempt.cancelled,
    }


def _logs(folder: Path, group: str, jobs: Collection[str | None]) -> dict[str | None, list[Source]]:
    """By job; under None those of none of these jobs, which go with the first attempt of their group."""
    found: dict[str | None, list[Source]] = {}
    for file in sorted((folder / JOBS / group).glob("*")):
        path = f"{LOGS}/{group}/{file.name}"
        if LOG.fullmatch(path) and _is_plain(file):
            named = JOB.match(file.name)
            job = named[1] if named and named[1] in jobs else None
            found.setdefault(job, []).append(Source(path=path, file=file))
    return found


def _run_files(folder: Path, subdir: str, still_open: bool) -> Iterator[Source]:
    run_dir = folder / subdir
    # before the parts are listed: what a manifest of this moment counts is then among them
    heads = [_source(f"{subdir}/{name}", run_dir / name) for name in HEADS if _is_plain(run_dir / name)]
    for here, folders, names in os.walk(run_dir):
        folders[:] = sorted(name for name in folders if name not in LEFT_THERE)
        for name in sorted(names):
            file = Path(here, name)
            inner = file.relative_to(run_dir).as_posix()
            if inner in HEADS or not travels(inner) or (still_open and is_journal(name)) or not _is_plain(file):
                continue
            yield _source(f"{subdir}/{inner}", file)
    yield from heads


def _source(path: str, file: Path) -> Source:
    return Source(path=path, content=file.read_bytes()) if path.endswith(REPLACED) else Source(path=path, file=file)


def _is_plain(file: Path) -> bool:
    """No link, no pipe that would be waited for, and there."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except FileNotFoundError:
        return False


def _size(source: Source) -> int:
    if source.content is not None:
        return len(source.content)
    return source.file.stat().st_size if source.file and source.file.exists() else 0
