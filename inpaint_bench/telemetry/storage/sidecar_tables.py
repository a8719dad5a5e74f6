"""The sidecar's tables on disk, saved by a thread of their own so that a slow disk delays no sample."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inpaint_bench.core import schema
from inpaint_bench.core.records import TableCounts

from .parts import PartWriter

WRITER = "sidecar"  # the worker writes events of its own into the same folder
TABLES = ("samples_fast", "samples_slow", "samples_gpm", "events")


class SidecarTables:
    """One PartWriter per table, and the thread that saves them.

    `report(kind, detail)` is called with storage_failed once per failure that lasts, and with storage_recovered;
    `after_save()` after each save. Every row stays in memory until it is saved. Raises OSError if a folder cannot be
    opened.
    """

    def __init__(
        self,
        run_dir: Path,
        metadata: Mapping[str, Mapping[str, str]],
        part_s: float,
        journal_s: float,
        report: Callable[[str, str], None],
        after_save: Callable[[], None],
    ) -> None:
        self.errors = 0
        self.error: str | None = None  # the current failure
        self._report = report
        self._after_save = after_save
        self._interval_s = 0.8 * min(part_s, journal_s)  # leaves the disk time, so that no journal is older than that
        self._writers = {
            table: PartWriter(
                run_dir / table,
                schema.SCHEMAS[table],
                metadata[table],
                part_s,
                self._interval_s,
                writer=WRITER if table == "events" else None,
            )
            for table in TABLES
        }
        self._due_s = 0.0  # on time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)

    def append(self, table: str, row: Mapping[str, Any]) -> None:
        """Add a row; only touches memory."""
        self._writers[table].append(**row)

    def start(self) -> None:
        """Start the thread."""
        self._save()
        self._thread.start()

    def close(self) -> bool:
        """Close every part. Returns whether all rows are saved."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        saved = False
        # A failure to close and its recovery are events, which must be saved in turn.
        for _ in range(3):
            saved = self._for_each(lambda writer: writer.close())
            if saved and not any(writer.unsaved for writer in self._writers.values()):
                break
        return saved

    def counts(self) -> dict[str, TableCounts]:
        """Return the rows appended and the parts closed, by table."""
        return {table: TableCounts(rows=w.rows, parts=w.parts) for table, w in self._writers.items()}

    def _run(self) -> None:
        while not self._stopping.wait(max(0.0, self._due_s - time.monotonic())):
            self._save()
            self._after_save()

    def _save(self) -> None:
        # From start to start: a slow save must not postpone the next one.
        now_s = max(time.monotonic(), self._due_s)
        self._due_s = now_s + self._interval_s
        self._for_each(lambda writer: writer.tick(now_s))

    def _for_each(self, action: Callable[[PartWriter], None]) -> bool:
        failure = None
        for table, writer in self._writers.items():
            try:
                action(writer)
            except Exception as error:  # sampling must go on whatever happens; the client is told
                failure = f"{table}: {error}"
        if failure:
            self.errors += 1
            if self.error is None:
                self.error = failure
                self._report("storage_failed", failure)
        elif self.error and not any(writer.failing for writer in self._writers.values()):
            self.error = None
            self._report("storage_recovered", "")
        return failure is None
