"""Merge the run directories of any number of sites into one dataset folder.

The dataset is built beside its place and renamed at the end: an interrupted merge leaves what was there before. Inputs
are only read, and only those that the last merge into the same folder did not read in their present state; the result
is the same.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import shutil
from collections.abc import Collection, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import polars as pl

from inpaint_bench.core import files, records, schema
from inpaint_bench.core.errors import UserError

from . import across_runs, comparability
from .columns import SAMPLE_GRIDS, SCHEMA, SKIPPED_SCHEMA, WINDOW_SCHEMA, WINDOWS, hive_value
from .dataset import write_partition
from .ingest import incremental, parts, run_dir
from .ingest.incremental import DirectoryRecord, MergeOutcome, PreviousDataset
from .ingest.parts import SkippedFile
from .metrics import flags, run_row

# All that a merge writes into a dataset folder.
_OUTPUT = {schema.DATASET, *incremental.INDEX, schema.SKIPPED, SAMPLE_GRIDS, *schema.TABLES}


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A run directory and what to do with it."""

    folder: Path
    fingerprint: str | None
    run_id: str | None
    duplicate: bool  # an earlier directory has this run id: only the content hash is needed
    previous: MergeOutcome | None  # unchanged since the last merge


def merge(
    roots: list[Path], dataset_dir: Path, *, threads: int = 1, allow_mixed: Collection[str] = ()
) -> dict[str, Any]:
    """Write the dataset and return the content of its dataset.json.

    `allow_mixed` lists the comparability.ATTRIBUTES in which runs of one GPU at one site may differ. Raise UserError
    where a root is missing, nothing is found, runs are not comparable, `dataset_dir` holds anything that a merge did
    not write, or it cannot be written.
    """
    comparability.check_attributes(allow_mixed)
    run_dir.check_roots(roots)
    _check_target(roots, dataset_dir)
    previous = PreviousDataset.read(dataset_dir)
    # Before any part is read: which of two directories with one run id counts depends on their order alone.
    tasks = _plan(roots, previous)
    if not tasks:
        where = ", ".join(map(str, roots))
        raise UserError(f"No run directory below {where}: none holds {schema.MANIFEST} or folders of parts.")
    # Not synced, which takes as long as an incremental merge: a dataset can be made again, and one that is damaged by a
    # power failure is not reused.
    with files.replacing_folder(dataset_dir, schema.DATASET, sync=False) as new:
        with closing(_outcomes(tasks, previous, new, threads)) as outcomes:
            summary = _write(outcomes, new, allow_mixed)
        metadata = {
            "schema_version": schema.SCHEMA_VERSION,
            "producer": schema.PRODUCER,
            "merged_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "roots": [str(root) for root in roots],
            "run_directories": len(tasks),
            "unchanged": sum(task.previous is not None for task in tasks),
            **summary,
            "analysis": incremental.code_version(),
            "index": incremental.index_hashes(new),
        }
        files.replace_json(new / schema.DATASET, metadata)
    return metadata


def _plan(roots: list[Path], previous: PreviousDataset) -> list[_Task]:
    """Return a task per run directory, in order. Reads nothing but the manifests of new or changed ones."""
    tasks: list[_Task] = []
    places: set[str] = set()
    for folder in run_dir.find_run_dirs(roots):
        fingerprint = run_dir.fingerprint(folder)
        record = previous.find(folder, fingerprint)
        run_id = record.run_id if record else run_dir.read_run_id(folder)
        duplicate = run_id is not None and hive_value(run_id) in places
        outcome = previous.reuse(record, duplicate=duplicate) if record else None
        task = _Task(folder=folder, fingerprint=fingerprint, run_id=run_id, duplicate=duplicate, previous=outcome)
        tasks.append(task)
        if run_id is not None:
            # By the folder in the dataset, not by the run id: `1` and `r-1` would write to one file.
            places.add(hive_value(run_id))
    return tasks


def _outcomes(
    tasks: list[_Task], previous: PreviousDataset, out: Path, threads: int
) -> Generator[MergeOutcome, None, None]:
    """Yield what becomes of each directory, in their order.

    Threads are enough to use several cores: reading, hashing, decoding and writing release the interpreter lock.
    """
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        # Only new and changed directories are read; results come back in the order of the tasks.
        outcomes = pool.map(lambda task: _read(task, out), [task for task in tasks if task.previous is None])
        for task in tasks:
            if task.previous is None:
                yield next(outcomes)
            else:
                previous.link(task.previous, out)
                yield task.previous
    finally:
        pool.shutdown(cancel_futures=True)  # and wait: the folder may be about to be removed


