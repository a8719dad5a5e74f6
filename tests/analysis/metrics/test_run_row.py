"""The row of a run: known inputs give known figures, and the audit of its window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.columns import COLUMNS, REAL
from analysis.ingest import parts
from analysis.metrics import run_row
from analysis.metrics.facts import Facts
from analysis.metrics.gpu_samples import GpuSamples
from inpaint_bench.core import schema
from inpaint_bench.core.records import Window
from inpaint_bench.core.schema import Status, WindowKind
from tests.analysis.build import S, _lever, load_run, write_run


def row_of(folder: Path, windows: list[Window] | None = None, **changes: pl.DataFrame) -> dict[str, Any]:
    """Return the row of a run directory, with other windows or tables where they are given."""
    run, tables = load_run(folder)
    windows = run.windows if windows is None else windows
    return run_row.summarise(Facts(manifest=run.manifest, windows=windows, tables=tables | changes))


def test_constant_power_gives_the_calculated_figures(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path))
    assert row["valid"], row["invalid_reason"]
    expected = {
        "images": 480,
        "n_steps": 60,
        "window_s": 30,
        "images_per_s": 16,
        "steps_per_s": 2,
        "power_w": 200,
        "energy_j": 6000,
        "energy_integral_j": 6000,
        "energy_ratio": 1,
        "joules_per_image": 12.5,
        "gpu_util_pct": 98,
        "temp_gpu_c_mean": 60,
        "data_wait_pct": 2,
        "step_ms_p50": 500,
        "runtime_h": 16 * 6500 / 16 / 3600,
        "vram_pct": 100 * 20000 / (46068 - 600),
        "throttle_power_pct": 0,
        "coverage_pct": 100,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert (row["energy_source"], row["runtime_kind"], row["source"]) == ("counter", "projected", "nvml")


def test_mean_power_is_energy_over_time_not_the_mean_of_samples(tmp_path: Path) -> None:
    """Most samples lie in the low half of a square wave, so their plain mean is far off."""
    folder = write_run(tmp_path)
    fast = load_run(folder)[1]["samples_fast"]
    start = 1000 * S
    low = (pl.col("t_mono_ns") - start) < 15 * S
    wave = fast.with_columns(
        pl.when(low).then(100.0).otherwise(300.0).cast(pl.Float32).alias("power_instant_w"),
        (pl.when(low).then(100.0).otherwise(300.0) * (pl.col("t_mono_ns") - start - 15 * S) / 1e6 + 1e7)
        .round()
        .cast(pl.UInt64)
        .alias("energy_mj"),
    )
    keep = low | (pl.col("tick_seq") % 4 == 0)
    row = row_of(folder, samples_fast=wave.filter(keep))
    assert row["valid"], row["invalid_reason"]
    assert row["power_w"] == pytest.approx(200, rel=1e-3)
    assert wave.filter(keep)["power_instant_w"].mean() != pytest.approx(200, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=40), st.floats(1, 700))
def test_integral_of_a_constant_is_exact_for_any_sampling(gaps: list[int], watts: float) -> None:
    t = np.cumsum(np.array(gaps, dtype=np.int64)) + 10**15
    start, end = int(t[0]), int(t[-1])
    samples = GpuSamples(uuid="GPU-1", t_ns=t, tick=np.arange(len(t)), columns={"power_w": np.full(len(t), watts)})
    assert samples.integral("power_w", (start, end)) == pytest.approx(watts * (end - start) * 1e-9, rel=1e-9)
    assert samples.integral("power_w", (start - 1, end)) is None


def test_gap_limit_follows_the_sampling_period(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, hz=2.0, telemetry={"hz": 2}))
    assert row["valid"], row["invalid_reason"]


def test_without_a_counter_energy_is_the_integral_with_its_source(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, counter=False, source="replay:a40-synthetic"))
    assert row["valid"], row["invalid_reason"]
    assert row["energy_source"] == "integral"
    assert row["power_w"] == pytest.approx(200)
    assert row["energy_ratio"] is None
    assert row["demonstration"]


def test_without_requested_telemetry_there_is_throughput_only(tmp_path: Path) -> None:
    folder = write_run(tmp_path, telemetry={"source": "none", "hz": None})
    samples = {name: parts.empty_frame(name) for name in schema.TABLES if name.startswith("samples_")}
    row = row_of(folder, **samples)
    assert row["valid"], row["invalid_reason"]
    assert row["images_per_s"] == pytest.approx(16)
    assert row["power_w"] is None
    assert "power_w=telemetry off" in row["null_reasons"]


def test_interrupted_window_is_excluded_from_the_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    windows = load_run(folder)[0].windows
    early = {"t_start_mono_ns": 995 * S, "t_start_unix_ns": windows[0].t_start_unix_ns}
    cut = Window(window_id="w-0b", kind=WindowKind.MEASURE, status=Status.INTERRUPTED, steps=5, images=40, **early)
    row = row_of(folder, [cut, *windows])
    assert row["images"] == 480
    assert "cut short" in row["warnings"]


def test_runtime_is_measured_where_the_run_processed_all_images(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, workload_facts={"epochs": 1, "dataset_images": 400}))
    assert row["runtime_kind"] == "measured"
    assert row["runtime_h"] == pytest.approx(39 / 3600)


def test_mfu_needs_flop_and_a_peak_of_the_same_precision(tmp_path: Path) -> None:
    facts, peak = {"flop_per_image": 0.6e12}, {"bf16_dense_tflops": 149.7}
    run = write_run(tmp_path, workload_facts=facts, gpu_facts=peak)
    assert row_of(run)["mfu_pct"] == pytest.approx(100 * 0.6 * 16 / 149.7)
    for number, levers, tflops in ((2, [], 37.4), (3, [_lever("tf32")], 74.8)):  # of an A40
        more = {"workload_facts": {**facts, "precision": "fp32"}, "gpu_facts": peak, "levers": levers}
        row = row_of(write_run(tmp_path, f"r-0{number}", **more))
        assert row["mfu_pct"] == pytest.approx(100 * 0.6 * 16 / tflops)


def test_samples_of_an_earlier_node_of_a_requeued_job_are_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    fast = load_run(folder)[1]["samples_fast"]
    earlier = fast.with_columns(
        pl.lit("GPU-of-another-node").alias("gpu_uuid"), (pl.col("t_mono_ns") + 9000 * S).alias("t_mono_ns")
    )
    same_gpu = fast.with_columns((pl.col("t_mono_ns") + 5000 * S).alias("t_mono_ns"))
    both = pl.concat([earlier, same_gpu, fast])
    row = row_of(folder, samples_fast=both)
    assert row["valid"], row["invalid_reason"]
    assert row["power_w"] == pytest.approx(200)
    assert row["gpu_util_pct"] == pytest.approx(98)


def changed(folder: Path, fast: Any = None, window: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the row of a run whose fast samples or measure window were changed afterwards."""
    run, tables = load_run(folder)
    samples = fast(tables["samples_fast"]) if fast else tables["samples_fast"]
    measured = {w.window_id: w.kind == WindowKind.MEASURE for w in run.windows}
    windows = [msgspec.structs.replace(w, **(window or {})) if measured[w.window_id] else w for w in run.windows]
    return row_of(folder, windows, samples_fast=samples)


