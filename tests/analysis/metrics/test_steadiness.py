"""Steady state: the mean step, and the outer thirds of blocks of 1 s, over measured time only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import merge
from analysis.dataset import open_dataset
from analysis.metrics import energy, flags, steadiness, telemetry
from inpaint_bench.core import schema
from inpaint_bench.core.paths import ROOT
from tests.analysis.build import S, rewrite, rewrite_json, write_run
from tests.analysis.committed import DATASETS, RESULTS


def row_of(tmp_path: Path, change: Any = None, **changes: Any) -> dict[str, Any]:
    folder = write_run(tmp_path / "grace", **{"window_s": 60.0} | changes)
    if change is not None:
        rewrite(folder, "steps", lambda rows: rows.with_columns(change.cast(pl.Float32).alias("device_ms")))
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds").runs.row(0, named=True)


SHARE = (pl.col("t_start_mono_ns") - 1000 * S) / (60 * S)  # of the measure window


def test_equal_steps_are_steady(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    assert (row["steady"], row["step_blocks"]) == ("yes", 60)
    assert (row["step_drift_pct"], row["step_mean_pct"]) == pytest.approx((0, 0), abs=1e-9)
    assert (row["warnings"], row["flags"]) == (None, None)


def test_growing_step_time_is_a_warning_and_a_flag_and_the_run_stays_valid(tmp_path: Path) -> None:
    row = row_of(tmp_path, pl.col("device_ms") * (1 + 0.06 * SHARE) / 1.03)  # together as long as the window
    assert (row["valid"], row["steady"], row["flags"]) == (True, "no", "unsteady")
    assert row["step_drift_pct"] == pytest.approx(100 * (1.05 / 1.01 - 1), abs=0.1)  # means of the outer thirds
    assert "the last third of the window +4.0 % off the first (limit 2 %)" in row["warnings"]


def test_slow_phase_in_the_middle_shows_in_the_mean_step(tmp_path: Path) -> None:
    slow = pl.when(SHARE.is_between(0.4, 0.6)).then(1.2).otherwise(1.0)
    row = row_of(tmp_path, pl.col("device_ms") * slow)
    assert (row["steady"], row["step_drift_pct"]) == ("no", pytest.approx(0, abs=1e-6))
    assert row["step_mean_pct"] == pytest.approx(4, abs=0.2)  # a fifth of the time at 1.2


def test_single_slow_step_is_steady(tmp_path: Path) -> None:
    row = row_of(tmp_path, pl.when(pl.col("step") == 70).then(900.0).otherwise("device_ms"))
    assert row["steady"] == "yes"


def test_two_blocks_are_too_short_with_a_reason(tmp_path: Path) -> None:
    row = row_of(tmp_path, window_s=2.9)
    assert (row["steady"], row["step_drift_pct"], row["step_mean_pct"]) == ("too_short", None, None)
    assert "step_drift_pct=too_short: 2 blocks of 1 s or a step, 3 are needed" in row["null_reasons"]
    assert "steady" not in (row["warnings"] or "")


def test_without_device_times_the_host_times_are_used(tmp_path: Path) -> None:
    row = row_of(tmp_path, pl.lit(None))
    assert (row["step_ms_kind"], row["steady"]) == ("host", "yes")


FLUX_FP32 = "pin_memory+non_blocking+cache_image+cache_masked+cache_text"
UNSTEADY = {  # of the committed datasets of 26 November and later, all runs that are not steady
    ("2026-11-26-h200-flux", "earlier_baseline+half+lora+attn_flash+cache_image+cache_masked+cache_text", 1): (
        18.6,
        -46.1,
    ),
    ("2026-11-26-h200-flux", "earlier_baseline+half+lora+attn_flash+cache_image+cache_masked+cache_text", 4): (
        3.2,
        11.4,
    ),
    ("2026-11-26-h200-flux", "tuned_dit+fp8+attn_flash4", 4): (1.8, 13.2),  # from 14 to 12 images/s in its last 2 s
    ("2026-11-26-h200-fp8-losses", "tuned_dit+fp8+attn_flash4", 4): (11.4, -12.2),
    ("2026-11-28-h100-yardstick", "baseline", 16): (2.4, 2.1),
    ("2026-11-28-h100-yardstick", "earlier_baseline", 16): (2.3, -0.6),
    ("2026-11-28-h200-breadth", "baseline", 4): (0.2, 7.3),  # the host is the limit
    ("2026-11-28-h200-breadth", "amp_fp16", 1): (-1.2, 3.5),  # as in all that make few images
    ("2026-11-28-h200-breadth", "amp_fp16", 2): (1.3, -7.7),
    ("2026-11-28-h200-breadth", "amp_fp16", 4): (0.4, -23.2),
    ("2026-11-29-h200-headlines", "baseline", 16): (1.7, 4.34),  # SD 2; the host again
    ("2026-11-29-h200-headlines", "poster_optimized", 24): (-0.69, 4.33),
    ("2026-11-29-h200-headlines-2", "baseline", 4): (-0.21, -3.2),  # the host
    ("2026-11-29-h200-headlines-3", "baseline", 4): (-0.30, -6.6),  # the host
    ("2026-11-29-h200-plain-losses", "tuned_online", 16): (2.33, -24.3),  # without a warm-up
    ("2026-11-30-h200-plain-losses", "tuned_online", 16): (3.03, -29.8),  # without a warm-up
    # Divided among two GPUs, which wait for the host; the last of two or three runs each.
    ("2026-11-29-h200-two-gpus", "baseline+fsdp2", 8): (-0.87, -4.49),
    ("2026-11-29-h200-two-gpus", "baseline+tensor", 8): (2.51, 19.8),
    ("2026-11-29-h200-two-gpus", "baseline+zero1", 8): (0.71, -3.23),
    # The host is the limit of latencies again; the last of several runs each.
    ("2026-11-29-h200-headlines-4", "amp_fp16", 1): (-3.31, 43.72),
    ("2026-11-29-h200-headlines-4", "amp_fp16", 2): (6.37, -20.98),
    ("2026-11-29-h200-headlines-4", "amp_fp16", 4): (-2.75, 16.28),
    ("2026-11-29-h200-two-gpus-2", "tuned_dit+attn_flash4+accumulate=4+pipeline", 8): (4.55, 17.94),
    ("2026-11-29-h200-two-gpus-2", f"earlier_baseline+grad_checkpoint+tensor+{FLUX_FP32}", 4): (-1.85, -11.03),
    ("2026-11-29-h200-two-gpus-2", f"earlier_baseline+adamw_fused+grad_checkpoint+bucket_view+zero1+{FLUX_FP32}", 1): (
        3.04,
        0.9,
    ),
    ("2026-11-30-h200-breadth", "amp_fp16", 1): (-2.5, -13.45),
    ("2026-11-30-h200-breadth", "amp_fp16", 2): (-0.26, -5.53),
    ("2026-11-30-h200-breadth", "poster_optimized", 24): (1.78, 6.72),
    ("2026-11-30-h200-counters", "baseline", 104): (-0.48, 5.84),
    ("2026-11-30-h200-levers", "baseline+attn_flash", 16): (0.97, -2.77),  # beside a compilation on the host
    ("2026-11-30-h200-levers", "baseline+channels_last", 16): (4.03, 1.87),
    ("2026-11-30-h200-two-gpus", f"earlier_baseline+grad_checkpoint+fsdp2+{FLUX_FP32}", 4): (4.21, 5.33),
    ("2026-11-30-h200-two-gpus", f"earlier_baseline+grad_checkpoint+tensor+{FLUX_FP32}", 4): (-1.13, 6.79),
    ("2026-11-30-h200-two-gpus", f"earlier_baseline+adamw_fused+grad_checkpoint+bucket_view+zero1+{FLUX_FP32}", 1): (
        4.09,
        -9.13,
    ),
    ("2026-11-28-h200-poster", "poster_optimized", 16): (2.47, -3.76),  # the last of three
    ("2026-11-28-h200-poster", "poster_optimized+no_channels_last", 16): (0.92, -2.77),
}


def test_committed_runs_are_judged_when_their_datasets_are_read() -> None:
    found = {}
    for name in (name for name in DATASETS if name >= "2026-11-26"):
        for row in open_dataset(RESULTS / name).runs.filter("valid").to_dicts():
            if row["step_ms_p50"] is None:  # steps of different work
                assert row["steady"] is None
                continue
            if row["workload"] == "volume3d_sample" and row["n_steps"] == 1:
                assert row["steady"] == "too_short"
                continue
            assert row["steady"] in ("yes", "no"), row["run_id"]  # none is too short
            assert ("unsteady" in (row["flags"] or "")) == (row["steady"] == "no")
            assert ("not steady: the mean step" in (row["warnings"] or "")) == (row["steady"] == "no")
            assert "too_short" not in (row["null_reasons"] or "")
            assert "drifts" not in (row["warnings"] or "")
            if row["steady"] == "no":
                found[name, row["recipe"], row["batch"]] = (row["step_mean_pct"], row["step_drift_pct"])
    assert found == {key: pytest.approx(figures, abs=0.05) for key, figures in UNSTEADY.items()}


def test_a_run_of_half_a_minute_is_judged() -> None:
    runs = open_dataset(RESULTS / "2026-11-21-h200-baseline").runs.filter("valid")  # 20 to 40 s
    assert dict(runs["steady"].value_counts().iter_rows()) == {"yes": 23, "no": 2}


def test_time_between_two_windows_is_not_measured_time(tmp_path: Path) -> None:
    """Two windows of 15 s with a validation of an hour between them are thirty blocks of one measured time."""
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
    assert (row["steady"], row["step_blocks"]) == ("yes", 30)


@settings(max_examples=60, deadline=None)
@given(st.floats(-0.2, 0.2), st.integers(3, 60))
def test_drift_of_a_line_is_that_of_its_outer_thirds(slope: float, count: int) -> None:
    """Two steps begin in each second."""
    share = np.arange(6 * count) / (6 * count)
    step_ms = 500 * (1 + slope * share)
    found = steadiness.judge(0.5 * np.arange(6 * count), step_ms, 3.0 * count)
    assert found.blocks == 3 * count
    drift_pct = 100 * (step_ms[-2 * count :].mean() / step_ms[: 2 * count].mean() - 1)
    assert found.drift_pct == pytest.approx(drift_pct, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.floats(30, 5000), st.floats(0.05, 2), st.floats(0.01, 100))
def test_verdict_does_not_depend_on_the_order_of_rows(seconds: float, step_s: float, noise_pct: float) -> None:
    at = np.arange(0, seconds, step_s)
    rng = np.random.default_rng(len(at))
    millis = 1000 * step_s * (1 + noise_pct / 100 * rng.uniform(-1, 1, len(at)))
    order = rng.permutation(len(at))
    one, other = steadiness.judge(at, millis, seconds), steadiness.judge(at[order], millis[order], seconds)
    assert (other.verdict, other.blocks) == (one.verdict, one.blocks)
    assert other.drift_pct == pytest.approx(one.drift_pct, rel=1e-6, abs=1e-6)
    assert other.mean_pct == pytest.approx(one.mean_pct, rel=1e-6, abs=1e-6)


def test_document_states_the_thresholds() -> None:
    text = " ".join((ROOT / "docs" / "dataset.md").read_text().split())
    for sentence in (
        f"a block is {steadiness.BLOCK_S:g} s of measured time",
        f"both are within {steadiness.LIMIT_PCT:g} %",
        f"cover less than {telemetry.MIN_COVERAGE_PCT:g} %",
        f"+/- {energy.SENSOR_W:g} W on each",
        f"by temperature for more than {flags.THERMAL_PCT:g} % of the window",
        f"by the power cap for more than {flags.POWER_CAP_PCT:g} % of the window",
    ):
        assert sentence in text
