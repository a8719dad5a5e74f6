"""Merging: nothing is skipped silently, no partial dataset is left, inputs are unchanged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from analysis import merge
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import incremental, run_dir
from analysis.stats.cells import build_cells
from inpaint_bench.core import schema, seal
from inpaint_bench.core.errors import UserError

from .build import write_quality, write_run


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
    assert len(dataset.files("0042")) == 3


def test_truncated_part_is_listed_and_the_merge_continues(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "grace", "r-01")
    write_run(tmp_path / "grace", "r-02")
    part = folder / "samples_fast" / "part-000002.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    dataset = merged(tmp_path)
    skip = dataset.skipped.row(0, named=True)
    assert (skip["code"], skip["path"], skip["run_id"]) == ("truncated", str(part), "r-01")
    assert "truncated" in skip["reason"]
    assert dict(dataset.runs.select("run_id", "valid").iter_rows()) == {"r-01": False, "r-02": True}


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


def test_run_with_a_manifest_of_wrong_types_is_left_out_and_the_others_are_merged(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01", batch=8)
    bad = write_run(tmp_path / "grace", "r-02")
    facts = json.loads((bad / schema.MANIFEST).read_text())
    for field, value in (("devices", 5), ("started_unix_ns", "yesterday"), ("slurm", "4711")):
        (bad / schema.MANIFEST).write_text(json.dumps({**facts, field: value}))
        dataset = merged(tmp_path)
        assert dataset.runs.select("run_id", "valid").rows() == [("r-01", True)]
        assert set(dataset.skipped["code"]) == {"manifest_damaged"}
        manifest = dataset.skipped.filter(path=str(bad / schema.MANIFEST)).row(0, named=True)
        assert f"$.{field}" in manifest["reason"]


def test_dataset_below_a_root_is_not_searched_for_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01")
    merge.merge([tmp_path / "grace"], tmp_path / "grace" / "ds")
    assert [p.name for p in run_dir.find_run_dirs([tmp_path / "grace"])[0]] == ["run-r-01"]


REWRITTEN = {schema.DATASET, incremental.DIRECTORIES}  # when it was merged, and when each file was written


@pytest.fixture
def read_dirs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of the run directories that are read; young files count as settled."""
    names: list[str] = []
    read_run = run_dir.read_run

    def record_and_read(folder: Path) -> Any:
        names.append(folder.name)
        return read_run(folder)

    monkeypatch.setattr(run_dir, "read_run", record_and_read)
    monkeypatch.setattr(run_dir, "SETTLED_S", 0)
    return names


def content(dataset: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(dataset).items() if name not in REWRITTEN}


def equals_fresh_merge(tmp_path: Path, *roots: Path) -> bool:
    """Return whether the dataset equals, byte for byte, a merge without an older dataset."""
    shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
    merge.merge(list(roots) or [tmp_path / "grace"], tmp_path / "fresh")
    return content(tmp_path / "ds") == content(tmp_path / "fresh")


def write_run_with_journal(root: Path, run_id: str) -> Path:
    folder = write_run(root, run_id)
    last = folder / "samples_fast" / "part-000002.parquet"
    rows = pq.read_table(last)
    with pa.OSFile(str(last.with_name(".journal.arrows")), "wb") as raw, pa.ipc.new_stream(raw, rows.schema) as stream:
        stream.write_table(rows)
    return folder


def test_merging_again_reads_only_what_is_new_or_changed(tmp_path: Path, read_dirs: list[str]) -> None:
    roots = tmp_path / "grace", tmp_path / "more"
    write_run_with_journal(roots[0], "r-01")
    changed = write_run(roots[0], "r-02")
    deleted = write_run(roots[0], "r-03")
    (write_run(roots[0], "r-04") / schema.MANIFEST).write_text("{")
    shown = write_run(roots[0], "r-05", noise=0.02, window_s=33.3, quality=write_quality(roots[0] / "run-r-05", 1, 1))
    (shown / "steps" / "part-000000.parquet").write_bytes(b"PAR1")
    shutil.copytree(roots[0] / "run-r-01", roots[1] / "copy")
    write_run(roots[1], "r-02", power_w=210.0)
    merged(tmp_path, *roots)
    assert len(read_dirs) == 7
    read_dirs.clear()
    dataset = merged(tmp_path, *roots)
    assert (read_dirs, dataset.metadata["unchanged"]) == ([], 7)
    assert equals_fresh_merge(tmp_path, *roots)

    write_run(roots[0], "r-00")
    write_run(changed.parent, "r-02", steps_per_s=3.0)
    shutil.rmtree(deleted)
    read_dirs.clear()
    dataset = merged(tmp_path, *roots)
    assert read_dirs == ["run-r-00", "run-r-02"]
    assert dataset.runs["run_id"].to_list() == ["r-00", "r-01", "r-02", "r-05"]
    assert sorted(dataset.skipped["code"]) == sorted(
        ["journal", "truncated", "conflict", "duplicate", "manifest_damaged", *["manifest_damaged"] * 5]
    )
    assert not list((tmp_path / "ds").rglob("run=r-03"))
    assert equals_fresh_merge(tmp_path, *roots)


