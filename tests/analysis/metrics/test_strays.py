"""Readings that no card gives, and a power that never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import merge
from analysis.dataset import open_dataset
from tests.analysis.build import rewrite, write_run


def merged(tmp_path: Path) -> dict[str, Any]:
    merge.merge([tmp_path / "runs"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds").runs.row(0, named=True)


def planted(column: str, value: float, rows: int, at: int = 8) -> pl.Expr:
    """Put a value into some rows within the window."""
    index = pl.int_range(pl.len())
    every = pl.when(index.is_between(at, at + rows - 1)).then(value).otherwise(pl.col(column))
    return every.alias(column)


FAST, SLOW = "samples_fast", "samples_slow"
# Column of the samples, reading, figure of the run, and its value without that reading.
READINGS = [
    (FAST, "gpu_util_pct", 2619.0, "gpu_util_pct", 98.0),
    (FAST, "mem_active_pct", 65535.0, "mem_active_pct", 58.8),
    (FAST, "power_instant_w", 4_294_967.0, "power_w", 200.0),
    (FAST, "power_instant_w", -1.0, "power_w", 200.0),
    (SLOW, "temp_gpu_c", 255.0, "temp_gpu_c_max", 60.0),
    (SLOW, "temp_gpu_c", 0.0, "temp_gpu_c_mean", 60.0),
    (SLOW, "sm_clock_mhz", 0.0, "sm_clock_mhz_mean", 1410.0),
    (SLOW, "sm_clock_mhz", 65535.0, "sm_clock_mhz_mean", 1410.0),
    (SLOW, "vram_used_mib", 90_000.0, "vram_used_mib_peak", 20_000.0),
    (SLOW, "vram_used_mib", 30_000.0, "vram_used_mib_peak", 20_000.0),  # with the free memory more than the total
]


@pytest.mark.parametrize(("table", "column", "value", "figure", "expected"), READINGS)
def test_one_reading_is_left_out_with_a_warning(
    tmp_path: Path, table: str, column: str, value: float, figure: str, expected: float
) -> None:
    folder = write_run(tmp_path / "runs")
    rewrite(folder, table, lambda rows: rows.with_columns(planted(column, value, 1, at=300 if table == FAST else 15)))
    row = merged(tmp_path)
    assert row["invalid_reason"] is None
    assert f"{table}: left out 1 of " in row["warnings"]
    assert f" values of {column}, e.g. " in row["warnings"]
    assert row[figure] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("table", "column", "value", "figure", "expected"), READINGS)
def test_many_such_readings_make_the_run_invalid(
    tmp_path: Path, table: str, column: str, value: float, figure: str, expected: float
) -> None:
    folder = write_run(tmp_path / "runs")
    rewrite(
        folder,
        table,
        lambda rows: rows.with_columns(planted(column, value, *((60, 200) if table == FAST else (12, 15)))),
    )
    row = merged(tmp_path)
    assert not row["valid"]
    assert table in row["invalid_reason"]


@pytest.mark.parametrize("watts", [60.0, 60.125, 0.0])
def test_power_that_never_changes_under_load_is_no_energy(tmp_path: Path, watts: float) -> None:
    folder = write_run(tmp_path / "runs", counter=False)
    rewrite(folder, FAST, lambda rows: rows.with_columns(pl.lit(watts).alias("power_instant_w")))
    row = merged(tmp_path)
    assert (row["energy_j"], row["joules_per_image"]) == (None, None)
    assert f"energy_j=power_instant_w is {watts:.4g} W in all of " in row["null_reasons"]
    assert "no energy: power_instant_w is" in row["warnings"]


def test_power_that_stands_still_in_the_window_alone_is_one_of_a_sensor_of_whole_watts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", counter=False)
    assert merged(tmp_path)["energy_j"] == pytest.approx(6000)
    finer = pl.when(pl.int_range(pl.len()) < 5).then(31.25).otherwise(pl.lit(199.75)).alias("power_instant_w")
    rewrite(folder, FAST, lambda rows: rows.with_columns(finer))
    assert merged(tmp_path)["energy_j"] is None


@pytest.mark.parametrize("spread_w", [0.001, 0.4, 3.0])
def test_power_of_a_capped_card_is_a_measurement(tmp_path: Path, spread_w: float) -> None:
    folder = write_run(tmp_path / "runs", counter=False)
    wiggle = (pl.lit(200.0) + spread_w * (pl.int_range(pl.len()) % 3 - 1)).alias("power_instant_w")
    rewrite(folder, FAST, lambda rows: rows.with_columns(wiggle))
    assert merged(tmp_path)["energy_j"] == pytest.approx(6000, rel=1e-3)


def test_few_readings_of_one_power_are_not_judged(tmp_path: Path) -> None:
    """A window may be short, and a sensor slow."""
    folder = write_run(tmp_path / "runs", counter=False, window_s=1.5)
    rewrite(folder, FAST, lambda rows: rows.with_columns(pl.lit(200.0).alias("power_instant_w")))
    assert merged(tmp_path)["energy_j"] == pytest.approx(300)
