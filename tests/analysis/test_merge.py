"""Merging: nothing is skipped silently, no partial dataset is left, inputs are unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from analysis import merge
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import run_dir
from analysis.stats.cells import build_cells
from inpaint_bench.core import schema
from inpaint_bench.core.errors import UserError

from .build import write_run


def merged(tmp_path: Path, *roots: Path) -> Dataset:
    merge.merge(list(roots) or [tmp_path / "grace"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_two_sites_are_merged_with_keys_in_folders_and_files(tmp_path: Path) -> None:
    write_run(tmp_path / "grace" / "deep" / "er", "r-01")
    write_run(tmp_path / "delta", "r-02", gpu="h200", site="delta")
    before = snapshot(tmp_path)
    dataset = merged(tmp_path, tmp_path / "grace", tmp_path / "delta")
    assert dataset.runs.sort("run_id")["site"].to_list() == ["grace", "delta"]
    path = tmp_path / "ds/samples_fast/site=delta/gpu=h200/run=r-02/part-000000.parquet"
    rows_in_file = pq.read_table(path, partitioning=None)
    assert {"site", "gpu", "run_id"} <= set(rows_in_file.column_names)
    rows = dataset.scan("samples_fast").collect()
    assert rows.group_by("run_id").len().height == 2
    assert {k: v for k, v in snapshot(tmp_path).items() if not k.startswith("ds/")} == before


def test_run_id_of_digits_stays_text(tmp_path: Path) -> None:
    """Regression known from polars: hive values that look like numbers become integers."""
    write_run(tmp_path / "grace", "0042")
    dataset = merged(tmp_path)
    assert (tmp_path / "ds/steps/site=grace/gpu=a40/run=r-0042").is_dir()
    assert dataset.scan("steps", "0042").collect().height == 60
    assert len(list((tmp_path / "ds").glob("*/site=*/gpu=*/run=r-0042"))) == 3


def test_every_kind_of_unusable_file_is_listed_with_its_reason(tmp_path: Path) -> None:
    good = write_run(tmp_path / "grace", "r-01")
    table = pq.read_table(good / "steps/part-000000.parquet")
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), good / "steps/part-000001.parquet")
    without_images = table.drop_columns(["images"])
    pq.write_table(without_images, good / "steps/part-000002.parquet")
    (good / "steps" / ".part-000003.parquet.tmp").write_bytes(b"PAR1")
    (good / "steps" / "notes.txt").write_text("hello")
    (write_run(tmp_path / "grace", "r-02") / schema.MANIFEST).unlink()
    (write_run(tmp_path / "grace", "r-03") / schema.MANIFEST).write_text('{"run_id": "r-0')
    (write_run(tmp_path / "grace", "r-04") / schema.WINDOWS).write_text("[[]]")
    write_run(tmp_path / "grace", "r-05", schema_version=0)
    dataset = merged(tmp_path)
    codes = dict(dataset.skipped.group_by("code").len().iter_rows())
    assert codes == {
        "schema_version": 1 + 6,
        "schema": 1,
        "temporary": 1,
        "unexpected": 1,
        "no_manifest": 6,
        "manifest_damaged": 6,
        "damaged": 1,
    }
    assert dataset.skipped["reason"].str.len_chars().min() > 10
    assert sorted(dataset.runs["run_id"]) == ["r-01", "r-04"]


def test_hidden_folders_with_runs_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01")
    write_run(tmp_path / "grace" / ".old" / "0", "r-02")
    skip = merged(tmp_path).skipped.row(0, named=True)
    assert (skip["code"], skip["path"]) == ("hidden", str(tmp_path / "grace" / ".old"))
    assert "hidden folder with runs, which is not searched" in skip["reason"]


def test_duplicate_run_is_merged_once_and_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "grace", "r-01")
    shutil.copytree(folder, tmp_path / "copy" / "run")
    dataset = merged(tmp_path, tmp_path / "grace", tmp_path / "copy", tmp_path / "grace")
    assert dataset.runs.height == 1
    assert dataset.skipped["code"].to_list() == ["duplicate"]


def test_one_run_id_with_two_contents_is_a_conflict(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01")
    write_run(tmp_path / "other", "r-01", power_w=210.0)
    dataset = merged(tmp_path, tmp_path / "grace", tmp_path / "other")
    assert dataset.metadata["conflicts"] == 1
    assert dataset.skipped["code"].to_list() == ["conflict"]
    assert "neither counts" in dataset.skipped["reason"][0]
    assert not dataset.runs["valid"].any()
    assert f"other content under this run id in {tmp_path / 'other' / 'run-r-01'}" in dataset.runs["invalid_reason"][0]
    shutil.rmtree(tmp_path / "other" / "run-r-01")
    dataset = merged(tmp_path, tmp_path / "grace", tmp_path / "other")
    assert dataset.runs["valid"].all()
    assert dataset.runs["power_w"][0] == pytest.approx(200)


def test_journal_is_read_in_place_without_repeating_rows_of_parts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "grace", "r-01")
    last = folder / "samples_fast" / "part-000002.parquet"
    rows = pq.read_table(last)
    overlap = pq.read_table(folder / "samples_fast" / "part-000001.parquet").slice(100)
    last.unlink()
    journal = folder / "samples_fast" / ".journal.arrows"
    with pa.OSFile(str(journal), "wb") as raw, pa.ipc.new_stream(raw, rows.schema) as stream:
        stream.write_table(overlap.cast(rows.schema))
        stream.write_table(rows.slice(0, 100))
        stream.write_table(rows.slice(100))
    complete = journal.read_bytes()
    dataset = merged(tmp_path)
    assert dataset.runs["valid"][0], dataset.runs["invalid_reason"][0]
    assert dataset.metadata["rows"]["samples_fast"] == 451
    assert dataset.skipped["code"].to_list() == ["journal"]
    journal.write_bytes(complete[:-300])
    dataset = merged(tmp_path)
    assert "tail is lost" in dataset.skipped["reason"][0]
    assert journal.exists()
    assert dataset.metadata["rows"]["samples_fast"] < 451


def test_journal_of_a_second_start_counts_from_0_and_is_kept(tmp_path: Path) -> None:
    """Regression: its rows were taken for those of the first start's parts, which have the same ticks."""
    folder = write_run(tmp_path / "grace", "r-01")
    rows = pq.read_table(folder / "samples_fast" / "part-000000.parquet")
    before = merged(tmp_path).metadata["rows"]["samples_fast"]
    index = rows.schema.get_field_index("t_mono_ns")
    later = rows.set_column(index, rows.schema.field(index), pc.add(rows["t_mono_ns"], 10**12))
    journal = folder / "samples_fast" / schema.JOURNAL
    with pa.OSFile(str(journal), "wb") as raw, pa.ipc.new_stream(raw, rows.schema) as stream:
        stream.write_table(later.cast(rows.schema))
    assert merged(tmp_path).metadata["rows"]["samples_fast"] == before + rows.num_rows