def test_unchanged_runs_are_hard_linked(tmp_path: Path, read_dirs: list[str]) -> None:
    write_run(tmp_path / "grace", "r-01")
    before = {path: path.stat().st_ino for path in merged(tmp_path).files("r-01")}
    assert {path: path.stat().st_ino for path in merged(tmp_path).files("r-01")} == before
    assert len(before) == 3
    assert read_dirs == ["run-r-01"]


def test_unchanged_runs_are_copied_where_hard_links_fail(
    tmp_path: Path, read_dirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "grace", "r-01")
    merged(tmp_path)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("not supported")))
    merged(tmp_path)
    merged(tmp_path)
    assert read_dirs == ["run-r-01"]
    assert equals_fresh_merge(tmp_path)


def test_change_that_keeps_size_and_mtime_is_detected(tmp_path: Path, read_dirs: list[str]) -> None:
    folder = write_run(tmp_path / "grace", "r-01")
    merged(tmp_path)
    manifest = folder / schema.MANIFEST
    stat = manifest.stat()
    manifest.write_text(manifest.read_text().replace("g001", "g002"))
    os.utime(manifest, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert manifest.stat().st_size == stat.st_size
    assert merged(tmp_path).runs["run_id"].to_list() == ["r-01"]
    assert read_dirs == ["run-r-01"] * 2
    assert equals_fresh_merge(tmp_path)


def test_run_whose_files_are_seconds_old_is_read_again(
    tmp_path: Path, read_dirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the margin for file systems of whole seconds, where a second write within one shows no change."""
    monkeypatch.setattr(run_dir, "SETTLED_S", 60)
    write_run(tmp_path / "grace", "r-01")
    merged(tmp_path)
    assert merged(tmp_path).metadata["unchanged"] == 0
    assert read_dirs == ["run-r-01"] * 2


def test_run_with_a_symlinked_folder_is_always_read(tmp_path: Path, read_dirs: list[str]) -> None:
    folder = write_run(tmp_path / "grace", "r-01")
    (folder / "steps").rename(tmp_path / "elsewhere")
    (folder / "steps").symlink_to(tmp_path / "elsewhere")
    merged(tmp_path)
    assert merged(tmp_path).metadata["unchanged"] == 0
    assert read_dirs == ["run-r-01"] * 2


def test_another_version_of_the_analysis_reads_everything(
    tmp_path: Path, read_dirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "grace", "r-01")
    merged(tmp_path)
    monkeypatch.setattr(incremental, "code_version", lambda: "another")
    merged(tmp_path)
    merged(tmp_path)
    assert read_dirs == ["run-r-01"] * 2


@pytest.mark.parametrize("name", [schema.RUNS, schema.RUN_WINDOWS, seal.DIRECTORIES, schema.DATASET, "steps"])
def test_changed_older_dataset_is_not_reused(tmp_path: Path, read_dirs: list[str], name: str) -> None:
    write_run(tmp_path / "grace", "r-01")
    dataset = merged(tmp_path)
    if name == "steps":
        dataset.files("r-01")[-1].unlink()
    elif name in (schema.DATASET, incremental.DIRECTORIES):
        (tmp_path / "ds" / name).write_text('{"schema_version": 1}')
    else:
        pl.read_parquet(tmp_path / "ds" / name).clear().write_parquet(tmp_path / "ds" / name)
    merged(tmp_path)
    assert read_dirs == ["run-r-01"] * 2
    assert equals_fresh_merge(tmp_path)


def test_duplicate_is_read_once_the_first_directory_is_deleted(tmp_path: Path, read_dirs: list[str]) -> None:
    folder = write_run(tmp_path / "grace", "r-01")
    shutil.copytree(folder, tmp_path / "grace" / "z")
    merged(tmp_path)
    shutil.rmtree(folder)
    assert merged(tmp_path).runs["run_dir"].to_list() == [str(tmp_path / "grace" / "z")]
    assert read_dirs == ["run-r-01", "z", "z"]
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
    tmp_path: Path, read_dirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skip it, because the plan did not reserve its folder in the dataset: another directory may have used it."""
    write_run(tmp_path / "grace", "r-01")
    write_run(tmp_path / "grace", "r-02")
    read_run_id = run_dir.read_run_id
    with monkeypatch.context() as early:
        early.setattr(run_dir, "read_run_id", lambda folder: None if folder.name == "run-r-02" else read_run_id(folder))
        dataset = merged(tmp_path)
    assert dataset.runs["run_id"].to_list() == ["r-01"]
    assert dataset.skipped["code"].to_list() == ["changing"]
    assert merged(tmp_path).runs["run_id"].to_list() == ["r-01", "r-02"]
    assert read_dirs == ["run-r-01", "run-r-02", "run-r-02"]
