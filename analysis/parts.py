"""The Parquet parts of one run: footers probed first, then read in the order in which they were written.

Inputs are never modified. A journal (the part that was still open when its writer died) is read in place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench import contract

# Several writers of one folder tell their files apart: part-000000.sidecar.parquet, .journal.sidecar.arrows.
_PART = re.compile(r"part-\d{6,}(\.[\w-]+)?\.parquet")
_JOURNAL = re.compile(re.escape(contract.JOURNAL).replace(r"\.arrows", r"(\.[\w-]+)?\.arrows"))
# What makes a row of a table the same row, seen once in a part and once in a journal.
_KEYS = {
    "samples_fast": ["gpu_uuid", "tick_seq"],
    "samples_slow": ["gpu_uuid", "tick_seq"],
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


def plain_schema(table: str) -> pa.Schema:
    """The contract's schema with dictionaries as plain strings: equal whoever wrote the dictionary."""
    fields = [
        pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type, nullable=True)
        for f in contract.SCHEMAS[table]
    ]
    return pa.schema(fields)


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


def probe(folder: Path, table: str, run_id: str | None) -> tuple[Parts, list[Skip]]:
    """Sort the files of one table's folder into readable parts, journals, and skipped ones with a reason."""
    parts = Parts()
    skips: list[Skip] = []
    if not folder.is_dir():
        return parts, skips
    for path in sorted(folder.iterdir()):
        if _JOURNAL.fullmatch(path.name):
            parts.journals.append(path)
            continue
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            code, why = "temporary", "temporary file of a write that never finished"
        elif not path.is_file() or not _PART.fullmatch(path.name):
            code, why = "unexpected", "not a part by its name"
        else:
            code, why = _fault(path, table)
        if code:
            skips.append(Skip(path=str(path), code=code, reason=why, run_id=run_id, size_bytes=_size(path)))
        else:
            parts.good.append(path)
    return parts, skips


def _fault(path: Path, table: str) -> tuple[str, str]:
    """Code and words for what is wrong with a part by its footer; empty strings for a good one."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        return "truncated", f"no readable Parquet footer: truncated or never closed ({_first_line(error)})"
    except OSError as error:
        return "unreadable", f"cannot be read ({_first_line(error)})"
    found = (schema.metadata or {}).get(b"schema_version", b"none").decode(errors="replace")
    if found != str(contract.SCHEMA_VERSION):
        return "schema_version", f"schema version {found}; this code reads {contract.SCHEMA_VERSION}"
    missing = [name for name in plain_schema(table).names if name not in schema.names]
    if missing:
        return "schema", f"lacks column {', '.join(missing)}"
    return "", ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _plain(batch: pa.Table, table: str) -> pa.Table:
    schema = plain_schema(table)
    return batch.select(schema.names).cast(schema)


def read_journal(path: Path, table: str) -> tuple[pa.Table, str | None]:
    """Every whole batch of an Arrow IPC stream that may simply end, and what was wrong with its tail."""
    batches: list[pa.RecordBatch] = []
    trouble = None
    try:
        with pa.OSFile(str(path)) as raw, pa.ipc.open_stream(raw) as stream:
            while True:
                try:
                    batches.append(stream.read_next_batch())
                except StopIteration:
                    break
    except (pa.ArrowException, OSError, EOFError) as error:
        trouble = _first_line(error)
    tables = [_plain(pa.Table.from_batches([batch]), table) for batch in batches]
    return (pa.concat_tables(tables) if tables else plain_schema(table).empty_table()), trouble


def read(table: str, parts: Parts, run_id: str) -> tuple[pl.DataFrame, list[Skip]]:
    """All rows of a table in written order. A part whose pages are damaged is skipped and listed, the rest stays.

    Rows of a journal that a closed part already holds are dropped; nothing else is deduplicated or sorted,
    because the audit must see what the writer did.
    """
    pieces: list[pa.Table] = []
    skips: list[Skip] = []
    for path in parts.good:
        try:
            pieces.append(_plain(pq.read_table(path, partitioning=None), table))
        except (pa.ArrowException, OSError, ValueError) as error:
            why = f"footer is good, pages are not ({_first_line(error)})"
            skips.append(Skip(path=str(path), code="damaged", reason=why, run_id=run_id, size_bytes=_size(path)))
    closed = _frame(pieces, table)
    late: list[pa.Table] = []
    for path in parts.journals:
        try:
            rows, trouble = read_journal(path, table)
        except (pa.ArrowException, ValueError, KeyError) as error:
            rows, trouble = plain_schema(table).empty_table(), _first_line(error)
        late.append(rows)
        why = f"journal of a part that was never closed: {rows.num_rows} rows taken from it"
        if trouble:
            why += f", its tail is lost ({trouble})"
        skips.append(Skip(path=str(path), code="journal", reason=why, run_id=run_id, size_bytes=_size(path)))
    if not late:
        return closed, skips
    keys = _KEYS[table]
    fresh = _frame(late, table).join(closed.select(keys), on=keys, how="anti", nulls_equal=True)
    return pl.concat([closed, fresh]), skips


def _frame(pieces: list[pa.Table], table: str) -> pl.DataFrame:
    frame = pl.from_arrow(pa.concat_tables(pieces) if pieces else plain_schema(table).empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame
