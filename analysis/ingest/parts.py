"""The Parquet parts and journals of one run's tables. Inputs are never modified.

Every part is read from disk once: its digest, its footer and its rows come from the same bytes. A journal, i.e. the
part that was still open when its writer died, is read in place. Nothing but plain files of bounded size is read, and
their names and errors are listed as printable text.
"""

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core import schema as contract
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import first_line
from inpaint_bench.core.files import read_plain
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.storage.parts import read_journal

# A row of a journal that a closed part holds too has the same values in those of these columns that its table has. The
# times belong to them: a sidecar or a training that was started again counts from 0.
_KEYS = (
    *("gpu_uuid", "tick_seq", "t_mono_ns", "window_id", "step", "t_start_mono_ns"),
    *("kind", "detail", "call", "kernel", "launch"),
)
MAX_PART_BYTES = 256 * 2**20  # limit for a part or journal; those of 6,000 rows or a minute have less than 1 MiB
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError)


def printable(text: str) -> str:
    """Return text of one line without control characters."""
    return sanitize(" ".join(text.splitlines()))


def path_text(path: Path) -> str:
    """Return a path as text that any file can hold; bytes that are not UTF-8 are escaped."""
    return sanitize(os.fsencode(path).decode("utf-8", "backslashreplace"))


def describe(error: BaseException) -> str:
    """Return the first line of an error."""
    return sanitize(error.strerror if isinstance(error, OSError) and error.strerror else first_line(error))


class SkippedFile(msgspec.Struct, kw_only=True, frozen=True):
    """A file or a run that the merge left out, and why: a row of skipped_files.parquet."""

    path: str  # as reached from the root that was given
    code: str
    reason: str
    run_id: str | None = None
    size_bytes: int | None = None


def skipped(path: Path, code: str, reason: str, run_id: str | None = None) -> SkippedFile:
    """Return the record of a skipped file, with its size."""
    try:
        status = path.lstat()
        size = status.st_size if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError):
        size = None
    return SkippedFile(path=path_text(path), code=code, reason=printable(reason), run_id=run_id, size_bytes=size)


@dataclass(kw_only=True)
class TableFiles:
    """The usable files of one table of one run, in written order."""

    table: str
    parts: dict[Path, pq.ParquetFile] = field(default_factory=dict)  # in memory, still compressed
    journals: dict[Path, bytes] = field(default_factory=dict)
    digests: dict[Path, bytes] = field(default_factory=dict)  # SHA-256 of both


def _part_version(schema: pa.Schema) -> int | str:
    text = (schema.metadata or {}).get(b"schema_version", b"none").decode(errors="replace")
    return int(text) if text.isdecimal() and len(text) < 10 else sanitize(text[:50])


def table_schema(table: str) -> pa.Schema:
    """Return the schema of a table with every column nullable, as readers of a dataset see it."""
    return pa.schema([pa.field(f.name, f.type, nullable=True) for f in SCHEMAS[table]])


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
    files = TableFiles(table=table)
    skips: list[SkippedFile] = []
    try:
        if folder.is_symlink():
            raise OSError(0, "is a link, which is not followed")
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return files, []
    except OSError as error:
        reason = f"cannot be read as a folder of parts ({describe(error)})"
        return files, [skipped(folder, "unreadable", reason, run_id)]
    for path in paths:
        if contract.JOURNAL_NAME.fullmatch(path.name) or contract.PART_NAME.fullmatch(path.name):
            problem = _open(path, files)
        elif path.name.startswith(".") and path.name.endswith(".tmp"):
            problem = "temporary", "temporary file of a write that never finished"
        else:
            problem = "unexpected", "not a part by its name"
        if problem:
            skips.append(skipped(path, *problem, run_id))
    return files, skips


