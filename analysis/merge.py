"""Run directories of any number of sites -> one dataset folder that says where everything came from.

The dataset is built under a temporary name beside its place and renamed at the end: an interrupted merge
leaves what was there before. Inputs are only read, and only those that the last merge into the same folder did
not read as they are now; what comes out is the same.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.ingest.incremental import WINDOWS, Kept, Outcome
from analysis.ingest.parts import Skip
from analysis.ingest.run_dir import Run, check_roots, find, fingerprint, peek, read_run
from inpaint_bench.core import files
from inpaint_bench.core import schema as contract
from inpaint_bench.core.errors import UserError

from . import comparability
from .ingest import incremental, parts, pictures
from .metrics import flags, run_row

KEYS = ("site", "gpu", "run")  # hive folders; all of them strings
_SKIP_SCHEMA = {
    "path": pl.String,
    "code": pl.String,
    "reason": pl.String,
    "run_id": pl.String,
    "size_bytes": pl.Int64,
}
WINDOW_SCHEMA: dict[str, pl.DataType] = {
    **dict.fromkeys(("run_id", "site", "gpu", "window_id", "kind", "status", "reason", "flags"), pl.String()),
    **dict.fromkeys(
        ("t_start_mono_ns", "t_end_mono_ns", "t_start_unix_ns", "t_end_unix_ns", "steps", "images"), pl.Int64()
    ),
}
_OWN = {contract.DATASET, *incremental.INDEX, contract.SKIPPED, pictures.FOLDER, *contract.TABLES}
ROW_GROUP = 262_144  # rows
_BATCH_ROWS = 65_536  # that the Parquet writer takes at a time
PARALLEL_BYTES = 64 * 2**20  # of parts to read: with less, other processes start longer than they help
_WRONG_KIND = (TypeError, ValueError, KeyError, AttributeError, pl.exceptions.PolarsError)
_LONG = ("samples_fast", "samples_slow")  # most rows, and only their numbers are looked at one by one
_BATCH = 1000  # rows of a small table that are held as Python objects


def partition(run: Run) -> Path:
    """`site=grace/gpu=a40/run=r-01`. Values begin with a letter: readers turn bare digits into integers."""
    values = zip(KEYS, (run.site, run.gpu, run.run_id), strict=True)
    return Path(*(f"{key}={hive_value(value)}" for key, value in values))


def hive_value(value: str) -> str:
    """A value as a folder name may carry it, however the id was written."""
    lettered = value if value[:1].isascii() and value[:1].isalpha() else f"r-{value}"
    return quote(lettered, safe="")


def merge(
    roots: list[Path], dataset_dir: Path, *, processes: int = 1, allow_mixed: Collection[str] = ()
) -> dict[str, Any]:
    """Write the dataset and return the content of its dataset.json.

    With `processes` above 1 large amounts are read by as many processes at once; a script that asks for them
    needs the usual guard of its main module. `allow_mixed`: which of comparable.ATTRIBUTES may differ among runs of
    one GPU at one site. Raises UserError where a root is missing, nothing is found, runs are not comparable, or
    `dataset_dir` holds anything that a merge did not write.
    """
    comparability.check_attributes(allow_mixed)
    check_roots(roots)
    _check_target(roots, dataset_dir)
    before = Kept.read(dataset_dir)
    plan = _plan(roots, before)
    if not plan:
        where = ", ".join(map(str, roots))
        raise UserError(f"No run directory below {where}: none holds {contract.MANIFEST} or folders of parts.")
    dataset_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = dataset_dir.with_name(f".{dataset_dir.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with _outcomes(plan, before, temporary, processes) as outcomes:
            account = _write(outcomes, roots, temporary, allow_mixed)
        _swap(temporary, dataset_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return account


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A run directory, and what is to be done with it."""

    folder: Path
    fingerprint: str | None
    run_id: str | None
    twin: bool  # its id was seen before: only its hash is needed
    size_bytes: int
    unchanged: bool


