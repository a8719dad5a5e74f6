"""The Parquet parts and journals of one run's tables. Inputs are never modified.

Every part is read from disk once: its digest, its footer and its rows come from the same bytes. A journal, i.e. the
part that was still open when its writer died, is read in place.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core import schema as contract

# A row of a journal that a closed part holds too has the same values in these columns.
_KEYS = {
    "samples_fast": ["gpu_uuid", "tick_seq"],
    "samples_slow": ["gpu_uuid", "tick_seq"],
    "samples_gpm": ["gpu_uuid", "tick_seq"],
    "steps": ["window_id", "step", "t_start_mono_ns"],
    "events": ["t_mono_ns", "kind", "gpu_uuid", "detail"],
}
_UNREADABLE = (pa.ArrowException, OSError, ValueError)


class SkippedFile(msgspec.Struct, kw_only=True, frozen=True):
    """A file or a run that the merge left out, and why: a row of skipped_files.parquet."""

    path: str  # as reached from the root that was given
    code: str
    reason: str
    run_id: str | None = None
    size_bytes: int | None = None


def skipped(path: Path, code: str, reason: str, run_id: str | None = None) -> SkippedFile:
    """Return the record of a skipped file, with its size."""
    size = path.stat().st_size if path.is_file() else None
    return SkippedFile(path=str(path), code=code, reason=reason, run_id=run_id, size_bytes=size)


@dataclass(kw_only=True)
class TableFiles:
    """The usable files of one table of one run, in written order."""

    parts: dict[Path, pq.ParquetFile] = field(default_factory=dict)  # in memory, still compressed
    journals: list[Path] = field(default_factory=list)
    digests: dict[Path, bytes] = field(default_factory=dict)  # SHA-256 of both


def version_problem(version: object) -> str | None:
    """Return why files of this schema version cannot be read, None where they can."""
    if version == contract.SCHEMA_VERSION and type(version) is int:
        return None
    reads = f"this code reads version {contract.SCHEMA_VERSION}"
    if isinstance(version, int) and version > contract.SCHEMA_VERSION:
        return f"schema version {version} is newer, {reads}: merge with the inpaint_bench that wrote it"
    return f"schema version {version}; {reads}"


def _part_version(schema: pa.Schema) -> int | str:
    text = (schema.metadata or {}).get(b"schema_version", b"none").decode(errors="replace")
    return int(text) if text.isdecimal() else text


def table_schema(table: str) -> pa.Schema:
    """Return the schema of a table with every column nullable: a part may hold nulls where none belong."""
    return pa.schema([pa.field(f.name, f.type, nullable=True) for f in contract.SCHEMAS[table]])


def empty_frame(table: str) -> pl.DataFrame:
    """Return the table without rows, with strings for dictionaries."""
    return _as_text(table_schema(table).empty_table())


def to_polars(rows: pa.Table) -> pl.DataFrame:
    """Return the rows for polars; dictionaries become categories, so that no text is repeated row by row."""
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    return frame


def open_table(folder: Path, table: str, run_id: str | None) -> tuple[TableFiles, list[SkippedFile]]:
    """Return the usable files of one table's folder, and the skipped ones with the reason."""
    files = TableFiles()
    skips: list[SkippedFile] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if contract.JOURNAL_NAME.fullmatch(path.name):
            files.journals.append(path)
            if path.is_file():
                files.digests[path] = hashlib.sha256(path.read_bytes()).digest()
        elif path.name.startswith(".") and path.name.endswith(".tmp"):
            skips.append(skipped(path, "temporary", "temporary file of a write that never finished", run_id))
        elif not path.is_file() or not contract.PART_NAME.fullmatch(path.name):
            skips.append(skipped(path, "unexpected", "not a part by its name", run_id))
        elif problem := _open_part(path, table, files):
            skips.append(skipped(path, *problem, run_id))
    return files, skips


def _open_part(path: Path, table: str, files: TableFiles) -> tuple[str, str] | None:
    """Add a part to the files, or return the code and the reason why its footer makes it unusable."""
    try:
        # Whole: the digest, the footer and later the rows are then of the same bytes.
        raw = path.read_bytes()
        part = pq.ParquetFile(pa.BufferReader(raw))
    except OSError as error:
        return "unreadable", f"cannot be read ({_first_line(error)})"
    except pa.ArrowException as error:
        return "truncated", f"no readable Parquet footer: truncated or never closed ({_first_line(error)})"
    schema = part.schema_arrow
    if problem := version_problem(_part_version(schema)):
        return "schema_version", problem
    # More columns than ours are no problem: `read_table` takes only ours.
    if missing := sorted(set(contract.SCHEMAS[table].names).difference(schema.names)):
        return "schema", f"lacks column {', '.join(missing)}"
    files.parts[path] = part
    files.digests[path] = hashlib.sha256(raw).digest()
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _read_journal(path: Path, schema: pa.Schema) -> tuple[pa.Table, str]:
    """Return every complete batch of an Arrow IPC stream that may simply end, and what is wrong with its tail."""
    batches: list[pa.RecordBatch] = []
    problem = ""
    try:
        with pa.OSFile(str(path)) as raw, pa.ipc.open_stream(raw) as stream:
            # Before any batch: rows of another schema version must not be taken.
            if b"schema_version" in (stream.schema.metadata or {}):
                problem = version_problem(_part_version(stream.schema)) or ""
            while not problem:
                batches.append(stream.read_next_batch())
    except StopIteration:
        pass
    except (pa.ArrowException, OSError, EOFError) as error:
        problem = f"its tail is lost ({_first_line(error)})"
    rows = pa.Table.from_batches(batches).select(schema.names).cast(schema) if batches else schema.empty_table()
    return rows, problem


def read_table(table: str, files: TableFiles, run_id: str) -> tuple[pa.Table, list[SkippedFile]]:
    """Return all rows of a table in written order, one chunk per column, and what was skipped.

    A part whose pages are damaged is skipped. Rows of a journal that a closed part already holds are dropped; nothing
    else is deduplicated or sorted, because the audit must see what the writer did.
    """
    schema = table_schema(table)
    pieces, journals = [], []
    skips: list[SkippedFile] = []
    for path, part in files.parts.items():
        try:
            pieces.append(part.read(columns=schema.names, use_threads=False).select(schema.names).cast(schema))
        except _UNREADABLE as error:
            skips.append(skipped(path, "damaged", f"footer is good, pages are not ({_first_line(error)})", run_id))
    for path in files.journals:
        try:
            rows, problem = _read_journal(path, schema)
        except (*_UNREADABLE, KeyError) as error:
            rows, problem = schema.empty_table(), _first_line(error)
        journals.append(rows)
        reason = f"journal of a part that was never closed: {rows.num_rows} rows taken from it"
        skips.append(skipped(path, "journal", f"{reason}, {problem}" if problem else reason, run_id))
    closed = _concat(pieces, schema)
    if not journals:
        return closed, skips
    # Rows that are in a closed part and in a journal too, e.g. after a kill between renaming and removing, count once.
    keys, rows = _KEYS[table], _concat(journals, schema)
    journal_keys, closed_keys = (_as_text(part.select(keys)) for part in (rows, closed))
    new = journal_keys.with_row_index("_row").join(
        closed_keys, on=keys, how="anti", nulls_equal=True, maintain_order="left"
    )
    return _concat([closed, rows.take(new["_row"].to_arrow())], schema), skips


def _as_text(rows: pa.Table) -> pl.DataFrame:
    return to_polars(rows).with_columns(pl.selectors.categorical().cast(pl.String))


def _concat(pieces: list[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return one table of one chunk per column; the dictionaries of its pieces become one."""
    if not pieces:
        return schema.empty_table()
    # Every part has a dictionary of its own; unified, the codes of all rows mean the same strings.
    return pa.concat_tables(pieces).unify_dictionaries().combine_chunks()
