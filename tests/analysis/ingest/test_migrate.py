"""Older schema versions are read, newer ones refused: a merge of what earlier and later code left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import merge
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import migrate
from inpaint_bench.core import files, schema
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import ROOT
from tests.analysis.build import manifest, rewrite_json, write_run

SINCE = ("gpu_facts", "study", "levers", "parity", "quality", "resumed")  # of manifests, after the first version


def of_version(
    folder: Path, version: int, *, without: tuple[str, ...] = (), renamed: dict[str, str] | None = None
) -> None:
    """Make a run directory look as if that version had written it: its parts, journals left out, and its manifest."""
    for part in folder.glob("*/part-*.parquet"):
        rows = pq.read_table(part, partitioning=None)
        rows = rows.drop_columns([name for name in without if name in rows.column_names])
        rows = rows.rename_columns([(renamed or {}).get(name, name) for name in rows.column_names])
        pq.write_table(rows.replace_schema_metadata({"schema_version": str(version)}), part)
    old = version < schema.SCHEMA_VERSION
    drop = SINCE if old else ()
    rewrite_json(
        folder,
        schema.MANIFEST,
        lambda m: {name: value for name, value in m.items() if name not in drop} | {"schema_version": version},
    )


def merged(tmp_path: Path) -> Dataset:
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds")


def test_a_run_of_the_first_version_counts_beside_one_of_today(tmp_path: Path) -> None:
    of_version(write_run(tmp_path / "grace", "r-old"), 1)
    write_run(tmp_path / "grace", "r-new")
    dataset = merged(tmp_path)
    assert dataset.skipped.height == 0
    assert dataset.runs["valid"].to_list() == [True, True]
    old, new = (dataset.runs.filter(run_id=name).row(0, named=True) for name in ("r-old", "r-new"))
    assert old["joules_per_image"] == new["joules_per_image"] == pytest.approx(12.5)
    assert "tensor_active_pct=not_recorded (schema version 1)" in old["null_reasons"]
    assert "tensor_active_pct=no samples_gpm" in new["null_reasons"]


def test_a_real_recording_of_the_first_version_gives_the_figures_that_it_gave_then(tmp_path: Path) -> None:
    """An H200's samples and steps as they were recorded, before samples_gpm existed."""
    recorded = open_dataset(ROOT / "benchmarks" / "results" / "2026-11-21-h200-baseline")
    then = recorded.runs.filter("valid").sort("run_id").row(0, named=True)
    folder = tmp_path / "grace" / "old"
    for path in recorded.files(then["run_id"]):
        table = path.relative_to(recorded.folder).parts[0]
        (folder / table).mkdir(parents=True)
        rows = pq.read_table(path, partitioning=None)  # of a dataset: the same rows, without the part's metadata
        pq.write_table(rows.replace_schema_metadata({"schema_version": "1"}), folder / table / path.name)
    names = ("gpu", "batch", "site", "recipe", "model", "workload")
    card = {"uuid": then["gpu_uuid"], "name": then["gpu_name"], "power_limit_w": then["power_limit_w"]}
    facts = manifest(then["run_id"], **{name: then[name] for name in names}, schema_version=1, devices=[card])
    files.replace_json(folder / schema.MANIFEST, {k: v for k, v in facts.items() if k not in SINCE})
    windows = recorded.windows.filter(run_id=then["run_id"]).to_dicts()
    files.replace_json(folder / schema.WINDOWS, windows)
    now = merged(tmp_path).runs.row(0, named=True)
    assert now["valid"], now["invalid_reason"]
    for name in ("energy_j", "energy_ratio", "images_per_s", "gpu_util_pct", "step_ms_p50", "vram_used_mib_peak"):
        assert now[name] == pytest.approx(then[name], rel=1e-9), name
    assert 0 < now["energy_error_pct"] < 5
    assert "sm_active_pct=not_recorded" in now["null_reasons"]


def test_a_column_that_was_not_written_then_is_null_with_its_reason(tmp_path: Path) -> None:
    of_version(write_run(tmp_path / "grace", "r-old"), 1, without=("mem_clock_mhz", "throttle_power_cap_ns", "lr"))
    dataset = merged(tmp_path)
    assert dataset.skipped.height == 0
    row = dataset.runs.row(0, named=True)
    assert (row["valid"], row["throttle_power_pct"]) == (True, None)
    assert "throttle_power_pct=not_recorded" in row["null_reasons"]
    slow = dataset.scan("samples_slow").collect()
    assert slow["throttle_power_cap_ns"].null_count() == slow.height
    why = "temp_mem_c=not_supported;mem_clock_mhz=not_recorded;throttle_power_cap_ns=not_recorded"
    assert slow["nulls"].unique().to_list() == [why]


def test_a_column_that_no_row_can_do_without_is_not_made_up(tmp_path: Path) -> None:
    of_version(write_run(tmp_path / "grace", "r-old"), 1, without=("t_mono_ns",))
    dataset = merged(tmp_path)
    assert set(dataset.skipped["code"]) == {"schema"}
    assert dataset.skipped["reason"].str.contains("lacks column t_mono_ns").all()
    assert not dataset.runs["valid"][0]


