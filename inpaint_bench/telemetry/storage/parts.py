"""Closed Parquet parts, one row group each, that are either complete or absent, and the journal of the open one.

A part is written under a temporary name, synced and renamed; until then its rows are in the journal. A process that is
killed at any moment loses at most the rows since the journal was saved.
"""

import fcntl
import io
import math
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core.files import fsync_path, replacing
from inpaint_bench.core.schema import JOURNAL, PART_NAME, PART_PATTERN, TABLES
from inpaint_bench.telemetry.report import JournalRecovery

_PART_KEY: Final = b"part"  # schema metadata: number of the part that a journal becomes


class Journal:
    """An Arrow IPC stream that mirrors the part which is still in memory. Not thread-safe.

    An IPC stream has no footer, so every whole message can be read back after a kill -9; a truncated last message is
    dropped. Each save is synced to disk.
    """

    def __init__(self, path: Path, schema: pa.Schema, part: int) -> None:
        self._path = path
        # The whole stream of the open part: a save that failed is repeated from it at the same offset.
        self._buffer = io.BytesIO()
        metadata = {**(schema.metadata or {}), _PART_KEY: str(part).encode()}
        self._stream = pa.ipc.new_stream(self._buffer, schema.with_metadata(metadata))
        self._saved_bytes = 0
        self._handle: int | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Add a batch, in memory only."""
        self._stream.write_batch(batch)

    def save(self) -> None:
        """Write and sync the appended batches. Raises OSError and leaves the file as it was, so that a retry works."""
        if self._handle is None:
            self._handle = _open_locked(self._path)
            os.ftruncate(self._handle, 0)
            # A new file survives a power failure only once its folder is synced too.
            fsync_path(self._path.parent)
        try:
            # pwrite at our own offset: a failed attempt is overwritten by the next one.
            with self._buffer.getbuffer() as view:
                size, position = len(view), self._saved_bytes
                while position < size:
                    position += os.pwrite(self._handle, view[position:], position)
            os.fsync(self._handle)
        except OSError:
            os.ftruncate(self._handle, self._saved_bytes)
            raise
        self._saved_bytes = size

    def delete(self) -> None:
        """Remove the file once its rows are in a closed part."""
        if self._handle is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


@dataclass
class JournalContent:
    """The rows of a journal on disk."""

    table: pa.Table
    part: int
    problem: Exception | None  # why its last message is left out: the message was incomplete or damaged


def read_journal(raw: bytes) -> JournalContent:
    """Read every whole batch of a journal. Raises ArrowException or EOFError if not even the schema was written."""
    stream = pa.ipc.open_stream(pa.BufferReader(raw))
    batches, problem = [], None
    while True:
        try:
            batch = stream.read_next_batch()
            # A message whose length is right may still hold blocks that never reached the disk.
            batch.validate(full=True)
        except StopIteration:
            break
        except (pa.ArrowException, OSError, EOFError) as error:
            problem = error
            break
        batches.append(batch)
    metadata = dict(stream.schema.metadata or {})
    part = metadata.pop(_PART_KEY, b"0")
    table = pa.Table.from_batches(batches, stream.schema).replace_schema_metadata(metadata)
    return JournalContent(table, int(part) if part.isdigit() else 0, problem)


def _open_locked(path: Path) -> int:
    """Open a journal. Raises BlockingIOError if a living process on this host writes it."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        pass  # a file system without locks
    return handle


def write_part(path: Path, table: pa.Table) -> None:
    """Write a complete part. Raises OSError and leaves no file if the disk refuses."""
    strings = [f.name for f in table.schema if pa.types.is_dictionary(f.type) or pa.types.is_string(f.type)]
    # One chunk and one dictionary per column, so that the part is a single row group.
    table = table.unify_dictionaries().combine_chunks()
    with replacing(path) as out:
        pq.write_table(table, out, compression="zstd", use_dictionary=strings, row_group_size=max(1, table.num_rows))


def recover_run(run_dir: Path) -> list[JournalRecovery]:
    """Turn the journals that a killed process left in a run directory into parts. Idempotent. Raises OSError."""
    journals = [run_dir / table / JOURNAL for table in TABLES]
    return [_recover(path) for path in journals if path.is_file()]


def _recover(path: Path) -> JournalRecovery:
    folder = path.parent
    record = JournalRecovery(table=folder.name, outcome="in_use")
    try:
        os.close(_open_locked(path))
    except BlockingIOError:
        return record
    try:
        journal = read_journal(path.read_bytes())
    except (pa.ArrowException, EOFError):
        journal = None
    if journal is None or journal.table.num_rows == 0:
        record.outcome = "empty"
    elif (target := folder / PART_PATTERN.format(journal.part)).exists():
        record.outcome = "already_closed"  # killed between the part's rename and the journal's removal
    else:
        metadata = {**(journal.table.schema.metadata or {}), b"recovered": b"true"}
        write_part(target, journal.table.replace_schema_metadata(metadata))
        record.outcome, record.part, record.rows = "recovered", target.name, journal.table.num_rows
        record.truncated = journal.problem is not None
    # Last: until the part is renamed, the journal is the only copy of its rows.
    path.unlink()
    # Parts that were being written when the process was killed; the journal had their rows.
    for temporary in folder.glob(".part-*.tmp"):
        temporary.unlink(missing_ok=True)
    return record


