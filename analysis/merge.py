"""Merge the run directories of any number of sites into one dataset folder.

The dataset is built beside its place and renamed at the end: an interrupted merge leaves what was there before. Inputs
are only read. A run directory that cannot be read or summarised is left out with the reason, and changes no other run.
"""

import datetime as dt
import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import polars as pl
import pyarrow as pa

from inpaint_bench.core import files, records, schema, seal
from inpaint_bench.core.console import echo, list_some, pluralize, share
from inpaint_bench.core.errors import UserError

from . import across_runs, comparability, dataset
from .columns import DEFINITIONS, SCHEMA, SKIPPED_SCHEMA, WINDOW_SCHEMA, hive_value
from .ingest import parts, planned, run_dir
from .ingest.parts import SkippedFile
from .ingest.run_dir import LeftOutError, ManifestFile, NodeFiles, read_node
from .metrics import flags, manifest_facts, run_row
from .metrics.facts import Facts

_TYPES: dict[type[pl.DataType], type | tuple[type, ...]] = {
    pl.String: str,
    pl.Boolean: bool,
    pl.Int64: int,
    pl.Float64: (int, float),
    pl.Datetime: dt.datetime,
}
# All that a merge writes into a dataset folder.
_OUTPUT = {schema.DATASET, *seal.INDEX, schema.SAMPLE_GRIDS, *schema.TABLES}


@dataclass(kw_only=True)
class _Outcome:
    """What becomes of one run directory in the dataset. A duplicate has a content hash, but no row."""

    folder: str
    run_id: str | None = None
    content_hash: str | None = None  # None if the run is left out
    skips: list[SkippedFile] = field(default_factory=list)
    # Set if the run is merged:
    row: dict[str, Any] | None = None  # row of runs.parquet
    windows: list[dict[str, Any]] = field(default_factory=list)  # rows of windows.parquet
    row_counts: dict[str, int] = field(default_factory=dict)  # rows of each long table
    digest: str | None = None  # across_runs.content_digest
    files: list[seal.WrittenFile] = field(default_factory=list)


def merge(
    roots: list[Path], dataset_dir: Path, *, threads: int = 1, allow_mixed: Collection[str] = ()
) -> dict[str, Any]:
    """Write the dataset and return the content of its dataset.json.

    `allow_mixed` lists the comparability.ATTRIBUTES in which runs of one GPU at one site may differ. Raise UserError
    if a root is missing, nothing is found, runs are not comparable, `dataset_dir` holds anything that a merge did
    not write or other runs, or it cannot be written.
    """
    comparability.check_attributes(allow_mixed)
    run_dir.check_roots(roots)
    _check_target(roots, dataset_dir)
    folders, sweeps, unread = run_dir.find_run_dirs(roots)
    without_run, damaged = planned.points_without_run(sweeps, folders)
    known = [*folders, *([*sweeps, *(Path(skip.path) for skip in unread)] if folders else [])]
    above = {folder for each in known for path in (each, each.resolve()) for folder in (path, *path.parents)}
    if empty := [root for root in roots if not {root, root.resolve()} & above]:
        where = ", ".join(map(str, empty))
        problem = f"No run directory below {where}: none holds {schema.MANIFEST} or folders of parts."
        if datasets := [root for root in empty if (root / schema.DATASET).is_file()]:
            problem += f" {datasets[0]} is merged already: `report` shows it. Give run directories to merge anew."
        if not folders:
            raise UserError(" ".join([problem, *planned.describe(without_run)]))
        echo(f"WARNING: {problem}", error=True)
    # Not synced: a dataset can be made again, and one that a power failure has damaged is refused.
    with files.replacing_folder(dataset_dir, schema.DATASET, sync=False) as new:
        outcomes = _read_all(folders, new, threads)
        _compare_with_earlier(outcomes, dataset_dir)
        summary = _write(outcomes, [*unread, *damaged], new, allow_mixed)
        metadata = {
            "schema_version": schema.SCHEMA_VERSION,
            "producer": schema.PRODUCER,
            "merged_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "roots": [parts.path_text(root) for root in roots],
            "run_directories": len(outcomes),
            "points_without_run": without_run,
            **summary,
            "definitions": DEFINITIONS,
        }
        metadata = seal.seal(metadata, new)
        files.replace_json(new / schema.DATASET, metadata)
    return metadata


