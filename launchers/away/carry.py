"""What of a sweep goes from the machine that ran it to the one that asked for it, and how it is put into place there.

Closed parts, JSON, logs, pictures: never a pickle, a checkpoint or weights. A run's manifest is read before its parts
are listed and put into place after all of them, so that a run that looks complete is complete, however a transfer ends.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inpaint_bench.contract import CHECKPOINTS, JOBS, MANIFEST, SCHEDULER, TELEMETRY, WINDOWS
from inpaint_bench.errors import UserError
from inpaint_bench.files import replacing
from inpaint_bench.telemetry.journal import is_journal
from inpaint_bench.terminal import count

from ..record.ledger import Attempt, Ledger, PointRecord
from .bundle import BundleError, Index, Member, Readable, Source, digest, read_files, skip_over

RESULTS = "results"
LOGS = "logs"  # of the jobs; where it lands, `jobs` holds pickles and takes nothing from outside
HEADS = (WINDOWS, TELEMETRY, SCHEDULER, MANIFEST)  # in the order in which they are put into place
SUFFIXES = (".parquet", ".json", ".arrows", ".png", ".yaml", ".log", ".out", ".err", ".csv")
LEFT_THERE = (CHECKPOINTS, "weights")  # folders of a run directory

_RUN_FILE = re.compile(r"(\d{1,7})/attempt-(\d{1,7})/(.+)")
_LOG = re.compile(rf"{LOGS}/([\w-]+)/[\w.-]+\.(out|err)", re.ASCII)
_WORD = re.compile(r"[\w.:@%+-]{1,200}", re.ASCII)


@dataclass(kw_only=True)
class Received:
    """What an import did."""

    runs: set[tuple[int, int]] = field(default_factory=set)  # point and attempt
    new: int = 0  # files
    kept: int = 0  # files that were here already, as they are
    older: int = 0  # files that are newer here
    bytes_new: int = 0

    def __str__(self) -> str:
        said = (
            "nothing new"
            if not self.new
            else f"{count(self.new, 'new file')} of {count(len(self.runs), 'run')}, {self.bytes_new:,} bytes"
        )
        said += f"; {self.kept} were here" if self.kept else ""
        return said + (f"; {self.older} are newer here" if self.older else "")


def outgoing(
    folder: Path, records: Iterable[PointRecord], unfinished: Collection[int]
) -> tuple[list[dict[str, Any]], list[Source]]:
    """Every attempt of a sweep, and the files that travel. `unfinished`: points whose last attempt has not ended."""
    attempts: list[dict[str, Any]] = []
    sources: list[Source] = []
    groups = set()
    for record in records:
        for attempt in record.attempts:
            still_open = record.num in unfinished and attempt is record.last
            sources += _run_files(folder, attempt.subdir, still_open)
            groups.add(attempt.group)
            attempts.append(_facts(attempt))
    for group in sorted(groups):
        for file in sorted((folder / JOBS / group).glob("*")):
            path = f"{LOGS}/{group}/{file.name}"
            if _LOG.fullmatch(path) and not file.is_symlink():
                sources.append(Source(path=path, content=file.read_bytes()))
    return attempts, sources


def _facts(attempt: Attempt) -> dict[str, Any]:
    return {
        "point": attempt.point,
        "attempt": attempt.attempt,
        "run_id": attempt.run_id,
        "site": attempt.site,
        "group": attempt.group,
        "job_name": attempt.job_name,
        "job_id": attempt.job_id,
        "refused": attempt.refused,
        "cancelled": attempt.cancelled,
    }


def _run_files(folder: Path, subdir: str, still_open: bool) -> Iterator[Source]:
    heads = {}
    for name in HEADS:  # before the parts are listed: what a manifest of this moment counts is then among them
        if (folder / subdir / name).is_file():
            heads[name] = (folder / subdir / name).read_bytes()
    for here, folders, names in os.walk(folder / subdir):
        folders[:] = sorted(name for name in folders if name not in LEFT_THERE)
        for name in sorted(names):
            file = Path(here, name)
            inner = file.relative_to(folder / subdir).as_posix()
            if inner in HEADS or file.is_symlink() or not _travels(inner) or (still_open and is_journal(name)):
                continue
            path = f"{subdir}/{inner}"
            closed = name.endswith(".parquet")
            yield Source(path=path, file=file) if closed else Source(path=path, content=file.read_bytes())
    for name, content in heads.items():
        yield Source(path=f"{subdir}/{name}", content=content)


def _travels(inner: str) -> bool:
    """No hidden file but the journal and Hydra's record: what a writer has not renamed yet is hidden."""
    *folders, name = inner.split("/")
    hidden = [part for part in (*folders, name) if part.startswith(".") and part != ".hydra" and not is_journal(part)]
    return not hidden and name.endswith(SUFFIXES)