class PartWriter:
    """Writes one table's rows as parts of about `part_s` seconds, and meanwhile into a journal.

    `append` only touches memory. `save` does the disk work and may be called from another thread; if the disk refuses,
    it raises OSError and keeps every row for the next call. `metadata` goes into every file; its `run_id` fills that
    column of rows without one. What an earlier writer left in its journal is recovered first, and no existing part is
    overwritten. Raises ValueError if another process writes to the folder.
    """

    def __init__(self, folder: Path, schema: pa.Schema, metadata: Mapping[str, str], part_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / JOURNAL
        if journal.is_file() and _recover(journal).outcome == "in_use":
            # Two writers would replace each other's parts.
            raise ValueError(f"{folder}: another process is writing to this folder")
        self._folder = folder
        encoded = {key.encode(): value.encode() for key, value in metadata.items()}
        self._schema = schema.with_metadata({**(schema.metadata or {}), **encoded})
        self._run_id = metadata.get("run_id")
        self._columns = set(schema.names)
        self._required = {f.name for f in schema if not f.nullable}
        self._part_s = part_s
        # A requeued job writes into the same folder: numbers go on where the earlier start ended.
        numbers = [int(match[1]) for path in folder.iterdir() if (match := PART_NAME.fullmatch(path.name))]
        self._number = max(numbers, default=-1) + 1
        self._pending_lock = threading.Lock()  # guards the rows that are not yet in a batch
        self._disk_lock = threading.Lock()  # guards everything else
        self._pending: list[dict[str, Any]] = []
        self._batches: list[pa.RecordBatch] = []
        self._journal: Journal | None = None
        self._part_due_s: float | None = None
        self.rows = 0  # appended
        self.parts = 0  # closed
        self.failing = False  # the last save did not succeed

    @property
    def unsaved(self) -> bool:
        """Return whether some rows are not in a closed part."""
        return bool(self._pending or self._batches)

    def append(self, **row: Any) -> None:
        """Add a row; omitted columns are null. Raises ValueError on an unknown or missing column."""
        if "run_id" not in row and self._run_id is not None:
            row["run_id"] = self._run_id
        # Checked here, where the traceback names the caller: `_collect` would drop an unknown column silently.
        if unknown := row.keys() - self._columns:
            raise ValueError(f"{self._folder.name}: no column {', '.join(sorted(unknown))}")
        if missing := [name for name in self._required if row.get(name) is None]:
            raise ValueError(f"{self._folder.name}: {', '.join(sorted(missing))} must not be null")
        with self._pending_lock:
            self._pending.append(row)
            self.rows += 1

    def save(self, now_s: float) -> None:
        """Save the journal, or close the part if it is due; `now_s` is time.monotonic(). Raises OSError."""
        with self._disk_lock:
            # Until the end of the block: an exception leaves it set.
            self.failing = True
            self._collect()
            if self._part_due_s is None:
                self._part_due_s = now_s + self._part_s
            if now_s >= self._part_due_s:
                self._close_part()
                self._part_due_s = now_s + self._part_s
            elif self._journal is not None:
                self._journal.save()
            self.failing = False

    def close(self) -> None:
        """Close the open part. Raises OSError if the disk refuses; the journal then holds what fits."""
        self.save(math.inf)
        self._part_due_s = None  # for rows that come later

    def _collect(self) -> None:
        """Convert the pending rows into a batch of the open part and of its journal."""
        # Swapped under the lock and converted outside of it: `append` never waits for the conversion.
        with self._pending_lock:
            rows, self._pending = self._pending, []
        if not rows:
            return
        columns = [pa.array([row.get(f.name) for row in rows], type=f.type) for f in self._schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if self._journal is None:
            self._journal = Journal(self._folder / JOURNAL, self._schema, self._number)
        self._batches.append(batch)
        self._journal.append(batch)

    def _close_part(self) -> None:
        if self._journal is None:
            return
        # Writing a part takes longer, and a kill may come meanwhile; on a full disk, only the journal may still fit.
        with suppress(OSError):
            self._journal.save()
        path = self._folder / PART_PATTERN.format(self._number)
        write_part(path, pa.Table.from_batches(self._batches, self._schema))
        # A kill before this line leaves both; recovery sees that the part exists and drops the journal.
        self._journal.delete()
        self._journal = None
        self._batches = []
        self._number += 1
        self.parts += 1