def _read_all(folders: list[Path], out: Path, threads: int) -> list[_Outcome]:
    """Return the outcome of each directory, in input order.

    Threads are enough to use several cores: reading, hashing, decoding and writing release the interpreter lock.
    """
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        groups: dict[str | Path, list[ManifestFile]] = defaultdict(list)
        for source in pool.map(run_dir.find_manifest, folders):
            # By the folder in the dataset, not by the run id: `1` and `r-1` would write to one file.
            groups[hive_value(source.manifest.run_id) if source.manifest else source.folder].append(source)
        outcomes: dict[Path, _Outcome] = {}
        for result in pool.map(lambda group: _read_group(group, out), groups.values()):
            outcomes |= result
        return [outcomes[folder] for folder in folders]
    finally:
        pool.shutdown(cancel_futures=True)  # and wait: the folder may be about to be removed


def _read_group(group: list[ManifestFile], out: Path) -> dict[Path, _Outcome]:
    """Return the outcomes of the directories of one run id. The first one that is not left out is merged."""
    outcomes: dict[Path, _Outcome] = {}
    for source in group:
        duplicate = any(outcome.row is not None for outcome in outcomes.values())
        outcomes[source.folder] = _read(source, out, duplicate=duplicate)
    return outcomes


def _read(source: ManifestFile, out: Path, *, duplicate: bool) -> _Outcome:
    """Read one run directory and write its part of the dataset. A duplicate needs only its content hash."""
    run_id = source.manifest.run_id if source.manifest else None
    try:
        return _merge_run(source, out, duplicate=duplicate)
    except UserError:
        raise
    except LeftOutError as error:
        skip = parts.skipped(source.folder, error.code, f"run left out: {error.reason}", run_id)
    # Catch-all. Reaching it means that a check is missing; tests count it.
    except Exception as error:
        reason = f"run left out: {type(error).__name__}: {parts.describe(error)}"
        skip = parts.skipped(source.folder, "internal", reason, run_id)
    return _Outcome(folder=parts.path_text(source.folder), run_id=run_id, skips=[skip])


def _merge_run(source: ManifestFile, out: Path, *, duplicate: bool) -> _Outcome:
    run, skips = run_dir.read_run(source)
    outcome = _Outcome(folder=parts.path_text(source.folder), skips=skips)
    if run is None:
        return outcome
    manifest, run_id = run.manifest, run.manifest.run_id
    outcome.run_id, outcome.content_hash = run_id, run.content_hash
    if duplicate:
        return outcome
    # Long tables are written run by run, so that memory holds those of a few runs at a time.
    tables: dict[str, pa.Table] = {}
    for name in schema.TABLES:
        tables[name], row_skips = parts.read_table(name, run.tables[name], run_id)
        outcome.skips += row_skips
        outcome.row_counts[name] = tables[name].num_rows
    nodes = _read_nodes(run, outcome, tables) if run.nodes else []
    frames = {name: parts.to_polars(rows) for name, rows in tables.items()}
    outcome.digest = across_runs.content_digest(run.windows, frames)
    run.incomplete = _incomplete(outcome.skips)
    facts = Facts(manifest=manifest, windows=run.windows, tables=frames, files=run, nodes=nodes)
    given = manifest_facts.manifest_columns(manifest)
    _checked(given, {name: SCHEMA[name] for name in given})  # before anything is worked out from them
    row = run_row.summarise(facts)
    row |= {"run_dir": outcome.folder, "content_hash": run.content_hash}
    if run.sample_grid:
        row["sample_grid"] = f"{schema.SAMPLE_GRIDS}/{quote(run_id, safe='')}.png"
    window_flags = flags.window_flags(facts)
    row["flags"] = flags.join(flags.run_flags(facts, window_flags, row["steady"]))
    keys = {"run_id": run_id, "site": manifest.site, "gpu": manifest.gpu}
    outcome.row = _checked(row, SCHEMA)
    for window, codes in zip(run.windows, window_flags, strict=True):
        values = {**msgspec.structs.asdict(window), **keys, "flags": flags.join(codes)}
        outcome.windows.append(_checked(values, WINDOW_SCHEMA))
    try:
        written = [dataset.write_partition(rows, manifest, out / name) for name, rows in tables.items()]
        if run.sample_grid:
            written.append(out / row["sample_grid"])
            (out / schema.SAMPLE_GRIDS).mkdir(exist_ok=True)
            (out / row["sample_grid"]).write_bytes(run.sample_grid)
        outcome.files = [seal.WrittenFile.read(path, out) for path in written if path]
    except (OSError, pa.ArrowException) as error:  # not this run's fault: the next one could not be written either
        raise UserError(f"{out}: cannot be written ({error})") from error
    return outcome


