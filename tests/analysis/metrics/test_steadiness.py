"""Steady state: drift and scatter of blocks of 10 s, over measured time only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import theilslopes

from analysis import merge
from analysis.dataset import open_dataset
from analysis.metrics import energy, flags, gpm_counters, steadiness
from inpaint_bench.core import schema
from inpaint_bench.core.paths import ROOT
from tests.analysis.build import S, rewrite, rewrite_json, write_run


def row_of(tmp_path: Path, change: Any = None, **changes: Any) -> dict[str, Any]:
    folder = write_run(tmp_path / "grace", **{"window_s": 60.0} | changes)
    if change is not None:
        rewrite(folder, "steps", lambda rows: rows.with_columns(change.cast(pl.Float32).alias("device_ms")))
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds").runs.row(0, named=True)


SHARE = (pl.col("t_start_mono_ns") - 1000 * S) / (60 * S)  # of the measure window


def test_equal_steps_are_steady(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    assert (row["steady"], row["step_blocks"]) == ("yes", 6)
    assert (row["step_drift_pct"], row["step_block_cv_pct"]) == pytest.approx((0, 0), abs=1e-9)
    assert row["warnings"] is None


def test_growing_step_time_is_a_warning_and_the_run_stays_valid(tmp_path: Path) -> None:
    row = row_of(tmp_path, pl.col("device_ms") * (1 + 0.06 * SHARE) / 1.03)  # together as long as the window
    assert (row["valid"], row["steady"]) == (True, "no")
    assert row["step_drift_pct"] == pytest.approx(5.8, abs=0.1)  # 6 % of the first step, of the median block
    assert "not steady: step time drifts by +5.8 % (limit 2 %)" in row["warnings"]


def test_one_slow_phase_is_scatter_and_no_drift(tmp_path: Path) -> None:
    slow = pl.when(SHARE.is_between(0.5, 0.66)).then(1.2).otherwise(1.0)
    row = row_of(tmp_path, pl.col("device_ms") * slow)
    assert row["steady"] == "no"
    assert abs(row["step_drift_pct"]) < steadiness.DRIFT_PCT
    assert row["step_block_cv_pct"] > steadiness.SCATTER_PCT


def test_single_slow_step_is_steady(tmp_path: Path) -> None:
    row = row_of(tmp_path, pl.when(pl.col("step") == 70).then(900.0).otherwise("device_ms"))
    assert row["steady"] == "yes"


def test_two_blocks_are_too_short_with_a_reason(tmp_path: Path) -> None:
    row = row_of(tmp_path, window_s=29.0)
    assert (row["steady"], row["step_drift_pct"], row["step_block_cv_pct"]) == ("too_short", None, None)
    assert "step_drift_pct=too_short: 2 block(s) of 10 s with steps, 3 are needed" in row["null_reasons"]
    assert "steady" not in (row["warnings"] or "")


def test_without_device_times_the_host_times_are_used(tmp_path: Path) -> None:
    row = row_of(tmp_path, pl.lit(None))
    assert (row["step_ms_kind"], row["steady"]) == ("host", "yes")


def test_time_between_two_windows_is_not_measured_time(tmp_path: Path) -> None:
    """Two windows of 15 s with a validation of an hour between them are three blocks of one measured time."""
    folder = write_run(tmp_path / "grace", window_s=30.0)
    pause = 3600 * S

    def halves(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        measured = windows[1]
        first = {**measured, "steps": 30, "images": 240}
        second = {**first, "window_id": "w-2"}
        for clock in ("mono", "unix"):
            first[f"t_end_{clock}_ns"] -= 15 * S
            second[f"t_start_{clock}_ns"] += 15 * S + pause
            second[f"t_end_{clock}_ns"] += pause
        return [windows[0], first, second]

    def later(rows: pl.DataFrame) -> pl.DataFrame:
        late = pl.col("step") >= 30
        times = ("t_start_mono_ns", "t_end_mono_ns")
        moved = [pl.when(late).then(pl.col(name) + pause).otherwise(name).alias(name) for name in times]
        name = pl.when(late).then(pl.lit("w-2")).otherwise(pl.lit("w-1")).alias("window_id")
        return rows.with_columns(*moved, name)

    rewrite_json(folder, schema.WINDOWS, halves)
    rewrite(folder, "steps", later)
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    row = open_dataset(tmp_path / "ds").runs.row(0, named=True)
    assert (row["steady"], row["step_blocks"]) == ("yes", 3)


@settings(max_examples=60, deadline=None)
@given(st.floats(-5, 5), st.floats(500, 1000), st.integers(5, 40), st.integers(0, 2**32 - 1))
def test_drift_is_the_slope_of_a_line_although_a_fifth_of_the_blocks_are_outliers(
    slope: float, level: float, count: int, seed: int
) -> None:
    """Three steps per block of 10 s, so the block means are the line; the drift is over all blocks."""
    rng = np.random.default_rng(seed)
    means = level + slope * np.arange(count)
    means[rng.choice(count, count // 5, replace=False)] += rng.uniform(100, 1000)
    start_s = np.arange(3 * count) * 10 / 3 + 0.1
    drift_pct = steadiness.judge(start_s, np.repeat(means, 3), 10.0 * count).drift_pct
    assert drift_pct == pytest.approx(100 * slope * count / np.median(means), abs=1e-6)
    assert drift_pct == pytest.approx(100 * theilslopes(means).slope * count / np.median(means), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(30, 5000),
    st.floats(0.05, 2),
    st.floats(0.01, 100),
    st.floats(1e-3, 1e3),
)
def test_verdict_does_not_depend_on_unit_or_order(seconds: float, step_s: float, noise_pct: float, unit: float) -> None:
    at = np.arange(0, seconds, step_s)
    rng = np.random.default_rng(len(at))
    millis = 1000 * step_s * (1 + noise_pct / 100 * rng.uniform(-1, 1, len(at)))
    result = steadiness.judge(at, millis, seconds)
    scaled = steadiness.judge(at, millis * unit, seconds)
    order = rng.permutation(len(at))
    shuffled = steadiness.judge(at[order], millis[order], seconds)
    for other in (scaled, shuffled):
        assert (other.verdict, other.blocks) == (result.verdict, result.blocks)
        assert other.drift_pct == pytest.approx(result.drift_pct, rel=1e-6, abs=1e-6)
        assert other.cv_pct == pytest.approx(result.cv_pct, rel=1e-6, abs=1e-6)


def test_a_day_of_training_uses_longer_blocks() -> None:
    at = np.arange(0, 86_400, 0.5)
    result = steadiness.judge(at, np.full(len(at), 500.0), 86_400.0)
    assert (result.verdict, result.blocks) == ("yes", steadiness.MAX_BLOCKS)


def test_document_states_the_thresholds() -> None:
    text = " ".join((ROOT / "docs" / "dataset.md").read_text().split())
    assert steadiness.DRIFT_PCT == steadiness.SCATTER_PCT
    for sentence in (
        f"blocks of {steadiness.BLOCK_S:g} s of measured time (longer ones if there would be more than "
        f"{steadiness.MAX_BLOCKS})",
        f"both are within {steadiness.DRIFT_PCT:g} %",
        f"cover less than {gpm_counters.MIN_COVERAGE_PCT:g} %",
        f"+/- {energy.SENSOR_W:g} W on each",
        f"by temperature for more than {flags.THERMAL_PCT:g} % of the window",
        f"by the power cap for more than {flags.POWER_CAP_PCT:g} % of the window",
    ):
        assert sentence in text
