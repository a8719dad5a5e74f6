"""A merged dataset, opened for reading. Long tables are scanned lazily: a report touches few of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from analysis.ingest.incremental import WINDOWS
from inpaint_bench.core import files
from inpaint_bench.core import schema as contract
from inpaint_bench.core.errors import UserError

from . import comparability, recipe_labels
from .columns import SCHEMA
from .ingest import migrate, parts
from .merge import KEYS, WINDOW_SCHEMA, hive_value


@dataclass(frozen=True, kw_only=True)
class Dataset:
    folder: Path
    metadata: dict[str, Any]  # dataset.json
    runs: pl.DataFrame
    windows: pl.DataFrame
    skipped: pl.DataFrame

    def scan(self, table: str, run_id: str | None = None) -> pl.LazyFrame:
        """Rows of a long table, of one run or of all."""
        one = "*" if run_id is None else hive_value(run_id)
        files_of_table = sorted((self.folder / table).glob(f"site=*/gpu=*/run={one}/part-*.parquet"))
        if not files_of_table:
            empty = pl.DataFrame(schema=parts.polars_schema(table))
            return empty.lazy().with_columns(pl.lit(None, pl.String).alias(key) for key in KEYS)
        hive = dict.fromkeys(KEYS, pl.String())
        rows = pl.scan_parquet(files_of_table, hive_partitioning=True, hive_schema=hive)
        return rows if run_id is None else rows.filter(pl.col("run_id") == run_id)

    def files(self, run_id: str) -> list[Path]:
        """The long tables' files of one run."""
        found = self.folder.glob(f"*/site=*/gpu=*/run={hive_value(run_id)}/part-*.parquet")
        return sorted(found)


def open_dataset(folder: Path) -> Dataset:
    """Raises UserError where the folder is missing, not a dataset, or of another schema version."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; merge run directories into it first (`inpaint-bench merge`).")
    try:
        account = files.read_json(folder / contract.DATASET)
    except ValueError as error:
        raise UserError(f"Dataset damaged: {error}. Merge again.") from None
    if not isinstance(account, dict):
        raise UserError(f"{folder} is not a merged dataset (no {contract.DATASET}); use `inpaint-bench merge`.")
    if why := migrate.objection(account.get("schema_version")):
        raise UserError(f"{folder}: {why}. Merge again.")
    try:
        return Dataset(
            folder=folder,
            metadata=account,
            runs=recipe_labels.add_short_names(
                comparability.add_comparability_key(_with_all_columns(pl.read_parquet(folder / contract.RUNS), SCHEMA))
            ),
            windows=_with_all_columns(pl.read_parquet(folder / WINDOWS), WINDOW_SCHEMA),
            skipped=pl.read_parquet(folder / contract.SKIPPED),
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{folder} is not a whole dataset ({error}). Merge again.") from None


def _with_all_columns(frame: pl.DataFrame, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Columns that an older merge did not write are null."""
    missing = [pl.lit(None, kind).alias(name) for name, kind in schema.items() if name not in frame.columns]
    return frame.with_columns(missing)
