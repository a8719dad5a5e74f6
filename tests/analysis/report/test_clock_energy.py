"""Energy over the SM clock inside runs, and over power limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from analysis import merge
from analysis.dataset import open_dataset
from analysis.report.sections import clock_energy
from analysis.report.tables import Section, TableBuilder
from tests.analysis.build import A40, S, rewrite, write_run


def section(folder: Path, *allowed: str) -> Section:
    merge.merge([folder / "in"], folder / "ds", allow_mixed=allowed)
    dataset = open_dataset(folder / "ds")
    assert dataset.runs["valid"].all(), dataset.runs["invalid_reason"].to_list()
    (found,) = clock_energy.sections(dataset, TableBuilder(runs=dataset.runs))
    return found


def test_a_run_that_computes_faster_at_high_clocks(tmp_path: Path) -> None:
    """200 W throughout: 15 s at 1500 MHz with 25 steps of 8 images, then 15 s at 1800 MHz with 35."""
    folder = write_run(tmp_path / "in", "r-01")
    steps = np.repeat([600.0, 3000 / 7], [25, 35])
    rewrite(folder, "steps", lambda rows: rows.with_columns(device_ms=pl.Series(steps, dtype=pl.Float32)))
    later = pl.col("t_mono_ns") >= 1015 * S  # the window begins at 1000 s
    rewrite(
        folder, "samples_slow", lambda rows: rows.with_columns(sm_clock_mhz=pl.when(later).then(1800).otherwise(1500))
    )
    found = section(tmp_path)
    assert "in 1 of 1 run with" in found.paragraphs[0]
    (row,) = found.tables[0].rows
    assert row[5:] == ["1,500 \u2192 1,800", "13.3 \u2192 18.7", "15.0 \u2192 10.7", "1.400", "0.714"]


def test_a_clock_that_hardly_varies_is_said_to_be_too_little(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "in", "r-01")
    clocks = 1500 + 10 * (pl.int_range(pl.len()) % 3)
    rewrite(folder, "samples_slow", lambda rows: rows.with_columns(sm_clock_mhz=clocks))
    found = section(tmp_path)
    assert found.tables == []
    assert "in 0 of 1 run with at least 9 readings. That is too little to show" in found.paragraphs[0]


def test_measured_limits_stand_side_by_side_with_the_best_of_each_kind(tmp_path: Path) -> None:
    for i, (limit, power, steps) in enumerate([(300.0, 280.0, 2.0), (200.0, 180.0, 1.8), (150.0, 140.0, 1.2)]):
        device = {"uuid": A40, "name": "NVIDIA A40", "index_visible": 0, "power_limit_w": limit, "memory_mib": 46068.0}
        write_run(tmp_path / "in", f"r-{i}", power_w=power, steps_per_s=steps, devices=[device])
    rows = section(tmp_path, "power_limit").tables[-1].rows
    assert [(row[2], row[7], row[9]) for row in rows] == [
        ("150", "14.6", "\u2013"),
        ("200", "12.5", "J/image"),
        ("300", "17.5", "cost"),
    ]