def null_between(column: str, first: float, last: float) -> Any:
    """Return a change that makes one column null between two times of the window."""
    seconds = (pl.col("t_mono_ns") - 1000 * S) / 1e9
    return lambda f: f.with_columns(pl.when(~seconds.is_between(first, last)).then(column).alias(column))


def test_energy_uncertainty_has_three_parts(tmp_path: Path) -> None:
    """Assume updates every 100 ms in a window of 30 s, 5 W of 200 W, and agreement of counter and integral."""
    row = row_of(write_run(tmp_path))
    assert row["energy_update_ms"] == pytest.approx(100)
    assert row["energy_edge_pct"] == pytest.approx(100 * 2 * 0.1 / 30)
    assert row["energy_sensor_pct"] == pytest.approx(2.5)
    assert row["energy_error_pct"] == pytest.approx(0.6667 + 2.5, rel=1e-4)
    assert row["joules_per_image_error"] == pytest.approx(12.5 * row["energy_error_pct"] / 100)


def test_uncertainty_grows_with_the_update_interval_and_the_disagreement(tmp_path: Path) -> None:
    coarse = (pl.col("energy_mj") // 100_000 * 100_000).alias("energy_mj")
    row = changed(write_run(tmp_path), lambda f: f.with_columns(coarse, pl.col("power_instant_w") * 1.25))
    assert row["energy_update_ms"] == pytest.approx(500)
    assert row["energy_edge_pct"] == pytest.approx(100 * 2 * 0.5 / 30)
    disagreement = 100 * abs(row["energy_ratio"] - 1)
    assert disagreement == pytest.approx(20, abs=1)
    assert row["energy_error_pct"] == pytest.approx(row["energy_edge_pct"] + row["energy_sensor_pct"] + disagreement)


def test_energy_by_the_integral_has_no_uncertainty_with_a_reason(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, counter=False))
    assert (row["energy_source"], row["energy_error_pct"], row["joules_per_image_error"]) == ("integral", None, None)
    assert "energy_error_pct=no energy counter to derive it from" in row["null_reasons"]


