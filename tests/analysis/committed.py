"""Rows of committed datasets, computed again by the present code from the samples committed with them.

The run directories are gone: of a manifest only what the row holds is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from analysis.columns import COLUMNS, PARITY
from analysis.dataset import Dataset
from analysis.metrics import flags, run_row
from analysis.metrics.facts import Facts
from inpaint_bench.core import records, schema
from inpaint_bench.core.records import Device, LeverReport, Manifest, TelemetryState, Window, to_record

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DATASETS = sorted(path.parent.name for path in RESULTS.glob("*/dataset.json"))
# Workloads whose steps differ in their work.
DIFFERENT_STEPS = ("command", "denoise_patch", "denoise_shape", "fid_clip")


def computed(dataset: Dataset, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a completed run by its tables."""
    tables = {name: dataset.scan(name, row["run_id"]).drop("site", "gpu").collect() for name in schema.TABLES}
    own = dataset.windows.filter(pl.col("run_id") == row["run_id"])
    windows = [to_record(window, Window) for window in own.to_dicts()]
    facts = Facts(manifest=_manifest(row, tables), windows=windows, tables=tables)
    summary = run_row.summarise(facts)
    return summary | {"flags": flags.join(flags.run_flags(facts, flags.window_flags(facts), summary["steady"]))}


def contradictions(dataset: Dataset, row: dict[str, Any]) -> list[str]:
    """Return the sentences that make a run invalid."""
    return [text for text in (computed(dataset, row)["invalid_reason"] or "").split("; ") if text]


def _manifest(row: dict[str, Any], tables: dict[str, pl.DataFrame]) -> Manifest:
    memory = tables["samples_slow"].select(pl.col("gpu_uuid").cast(pl.String), "vram_total_mib").unique()
    totals = dict(memory.iter_rows())
    uuids = row["gpu_uuid"].split(", ")
    limit_w = row["power_limit_w"] and row["power_limit_w"] / len(uuids)
    board = {"name": row["gpu_name"], "power_limit_w": limit_w, "max_sm_clock_mhz": row["sm_clock_mhz_limit"]}
    devices = [Device(uuid=uuid, memory_mib=totals.get(uuid), **board) for uuid in uuids]
    facts = {
        column.name: row[column.name]
        for column in COLUMNS
        if column.fact == f"workload_facts.{column.name}" and row[column.name] is not None and column.name != "cache"
    }
    uniform = row["workload"] not in DIFFERENT_STEPS
    levers = to_record(json.loads(row["levers"] or "[]"), list[LeverReport])
    weights = [{"weights_precision": lever.requested} for lever in levers if lever.field == "weights"]
    parity = {name.removeprefix("parity_"): row[name] for name in PARITY}
    same = (
        "run_id",
        "status",
        "workload",
        "recipe",
        "model",
        "site",
        "gpu",
        "gpus",
        "nodes",
        "batch",
        "seed",
        "boot_id",
    )
    return Manifest(
        **{name: row[name] for name in same},
        schema_version=schema.SCHEMA_VERSION,
        started_unix_ns=round(row["started"].timestamp() * 1e9) - 1000,
        ended_unix_ns=round(row["ended"].timestamp() * 1e9) + 1000,
        devices=devices,
        workload_facts=facts | {"uniform_steps": uniform} | (weights[0] if weights else {}),
        levers=levers,
        parity=records.Parity(far=row["parity_exceeded"], **parity),
        quality=records.Quality(validation=json.loads(row["validation"] or "[]")),
        memory=records.MemoryPeaks(
            allocated_peak_mib=row["torch_allocated_peak_mib"], reserved_peak_mib=row["torch_reserved_peak_mib"]
        ),
        profile=to_record(json.loads(row["profile"]), records.ProfileFacts) if row["profile"] else None,
        # Of a command the rate of the samples is not known.
        telemetry=TelemetryState(source=row["source"], hz=10.0 if row["workload"] != schema.COMMAND else None),
    )
