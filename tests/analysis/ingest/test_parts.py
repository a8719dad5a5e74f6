"""Parts, journals, manifests and datasets of another schema version or shape are left out with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import merge
from analysis.dataset import Dataset, open_dataset
from inpaint_bench.core import files, schema, seal
from inpaint_bench.core.errors import UserError
from tests.analysis.build import rewrite_json, write_run

NEWER = schema.SCHEMA_VERSION + 1


def merged(tmp_path: Path) -> Dataset:
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds")


@pytest.mark.parametrize(("version", "message"), [(NEWER, "is newer"), (schema.SCHEMA_VERSION - 1, "reads version")])
def test_run_of_another_version_is_skipped_with_all_its_parts(tmp_path: Path, version: int, message: str) -> None:
    write_run(tmp_path / "grace", "r-other", schema_version=version)
    write_run(tmp_path / "grace", "r-01")
    dataset = merged(tmp_path)
    assert dataset.runs["run_id"].to_list() == ["r-01"]
    assert dataset.skipped["code"].to_list() == ["schema_version"] * 6
    manifest = dataset.skipped.filter(pl.col("path").str.ends_with(schema.MANIFEST)).row(0, named=True)
    assert manifest["reason"].startswith(f"manifest: schema version {version}")
    assert message in manifest["reason"]


@pytest.mark.parametrize(
    ("version", "rows", "message"), [(schema.SCHEMA_VERSION, 451, "150 rows taken"), (NEWER, 301, "is newer")]
)
def test_journal_of_a_newer_version_gives_no_rows(tmp_path: Path, version: int, rows: int, message: str) -> None:
    last = write_run(tmp_path / "grace", "r-01") / "samples_fast" / "part-000002.parquet"
    table = pq.read_table(last, partitioning=None).replace_schema_metadata({"schema_version": str(version)})
    with pa.OSFile(str(last.with_name(".journal.arrows")), "wb") as raw, pa.ipc.new_stream(raw, table.schema) as stream:
        stream.write_table(table)
    last.unlink()
    dataset = merged(tmp_path)
    assert dataset.skipped["code"].to_list() == ["journal"]
    assert message in dataset.skipped["reason"][0]
    assert dataset.metadata["rows"]["samples_fast"] == rows


@pytest.mark.parametrize("version", [None, 0, -1, True, "1", 1.0])
def test_a_value_that_is_no_version_is_refused(version: Any) -> None:
    reads = f"this code reads version {schema.SCHEMA_VERSION}"
    assert schema.version_problem(version) == f"schema version {version}; {reads}"
    assert schema.version_problem(schema.SCHEMA_VERSION) is None


def test_dataset_of_another_version_is_refused_and_missing_columns_are_null(tmp_path: Path) -> None:
    write_run(tmp_path / "grace")
    merged(tmp_path)
    for name, columns in (
        (schema.RUNS, ("comparability_key", "power_semantics", "steady")),
        (schema.RUN_WINDOWS, ("flags",)),
    ):
        pl.read_parquet(tmp_path / "ds" / name).drop(columns).write_parquet(tmp_path / "ds" / name)
    rewrite_json(tmp_path / "ds", schema.DATASET, lambda metadata: seal.seal(metadata, tmp_path / "ds"))
    dataset = open_dataset(tmp_path / "ds")
    assert dataset.runs.select("comparability_key", "power_semantics", "steady").row(0) == (
        "",
        "energy_mj by nvml",
        None,
    )
    assert dataset.windows["flags"].to_list() == [None, None]
    rewrite_json(tmp_path / "ds", schema.DATASET, lambda metadata: metadata | {"schema_version": NEWER})
    with pytest.raises(UserError, match="is newer"):
        open_dataset(tmp_path / "ds")
    files.replace_bytes(tmp_path / "ds" / schema.DATASET, b"{")
    with pytest.raises(UserError, match="Dataset damaged"):
        open_dataset(tmp_path / "ds")