def test_today_every_column_must_be_there(tmp_path: Path) -> None:
    of_version(write_run(tmp_path / "grace", "r-new"), schema.SCHEMA_VERSION, without=("temp_mem_c",))
    assert merged(tmp_path).skipped["code"].to_list() == ["schema"]


def test_what_a_version_called_otherwise_is_read_under_todays_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = migrate.Migration(
        lacks="", columns={"samples_fast": {"power_w": "power_instant_w"}}, manifest={"cluster": "site"}
    )
    monkeypatch.setitem(migrate.MIGRATIONS, 1, rename)
    folder = write_run(tmp_path / "grace", "r-old")
    of_version(folder, 1, renamed={"power_instant_w": "power_w"})
    rewrite_json(folder, schema.MANIFEST, lambda m: {**{k: v for k, v in m.items() if k != "site"}, "cluster": "old"})
    row = merged(tmp_path).runs.row(0, named=True)
    assert (row["valid"], row["site"], row["energy_integral_j"]) == (True, "old", pytest.approx(6000))


def test_a_run_from_the_future_is_listed_and_says_which_code_reads_it(tmp_path: Path) -> None:
    of_version(write_run(tmp_path / "grace", "r-far"), schema.SCHEMA_VERSION + 1)
    write_run(tmp_path / "grace", "r-new")
    dataset = merged(tmp_path)
    assert dataset.runs["run_id"].to_list() == ["r-new"]
    assert set(dataset.skipped["code"]) == {"schema_version"}
    newer = f"schema version {schema.SCHEMA_VERSION + 1} is newer than {schema.SCHEMA_VERSION}"
    assert dataset.skipped.filter(pl.col("path").str.ends_with(schema.MANIFEST))["reason"][0].startswith(
        f"manifest: {newer}"
    )


def test_a_part_from_the_future_in_a_run_of_today_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "grace", "r-new")
    part = folder / "steps" / "part-000000.parquet"
    rows = pq.read_table(part, partitioning=None).replace_schema_metadata({"schema_version": "99"})
    pq.write_table(rows, part)
    skip = merged(tmp_path).skipped.row(0, named=True)
    assert (skip["path"], skip["code"]) == (str(part), "schema_version")
    assert "schema version 99 is newer than" in skip["reason"]


@pytest.mark.parametrize(("version", "rows", "words"), [(1, 451, "rows taken from it"), (99, 301, "is newer than")])
def test_a_journal_says_its_version_too(tmp_path: Path, version: int, rows: int, words: str) -> None:
    folder = write_run(tmp_path / "grace", "r-01")
    last = folder / "samples_fast" / "part-000002.parquet"
    table = pq.read_table(last, partitioning=None).drop_columns(["mem_active_pct"])
    table = table.replace_schema_metadata({"schema_version": str(version)})
    with pa.OSFile(str(last.with_name(".journal.arrows")), "wb") as raw, pa.ipc.new_stream(raw, table.schema) as stream:
        stream.write_table(table)
    last.unlink()
    dataset = merged(tmp_path)
    assert dataset.skipped["code"].to_list() == ["journal"]
    assert words in dataset.skipped["reason"][0]
    assert dataset.metadata["rows"]["samples_fast"] == rows


@pytest.mark.parametrize("version", [None, 0, -1, True, "1", 1.0])
def test_what_is_no_version_of_ours_is_refused(version: Any) -> None:
    assert f"schema version {version}; this code reads 1 to {schema.SCHEMA_VERSION}" == migrate.objection(version)


def test_every_version_since_the_first_can_be_read() -> None:
    assert sorted(migrate.MIGRATIONS) == list(range(1, schema.SCHEMA_VERSION))


def test_a_dataset_of_the_first_version_opens_and_one_from_the_future_is_a_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "grace")
    merged(tmp_path)
    account = tmp_path / "ds" / schema.DATASET
    first = files.read_json(account)
    assert isinstance(first, dict)
    older = pl.read_parquet(tmp_path / "ds" / schema.RUNS).drop(
        "comparability_key", "power_semantics", "steady", "flags"
    )
    older.write_parquet(tmp_path / "ds" / schema.RUNS)
    windows = tmp_path / "ds" / "windows.parquet"
    pl.read_parquet(windows).drop("flags").write_parquet(windows)
    files.replace_json(account, first | {"schema_version": 1})
    assert open_dataset(tmp_path / "ds").runs.select("comparability_key", "power_semantics", "steady").row(0) == (
        "",
        "energy_mj by nvml",
        None,
    )
    assert open_dataset(tmp_path / "ds").windows["flags"].to_list() == [None, None]
    files.replace_json(account, first | {"schema_version": schema.SCHEMA_VERSION + 1})
    with pytest.raises(UserError, match="is newer than"):
        open_dataset(tmp_path / "ds")