def test_counter_without_sampled_power_has_no_uncertainty_with_a_reason(tmp_path: Path) -> None:
    hidden = [pl.lit(None).alias(name) for name in ("power_instant_w", "power_avg1s_w")]
    row = changed(write_run(tmp_path), lambda f: f.with_columns(*hidden))
    assert (row["energy_source"], row["energy_error_pct"]) == ("counter", None)
    assert "energy_error_pct=no sampled power to check the energy counter against" in row["null_reasons"]


def test_null_at_the_edge_is_interpolated_from_known_readings(tmp_path: Path) -> None:
    row = changed(write_run(tmp_path), null_between("energy_mj", -0.15, 0.05))
    assert (row["energy_source"], row["energy_j"]) == ("counter", pytest.approx(6000))


@pytest.mark.parametrize(
    ("columns", "nulls"),
    [
        (("gpu_util_pct",), ("gpu_util_pct",)),
        (("energy_mj", "power_instant_w", "power_avg1s_w"), ("power_w", "energy_j", "energy_integral_j")),
    ],
)
def test_mostly_null_column_does_not_cover_the_window(tmp_path: Path, columns: Any, nulls: Any) -> None:
    def cut(frame: pl.DataFrame) -> pl.DataFrame:
        for column in columns:
            frame = null_between(column, 2, 28)(frame)
        return frame

    row = changed(write_run(tmp_path), cut)
    assert [row[name] for name in nulls] == [None] * len(nulls)
    assert f"{columns[0]} unknown for 26." in row["warnings"]
    assert all(f"{name}=" in row["null_reasons"] for name in nulls)
    assert row["coverage_pct"] < 20


def test_counter_with_a_gap_is_replaced_by_the_integral(tmp_path: Path) -> None:
    row = changed(write_run(tmp_path), null_between("energy_mj", 5, 10))
    assert (row["energy_source"], row["power_w"]) == ("integral", pytest.approx(200))


def test_short_window_is_a_warning(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, window_s=15.0))
    assert row["valid"], row["invalid_reason"]
    assert "short window: 15.0 s, 30 steps" in row["warnings"]


def test_gap_limit_is_at_most_three_seconds(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, hz=0.25, telemetry={"hz": 0.25}))
    assert "(limit 3.00 s)" in row["invalid_reason"]


def test_mix_of_measured_and_replayed_samples_is_an_invalid_demonstration(tmp_path: Path) -> None:
    some = pl.when(pl.col("tick_seq") < 100).then(pl.lit("replay:x")).otherwise("source").alias("source")
    row = changed(write_run(tmp_path), lambda f: f.with_columns(some))
    assert (row["demonstration"], row["valid"]) == (True, False)
    assert "telemetry of several kinds: nvml, replay:x" in row["invalid_reason"]


def test_data_facts_and_unusual_steps_are_in_the_row(tmp_path: Path) -> None:
    data = {"kind": "folder", "found": 10, "used": 9, "skipped": [{"file": "a.jpg", "reason": "truncated"}]}
    row = row_of(write_run(tmp_path, data=data, workload_facts={"losses_not_finite": 2, "skipped_steps": 3}))
    assert (row["images_found"], row["images_used"], row["images_skipped"]) == (10, 9, 1)
    assert "a.jpg" in row["skipped_images"]
    assert "2 losses not finite; 3 optimizer steps skipped" in row["warnings"]


@pytest.mark.parametrize("source", ["nvml", "none"])
def test_every_null_figure_has_its_reason(tmp_path: Path, source: str) -> None:
    nothing = pl.lit("power_instant_w=no_permission;gpu_util_pct=not_supported").alias("nulls")
    hidden = [pl.lit(None).alias(name) for name in ("power_instant_w", "power_avg1s_w", "energy_mj", "gpu_util_pct")]
    folder = write_run(tmp_path, telemetry={"source": source})
    row = changed(folder, lambda f: f.clear() if source == "none" else f.with_columns(nothing, *hidden))
    reasons = dict(pair.split("=", 1) for pair in row["null_reasons"].split("; "))
    assert {each.name for each in COLUMNS if each.kind == REAL and row[each.name] is None} <= reasons.keys()
    if source == "nvml":
        assert (reasons["energy_integral_j"], reasons["gpu_util_pct"]) == ("no_permission", "not_supported")
