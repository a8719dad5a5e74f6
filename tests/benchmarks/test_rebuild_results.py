"""The committed datasets have the columns that the present code computes from their samples."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from analysis.columns import DEFINITIONS
from analysis.dataset import open_dataset
from benchmarks.rebuild_results import rebuild

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["2026-11-21-h200-levers", "2026-11-21-h200-batches"])
def test_a_rebuilt_dataset_is_the_committed_one(tmp_path: Path, name: str) -> None:
    shutil.copytree(RESULTS / name, tmp_path / name)
    rebuild(open_dataset(tmp_path / name))
    columns = [pl.col("run_id"), *map(pl.col, DEFINITIONS), pl.col("images_per_s"), pl.col("joules_per_image")]
    before, after = (open_dataset(folder / name).runs.select(columns) for folder in (RESULTS, tmp_path))
    assert after.equals(before)
