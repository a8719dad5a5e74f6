"""Columns that older merges did not write, derived when their datasets are read; and what tables show of cells."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from analysis import merge
from analysis.dataset import add_columns, open_dataset
from analysis.report.tables import TableBuilder
from tests.analysis.build import S, rewrite, write_run

from .committed import DATASETS, RESULTS

DERIVED = ("steady", "step_blocks", "step_mean_pct", "step_drift_pct", "vram_run_mib_peak", "vram_run_pct")


def test_a_dataset_without_the_columns_gets_what_a_merge_of_today_writes(tmp_path: Path) -> None:
    """Of one run that drifts, and of one that needs more memory before its window than in it."""
    drift = 1 + 0.1 * (pl.col("t_start_mono_ns") - 1000 * S) / (30 * S)
    folder = write_run(tmp_path / "in", "r-1")
    rewrite(folder, "steps", lambda rows: rows.with_columns((pl.col("device_ms") * drift / 1.05).cast(pl.Float32)))
    rewrite(write_run(tmp_path / "in", "r-2"), "samples_slow", more_before)
    merge.merge([tmp_path / "in"], tmp_path / "ds")
    merged = open_dataset(tmp_path / "ds")
    assert merged.runs["steady"].to_list() == ["no", "yes"]
    assert merged.runs["vram_run_mib_peak"].to_list() == [20_000, 40_000]
    assert merged.runs["vram_used_mib_peak"].to_list() == [20_000, 20_000]
    null = [pl.lit(None, merged.runs.schema[name]).alias(name) for name in DERIVED]
    flags = pl.col("flags").replace("unsteady", None)
    old = merged.runs.with_columns(*null, flags, warnings=pl.lit(None, pl.String))
    derived = add_columns(old, merged.windows, merged.scan, ["run_id"])
    same = [*DERIVED, "flags", "warnings"]
    assert derived.select(same).rows() == [pytest.approx(row) for row in merged.runs.select(same).rows()]


def more_before(rows: pl.DataFrame) -> pl.DataFrame:
    """Parity needs as much again, and lets go of it before the window opens at 1000 s."""
    more = pl.when(pl.col("t_mono_ns") < 998 * S).then(20_000.0).otherwise(0.0)
    used, free = pl.col("vram_used_mib") + more, pl.col("vram_free_mib") - more
    kinds = rows.schema
    changed = {"vram_used_mib": used, "vram_free_mib": free}
    return rows.with_columns(value.cast(kinds[name]).alias(name) for name, value in changed.items())


@pytest.mark.parametrize("name", DATASETS)
def test_the_whole_run_needs_at_least_the_memory_of_its_windows(name: str) -> None:
    runs = open_dataset(RESULTS / name).runs.drop_nulls("vram_used_mib_peak")
    assert runs["vram_run_mib_peak"].null_count() == 0
    assert (runs["vram_run_mib_peak"] >= runs["vram_used_mib_peak"]).all()
    assert (runs["vram_run_pct"] <= 100).all()


def test_summaries_show_cards_unsteady_runs_the_energy_bound_and_both_peaks() -> None:
    build = TableBuilder(runs=open_dataset(RESULTS / "2026-11-26-h200-flux").runs)
    energy, memory = build.summary("energy"), build.summary("memory")
    at = energy.columns.index("Energy [J/image]")
    assert energy.columns[at + 1] == "Energy error, at most [%]"
    rows = {(row[3], row[2]): row for row in energy.rows}
    counted = [energy.columns.index(name) for name in ("n", "Cards", "Not steady")]
    assert [rows["tuned_dit+fp8+attn_flash4", "4"][i] for i in counted] == ["1", "1", "1"]
    assert [rows["earlier_baseline+cached", "8"][i] for i in counted] == ["3", "2", "\u2013"]
    peaks = [memory.columns.index(f"VRAM peak, {which} [MiB]") for which in ("measured", "whole run")]
    (row,) = (row for row in memory.rows if row[2:4] == ["8", "earlier_baseline+cached"])
    assert [row[i] for i in peaks] == ["77,357", "142,557"]
