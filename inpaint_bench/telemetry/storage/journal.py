"""The journal: an Arrow IPC stream that mirrors the part which is still in memory.

An IPC stream has no footer, so every whole message can be read back after a kill -9; a truncated last message is
dropped. Each save is synced to disk.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from inpaint_bench.core.files import fsync_folder
from inpaint_bench.core.schema import JOURNAL

PART_KEY = b"part"  # schema metadata: number of the part that this journal becomes
_NAME = re.compile(r"\.journal(\.[\w-]+)?\.arrows", re.ASCII)


class Journal:
    """Append-only mirror of one part. Not thread-safe."""

    def __init__(self, path: Path, schema: pa.Schema, part: int) -> None:
        self._path = path
        self._buffer = io.BytesIO()
        metadata = {**(schema.metadata or {}), PART_KEY: str(part).encode()}
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
            fsync_folder(self._path.parent)
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
    truncated: bool  # the last message was incomplete and is left out


def read_journal(path: Path) -> JournalContent | None:
    """Read every whole batch of a journal. Returns None if not even the schema was written."""
    try:
        stream = pa.ipc.open_stream(path.read_bytes())
    except (pa.ArrowException, EOFError):
        return None
    batches, truncated = [], False
    while True:
        try:
            batch = stream.read_next_batch()
            # A message whose length is right may still hold blocks that never reached the disk.
            batch.validate(full=True)
        except StopIteration:
            break
        except (pa.ArrowException, OSError):
            truncated = True
            break
        batches.append(batch)
    metadata = dict(stream.schema.metadata or {})
    part = int(metadata.pop(PART_KEY, b"0"))
    table = pa.Table.from_batches(batches, stream.schema).replace_schema_metadata(metadata)
    return JournalContent(table, part, truncated)


def is_journal(name: str) -> bool:
    """Return whether a file name is that of a journal, whichever writer it belongs to."""
    return _NAME.fullmatch(name) is not None


def journal_name(writer: str | None) -> str:
    """Return the file name of a writer's journal; None is the folder's only or main writer."""
    return JOURNAL.replace(".arrows", f".{writer}.arrows") if writer else JOURNAL


def in_use(path: Path) -> bool:
    """Return whether a living process on this host writes the journal (other hosts: only if they share locks)."""
    try:
        os.close(_open_locked(path, create=False))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _open_locked(path: Path, create: bool = True) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        pass  # a file system without locks
    return handle