def test_invalid_and_failed_runs_are_rows_but_in_no_mean(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01", steps_per_s=2.0)
    write_run(tmp_path / "grace", "r-02", steps_per_s=4.0, gap=(5.0, 7.0))
    write_run(tmp_path / "grace", "r-03", status="failed", reason="oom_gpu", message="CUDA out of memory")
    dataset = merged(tmp_path)
    assert dataset.runs.height == 3
    cells = build_cells(dataset.runs)
    assert cells.select("n", "images_per_s").rows() == [(1, pytest.approx(16))]


def test_interrupted_merge_leaves_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "grace", "r-01")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merge.run_row, "summarise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        merge.merge([tmp_path / "grace"], tmp_path / "ds")
    assert [p.name for p in tmp_path.iterdir()] == ["grace"]


def test_interrupted_merge_leaves_the_older_dataset_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "grace", "r-01")
    merged(tmp_path)
    before = snapshot(tmp_path)
    monkeypatch.setattr(merge.files, "replace_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        merge.merge([tmp_path / "grace"], tmp_path / "ds")
    assert snapshot(tmp_path) == before


def test_older_dataset_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01")
    merged(tmp_path)
    write_run(tmp_path / "grace", "r-02")
    assert merged(tmp_path).runs.height == 2
    (tmp_path / "ds" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        merged(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "photo.jpg").write_text("x")
    with pytest.raises(UserError, match=r"holds no dataset\.json"):
        merge.merge([tmp_path / "grace"], tmp_path / "photos")
    with pytest.raises(UserError, match="holds root"):
        merge.merge([tmp_path / "grace"], tmp_path)


def test_dataset_of_other_runs_is_not_replaced_and_a_run_that_is_dropped_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for site, run_id in (("grace", "r-01"), ("delta", "r-02")):
        write_run(tmp_path / site, run_id)
    merged(tmp_path, tmp_path / "grace", tmp_path / "delta")
    merged(tmp_path)
    assert "ds: 1 of 2 earlier runs is not merged now" in capsys.readouterr().err
    with pytest.raises(UserError, match="ds is a dataset of 1 other run; name another folder"):
        merged(tmp_path, tmp_path / "delta")
    assert open_dataset(tmp_path / "ds").runs["run_id"].to_list() == ["r-01"]


def test_root_without_a_run_beside_others_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "grace", "r-01")
    merged(tmp_path)
    (tmp_path / "empty").mkdir()
    assert merged(tmp_path, tmp_path / "grace", tmp_path / "empty").runs.height == 1
    assert capsys.readouterr().err.startswith(f"WARNING: No run directory below {tmp_path}/empty: none holds")
    with pytest.raises(UserError, match=r"ds is merged already: `report` shows it"):
        merge.merge([tmp_path / "ds"], tmp_path / "other")


def test_dataset_below_a_root_is_not_searched_for_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01")
    merge.merge([tmp_path / "grace"], tmp_path / "grace" / "ds")
    assert [p.name for p in run_dir.find_run_dirs([tmp_path / "grace"])[0]] == ["run-r-01"]


REWRITTEN = {schema.DATASET}  # when it was merged


def content(dataset: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(dataset).items() if name not in REWRITTEN}


def equals_fresh_merge(tmp_path: Path, *roots: Path) -> bool:
    """Return whether the dataset equals, byte for byte, a merge without an older dataset."""
    shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
    merge.merge(list(roots) or [tmp_path / "grace"], tmp_path / "fresh")
    return content(tmp_path / "ds") == content(tmp_path / "fresh")


def test_merging_again_equals_a_merge_of_what_is_there_now(tmp_path: Path) -> None:
    for name in ("r-01", "r-02", "r-03"):
        write_run(tmp_path / "grace", name)
    merged(tmp_path)
    shutil.rmtree(tmp_path / "grace" / "run-r-01")
    write_run(tmp_path / "grace", "r-02", steps_per_s=3.0)
    write_run(tmp_path / "grace", "r-04")
    assert merged(tmp_path).runs["run_id"].to_list() == ["r-02", "r-03", "r-04"]
    assert equals_fresh_merge(tmp_path)


def test_several_threads_give_the_same_dataset(tmp_path: Path) -> None:
    for index in range(4):
        write_run(tmp_path / "grace", f"r-{index}", noise=0.01, steps_per_s=1.0 + index)
    shutil.copytree(tmp_path / "grace" / "run-r-1", tmp_path / "grace" / "z")
    merge.merge([tmp_path / "grace"], tmp_path / "ds", threads=2)
    assert equals_fresh_merge(tmp_path)


def test_run_ids_with_the_same_folder_name_are_a_conflict(tmp_path: Path) -> None:
    """Regression: the second of `0042` and `r-0042` ended the merge with a traceback."""
    write_run(tmp_path / "grace", "0042")
    write_run(tmp_path / "grace", "r-0042")
    dataset = merged(tmp_path)
    assert dataset.runs.height == 1
    assert dataset.skipped["code"].to_list() == ["conflict"]


def test_parts_with_other_types_and_column_order_are_read_alike(tmp_path: Path) -> None:
    """Plain and large strings, wider integers and another order of columns are the same rows."""
    folder = write_run(tmp_path / "grace", "r-01")
    expected = merged(tmp_path).scan("samples_fast").collect()
    for part in sorted((folder / "samples_fast").iterdir())[:2]:
        rows = pq.read_table(part)
        kinds = {pa.dictionary(pa.int32(), pa.string()): pa.large_string(), pa.uint32(): pa.int64()}
        wide = [pa.field(f.name, kinds.get(f.type, f.type)) for f in reversed(rows.schema)]
        rows = rows.select([f.name for f in wide]).cast(pa.schema(wide, metadata=rows.schema.metadata))
        pq.write_table(rows, part)
    assert merged(tmp_path).scan("samples_fast").collect().equals(expected)


def test_run_that_starts_during_the_merge_is_listed_and_read_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest is read once, before any run: its directory has no place in the dataset without one."""
    write_run(tmp_path / "grace", "r-01")
    manifest = write_run(tmp_path / "grace", "r-02") / schema.MANIFEST
    written = manifest.read_bytes()
    manifest.unlink()
    read_run = run_dir.read_run

    def start_another(found: Any) -> Any:
        manifest.write_bytes(written)
        return read_run(found)

    with monkeypatch.context() as early:
        early.setattr(run_dir, "read_run", start_another)
        dataset = merged(tmp_path)
    assert dataset.runs["run_id"].to_list() == ["r-01"]
    assert set(dataset.skipped["code"]) == {"no_manifest"}
    assert merged(tmp_path).runs["run_id"].to_list() == ["r-01", "r-02"]