def _plan(roots: list[Path], before: Kept) -> list[_Task]:
    """Every run directory in order. Reads nothing but the manifests of those that are new or changed."""
    tasks: list[_Task] = []
    seen: set[str] = set()
    for folder in find(roots):
        mark, size_bytes = fingerprint(folder)
        same, run_id = before.run_id(folder, mark)
        if not same:
            run_id = peek(folder)
        place = None if run_id is None else hive_value(run_id)
        twin = place in seen
        unchanged = same and before.outcome(folder, mark, twin=twin) is not None
        tasks.append(
            _Task(
                folder=folder,
                fingerprint=mark,
                run_id=run_id,
                twin=twin,
                size_bytes=0 if unchanged else size_bytes,
                unchanged=unchanged,
            )
        )
        if place is not None:
            seen.add(place)
    return tasks


@contextmanager
def _outcomes(plan: list[_Task], before: Kept, out: Path, processes: int) -> Iterator[Iterator[tuple[Outcome, bool]]]:
    """What becomes of each directory, in the plan's order, and whether it was taken over from the last merge."""
    new = [task for task in plan if not task.unchanged]
    several = min(processes, len(new))
    if several < 2 or sum(task.size_bytes for task in new) < PARALLEL_BYTES:
        yield _in_order(plan, before, out, (_read(task, out) for task in new))
        return
    pool = ProcessPoolExecutor(several, mp_context=get_context("spawn"), initializer=_alone)
    try:
        with _one_thread_each():
            read = pool.map(_read, new, [out] * len(new))  # starts the processes
        yield _in_order(plan, before, out, read)
    except BrokenProcessPool:
        raise UserError(
            "A process of this merge was killed, most likely for want of memory; nothing was changed. "
            "Merge again with --processes 1."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)  # waits: nobody may write into a folder that is being removed


