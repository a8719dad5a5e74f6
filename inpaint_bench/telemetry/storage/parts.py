"""Closed Parquet parts: whole or not there, one row group each.

A part is written under a temporary name, synced and renamed; until then its rows are in the journal. A
process killed at any moment has lost at most the rows of the last `journal_s` seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inpaint_bench.core.files import replacing
from inpaint_bench.core.schema import PART_PATTERN

from .journal import Journal, in_use, journal_name, read_journal

log = logging.getLogger(__name__)


def part_name(number: int, writer: str | None) -> str:
    """File name of a part; `writer` tells several writers of one folder apart."""
    name = PART_PATTERN.format(number)
    return name.replace(".parquet", f".{writer}.parquet") if writer else name


def write_part(path: Path, table: pa.Table) -> None:
    """Write a part whole. Raises OSError and leaves nothing behind when the disk does not take it."""
    strings = [f.name for f in table.schema if pa.types.is_dictionary(f.type) or pa.types.is_string(f.type)]
    table = table.unify_dictionaries().combine_chunks()
    with replacing(path) as out:
        pq.write_table(table, out, compression="zstd", use_dictionary=strings, row_group_size=max(1, table.num_rows))


def recover_folder(folder: Path) -> list[dict[str, Any]]:
    """Turn leftover journals of a table's folder into parts; one record per journal. Idempotent.

    A journal whose writer lives on this host is left alone (`in_use`). One whose part was already closed
    is only removed.
    """
    found = []
    for path in sorted(folder.glob(".journal*.arrows")):
        writer = path.name.removeprefix(".journal").removesuffix(".arrows").strip(".") or None
        record: dict[str, Any] = {"table": folder.name, "writer": writer, "part": None, "rows": 0}
        found.append(record)
        if in_use(path):
            record["outcome"] = "in_use"
            continue
        journal = read_journal(path)
        if journal is None or journal.table.num_rows == 0:
            record["outcome"] = "empty"
        elif (target := folder / part_name(journal.part, writer)).exists():
            record["outcome"] = "already_closed"
        else:
            metadata = {**(journal.table.schema.metadata or {}), b"recovered": b"true"}
            write_part(target, journal.table.replace_schema_metadata(metadata))
            record.update(outcome="recovered", part=target.name, rows=journal.table.num_rows)
            record["whole"] = journal.whole
        path.unlink()
        for rest in folder.glob(f".{part_name(0, writer).replace('000000', '*')}*.tmp"):
            rest.unlink(missing_ok=True)
    return found


class PartWriter:
    """Rows of one table into parts of `part_s` seconds, with a journal saved every `journal_s` seconds.

    `append` only touches memory. `tick` does the disk work and may be called from another thread; it
    raises OSError when the disk refuses, keeps every row and tries again at the next one due. `metadata`
    goes into every file; its `run_id` fills that column where a row does not give it. Leftovers of an
    earlier writer are recovered first, and no existing part is ever overwritten. Several writers may
    share a folder under different `writer` names.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        metadata: Mapping[str, str],
        part_s: float,
        journal_s: float,
        *,
        writer: str | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if in_use(folder / journal_name(writer)):
            raise ValueError(f"{folder}: another process is writing here")
        recover_folder(folder)
        self._folder = folder
        self._writer = writer
        more = {key.encode(): value.encode() for key, value in metadata.items()}
        self._schema = schema.with_metadata({**(schema.metadata or {}), **more})
        self._run_id = metadata.get("run_id")
        self._names = set(schema.names)
        self._required = {f.name for f in schema if not f.nullable}
        self._part_s = part_s
        self._step_s = min(journal_s, part_s)
        taken = [int(p.name.split("-")[1][:6]) for p in folder.glob(part_name(0, writer).replace("000000", "*"))]
        self._number = max(taken, default=-1) + 1
        self._lock = threading.Lock()  # the rows not yet in a batch
        self._disk = threading.Lock()  # everything else
        self._pending: list[dict[str, Any]] = []
        self._batches: list[pa.RecordBatch] = []
        self._journal: Journal | None = None
        self._journal_due: float | None = None
        self._part_due = 0.0
        self.rows = 0  # appended
        self.parts = 0  # closed
        self.failing = False  # the last try to save did not succeed

    @property
    def unsaved(self) -> bool:
        """Whether there are rows that are in no closed part."""
        return bool(self._pending or self._batches)

    def append(self, **row: Any) -> None:
        """Take one row; columns left out are null. Raises ValueError on an unknown or missing column."""
        if "run_id" not in row and self._run_id is not None:
            row["run_id"] = self._run_id
        if unknown := row.keys() - self._names:
            raise ValueError(f"{self._folder.name}: no column {', '.join(sorted(unknown))}")
        if missing := [name for name in self._required if row.get(name) is None]:
            raise ValueError(f"{self._folder.name}: {', '.join(sorted(missing))} must not be null")
        with self._lock:
            self._pending.append(row)
            self.rows += 1

    def tick(self, now_s: float) -> None:
        """Save the journal or close the part if it is time. `now_s` is time.monotonic()."""
        with self._disk:
            if self._journal_due is None:
                self._journal_due, self._part_due = now_s + self._step_s, now_s + self._part_s
            if now_s < self._journal_due:
                return
            self._journal_due = now_s + self._step_s
            self.failing = True
            self._collect()
            if now_s >= self._part_due:
                if self._journal is not None:
                    with suppress(OSError):  # the part is tried all the same
                        self._journal.save()  # writing a part takes longer, and a kill may fall into it
                self._close_part()
                self._part_due = now_s + self._part_s
            elif self._journal is not None:
                self._journal.save()
            self.failing = False

    def close(self) -> None:
        """Close the open part. Raises OSError when the disk refuses; the journal then holds what it could."""
        with self._disk:
            self.failing = True
            self._collect()
            self._close_part()
            self.failing = False

    def _collect(self) -> None:
        """Rows in memory -> one batch, in the journal's memory."""
        with self._lock:
            rows, self._pending = self._pending, []
        if not rows:
            return
        columns = [pa.array([row.get(f.name) for row in rows], type=f.type) for f in self._schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if self._journal is None:
            self._journal = Journal(self._folder / journal_name(self._writer), self._schema, self._number)
        self._batches.append(batch)
        self._journal.add(batch)

    def _close_part(self) -> None:
        if self._journal is None:
            return
        path = self._folder / part_name(self._number, self._writer)
        try:
            write_part(path, pa.Table.from_batches(self._batches, self._schema))
        except OSError:
            self._journal.save()  # smaller than a part, it may still fit
            raise
        self._journal.drop()
        self._journal = None
        self._batches = []
        self._number += 1
        self.parts += 1


@contextmanager
def ticking(writer: PartWriter, every_s: float) -> Iterator[None]:
    """A thread that ticks the writer while the block runs, so that a slow disk delays no row.

    A disk that refuses is told once; every row stays in memory and each next journal is another try.
    """
    stop = threading.Event()

    def work() -> None:
        told = False
        while True:
            try:
                writer.tick(time.monotonic())
            except OSError as error:
                if not told:
                    log.warning("rows cannot be saved while they come, and wait in memory: %s", error)
                told = True
            if stop.wait(every_s):
                return

    thread = threading.Thread(target=work, name="rows", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
