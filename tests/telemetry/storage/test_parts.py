"""Parts and journals: complete or absent, and no row lost."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inpaint_bench.core import schema
from inpaint_bench.core.tables import EVENTS
from inpaint_bench.telemetry.storage.parts import PartWriter, read_journal, recover_run
from tests.telemetry.support import leftovers, rows


def _writer(run_dir: Path, part_s: float = 10.0) -> PartWriter:
    metadata = {"run_id": "r-1", "producer": "test"}
    return PartWriter(run_dir / "events", EVENTS, metadata, part_s)


def _add(writer: PartWriter, *seconds: int) -> None:
    for second in seconds:
        writer.append(t_mono_ns=second, t_unix_ns=second, kind="test", detail=f"at {second}")


def test_part_is_one_row_group_with_schema_and_producer(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.save(0.0)
    _add(writer, 1, 2)
    writer.save(1.0)
    _add(writer, 3)
    writer.close()
    part = pq.ParquetFile(tmp_path / "events" / "part-000000.parquet")
    assert part.num_row_groups == 1
    assert part.metadata.row_group(0).column(1).compression == "ZSTD"
    assert part.schema_arrow.equals(EVENTS)
    assert part.schema_arrow.metadata[b"producer"] == b"test"
    assert part.schema_arrow.metadata[b"schema_version"] == str(schema.SCHEMA_VERSION).encode()
    table = rows(tmp_path, "events")
    assert table["t_mono_ns"].to_list() == [1, 2, 3]
    assert table["run_id"].to_list() == ["r-1"] * 3
    assert table["gpu_uuid"].null_count() == 3
    assert leftovers(tmp_path) == []


def test_parts_are_closed_by_time_and_never_overwritten_by_a_later_writer(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    for second in range(25):
        writer.save(float(second))
        _add(writer, second)
    writer.close()
    second = _writer(tmp_path)
    _add(second, 99)
    second.close()
    names = sorted(path.name for path in (tmp_path / "events").iterdir())
    assert names == [f"part-00000{i}.parquet" for i in range(4)]
    assert rows(tmp_path, "events")["t_mono_ns"].to_list() == [*range(25), 99]


def test_failed_save_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _writer(tmp_path)
    writer.save(0.0)
    _add(writer, 1)
    writer.save(1.0)
    journal = tmp_path / "events" / schema.JOURNAL
    before = journal.read_bytes()
    _add(writer, 2)

    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("inpaint_bench.telemetry.storage.parts.os.fsync", refuse)
        with pytest.raises(OSError, match="No space"):
            writer.save(2.0)
    assert journal.read_bytes() == before
    writer.save(3.0)
    content = read_journal(journal.read_bytes())
    assert (content.problem, content.table["t_mono_ns"].to_pylist()) == (None, [1, 2])
    writer.close()


def test_journal_truncated_anywhere_gives_its_first_rows(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.save(0.0)
    for second in (1, 2):
        _add(writer, second)
        writer.save(float(second))
    content, truncated = (tmp_path / "events" / schema.JOURNAL).read_bytes(), set()
    for length in range(0, len(content), 7):
        run = tmp_path / f"cut-{length}"
        (run / "events").mkdir(parents=True)
        (run / "events" / schema.JOURNAL).write_bytes(content[:length])
        records = recover_run(run)
        recovered = sum(record.rows for record in records)
        times = rows(run, "events")["t_mono_ns"].to_list() if recovered else []
        assert times == [1, 2][:recovered]
        if recovered:
            assert [record.outcome for record in records] == ["recovered"]
            truncated.add(records[0].truncated)
        assert recover_run(run) == []
        assert leftovers(run) == []
    assert True in truncated
    writer.close()


def test_journal_of_a_closed_part_is_removed_without_duplicating_rows(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.save(0.0)
    _add(writer, 1)
    writer.save(1.0)
    journal = tmp_path / "events" / schema.JOURNAL
    content = journal.read_bytes()
    writer.close()
    journal.write_bytes(content)  # killed between the rename and the removal
    (record,) = recover_run(tmp_path)
    assert record.outcome == "already_closed"
    assert rows(tmp_path, "events")["t_mono_ns"].to_list() == [1]


def test_recovery_does_not_touch_the_journal_of_a_living_writer(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.save(0.0)
    _add(writer, 1)
    writer.save(1.0)
    (record,) = recover_run(tmp_path)
    assert record.outcome == "in_use"
    with pytest.raises(ValueError, match="another process"):
        _writer(tmp_path)
    _add(writer, 2)
    writer.close()
    assert rows(tmp_path, "events")["t_mono_ns"].to_list() == [1, 2]


def test_journal_holds_every_row_before_the_part_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a kill while a part was written cost twice the journal's interval."""
    writer = _writer(tmp_path, part_s=2.0)
    journal = tmp_path / "events" / schema.JOURNAL
    in_journal: list[int] = []

    def write(path: Path, table: pa.Table) -> None:
        content = read_journal(journal.read_bytes())
        in_journal.extend(content.table["t_mono_ns"].to_pylist())

    monkeypatch.setattr("inpaint_bench.telemetry.storage.parts.write_part", write)
    for second in (0, 1, 2):
        _add(writer, second)
        writer.save(float(second))
    assert in_journal == [0, 1, 2]


def test_row_with_unknown_or_missing_column_is_refused(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    with pytest.raises(ValueError, match="no column knd"):
        writer.append(t_mono_ns=1, t_unix_ns=1, kind="x", knd="x")
    with pytest.raises(ValueError, match="t_unix_ns must not be null"):
        writer.append(t_mono_ns=1, kind="x")