def present(folder: Path, subdirs: Iterable[str]) -> dict[str, list[Any]]:
    """Size and SHA-256 by path of what a sweep directory holds of these folders already."""
    found: dict[str, list[Any]] = {}
    for subdir in subdirs:
        for file in (folder / subdir).rglob("*"):
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as content:
                    found[file.relative_to(folder).as_posix()] = list(digest(content))
    return found


def check(index: Index, ledger: Ledger, *, site: str | None = None) -> list[dict[str, Any]]:
    """The attempts that a bundle brings, all of them of points that this sweep sent away. Raises UserError.

    `site`: the only one whose attempts may be among them.
    """
    head, sweep = index.head, ledger.sweep
    if head.get("kind") != RESULTS:
        raise BundleError("it holds no results (a plan goes to `launch --plan`)")
    if head.get("sweep_id") != sweep["sweep_id"]:
        raise UserError(
            f"{ledger.folder}: is sweep {sweep['sweep_id']}, and these are results of {_said(head.get('sweep_id'))}"
        )
    if not isinstance(head.get("made_unix"), int | float) or not isinstance(head.get("attempts"), list):
        raise BundleError("its list lacks a time or attempts")
    if not isinstance(head.get("journals"), list):
        raise BundleError("its list lacks the journals")
    records = ledger.points()
    for facts in head["attempts"]:
        _check_facts(facts)
        record = records.get(facts["point"])
        where = f"point {facts['point']}"
        if record is None:
            raise UserError(f"{where}: is not in {ledger.folder}")
        known = {attempt.attempt: attempt for attempt in record.attempts}.get(facts["attempt"])
        if facts["site"] != (known.site if known else record.site) or facts["site"] != (site or facts["site"]):
            raise UserError(f"{where}: was sent to {record.site}, and these results are of {facts['site']}")
        if known and not known.carried and sweep["sites"][known.site]["reach"]["method"] != "ssh":
            raise UserError(f"{where}: attempt {facts['attempt']} was sent from here; there is nothing to bring")
        if known and known.run_id != facts["run_id"]:
            raise UserError(f"{where}: attempt {facts['attempt']} is another run here ({known.run_id})")
    mine = {(facts["point"], facts["attempt"]) for facts in head["attempts"]}
    groups = {facts["group"] for facts in head["attempts"]}
    for member in index.members:
        run, log = _RUN_FILE.fullmatch(member.path), _LOG.fullmatch(member.path)
        if run and (int(run[1]), int(run[2])) in mine and _travels(run[3]) and run[3].split("/")[0] not in LEFT_THERE:
            continue
        if log and log[1] in groups:
            continue
        raise BundleError(f"{member.path}: not a file of the runs that it brings")
    attempts: list[dict[str, Any]] = head["attempts"]
    return attempts


def receive(stream: Readable, index: Index, ledger: Ledger, *, newest_unix: float) -> Received:
    """Put every file of a checked bundle into place, one by one, each verified first. Raises BundleError, UserError.

    What is here already, byte for byte, is left; a closed part that differs is refused; of what grows, the newer wins
    (`newest_unix`: when the newest was made of those that came from this site).
    """
    free = shutil.disk_usage(ledger.folder).free
    if index.total_bytes > 0.95 * free:
        raise UserError(f"{ledger.folder}: {index.total_bytes:,} bytes are to come and {free:,} are free")
    outdated = index.head["made_unix"] < newest_unix
    root, result = ledger.folder.resolve(), Received()

    def each(member: Member, chunks: Iterator[bytes]) -> None:
        target = root / member.path
        if not target.parent.resolve().is_relative_to(root):
            raise UserError(f"{target}: leads out of {root} by a link")
        if target.is_symlink() or target.exists():
            same = not target.is_symlink() and target.is_file() and _same(target, member)
            if not same and member.path.endswith(".parquet"):
                raise UserError(f"{target}: a closed part differs from the one that was brought; nothing replaces it")
            if same or outdated:
                skip_over(chunks)
                result.kept += same
                result.older += not same
                return
        elif outdated and is_journal(target.name):  # it is a part by now
            skip_over(chunks)
            result.older += 1
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as out:
            for chunk in chunks:
                out.write(chunk)
        result.new += 1
        result.bytes_new += member.size
        if run := _RUN_FILE.fullmatch(member.path):
            result.runs.add((int(run[1]), int(run[2])))

    read_files(stream, index, each)
    if not outdated:
        for facts in index.head["attempts"]:
            _drop_journals(root, Path(str(facts["point"]), f"attempt-{facts['attempt']}"), index.head["journals"])
    return result


