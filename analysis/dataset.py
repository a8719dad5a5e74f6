"""A merged dataset, opened for reading. Long tables are scanned lazily: a report reads few of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from inpaint_bench.core import files, schema
from inpaint_bench.core.errors import UserError

from . import comparability, recipe_labels
from .columns import HIVE_KEYS, SCHEMA, WINDOW_SCHEMA, WINDOWS, hive_value
from .ingest import parts


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The tables of a dataset folder."""

    folder: Path
    metadata: dict[str, Any]  # dataset.json
    runs: pl.DataFrame
    windows: pl.DataFrame
    skipped: pl.DataFrame

    def scan(self, table: str, run_id: str | None = None) -> pl.LazyFrame:
        """Scan the rows of a long table, of one run or of all."""
        run = "*" if run_id is None else hive_value(run_id)
        paths = sorted((self.folder / table).glob(f"site=*/gpu=*/run={run}/part-*.parquet"))
        if not paths:
            return parts.empty_frame(table).lazy().with_columns(pl.lit(None, pl.String).alias(key) for key in HIVE_KEYS)
        rows = pl.scan_parquet(paths, hive_partitioning=True, hive_schema=dict.fromkeys(HIVE_KEYS, pl.String()))
        return rows if run_id is None else rows.filter(pl.col("run_id") == run_id)

    def files(self, run_id: str) -> list[Path]:
        """Return the files of one run in the long tables."""
        return sorted(self.folder.glob(f"*/site=*/gpu=*/run={hive_value(run_id)}/part-*.parquet"))


def open_dataset(folder: Path) -> Dataset:
    """Open a dataset. Raise UserError where the folder is missing, not a dataset, or of another schema version."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; merge run directories into it first (`inpaint-bench merge`).")
    try:
        metadata = files.read_json(folder / schema.DATASET)
    except ValueError as error:
        raise UserError(f"Dataset damaged: {error}. Merge again.") from None
    if not isinstance(metadata, dict):
        raise UserError(f"{folder} is not a merged dataset (no {schema.DATASET}); use `inpaint-bench merge`.")
    if problem := parts.version_problem(metadata.get("schema_version")):
        raise UserError(f"{folder}: {problem}. Merge again.")
    try:
        runs = _with_all_columns(pl.read_parquet(folder / schema.RUNS), SCHEMA)
        return Dataset(
            folder=folder,
            metadata=metadata,
            runs=recipe_labels.add_short_names(comparability.add_comparability_key(runs)),
            windows=_with_all_columns(pl.read_parquet(folder / WINDOWS), WINDOW_SCHEMA),
            skipped=pl.read_parquet(folder / schema.SKIPPED),
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{folder} is not a complete dataset ({error}). Merge again.") from None


def _with_all_columns(frame: pl.DataFrame, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Add the columns that an older merge did not write, as null."""
    return frame.with_columns(pl.lit(None, kind).alias(name) for name, kind in columns.items() if name not in frame)
