"""The Parquet parts of one run: footers probed first, then read in the order in which they were written.

Inputs are never modified. A journal (the part that was still open when its writer died) is read in place.
Every part is read from disk once: its digest, its footer and its rows come from the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core import schema as contract

from . import migrate

# Several writers of one folder tell their files apart: part-000000.sidecar.parquet, .journal.sidecar.arrows.
_PART = re.compile(r"part-\d{6,}(\.[\w-]+)?\.parquet")
_JOURNAL = re.compile(re.escape(contract.JOURNAL).replace(r"\.arrows", r"(\.[\w-]+)?\.arrows"))
# What makes a row of a table the same row, seen once in a part and once in a journal.
_KEYS = {
    "samples_fast": ["gpu_uuid", "tick_seq"],
    "samples_slow": ["gpu_uuid", "tick_seq"],
    "samples_gpm": ["gpu_uuid", "tick_seq"],
    "steps": ["window_id", "step", "t_start_mono_ns"],
    "events": ["t_mono_ns", "kind", "gpu_uuid", "detail"],
}


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A file or a run that the merge left out, and why."""

    path: str  # as reached from the root that was given
    code: str
    reason: str
    run_id: str | None = None
    size_bytes: int | None = None


@dataclass(kw_only=True)
class Parts:
    """What one table of one run has on disk."""

    good: list[Path] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)
    digests: dict[Path, bytes] = field(default_factory=dict)  # SHA-256 of both
    opened: dict[Path, pq.ParquetFile] = field(default_factory=dict)  # in memory until `read` has taken them


def plain_schema(table: str) -> pa.Schema:
    """The contract's schema with dictionaries as plain strings: equal whoever wrote the dictionary."""
    fields = [
        pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type, nullable=True)
        for f in contract.SCHEMAS[table]
    ]
    return pa.schema(fields)


def coded_schema(table: str) -> pa.Schema:
    """The contract's schema, dictionaries kept, every column nullable: a part may hold nulls where none belong."""
    return pa.schema([pa.field(f.name, f.type, nullable=True) for f in contract.SCHEMAS[table]])


def polars_schema(table: str) -> dict[str, pl.DataType]:
    """The same for polars."""
    frame = pl.from_arrow(plain_schema(table).empty_table())
    assert isinstance(frame, pl.DataFrame)
    return dict(frame.schema)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def probe(folder: Path, table: str, run_id: str | None, *, keep: bool = True) -> tuple[Parts, list[Skip]]:
    """Sort the files of one table's folder into readable parts, journals, and skipped ones with a reason.

    The parts stay in memory for `read`, still compressed, unless `keep` is false.
    """
    parts = Parts()
    skips: list[Skip] = []
    if not folder.is_dir():
        return parts, skips
    for path in sorted(folder.iterdir()):
        if _JOURNAL.fullmatch(path.name):
            parts.journals.append(path)
            if path.is_file():
                parts.digests[path] = hashlib.sha256(path.read_bytes()).digest()
            continue
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            code, why = "temporary", "temporary file of a write that never finished"
        elif not path.is_file() or not _PART.fullmatch(path.name):
            code, why = "unexpected", "not a part by its name"
        else:
            code, why, raw, opened = _open(path, table)
            if opened is not None:
                parts.digests[path] = hashlib.sha256(raw).digest()
                if keep:
                    parts.opened[path] = opened
        if code:
            skips.append(Skip(path=str(path), code=code, reason=why, run_id=run_id, size_bytes=_size(path)))
        else:
            parts.good.append(path)
    return parts, skips