def hold_memory() -> None:
    """Let this process keep the memory that it frees, for the next run's arrays; for a process that only merges.

    glibc gives large arrays back to the kernel one by one, and fresh pages cost a quarter of a merge's CPU time.
    Other C libraries are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((-3, 32 * 2**20), (-1, 2**30), (-2, 64 * 2**20)):  # M_MMAP_THRESHOLD, M_TRIM_, M_TOP_PAD
        mallopt(option, value)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started meanwhile have one thread in polars, which asks when it is imported."""
    name = "POLARS_MAX_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _alone() -> None:
    """Set up a process that reads runs: no Ctrl-C of its own, and it ends with its parent."""
    hold_memory()
    pa.set_cpu_count(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _in_order(plan: list[_Task], before: Kept, out: Path, read: Iterator[Outcome]) -> Iterator[tuple[Outcome, bool]]:
    for task in plan:
        if task.unchanged:
            outcome = before.outcome(task.folder, task.fingerprint, twin=task.twin)
            if outcome is None:
                raise UserError("The older dataset was changed while it was merged into; merge again.")
            before.link(outcome, out)
            yield outcome, True
        else:
            yield next(read), False


def _read(task: _Task, out: Path) -> Outcome:
    """Read one run directory and write its part of the dataset, below which no other one writes."""
    found, skips = read_run(task.folder, keep=not task.twin)
    outcome = Outcome(folder=task.folder, fingerprint=task.fingerprint, skips=skips)
    if found is None:
        return outcome
    if found.run_id != task.run_id:  # began, or was replaced, since the plan was made: its place may be taken
        why = "its manifest appeared or changed while it was merged; merge again"
        skip = Skip(path=str(task.folder), code="changing", reason=why, run_id=found.run_id)
        return Outcome(folder=task.folder, skips=[skip])
    outcome.run_id, outcome.hash = found.run_id, found.hash
    if task.twin:
        return outcome
    frames: dict[str, pl.DataFrame] = {}
    for name in contract.TABLES:
        rows, late = parts.read_coded(name, found.tables[name], found.run_id)
        outcome.late += late
        outcome.rows[name] = rows.num_rows
        if written := _write_table(rows, found, out / name):
            outcome.files.append(_file(written, out))
        frames[name] = parts.coded(rows) if name in _LONG else parts.plain(name, rows)
    picture, objection = pictures.copy(found.folder, found.manifest, out)
    outcome.late += [objection] if objection else []
    outcome.files += [_file(out / picture, out)] if picture else []
    touched = _marks(found, frames)
    outcome.row = {**_row(found, frames), **touched.run, "sample_grid": picture}
    outcome.windows = [
        {**_window(found, window), "flags": codes} for window, codes in zip(found.windows, touched.windows, strict=True)
    ]
    return outcome


def _file(path: Path, out: Path) -> tuple[str, int, int]:
    of = path.stat()
    return str(path.relative_to(out)), of.st_size, of.st_mtime_ns


def _check_target(roots: list[Path], target: Path) -> None:
    for root in roots:
        if target.resolve() == root.resolve() or target.resolve() in root.resolve().parents:
            raise UserError(f"Dataset folder {target} holds root {root}; put the dataset elsewhere.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} is not a folder; give the name of a new or an older dataset folder.")
    if not target.exists():
        return
    names = {path.name for path in target.iterdir()}
    if names and contract.DATASET not in names:
        raise UserError(f"{target} is not a dataset (no {contract.DATASET}); it is left as it is.")
    if foreign := sorted(names - _OWN):
        raise UserError(
            f"{target} also holds {', '.join(foreign)}, which merging anew would delete; move it out first."
        )


def _swap(new: Path, target: Path) -> None:
    """Rename into place. An older dataset steps aside first, and comes back if the rename fails."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(aside)
    try:
        new.rename(target)
    except BaseException:
        if aside.exists():
            aside.rename(target)
        raise
    files.fsync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


@dataclass(kw_only=True)
class _Small:
    """Rows of a small table, few of them as Python objects at a time."""

    schema: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    frames: list[pl.DataFrame] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if len(self.rows) == _BATCH:
            self._pack()

    def _pack(self) -> None:
        self.frames.append(pl.DataFrame(self.rows, schema=self.schema, strict=False))
        self.rows = []

    def frame(self) -> pl.DataFrame:
        self._pack()
        return pl.concat(self.frames, rechunk=True)


def _write(
    outcomes: Iterator[tuple[Outcome, bool]], roots: list[Path], out: Path, allow_mixed: Collection[str]
) -> dict[str, Any]:
    table, windows = _Small(schema=run_row.SCHEMA), _Small(schema=WINDOW_SCHEMA)
    skipped, directories = _Small(schema=_SKIP_SCHEMA), _Small(schema=incremental.SCHEMA)
    counts = dict.fromkeys(contract.TABLES, 0)
    first: dict[str, Outcome] = {}  # by place; without its rows
    seen = skips = conflicts = valid = unchanged = 0
    for outcome, same in outcomes:
        seen += 1
        unchanged += same
        own = [*outcome.skips, *outcome.late]
        if outcome.row is not None and outcome.run_id is not None:
            table.add(outcome.row)
            valid += bool(outcome.row["valid"])
            for window in outcome.windows:
                windows.add(window)
            for name, rows in outcome.rows.items():
                counts[name] += rows
            first[hive_value(outcome.run_id)] = Outcome(folder=outcome.folder, run_id=outcome.run_id, hash=outcome.hash)
        elif outcome.run_id is not None:
            own.append(_second(outcome, first.get(hive_value(outcome.run_id))))
            conflicts += own[-1].code == "conflict"
        for skip in own:
            skipped.add({name: getattr(skip, name) for name in _SKIP_SCHEMA})
        skips += len(own)
        directories.add(outcome.entry())
    merged = comparability.add_comparability_key(table.frame())
    mixed = comparability.find_conflicts(merged)
    comparability.refuse_conflicts(mixed, allow_mixed)
    merged.write_parquet(out / contract.RUNS)
    windows.frame().write_parquet(out / WINDOWS)
    skipped.frame().write_parquet(out / contract.SKIPPED)
    directories.frame().write_parquet(out / incremental.DIRECTORIES)
    account = {
        "schema_version": contract.SCHEMA_VERSION,
        "producer": contract.PRODUCER,
        "merged_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "roots": [str(root) for root in roots],
        "run_directories": seen,
        "unchanged": unchanged,
        "runs": len(first),
        "runs_valid": valid,
        "rows": counts,
        "skipped": skips,
        "conflicts": conflicts,
        "mixed": [one.description for one in mixed],
        "run_hashes": {str(one.run_id): one.hash for one in first.values()},
        "content_hash": hashlib.sha256("".join(sorted(str(o.hash) for o in first.values())).encode()).hexdigest(),
        "analysis": incremental.version(),
        "index": incremental.index_hashes(out),
    }
    files.replace_json(out / contract.DATASET, account)
    return account


def _second(outcome: Outcome, one: Outcome | None) -> Skip:
    """Why a directory with a run id that was seen before is left out."""
    where = one.folder if one else "another directory"
    if one and one.hash == outcome.hash:
        code, why = "duplicate", f"same content as {where}, which was kept"
    else:
        code = "conflict"
        why = (
            f"CONFLICT: run id also in {where} with other content; the first one found was kept, "
            "not because it is right. Remove one of the two and merge again"
        )
    return Skip(path=str(outcome.folder), code=code, reason=why, run_id=outcome.run_id)


def _write_table(rows: pa.Table, run: Run, folder: Path) -> Path | None:
    """The run's rows with the hive keys repeated as columns, in one file. No rows, no file.

    Strings are plain strings to whoever reads it. Integers (times, counters) as differences and floats split by
    byte leave LZ4 so little that the file is smaller than with zstd alone, and is written and read in half the time.
    No least and greatest text: the folders name what a reader would skip by.
    """
    if not rows.num_rows:
        return None
    path = folder / partition(run) / contract.PART_PATTERN.format(0)
    path.parent.mkdir(parents=True)
    same = pa.nulls(rows.num_rows, pa.int32()).fill_null(0)
    for name, value in (("site", run.site), ("gpu", run.gpu)):
        rows = rows.append_column(name, pa.DictionaryArray.from_arrays(same, pa.array([value], pa.string())))
    words = [field.name for field in rows.schema if pa.types.is_dictionary(field.type)]
    pq.write_table(
        rows.replace_schema_metadata({b"schema_version": str(contract.SCHEMA_VERSION).encode()}),
        path,
        row_group_size=ROW_GROUP,
        write_batch_size=_BATCH_ROWS,
        compression="lz4",
        use_dictionary=words,
        column_encoding={field.name: code for field in rows.schema if (code := _encoding(field.type))},
        write_statistics=[name for name in rows.schema.names if name not in words],
        store_schema=False,
    )
    return path


def _encoding(kind: pa.DataType) -> str | None:
    if pa.types.is_integer(kind):
        return "DELTA_BINARY_PACKED"
    return "BYTE_STREAM_SPLIT" if pa.types.is_floating(kind) else None


def _row(run: Run, tables: dict[str, pl.DataFrame]) -> dict[str, Any]:
    try:
        names = ("samples_fast", "samples_slow", "steps", "events", "samples_gpm")
        row = run_row.summarise(run.manifest, run.windows, *(tables[name] for name in names))
    except _WRONG_KIND as error:
        # A manifest of the right version with fields of the wrong kind: one bad run must not stop the rest.
        row = dict.fromkeys(run_row.SCHEMA)
        row.update(run_id=run.run_id, valid=False, demonstration=bool(run.manifest.get("demonstration")))
        row.update(status=str(run.manifest.get("status")))
        row["invalid_reason"] = f"cannot be summarised ({type(error).__name__}: {error})"
    row.update(site=run.site, gpu=run.gpu, run_dir=str(run.folder), content_hash=run.hash)
    return row


@dataclass(frozen=True, kw_only=True)
class _Marks:
    run: dict[str, str | None]  # columns of runs.parquet
    windows: list[str | None]


def _marks(run: Run, tables: dict[str, pl.DataFrame]) -> _Marks:
    try:
        found = flags.window_flags(run.manifest, run.windows, tables["samples_slow"], tables["events"])
        whole = flags.run_flags(run.manifest, run.windows, found, tables["events"])
    except _WRONG_KIND:  # such a run does not count: see _row
        return _Marks(run={"flags": None}, windows=[None] * len(run.windows))
    return _Marks(run={"flags": flags.join(whole)}, windows=[flags.join(one) for one in found])


def _window(run: Run, window: dict[str, Any]) -> dict[str, Any]:
    row = {name: window.get(name) for name in WINDOW_SCHEMA}
    row.update(run_id=run.run_id, site=run.site, gpu=run.gpu)
    return row
