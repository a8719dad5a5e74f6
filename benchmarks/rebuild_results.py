"""Compute the columns of merged datasets anew whose definition changed, from the samples in the dataset itself.

    python -m benchmarks.rebuild_results benchmarks/results/2026-11-21-h200-*

For datasets whose run directories are gone. The columns in `analysis.columns.DEFINITIONS` are replaced, and those that
the older merge did not know are filled; of all other figures that follow from samples, steps and windows it prints
which would differ, and by how much at most. The datasets are sealed anew.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl

from analysis import across_runs, seal
from analysis.columns import DEFINITIONS, FLOAT, SCHEMA, WINDOW_SCHEMA, WINDOWS
from analysis.dataset import Dataset, open_dataset
from analysis.ingest.incremental import DIRECTORIES, DirectoryRecord, WrittenFile
from analysis.metrics import flags, run_row
from analysis.metrics.manifest_facts import manifest_columns
from inpaint_bench.core import files, records, schema
from inpaint_bench.core.records import Device, Manifest, TelemetryState, Window, to_record

Row = dict[str, Any]


def main() -> None:
    """Rebuild the datasets named on the command line."""
    for folder in map(Path, sys.argv[1:]):
        if (folder / schema.DATASET).is_file():
            rebuild(open_dataset(folder))


def rebuild(dataset: Dataset) -> None:
    """Replace the columns, and print by how much they and others differ."""
    rows, windows, directories = [], [], []
    changes: dict[str, list[float]] = defaultdict(list)
    filled: set[str] = set()
    for row in dataset.runs.select(*SCHEMA).iter_rows(named=True):
        own = dataset.windows.filter(pl.col("run_id") == row["run_id"]).to_dicts()
        tables = {
            name: dataset.scan(name, row["run_id"]).drop("site", "gpu", "run").collect() for name in schema.TABLES
        }
        new, window_flags = _compute(row, own, tables)
        new["inactive_levers"] = (
            ", ".join(lever["name"] for lever in json.loads(row["levers"] or "[]") if lever["active"] is False) or None
        )
        for name in SCHEMA.keys() - _from_manifest():
            if row[name] is None and new[name] is not None:
                filled.add(name)
            elif row[name] != new[name] and name in FLOAT:
                changes[name].append(math.inf if new[name] is None else abs(new[name] - row[name]))
        rows.append(row | {name: new[name] for name in {*DEFINITIONS, *filled} if new[name] is not None})
        rows[-1]["null_reasons"] = _still_null(rows[-1])
        windows += [window | {"flags": codes} for window, codes in zip(own, window_flags, strict=True)]
        directories.append(_record(row, tables, dataset))
    pl.DataFrame(rows, schema=SCHEMA).write_parquet(dataset.folder / schema.RUNS)
    pl.DataFrame(windows, schema=WINDOW_SCHEMA).write_parquet(dataset.folder / WINDOWS)
    records.write_record(dataset.folder / DIRECTORIES, directories)
    metadata = {name: value for name, value in dataset.metadata.items() if name != "analysis"}
    files.replace_json(dataset.folder / schema.DATASET, seal.seal(metadata, dataset.folder))
    print(dataset.folder.name)
    print(f"  filled: {', '.join(sorted(filled)) or 'none'}")
    for name, differences in sorted(changes.items()):
        verb = "replaced" if name in DEFINITIONS else "kept, although other"
        print(f"  {name}: {verb} in {len(differences)} runs, by up to {max(differences):.3g}")


def _still_null(row: Row) -> str | None:
    reasons = [entry for entry in (row["null_reasons"] or "").split("; ") if row.get(entry.partition("=")[0]) is None]
    return "; ".join(filter(None, reasons)) or None


def _compute(row: Row, windows: list[Row], tables: dict[str, pl.DataFrame]) -> tuple[Row, list[str | None]]:
    """Return the row as the present code computes it, and the flags of its windows."""
    uuids = (row["gpu_uuid"] or "").split(", ") if row["gpu_uuid"] else []
    started_ns = None if row["started"] is None else round(row["started"].timestamp() * 1e9) - 1000
    manifest = Manifest(
        schema_version=schema.SCHEMA_VERSION,
        run_id=row["run_id"],
        status=row["status"],
        reason=row["reason"],
        started_unix_ns=started_ns,
        batch=row["batch"],
        gpus=row["gpus"],
        devices=[Device(uuid=uuid, name=row["gpu_name"]) for uuid in uuids],
        telemetry=TelemetryState(source=row["source"], hz=10.0),
    )
    typed = [to_record(window, Window) for window in windows]
    new = run_row.summarise(manifest, typed, tables)
    codes = flags.window_flags(manifest, typed, tables)
    new["flags"] = flags.join(flags.run_flags(manifest, typed, codes, tables["events"]))
    return new, [flags.join(own) for own in codes]


def _from_manifest() -> set[str]:
    bare = Manifest(schema_version=schema.SCHEMA_VERSION, run_id="", status=schema.Status.COMPLETED)
    verdicts = {"valid", "invalid_reason", "warnings", "null_reasons"}
    return {*manifest_columns(bare), "mfu_pct", "runtime_h", *verdicts} - {"inactive_levers"}


def _record(row: Row, tables: dict[str, pl.DataFrame], dataset: Dataset) -> DirectoryRecord:
    written = [*dataset.files(row["run_id"]), *([dataset.folder / row["sample_grid"]] if row["sample_grid"] else [])]
    digests = [across_runs.row_digests(name, rows) for name, rows in tables.items()]
    return DirectoryRecord(
        folder=row["run_dir"],
        run_id=row["run_id"],
        content_hash=row["content_hash"],
        row_counts={name: rows.height for name, rows in tables.items()},
        row_digests={name: values for digest in digests for name, values in digest.items()},
        files=[WrittenFile.read(path, dataset.folder) for path in written],
    )


if __name__ == "__main__":
    main()
