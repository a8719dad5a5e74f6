"""A thread that saves tables, so that a slow disk delays no row."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from inpaint_bench.core.records import TableCounts

from .parts import PartWriter

log = logging.getLogger(__name__)


@dataclass
class BackgroundSaver:
    """Saves the tables of some writers, so that a row is on disk at most `journal_s` after it was appended.

    `report(kind, detail)` is called with storage_failed once per failure that lasts, and with storage_recovered;
    `after_save()` after each save. Every row stays in memory until it is saved.
    """

    writers: Mapping[str, PartWriter]
    journal_s: float
    report: Callable[[str, str], None]
    after_save: Callable[[], None] = lambda: None
    errors: int = 0
    error: str | None = None  # the failure that lasts
    _due_s: float = 0.0  # on time.monotonic()
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def append(self, table: str, row: Mapping[str, Any]) -> None:
        """Add a row; only touches memory."""
        self.writers[table].append(**row)

    def start(self) -> None:
        # Once in the caller's thread: a run that is killed in its first seconds leaves the rows that it has.
        self._save()
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread:
            self._thread.join()

    def close(self) -> bool:
        """End the thread and close every part. Returns whether all rows are saved."""
        self.stop()
        saved = False
        # A failure to close and its recovery may be reported as rows, which must be saved in turn.
        for _ in range(3):
            saved = self._for_each(lambda writer: writer.close())
            if saved and not any(writer.unsaved for writer in self.writers.values()):
                break
        return saved

    def counts(self) -> dict[str, TableCounts]:
        """Return the rows appended and the parts closed, by table."""
        return {table: TableCounts(rows=w.rows, parts=w.parts) for table, w in self.writers.items()}

    def _run(self) -> None:
        while not self._stopping.wait(max(0.0, self._due_s - time.monotonic())):
            self._save()
            self.after_save()

    def _save(self) -> None:
        # From start to start: a slow save must not postpone the next one.
        now_s = max(time.monotonic(), self._due_s)
        self._due_s = now_s + 0.8 * self.journal_s  # the rest is for the save itself
        self._for_each(lambda writer: writer.save(now_s))

    def _for_each(self, action: Callable[[PartWriter], None]) -> bool:
        failure = None
        for table, writer in self.writers.items():
            try:
                action(writer)
            except Exception as error:  # the thread must go on whatever happens
                failure = f"{table}: {error}"
        if failure:
            self.errors += 1
            # A disk that stays full is one event, not one per save.
            if self.error is None:
                self.error = failure
                self.report("storage_failed", failure)
        elif self.error and not any(writer.failing for writer in self.writers.values()):
            self.error = None
            self.report("storage_recovered", "")
        return failure is None


@contextmanager
def saving_in_background(writer: PartWriter, journal_s: float) -> Iterator[None]:
    """Save a writer's rows during the block, and leave its last part open. A failing disk is logged once."""
    message = "rows that cannot be saved are kept in memory: %s %s"
    saver = BackgroundSaver({"rows": writer}, journal_s, lambda *problem: log.warning(message, *problem))
    saver.start()
    try:
        yield
    finally:
        saver.stop()
