"""The present code computes the figures of committed datasets again from the samples committed with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.columns import DEFINITIONS
from analysis.dataset import Dataset, open_dataset
from analysis.metrics import flags, run_row
from analysis.metrics.facts import Facts
from inpaint_bench.core import schema
from inpaint_bench.core.records import Device, Manifest, TelemetryState, Window, to_record

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIGURES = [*DEFINITIONS, "images_per_s", "joules_per_image", "step_ms_p50", "energy_ratio", "gpu_util_pct"]


def computed(dataset: Dataset, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run by its tables; of its manifest only what these figures need is known."""
    manifest = Manifest(
        schema_version=schema.SCHEMA_VERSION,
        run_id=row["run_id"],
        status=row["status"],
        started_unix_ns=round(row["started"].timestamp() * 1e9) - 1000,
        batch=row["batch"],
        gpus=row["gpus"],
        devices=[Device(uuid=row["gpu_uuid"], name=row["gpu_name"])],
        telemetry=TelemetryState(source=row["source"], hz=10.0),
    )
    own = dataset.windows.filter(pl.col("run_id") == row["run_id"])
    windows = [to_record(window, Window) for window in own.to_dicts()]
    tables = {name: dataset.scan(name, row["run_id"]).drop("site", "gpu", "run").collect() for name in schema.TABLES}
    facts = Facts(manifest=manifest, windows=windows, tables=tables)
    run_flags = flags.run_flags(facts, flags.window_flags(facts))
    return run_row.summarise(facts) | {"flags": flags.join(run_flags)}


@pytest.mark.parametrize("name", ["2026-11-21-h200-levers", "2026-11-21-h200-batches"])
def test_figures_of_a_committed_dataset_follow_from_its_samples(name: str) -> None:
    dataset = open_dataset(RESULTS / name)
    completed = dataset.runs.filter(pl.col("status") == "completed", pl.col("valid"))
    assert completed.height > 3
    for row in completed.iter_rows(named=True):
        new = computed(dataset, row)
        assert {name: new[name] for name in FIGURES} == {name: row[name] for name in FIGURES}, row["run_id"]