def _read_nodes(run: run_dir.Run, outcome: _Outcome, tables: dict[str, pa.Table]) -> list[NodeFiles]:
    """Return what the sidecar of each node wrote, rank 0's first, and add the rows of all nodes to the tables."""
    incomplete = _incomplete(outcome.skips)
    rows = {name: parts.to_polars(tables[name]) for name in schema.NODE_TABLES}
    nodes: list[NodeFiles] = [replace(run, name=run.folder.name, incomplete=incomplete, rows=rows)]
    for node in run.nodes:
        of_node, node.sidecar, skips = read_node(run, node)
        outcome.skips += skips
        if of_node:
            node.incomplete = _incomplete(skips)
            node.rows = {name: parts.to_polars(rows) for name, rows in of_node.items()}
            nodes.append(node)
            for name, rows in of_node.items():
                tables[name] = parts.concat([tables[name], rows], rows.schema)
                outcome.row_counts[name] = tables[name].num_rows
    return nodes


def _incomplete(skips: list[SkippedFile]) -> frozenset[str]:
    """Return the tables of which rows may be missing, because a file was skipped."""
    return frozenset(Path(skip.path).parent.name for skip in skips)


def _checked(row: dict[str, Any], types: Mapping[str, pl.DataType]) -> dict[str, Any]:
    """Return a row with printable texts. Raise LeftOutError for a figure that no column can hold."""
    for name, kind in types.items():
        value = row[name]
        if isinstance(value, str):
            row[name] = parts.printable(value)
        elif isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < 2**63):
            raise LeftOutError("figure", f"{name} is {value:g}, which no measurement gives")
        if value is not None and not isinstance(value, _TYPES[type(kind)]):
            raise LeftOutError("figure", f"{name} is {parts.printable(repr(value)[:50])}, which is no {kind}")
    return row