def _read(task: _Task, out: Path) -> MergeOutcome:
    """Read one run directory and write its part of the dataset, which no other directory writes to."""
    run, skips = run_dir.read_run(task.folder)
    record = DirectoryRecord(folder=str(task.folder), fingerprint=task.fingerprint, file_skips=skips)
    if run is None:
        return MergeOutcome(record=record)
    manifest, run_id = run.manifest, run.manifest.run_id
    if run_id != task.run_id:  # began, or was replaced, since the plan was made: its place may be taken
        reason = "its manifest appeared or changed while it was merged; merge again"
        skip = parts.skipped(task.folder, "changing", reason, run_id)
        return MergeOutcome(record=DirectoryRecord(folder=str(task.folder), file_skips=[skip]))
    record.run_id, record.content_hash = run_id, run.content_hash
    if task.duplicate:
        return MergeOutcome(record=record)
    written: list[Path | None] = []
    # Long tables are written run by run, so that memory holds those of a few runs at a time.
    frames: dict[str, pl.DataFrame] = {}
    for name in schema.TABLES:
        rows, row_skips = parts.read_table(name, run.tables[name], run_id)
        record.row_skips += row_skips
        record.row_counts[name] = rows.num_rows
        written.append(write_partition(rows, manifest, out / name))
        frames[name] = parts.to_polars(rows)
        record.row_digests |= across_runs.row_digests(name, frames[name])
    row = run_row.summarise(manifest, run.windows, frames)
    row |= {"run_dir": str(run.folder), "content_hash": run.content_hash}
    if run.sample_grid:
        row["sample_grid"] = f"{SAMPLE_GRIDS}/{quote(run_id, safe='')}.png"
        written.append(out / row["sample_grid"])
        (out / SAMPLE_GRIDS).mkdir(exist_ok=True)
        shutil.copyfile(run.sample_grid, out / row["sample_grid"])
    record.files = [_file_entry(path, out) for path in written if path]
    window_flags = flags.window_flags(manifest, run.windows, frames["samples_slow"], frames["events"])
    row["flags"] = flags.join(flags.run_flags(manifest, run.windows, window_flags, frames["events"]))
    keys = {"run_id": run_id, "site": manifest.site, "gpu": manifest.gpu}
    windows = [
        {**msgspec.structs.asdict(window), **keys, "flags": flags.join(codes)}
        for window, codes in zip(run.windows, window_flags, strict=True)
    ]
    return MergeOutcome(record=record, row=row, windows=windows)


def _file_entry(path: Path, out: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path.relative_to(out)), stat.st_size, stat.st_mtime_ns


def _write(outcomes: Iterable[MergeOutcome], out: Path, allow_mixed: Collection[str]) -> dict[str, Any]:
    """Write the tables over all runs and return what dataset.json says about them."""
    rows: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    skips: list[SkippedFile] = []
    directories: list[DirectoryRecord] = []
    merged: dict[str, DirectoryRecord] = {}  # by folder in the dataset
    # In the order of the plan, whichever thread ends first: the first directory of a run id is the one that counts.
    for outcome in outcomes:
        record = outcome.record
        directories.append(record)
        skips += [*record.file_skips, *record.row_skips]
        if outcome.row is not None:
            rows.append(outcome.row)
            windows += outcome.windows
            merged[hive_value(outcome.row["run_id"])] = record
        elif record.run_id is not None:
            skips.append(_duplicate(record, merged.get(hive_value(record.run_id))))
    # Runs of all sites are known only now; a refusal here leaves the older dataset in place.
    across_runs.add_problems(rows, windows, {str(record.run_id): record.row_digests for record in merged.values()})
    runs = comparability.add_comparability_key(pl.DataFrame(rows, schema=SCHEMA, strict=False))
    conflicts = comparability.find_conflicts(runs)
    comparability.refuse_conflicts(conflicts, allow_mixed)
    runs.write_parquet(out / schema.RUNS)
    pl.DataFrame(windows, schema=WINDOW_SCHEMA, strict=False).write_parquet(out / WINDOWS)
    pl.DataFrame(list(map(msgspec.structs.asdict, skips)), schema=SKIPPED_SCHEMA).write_parquet(out / schema.SKIPPED)
    records.write_record(out / incremental.DIRECTORIES, directories)
    # Sorted, so that the hash of a dataset does not depend on where its runs were found.
    hashes = sorted(str(record.content_hash) for record in merged.values())
    return {
        "runs": len(merged),
        "runs_valid": int(runs["valid"].sum()),
        "rows": {name: sum(record.row_counts[name] for record in merged.values()) for name in schema.TABLES},
        "skipped": len(skips),
        "conflicts": sum(skip.code == "conflict" for skip in skips),
        "mixed": [description for _, description in conflicts],
        "content_hash": hashlib.sha256("".join(hashes).encode()).hexdigest(),
    }


def _duplicate(record: DirectoryRecord, first: DirectoryRecord | None) -> SkippedFile:
    """Return why a directory is skipped whose run id another directory has."""
    where = first.folder if first else "another directory"
    if first and first.content_hash == record.content_hash:
        code, reason = "duplicate", f"same content as {where}, which was merged"
    else:
        code = "conflict"
        reason = (
            f"CONFLICT: run id also in {where} with other content; the first one in order was merged, "
            "which does not make it the right one. Remove one of the two and merge again"
        )
    return parts.skipped(Path(record.folder), code, reason, record.run_id)


def _check_target(roots: list[Path], target: Path) -> None:
    """Raise UserError where replacing the dataset would delete a root, or a file that no merge wrote."""
    for root in roots:
        if target.resolve() == root.resolve() or target.resolve() in root.resolve().parents:
            raise UserError(f"Dataset folder {target} holds root {root}; put the dataset elsewhere.")
    # A folder without dataset.json is not checked here: replacing it is refused unless it is empty.
    names = {path.name for path in target.iterdir()} if (target / schema.DATASET).is_file() else set()
    if foreign := sorted(names - _OUTPUT):
        raise UserError(
            f"{target} also holds {', '.join(foreign)}, which merging anew would delete; move it out first."
        )
