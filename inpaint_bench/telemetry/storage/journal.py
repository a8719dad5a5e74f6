"""The part that is still open, mirrored on disk as an Arrow IPC stream.

A stream may just end, so whatever was saved can be read back after a kill -9; a half-written last message
is left out. Data reach the disk (fsync) with each save.
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


class Journal:
    """Append-only mirror of one part. Not thread-safe."""

    def __init__(self, path: Path, schema: pa.Schema, part: int) -> None:
        self._path = path
        self._buffer = io.BytesIO()
        metadata = {**(schema.metadata or {}), PART_KEY: str(part).encode()}
        self._stream = pa.ipc.new_stream(self._buffer, schema.with_metadata(metadata))
        self._saved = 0
        self._handle: int | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch, in memory only."""
        self._stream.write_batch(batch)

    def save(self) -> None:
        """Write and sync what was added. Raises OSError; the file is then as before: try again."""
        if self._handle is None:
            self._handle = _open_locked(self._path)
            os.ftruncate(self._handle, 0)
            fsync_folder(self._path.parent)
        try:
            with self._buffer.getbuffer() as view:
                size, position = len(view), self._saved
                while position < size:
                    position += os.pwrite(self._handle, view[position:], position)
            os.fsync(self._handle)
        except OSError:
            os.ftruncate(self._handle, self._saved)
            raise
        self._saved = size

    def drop(self) -> None:
        """Remove the file: its rows are in a closed part."""
        if self._handle is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


@dataclass
class Found:
    """What a journal on disk holds."""

    table: pa.Table
    part: int
    whole: bool  # False: it ends in a half-written message, which is left out


def read_journal(path: Path) -> Found | None:
    """Every whole batch of a journal; None where not even the schema was written."""
    try:
        stream = pa.ipc.open_stream(path.read_bytes())
    except (pa.ArrowException, EOFError):
        return None
    batches, whole = [], True
    while True:
        try:
            batch = stream.read_next_batch()
            batch.validate(full=True)
        except StopIteration:
            break
        except (pa.ArrowException, OSError):
            whole = False
            break
        batches.append(batch)
    metadata = dict(stream.schema.metadata or {})
    part = int(metadata.pop(PART_KEY, b"0"))
    table = pa.Table.from_batches(batches, stream.schema).replace_schema_metadata(metadata)
    return Found(table, part, whole)


_NAME = re.compile(r"\.journal(\.[\w-]+)?\.arrows", re.ASCII)


def is_journal(name: str) -> bool:
    """Of any writer of a folder."""
    return _NAME.fullmatch(name) is not None


def journal_name(writer: str | None) -> str:
    """File name of a journal; `writer` tells several writers of one folder apart."""
    stem, suffix = os.path.splitext(JOURNAL)  # noqa: PTH122 - Path sees no suffix in a dot file's last part
    return f"{stem}.{writer}{suffix}" if writer else JOURNAL


def in_use(path: Path) -> bool:
    """Whether a living process on this host writes this journal. Other hosts: only where locks are shared."""
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
