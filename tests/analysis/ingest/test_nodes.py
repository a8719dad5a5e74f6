"""A run on two nodes: the second one's telemetry has a folder, a boot and a monotonic clock of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import merge
from analysis.dataset import Dataset, open_dataset
from inpaint_bench.core import schema
from tests.analysis import real_run

RUN_ID = "r-20261121T092412-nodes"
SECOND, SECOND_BOOT = "GPU-00000000-0000-0000-0000-000000000002", "b1ed1c9c-97d1-4bff-9a0e-8d7c7d1a9b6e"
MORE_W = 0.25  # so that the samples of the cards are not equal
AHEAD_NS = 123_456_789 * 10**6
FACTS = {"local_rank": 0, "pid": 4711, "device": "cuda", "steps": 60, "data_wait_s": 0.0}


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_run(sweep: Path) -> Path:
    """Write a run of two GPUs on two nodes, whose power differs by little."""
    folder = real_run.write_run(sweep / "0" / "attempt-1", RUN_ID)
    report = json.loads((folder / schema.TELEMETRY).read_text())
    first = report["devices"][0]["uuid"]
    for table in schema.NODE_TABLES:
        columns = real_run.columns_of(table, RUN_ID, 0)
        columns["t_mono_ns"] = [time_ns + AHEAD_NS for time_ns in columns["t_mono_ns"]]
        if table == "samples_fast":
            for name in ("power_instant_w", "power_avg1s_w"):
                columns[name] = [power_w + MORE_W for power_w in columns[name]]
        if "gpu_uuid" in columns:
            columns["gpu_uuid"] = [SECOND] * len(columns["gpu_uuid"])
        part = folder / "node-1" / table / schema.PART_PATTERN.format(0)
        real_run.write_table(part, table, columns, RUN_ID)
        report["tables"][table]["parts"] = 1
    report["devices"][0]["uuid"] = SECOND
    report |= {name: report[name] + AHEAD_NS for name in ("started_mono_ns", "ended_mono_ns")}
    (folder / "node-1" / schema.TELEMETRY).write_text(json.dumps(report | {"host": "gpue02", "boot_id": SECOND_BOOT}))
    manifest = json.loads((folder / schema.MANIFEST).read_text())
    ranks = [{"rank": 0, "node": "gpue01", "gpu_uuid": first}, {"rank": 1, "node": "gpue02", "gpu_uuid": SECOND}]
    change(
        folder / schema.MANIFEST,
        batch=16,
        gpus=2,
        nodes=2,
        ranks=[FACTS | manifest["memory"] | rank for rank in ranks],
        devices=[*manifest["devices"], manifest["devices"][0] | {"uuid": SECOND}],
        overrides=["gpu=h200", "batch=16", "gpus=1", "nodes=2", "recipe=baseline", "site=delta", "seed=0"],
        workload_facts=manifest["workload_facts"] | {"batch_requested": 16},
    )
    return folder


def merged(tmp_path: Path) -> Dataset:
    merge.merge([tmp_path / "sweep"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds")


def test_energy_is_that_of_the_gpus_of_all_nodes(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep")
    real_run.write_run(tmp_path / "sweep" / "1" / "attempt-1", "r-one", index=1)
    dataset = merged(tmp_path)
    two, one = (dataset.runs.row(by_predicate=pl.col("run_id") == name, named=True) for name in (RUN_ID, "r-one"))
    assert two["valid"], two["invalid_reason"]
    assert (two["gpus"], two["nodes"], one["nodes"]) == (2, 2, 1)
    assert two["energy_j"] == pytest.approx(2 * one["energy_j"], rel=1e-3)
    assert two["cpu_energy_j"] == pytest.approx(2 * 500 * two["window_s"], rel=1e-3)
    assert two["joules_per_image"] * two["images_per_s_per_w"] == pytest.approx(1)
    assert dataset.scan("samples_fast", RUN_ID).select("gpu_uuid").unique().collect().height == 2
    assert dataset.skipped.is_empty()


def test_rows_whose_clock_cannot_be_placed_are_not_taken(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep")
    (folder / "node-1" / schema.TELEMETRY).unlink()
    dataset = merged(tmp_path)
    assert f"no samples of {SECOND}" in dataset.runs["invalid_reason"][0]
    assert dataset.skipped["code"].to_list() == ["no_clock"]


def test_lost_rows_of_the_second_node_make_the_run_invalid(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep")
    report = json.loads((folder / "node-1" / schema.TELEMETRY).read_text())
    report["tables"]["samples_slow"]["rows"] += 1
    change(folder / "node-1" / schema.TELEMETRY, tables=report["tables"])
    reason = merged(tmp_path).runs["invalid_reason"][0]
    assert "node-1: samples_slow holds 59 rows, and the sidecar wrote 60" in reason


def test_second_node_of_another_name_contradicts_the_ranks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep")
    change(folder / "node-1" / schema.TELEMETRY, host="gpue03")
    reason = merged(tmp_path).runs["invalid_reason"][0]
    assert "node-1: telemetry.json has host gpue03, the manifest gpue02" in reason


def test_folder_of_a_node_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep")
    (folder / "node-1").rename(tmp_path / "elsewhere")
    (folder / "node-1").symlink_to(tmp_path / "elsewhere")
    assert f"no samples of {SECOND}" in merged(tmp_path).runs["invalid_reason"][0]
