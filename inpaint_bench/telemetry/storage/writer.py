"""The sidecar's tables on disk, written by a thread of their own so that a slow disk delays no sample.

A disk that refuses is reported once, every row stays in memory, and each next journal is another try.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inpaint_bench.core import schema

from .parts import PartWriter

WRITER = "sidecar"  # the worker writes events of its own beside the sidecar's
TABLES = ("samples_fast", "samples_slow", "samples_gpm", "events")


class Storage:
    """`report(kind, detail)` hears of storage_failed and storage_recovered; `note()` is called after each save.

    Raises OSError where nothing opens.
    """

    def __init__(
        self,
        run_dir: Path,
        metadata: Mapping[str, Mapping[str, str]],
        part_s: float,
        journal_s: float,
        report: Callable[[str, str], None],
        note: Callable[[], None],
    ) -> None:
        self.errors = 0
        self.error: str | None = None  # the one that has not been overcome
        self._report = report
        self._note = note
        step_s = 0.8 * min(part_s, journal_s)  # the rest is for the disk
        self._writers = {
            table: PartWriter(
                run_dir / table,
                schema.SCHEMAS[table],
                metadata[table],
                part_s,
                step_s,
                writer=WRITER if table == "events" else None,
            )
            for table in TABLES
        }
        self._pause_s = step_s
        self._due_s = 0.0  # on time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)

    def append(self, table: str, row: Mapping[str, Any]) -> None:
        """Take a row; only touches memory."""
        self._writers[table].append(**row)

    def start(self) -> None:
        self._save()
        self._thread.start()

    def close(self) -> bool:
        """Close every part; False where rows could not be saved."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        saved = False
        for _ in range(3):  # that it failed, and that it went well then, are events, to be saved too
            saved = self._each(lambda writer: writer.close())
            if saved and not any(writer.unsaved for writer in self._writers.values()):
                break
        return saved

    def counts(self) -> dict[str, dict[str, int]]:
        return {table: {"rows": w.rows, "parts": w.parts} for table, w in self._writers.items()}

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, self._due_s - time.monotonic())):
            self._save()
            self._note()

    def _save(self) -> None:
        """From one save's beginning to the next's: what a save takes does not put off the one after it."""
        now_s = max(time.monotonic(), self._due_s)
        self._due_s = now_s + self._pause_s
        self._each(lambda writer: writer.tick(now_s))

    def _each(self, action: Callable[[PartWriter], None]) -> bool:
        failed = None
        for table, writer in self._writers.items():
            try:
                action(writer)
            except Exception as error:  # whatever it is: the samples go on, and the client hears of it
                failed = f"{table}: {error}"
        if failed:
            self.errors += 1
            if self.error is None:
                self.error = failed
                self._report("storage_failed", failed)
        elif self.error and not any(writer.failing for writer in self._writers.values()):
            self.error = None
            self._report("storage_recovered", "")
        return failed is None
