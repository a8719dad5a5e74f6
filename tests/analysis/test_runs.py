"""The row of a run: known arithmetic in, known figures out, and the audit of its window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import energy, load, parts, runs
from analysis.audit import counter_fell

from .build import S, manifest, write_run


def row_of(folder: Path) -> dict[str, Any]:
    run, _ = load.read_run(folder)
    assert run is not None
    tables = {name: parts.read(name, found, run.run_id)[0] for name, found in run.tables.items()}
    return runs.summarise(run.manifest, run.windows, tables["samples_fast"], tables["samples_slow"], tables["steps"])


def test_constant_power_gives_the_figures_that_arithmetic_gives(tmp_path: Path) -> None:
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


@settings(max_examples=60, deadline=None)
@given(
    joules=st.floats(1e-3, 1e9), images=st.integers(1, 10**7), seconds=st.floats(1, 1e6), steps=st.integers(1, 10**6)
)
def test_joules_per_image_times_images_per_s_per_w_is_one(
    joules: float, images: int, seconds: float, steps: int
) -> None:
    row: dict[str, Any] = {"energy_j": joules, "images": images, "n_steps": steps, "window_s": seconds}
    runs._per_watt(row)
    assert row["joules_per_image"] * row["images_per_s_per_w"] == pytest.approx(1, rel=1e-12)
    assert row["power_w"] * row["images_per_s_per_w"] == pytest.approx(images / seconds, rel=1e-12)


def test_mean_power_is_energy_over_time_not_the_mean_of_samples(tmp_path: Path) -> None:
    """Samples crowd into the low half of a square wave: their plain mean would be far off."""
    folder = write_run(tmp_path)
    run, _ = load.read_run(folder)
    assert run is not None
    fast = parts.read("samples_fast", run.tables["samples_fast"], run.run_id)[0]
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
    slow = parts.read("samples_slow", run.tables["samples_slow"], run.run_id)[0]
    steps = parts.read("steps", run.tables["steps"], run.run_id)[0]
    row = runs.summarise(run.manifest, run.windows, wave.filter(keep), slow, steps)
    assert row["valid"], row["invalid_reason"]
    assert row["power_w"] == pytest.approx(200, rel=1e-3)
    assert wave.filter(keep)["power_instant_w"].mean() != pytest.approx(200, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=40), st.floats(1, 700))
def test_the_integral_of_a_constant_is_exact_whatever_the_sampling(gaps: list[int], watts: float) -> None:
    import numpy as np

    t = np.cumsum(np.array(gaps, dtype=np.int64)) + 10**15
    start, end = int(t[0]), int(t[-1])
    value = np.full(len(t), watts)
    assert energy.integral(t, value, start, end) == pytest.approx(watts * (end - start) * 1e-9, rel=1e-9)
    assert energy.integral(t, value, start - 1, end) is None


def test_a_gap_in_the_samples_makes_the_run_invalid_and_says_where(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, gap=(10.0, 11.0)))
    assert not row["valid"]
    assert "gap of 1.00 s at 10.0 s of the window (limit 0.50 s)" in row["invalid_reason"]
    assert row["images_per_s"] == pytest.approx(16)


def test_the_gap_limit_follows_the_sampling_period(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, hz=2.0, telemetry={"hz": 2}))
    assert row["valid"], row["invalid_reason"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.filter(pl.col("t_mono_ns") > 1001 * S), "after the window opened"),
        (lambda f: f.filter(pl.col("t_mono_ns") < 1029 * S), "before the window closed"),
        (lambda f: f.with_columns(pl.lit(7, pl.UInt32).alias("tick_seq")), "tick_seq repeats"),
        (lambda f: f.reverse(), "clock does not move forward"),
        (lambda f: f.with_columns(pl.lit("GPU-other").alias("gpu_uuid")), "GPUs differ"),
        (
            lambda f: f.with_columns(
                pl.when(pl.col("tick_seq") < 200).then("energy_mj").otherwise(pl.lit(5, pl.UInt64))
            ),
            "energy counter went back",
        ),
        (lambda f: f.clear(), "no telemetry samples in the measure window"),
    ],
)
def test_the_audit_names_what_is_wrong(tmp_path: Path, change: Any, words: str) -> None:
    run, _ = load.read_run(write_run(tmp_path))
    assert run is not None
    tables = {name: parts.read(name, found, run.run_id)[0] for name, found in run.tables.items()}
    fast = change(tables["samples_fast"])
    row = runs.summarise(run.manifest, run.windows, fast, tables["samples_slow"], tables["steps"])
    assert not row["valid"]
    assert words in row["invalid_reason"]


def test_a_counter_that_fell_gives_no_energy(tmp_path: Path) -> None:
    from analysis.audit import Lane

    run, _ = load.read_run(write_run(tmp_path))
    assert run is not None
    fast = parts.read("samples_fast", run.tables["samples_fast"], run.run_id)[0]
    lane = Lane.split(fast, ["energy_mj"])[0]
    assert not counter_fell(lane)
    lane.columns["energy_mj"] = lane.columns["energy_mj"][::-1]
    assert counter_fell(lane)


def test_without_a_counter_energy_is_the_integral_and_says_so(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, counter=False, source="replay:a40-synthetic"))
    assert row["valid"], row["invalid_reason"]
    assert row["energy_source"] == "integral"
    assert row["power_w"] == pytest.approx(200)
    assert row["energy_ratio"] is None
    assert row["demonstration"]


@pytest.mark.parametrize(("status", "reason"), [("failed", "oom_gpu"), ("interrupted", "preempted"), ("running", None)])
def test_a_run_that_did_not_complete_is_a_row_without_figures(tmp_path: Path, status: str, reason: str | None) -> None:
    row = row_of(write_run(tmp_path, status=status, reason=reason))
    assert (row["status"], row["valid"]) == (status, False)
    assert row["images_per_s"] is None
    assert row["power_w"] is None
    assert status in row["invalid_reason"]
    assert (reason or "") in row["invalid_reason"]


def test_throughput_stands_alone_where_no_telemetry_was_asked_for() -> None:
    spans = {"t_start_mono_ns": 0, "t_end_mono_ns": 10 * S}
    window = {"window_id": "w", "kind": "measure", "status": "completed", "steps": 20, "images": 160, **spans}
    empty = {name: pl.DataFrame(schema=parts.polars_schema(name)) for name in ("samples_fast", "samples_slow", "steps")}
    facts = manifest("r-1", telemetry={"source": "none", "hz": None})
    row = runs.summarise(facts, [window], *empty.values())
    assert row["valid"]
    assert row["images_per_s"] == pytest.approx(16)
    assert row["power_w"] is None
    assert "power_w=telemetry off" in row["nulls"]


def test_an_interrupted_window_stays_out_of_the_figures(tmp_path: Path) -> None:
    run, _ = load.read_run(write_run(tmp_path))
    assert run is not None
    cut = {"window_id": "w-0b", "kind": "measure", "status": "interrupted", "steps": 5, "images": 40}
    tables = {name: parts.read(name, found, run.run_id)[0] for name, found in run.tables.items()}
    frames = [tables[name] for name in ("samples_fast", "samples_slow", "steps")]
    row = runs.summarise(run.manifest, [cut, *run.windows], *frames)
    assert row["images"] == 480
    assert "cut short" in row["warnings"]


def test_runtime_is_measured_where_the_run_went_the_whole_way(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path, workload_facts={"epochs": 1, "num_images": 400}))
    assert row["runtime_kind"] == "measured"
    assert row["runtime_h"] == pytest.approx(39 / 3600)


def test_mfu_needs_flop_and_a_peak_of_the_same_precision(tmp_path: Path) -> None:
    facts, peak = {"flop_per_image": 2.4e12}, {"bf16_dense_tflops": 149.7}
    run = write_run(tmp_path, workload_facts=facts, gpu_facts=peak)
    assert row_of(run)["mfu_pct"] == pytest.approx(100 * 2.4 * 16 / 149.7)
    other = row_of(write_run(tmp_path, "r-02", workload_facts={**facts, "precision": "fp32"}, gpu_facts=peak))
    assert other["mfu_pct"] is None
    assert "mfu_pct=the BF16 peak says nothing about fp32" in other["nulls"]


def test_samples_of_a_node_that_a_requeued_job_left_do_not_matter(tmp_path: Path) -> None:
    run, _ = load.read_run(write_run(tmp_path))
    assert run is not None
    tables = {name: parts.read(name, found, run.run_id)[0] for name, found in run.tables.items()}
    fast = tables["samples_fast"]
    earlier = fast.with_columns(
        pl.lit("GPU-of-another-node").alias("gpu_uuid"), (pl.col("t_mono_ns") + 9000 * S).alias("t_mono_ns")
    )
    same_gpu = fast.with_columns((pl.col("t_mono_ns") + 5000 * S).alias("t_mono_ns"))
    both = pl.concat([earlier, same_gpu, fast])
    row = runs.summarise(run.manifest, run.windows, both, tables["samples_slow"], tables["steps"])
    assert row["valid"], row["invalid_reason"]
    assert row["power_w"] == pytest.approx(200)
    assert row["gpu_util_pct"] == pytest.approx(98)