def _open(path: Path, files: TableFiles) -> tuple[str, str] | None:
    """Add a journal or a part to the files, or return the code and the reason why it or its footer is unusable."""
    columns = SCHEMAS[files.table]
    try:
        # Whole: the digest, the footer and later the rows are then of the same bytes.
        raw = read_plain(path, max_bytes=MAX_PART_BYTES)
        if contract.JOURNAL_NAME.fullmatch(path.name):
            files.digests[path], files.journals[path] = hashlib.sha256(raw).digest(), raw
            return None
        part = pq.ParquetFile(pa.BufferReader(raw))
    except OSError as error:
        return "unreadable", f"cannot be read ({describe(error)})"
    except (pa.ArrowException, ValueError) as error:
        return "truncated", f"no readable Parquet footer: truncated or never closed ({describe(error)})"
    schema = part.schema_arrow
    if problem := contract.version_problem(_part_version(schema)):
        return "schema_version", problem
    # More columns than ours are no problem: `read_table` takes only ours.
    # Fewer are allowed in results, to which a later version of a workload may add columns.
    needed = {kind.name for kind in columns if not (kind.nullable and files.table.startswith(contract.RESULTS))}
    if missing := sorted(needed.difference(schema.names)):
        return "schema", f"lacks column {', '.join(missing)}"
    files.digests[path], files.parts[path] = hashlib.sha256(raw).digest(), part
    return None


def _read_journal(raw: bytes, table: str) -> tuple[pa.Table, str]:
    """Return every complete batch of a journal, and what is wrong with its tail."""
    try:
        journal = read_journal(raw)
    except (pa.ArrowException, OSError, EOFError) as error:
        return table_schema(table).empty_table(), f"its tail is lost ({describe(error)})"
    # Rows of another schema version must not be taken.
    schema = journal.table.schema
    if b"schema_version" in (schema.metadata or {}) and (problem := contract.version_problem(_part_version(schema))):
        return table_schema(table).empty_table(), problem
    rows = _conform(journal.table, table) if journal.table.num_rows else table_schema(table).empty_table()
    return rows, f"its tail is lost ({describe(journal.problem)})" if journal.problem else ""


def _conform(rows: pa.Table, table: str) -> pa.Table:
    """Return the rows in our types. Raise ValueError for a null where none belongs, ArrowException for damage."""
    schema = table_schema(table)
    for kind in SCHEMAS[table]:
        if kind.name not in rows.column_names:
            rows = rows.append_column(kind, pa.nulls(rows.num_rows, kind.type))
    rows = rows.select(schema.names).cast(schema)
    rows.validate(full=True)
    for kind in SCHEMAS[table]:
        if not kind.nullable and rows[kind.name].null_count:
            raise ValueError(f"{rows[kind.name].null_count} rows without {kind.name}")
    return rows


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
            pieces.append(_conform(part.read(columns=schema.names, use_threads=False), table))
        except _UNREADABLE as error:
            skips.append(skipped(path, "damaged", f"footer is good, rows are not ({describe(error)})", run_id))
    for path, raw in files.journals.items():
        try:
            rows, problem = _read_journal(raw, table)
        except _UNREADABLE as error:
            rows, problem = schema.empty_table(), describe(error)
        journals.append(rows)
        reason = f"journal of a part that was never closed: {rows.num_rows} rows taken from it"
        skips.append(skipped(path, "journal", f"{reason}, {problem}" if problem else reason, run_id))
    closed = concat(pieces, schema)
    if not journals:
        return closed, skips
    # Rows that are in a closed part and in a journal too, e.g. after a kill between renaming and removing, count once.
    keys, rows = [name for name in _KEYS if name in schema.names], concat(journals, schema)
    journal_keys, closed_keys = (_as_text(part.select(keys)) for part in (rows, closed))
    new = journal_keys.with_row_index("_row").join(
        closed_keys, on=keys, how="anti", nulls_equal=True, maintain_order="left"
    )
    return concat([closed, rows.take(new["_row"].to_arrow())], schema), skips


def _as_text(rows: pa.Table) -> pl.DataFrame:
    return to_polars(rows).with_columns(pl.selectors.categorical().cast(pl.String))


def concat(pieces: list[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return one table of one chunk per column; the dictionaries of its pieces become one."""
    if not pieces:
        return schema.empty_table()
    # Every part has a dictionary of its own; unified, the codes of all rows mean the same strings.
    return pa.concat_tables(pieces).unify_dictionaries().combine_chunks()