def _open(path: Path, table: str) -> tuple[str, str, bytes, pq.ParquetFile | None]:
    """Code and words for what is wrong with a part by its footer, else its bytes and the file opened in them."""
    try:
        raw = path.read_bytes()
        opened = pq.ParquetFile(pa.BufferReader(raw))
    except OSError as error:
        return "unreadable", f"cannot be read ({_first_line(error)})", b"", None
    except pa.ArrowException as error:
        return "truncated", f"no readable Parquet footer: truncated or never closed ({_first_line(error)})", b"", None
    schema = opened.schema_arrow
    version = migrate.version_of(schema)
    if why := migrate.objection(version):
        return "schema_version", why, b"", None
    assert isinstance(version, int)
    if missing := migrate.lacking(table, version, schema.names):
        return "schema", f"lacks column {', '.join(missing)}", b"", None
    return "", "", raw, opened


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _coded(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows under `schema`, cast where the writer had other types. Raises ArrowInvalid on values that do not fit."""
    rows = rows.select(schema.names)
    if rows.schema.equals(schema):
        return rows
    columns = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        column = rows[name]
        if column.type != kind:
            coded = pa.types.is_dictionary(kind)
            column = column.cast(pa.string()).dictionary_encode() if coded else column.cast(kind)
        columns.append(column)
    return pa.table(columns, schema=schema)


def _rows(opened: pq.ParquetFile, table: str, schema: pa.Schema) -> pa.Table:
    """A part's rows under `schema`, whichever version wrote it."""
    found = opened.schema_arrow
    version = migrate.version_of(found)
    assert isinstance(version, int)
    now = migrate.names(table, version, found.names)
    wanted = [name for name, new in now.items() if new in schema.names]
    return _coded(migrate.rows(table, version, opened.read(columns=wanted, use_threads=False)), schema)


def read_journal(path: Path, table: str) -> tuple[pa.Table, str | None]:
    """Every whole batch of an Arrow IPC stream that may simply end, and what was wrong with its tail.

    Raises ValueError where another version wrote it that cannot be read.
    """
    batches: list[pa.RecordBatch] = []
    trouble, version = None, contract.SCHEMA_VERSION
    try:
        with pa.OSFile(str(path)) as raw, pa.ipc.open_stream(raw) as stream:
            if b"schema_version" in (stream.schema.metadata or {}):
                version = _readable(stream.schema)
            while True:
                try:
                    batches.append(stream.read_next_batch())
                except StopIteration:
                    break
    except (pa.ArrowException, OSError, EOFError) as error:
        trouble = _first_line(error)
    schema = coded_schema(table)
    tables = [_coded(migrate.rows(table, version, pa.Table.from_batches([batch])), schema) for batch in batches]
    return (pa.concat_tables(tables) if tables else schema.empty_table()), trouble


def _readable(schema: pa.Schema) -> int:
    version = migrate.version_of(schema)
    if why := migrate.objection(version):
        raise ValueError(why)
    assert isinstance(version, int)
    return version


def read(table: str, parts: Parts, run_id: str) -> tuple[pl.DataFrame, list[Skip]]:
    """`read_coded` with strings for dictionaries, as polars likes it."""
    rows, skips = read_coded(table, parts, run_id)
    return plain(table, rows), skips


def plain(table: str, rows: pa.Table) -> pl.DataFrame:
    """Rows of `read_coded` as polars has them: strings for dictionaries."""
    frame = pl.from_arrow(rows.cast(plain_schema(table)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def coded(rows: pa.Table) -> pl.DataFrame:
    """The same with categories for dictionaries: no text is written out row by row."""
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    return frame


def read_coded(table: str, parts: Parts, run_id: str) -> tuple[pa.Table, list[Skip]]:
    """All rows of a table in written order. A part whose pages are damaged is skipped and listed, the rest stays.

    Rows of a journal that a closed part already holds are dropped; nothing else is deduplicated or sorted,
    because the audit must see what the writer did. One chunk per column.
    """
    schema = coded_schema(table)
    pieces: list[pa.Table] = []
    skips: list[Skip] = []
    for path in parts.good:
        try:
            opened = parts.opened.pop(path, None) or pq.ParquetFile(path)
            pieces.append(_rows(opened, table, schema))
        except (pa.ArrowException, OSError, ValueError) as error:
            why = f"footer is good, pages are not ({_first_line(error)})"
            skips.append(Skip(path=str(path), code="damaged", reason=why, run_id=run_id, size_bytes=_size(path)))
    closed = _joined(pieces, schema)
    late: list[pa.Table] = []
    for path in parts.journals:
        try:
            rows, trouble = read_journal(path, table)
        except (pa.ArrowException, ValueError, KeyError) as error:
            rows, trouble = schema.empty_table(), _first_line(error)
        late.append(rows)
        why = f"journal of a part that was never closed: {rows.num_rows} rows taken from it"
        if trouble:
            why += f", its tail is lost ({trouble})"
        skips.append(Skip(path=str(path), code="journal", reason=why, run_id=run_id, size_bytes=_size(path)))
    if not late:
        return closed, skips
    keys, rows = _KEYS[table], _joined(late, schema)
    numbered = plain(table, rows).select(keys).with_row_index("_at")
    fresh = numbered.join(
        plain(table, closed).select(keys), on=keys, how="anti", nulls_equal=True, maintain_order="left"
    )
    return _joined([closed, rows.take(fresh["_at"].to_arrow())], schema), skips


def null_reasons(nulls: pl.Series) -> dict[str, str]:
    """Why columns are null, by the rows' own `nulls`: the first reason of each, by their text."""
    said: dict[str, str] = {}
    for cell in nulls.unique().drop_nulls().sort():
        for pair in str(cell).split(";"):
            column, _, why = pair.strip().partition("=")
            if why:
                said.setdefault(column, why)
    return said


def _joined(pieces: list[pa.Table], schema: pa.Schema) -> pa.Table:
    """One table of one chunk; the dictionaries of its pieces become one."""
    if not pieces:
        return schema.empty_table()
    return pa.concat_tables(pieces).unify_dictionaries().combine_chunks()