def _write(
    outcomes: list[_Outcome], unread: list[SkippedFile], out: Path, allow_mixed: Collection[str]
) -> dict[str, Any]:
    """Write the tables over all runs and return what dataset.json says about them. `unread` was not read."""
    rows: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    skips = list(unread)
    merged: dict[str, _Outcome] = {}  # by folder in the dataset
    conflicting: dict[str, list[str]] = defaultdict(list)  # directories with other content, by run id
    for outcome in outcomes:
        skips += outcome.skips
        if outcome.row is not None:
            rows.append(outcome.row)
            windows += outcome.windows
            merged[hive_value(outcome.row["run_id"])] = outcome
        elif outcome.content_hash is not None:
            first = merged[hive_value(str(outcome.run_id))]
            skips.append(_duplicate(outcome, first))
            if skips[-1].code == "conflict":
                conflicting[str(first.run_id)].append(outcome.folder)
    # Runs of all sites are known only now; a refusal here leaves the older dataset in place.
    digests = {str(outcome.run_id): outcome.digest for outcome in merged.values()}
    problems = across_runs.find_problems(rows, windows, digests, dt.datetime.now(dt.UTC))
    for run_id, folders in conflicting.items():
        problems[run_id].append(f"other content under this run id in {list_some(folders, most=1)}; remove one")
    across_runs.leave_out(rows, problems)
    across_runs.tell_read_backs(rows)
    if "power_semantics" not in allow_mixed:
        across_runs.leave_out(rows, comparability.find_integrals(rows))
    runs = comparability.add_comparability_key(pl.DataFrame(rows, schema=SCHEMA, strict=False))
    conflicts = comparability.find_conflicts(runs)
    comparability.refuse_conflicts(conflicts, allow_mixed)
    seal.write_table(out / schema.RUNS, runs)
    seal.write_table(out / schema.RUN_WINDOWS, pl.DataFrame(windows, schema=WINDOW_SCHEMA, strict=False))
    listed = pl.DataFrame(list(map(msgspec.structs.asdict, skips)), schema=SKIPPED_SCHEMA)
    seal.write_table(out / schema.SKIPPED, listed)
    directories = [seal.Directory(outcome.folder, outcome.run_id, outcome.files) for outcome in outcomes]
    records.write_record(out / seal.DIRECTORIES, directories)
    # Sorted, so that the hash of a dataset does not depend on where its runs were found.
    hashes = sorted(str(outcome.content_hash) for outcome in merged.values())
    return {
        "runs": len(merged),
        "runs_valid": int(runs["valid"].sum()),
        "rows": {name: sum(outcome.row_counts[name] for outcome in merged.values()) for name in schema.TABLES},
        "skipped": len(skips),
        "conflicts": sum(skip.code == "conflict" for skip in skips),
        "mixed": [description for _, description in conflicts],
        "content_hash": hashlib.sha256("".join(hashes).encode()).hexdigest(),
    }


def _duplicate(outcome: _Outcome, first: _Outcome) -> SkippedFile:
    if first.content_hash == outcome.content_hash:
        code, reason = "duplicate", f"same content as {first.folder}, which was merged"
    else:
        code = "conflict"
        reason = (
            f"CONFLICT: run id also in {first.folder} with other content; nothing tells which is right, so neither "
            "counts: that one is listed as not valid. Remove one of the two and merge again"
        )
    return parts.skipped(Path(outcome.folder), code, reason, outcome.run_id)


def _compare_with_earlier(outcomes: list[_Outcome], target: Path) -> None:
    """Raise UserError if the dataset at `target` has runs, none of which is merged now; warn if some are not."""
    try:
        before = set(seal.read_table(target / schema.RUNS)["run_id"])
    except (UserError, OSError, pl.exceptions.PolarsError):
        return  # there is none, or nothing can be read of it
    dropped = before - {outcome.run_id for outcome in outcomes}
    if dropped and dropped == before:
        raise UserError(f"{target} is a dataset of {pluralize(len(before), 'other run')}; name another folder.")
    if dropped:
        echo(f"{target}: {share(len(dropped), len(before), 'earlier run', 'are')} not merged now", error=True)


def _check_target(roots: list[Path], target: Path) -> None:
    """Raise UserError if replacing the dataset would delete a root, or a file that no merge wrote."""
    for root in roots:
        if target.resolve() == root.resolve() or target.resolve() in root.resolve().parents:
            raise UserError(f"Dataset folder {target} holds root {root}; put the dataset elsewhere.")
    # A folder without dataset.json is not checked here: replacing it is refused unless it is empty.
    names = {path.name for path in target.iterdir()} if (target / schema.DATASET).is_file() else set()
    if foreign := sorted(names - _OUTPUT):
        raise UserError(
            f"{target} also holds {', '.join(foreign)}, which merging anew would delete; move it out first."
        )