def _drop_journals(root: Path, subdir: Path, kept: list[Any]) -> None:
    """A journal that is no more became a part, which is here by now: its rows would count twice."""
    if not (root / subdir).resolve().is_relative_to(root):
        return
    for file in (root / subdir).rglob("*"):
        if is_journal(file.name) and file.relative_to(root).as_posix() not in kept:
            file.unlink()


def adopt(attempts: Iterable[dict[str, Any]], ledger: Ledger, *, carried: bool) -> None:
    """Write attempts into the ledger that were made elsewhere: from a plan, or by a `rerun` there.

    What a point asks for stays as it was asked here: `rerun` composes it, which could run anything.
    """
    records = ledger.points()
    known = {(a.point, a.attempt) for record in records.values() for a in record.attempts}
    new = [facts for facts in attempts if (facts["point"], facts["attempt"]) not in known]
    for facts in sorted(new, key=lambda facts: (facts["point"], facts["attempt"])):
        pair, record = [facts["point"], facts["attempt"]], records[facts["point"]]
        ledger.append(
            "planned",
            group=facts["group"],
            job_name=facts["job_name"],
            site=facts["site"],
            carried=carried,
            points=[[*pair, facts["run_id"]]],
            asked=[{"overrides": record.overrides, "gpu": record.gpu, "batch": record.batch}],
        )
        if facts["job_id"]:
            ledger.append("submitted", group=facts["group"], job_id=facts["job_id"], points=[pair])
        if facts["refused"]:
            ledger.append("refused", group=facts["group"], points=[pair], message=facts["refused"])
        if facts["cancelled"]:
            ledger.append("cancelled", points=[pair])


def newest(ledger: Ledger, origin: str) -> float:
    """When the newest results that came from there were taken there."""
    return max((note["made_unix"] for note in ledger.notes("collected") if note["origin"] == origin), default=0.0)


def head(ledger: Ledger, attempts: list[dict[str, Any]], sources: Iterable[Source]) -> dict[str, Any]:
    """What a bundle of results says of itself."""
    return {
        "kind": RESULTS,
        "sweep_id": ledger.sweep["sweep_id"],
        "made_unix": round(time.time(), 3),
        "attempts": attempts,
        "journals": [source.path for source in sources if is_journal(source.path.rpartition("/")[2])],
    }


def _same(target: Path, member: Member) -> bool:
    if target.stat().st_size != member.size:
        return False
    with target.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == member.sha256


def _check_facts(facts: Any) -> None:
    """Types, and words without anything that a terminal or a path would obey."""

    def number(key: str) -> bool:
        return isinstance(facts[key], int) and not isinstance(facts[key], bool) and 0 <= facts[key] < 10**7

    def word(key: str, optional: bool = False) -> bool:
        value = facts[key]
        return (optional and value is None) or (isinstance(value, str) and bool(_WORD.fullmatch(value)))

    def line(value: Any) -> bool:
        return isinstance(value, str) and len(value) < 10_000 and value.isprintable()

    try:
        good = all(number(key) for key in ("point", "attempt"))
        good = good and all(word(key) for key in ("run_id", "site", "group"))
        good = good and all(word(key, optional=True) for key in ("job_name", "job_id"))
        good = good and (facts["refused"] is None or line(facts["refused"])) and isinstance(facts["cancelled"], bool)
    except (KeyError, TypeError):
        good = False
    if not good:
        raise BundleError("its list describes an attempt in a way that cannot be")


def _said(value: Any) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else "something else"
