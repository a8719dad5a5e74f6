"""The thread that saves tables: on time, and no row lost on a failing disk."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from inpaint_bench.core.tables import EVENTS, SCHEMAS
from inpaint_bench.telemetry.storage.background import BackgroundSaver, saving_in_background
from inpaint_bench.telemetry.storage.parts import PartWriter
from tests.telemetry.support import rows, wait_until

TABLES = ("samples_fast", "samples_slow", "samples_gpm", "events")


def _writers(run_dir: Path) -> dict[str, PartWriter]:
    return {t: PartWriter(run_dir / t, SCHEMAS[t], {"run_id": "r-1"}, 60.0) for t in TABLES}


def _add(writer: PartWriter, *seconds: int) -> None:
    for second in seconds:
        writer.append(t_mono_ns=second, t_unix_ns=second, kind="test", detail=f"at {second}")


def test_slow_disk_does_not_postpone_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = BackgroundSaver(_writers(tmp_path), 0.25, lambda kind, detail: None)
    saves: list[float] = []

    def slow(self: PartWriter, now_s: float) -> None:
        saves.append(now_s)
        time.sleep(0.02)

    monkeypatch.setattr(PartWriter, "save", slow)
    tables.start()
    wait_until(lambda: len(saves) >= 5 * len(TABLES))
    tables.close()
    saves = saves[:: len(TABLES)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(saves)]
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.2, abs=0.05)  # 0.28 if saves postponed each other


def _tables(run_dir: Path, reported: list[str]) -> BackgroundSaver:
    """Return tables with an event for each report, as the sidecar's have."""

    def report(kind: str, detail: str) -> None:
        reported.append(kind)
        tables.append(
            "events", {"t_mono_ns": len(reported), "t_unix_ns": len(reported), "kind": kind, "detail": detail}
        )

    tables = BackgroundSaver(_writers(run_dir), 5.0, report)
    tables.append("events", {"t_mono_ns": 0, "t_unix_ns": 0, "kind": "test"})
    return tables


@pytest.mark.parametrize("before_the_end", [True, False], ids=["from earlier on", "at the end alone"])
def test_disk_that_recovers_at_the_end_leaves_no_error_and_both_events_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_the_end: bool
) -> None:
    """Regression: the report was complete with an error that was overcome, and its last event was in no part."""
    reported: list[str] = []
    tables = _tables(tmp_path, reported)
    tables.start()
    real, refused = PartWriter._close_part, []

    def refuse(self: PartWriter) -> None:
        if self._journal is not None and not refused:
            refused.append(self)
            raise OSError(28, "No space left on device")
        real(self)

    monkeypatch.setattr(PartWriter, "_close_part", refuse)
    if before_the_end:
        tables._for_each(lambda writer: writer.save(time.monotonic() + 100))
        assert tables.error == "events: [Errno 28] No space left on device"
    assert tables.close()
    assert tables.error is None
    assert reported == ["storage_failed", "storage_recovered"]
    assert rows(tmp_path, "events")["kind"].to_list() == ["test", *reported]
    assert tables.counts()["events"].rows == 3


def test_failing_disk_is_logged_once_by_the_background_thread_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = PartWriter(tmp_path / "events", EVENTS, {"run_id": "r-1"}, 60.0)
    attempts: list[float] = []

    def refuse(now_s: float) -> None:
        attempts.append(now_s)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(writer, "save", refuse)
        with saving_in_background(writer, 0.01):
            _add(writer, 1)
            wait_until(lambda: len(attempts) > 3)
    assert caplog.text.count("No space left on device") == 1
    writer.close()
    assert rows(tmp_path, "events")["t_mono_ns"].to_list() == [1]
