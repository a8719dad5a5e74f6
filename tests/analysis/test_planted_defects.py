"""Defects planted in run directories go through the real merge: each is found, for the right reason.

A defective run stays in the dataset with its reason, and is in no mean.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import merge
from analysis.columns import COLUMNS, REAL
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import parts
from analysis.metrics import run_row
from analysis.metrics.facts import Facts
from analysis.stats.cells import build_cells
from inpaint_bench.core import schema
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Manifest, Window

from .build import A40, UNIX0, S, manifest, rewrite, rewrite_json, write_event, write_run

DEFECTIVE, SOUND = "r-2-defective", "r-1-sound"
SECONDS = (pl.col("t_mono_ns") - 1000 * S) / 1e9  # of the measure window


def defective(tmp_path: Path, **changes: Any) -> Path:
    """Write the run to plant a defect in, beside a sound one of the same cell."""
    write_run(tmp_path / "grace", SOUND)
    return write_run(tmp_path / "grace", DEFECTIVE, **changes)


def merged(tmp_path: Path) -> Dataset:
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds")


def row_of(dataset: Dataset, run_id: str = DEFECTIVE) -> dict[str, Any]:
    return dataset.runs.filter(pl.col("run_id") == run_id).row(0, named=True)


def cell_of(dataset: Dataset) -> dict[str, Any]:
    return build_cells(dataset.runs).row(0, named=True)


def reason_of(tmp_path: Path) -> str:
    """Return why the defective run is invalid. It is in the dataset; the cell holds the sound run only."""
    dataset = merged(tmp_path)
    assert row_of(dataset, SOUND)["valid"], row_of(dataset, SOUND)["invalid_reason"]
    row = row_of(dataset)
    assert row["valid"] is False
    assert cell_of(dataset)["run_ids"] == [SOUND]
    return str(row["invalid_reason"])


def valid_row_and_cell(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the defective run's row and its cell, where the run is still valid."""
    dataset = merged(tmp_path)
    row, cell = row_of(dataset), cell_of(dataset)
    assert row["valid"], row["invalid_reason"]
    assert cell["run_ids"] == [SOUND, DEFECTIVE]
    return row, cell


def refused_conflict(tmp_path: Path, attribute: str) -> str:
    """Return why the two runs are not merged. Where that is allowed, they are two cells."""
    with pytest.raises(UserError, match=f"add --allow-mixed {attribute}: then they are cells of their own") as error:
        merged(tmp_path)
    assert not (tmp_path / "ds").exists()
    merge.merge([tmp_path / "grace"], tmp_path / "ds", allow_mixed=[attribute])
    cells = build_cells(open_dataset(tmp_path / "ds").runs)
    assert sorted(cells["run_ids"].to_list()) == [[SOUND], [DEFECTIVE]]
    assert cells["series"].n_unique() == 2
    return str(error.value)


def column(name: str, value: Any, where: pl.Expr | None = None) -> Any:
    """Return a change of one column, in some of its rows."""
    new = value if isinstance(value, pl.Expr) else pl.lit(value)
    inside = pl.lit(True) if where is None else where
    return lambda rows: rows.with_columns(pl.when(inside).then(new).otherwise(name).cast(rows.schema[name]).alias(name))


def moved(kind: str, **seconds: float) -> Any:
    """Return a change of the windows of one kind: edges moved by seconds, on both clocks."""

    def change(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for window in windows:
            for edge, by in seconds.items() if window["kind"] == kind else ():
                for clock in ("mono", "unix"):
                    window[f"t_{edge}_{clock}_ns"] += round(by * S)
        return windows

    return change


class TestWrongGpu:
    def test_is_detected_by_its_uuid(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        for table in ("samples_fast", "samples_slow"):
            rewrite(folder, table, column("gpu_uuid", "GPU-of-a-neighbour"))
        reason = f"GPUs differ: samples of GPU-of-a-neighbour, which the manifest does not list; no samples of {A40}"
        assert reason in reason_of(tmp_path)

    def test_is_detected_in_the_slow_samples_alone(self, tmp_path: Path) -> None:
        rewrite(defective(tmp_path), "samples_slow", column("gpu_uuid", "GPU-of-a-neighbour"))
        assert "slow samples of GPU-of-a-neighbour, which the manifest does not list" in reason_of(tmp_path)


class TestCoTenant:
    def test_makes_the_run_invalid(self, tmp_path: Path) -> None:
        write_event(defective(tmp_path), "co_tenant", "pid 4242")
        assert reason_of(tmp_path) == f"another process was on GPU {A40}: pid 4242"

    def test_before_the_warm_up_makes_the_run_invalid_too(self, tmp_path: Path) -> None:
        write_event(defective(tmp_path), "co_tenant", "pid 4242", at_s=-9.9)
        assert f"another process was on GPU {A40}: pid 4242" in reason_of(tmp_path)

    def test_on_a_gpu_of_another_node_is_ignored(self, tmp_path: Path) -> None:
        write_event(defective(tmp_path), "co_tenant", "pid 4242", gpu_uuid="GPU-of-another-node")
        valid_row_and_cell(tmp_path)

    def test_during_an_earlier_start_is_ignored(self, tmp_path: Path) -> None:
        write_event(defective(tmp_path), "co_tenant", "pid 4242", at_s=-1500)
        valid_row_and_cell(tmp_path)


class TestEnergyCounter:
    def test_reset_gives_no_energy(self, tmp_path: Path) -> None:
        rewrite(
            defective(tmp_path),
            "samples_fast",
            column("energy_mj", pl.col("energy_mj") - 5_000_000, SECONDS > 12),
        )
        assert f"GPU {A40}: energy counter went back (driver reloaded?)" in reason_of(tmp_path)
        assert row_of(open_dataset(tmp_path / "ds"))["energy_j"] is None

    def test_stuck_while_power_is_drawn_is_not_zero_joules(self, tmp_path: Path) -> None:
        rewrite(defective(tmp_path), "samples_fast", column("energy_mj", 5_000_000))
        assert "energy counter does not move for 30.00 s at 0.0 s of the window, while 200 W are drawn" in reason_of(
            tmp_path
        )
        row = row_of(open_dataset(tmp_path / "ds"))
        assert (row["energy_source"], row["power_w"]) == ("integral", pytest.approx(200))

    def test_stuck_half_way_does_not_halve_the_energy(self, tmp_path: Path) -> None:
        stuck = pl.col("energy_mj").clip(upper_bound=5_000_000 + 25 * 200_000)
        rewrite(defective(tmp_path), "samples_fast", column("energy_mj", stuck))
        assert "energy counter does not move for 15.00 s at 15.0 s of the window" in reason_of(tmp_path)
        assert row_of(open_dataset(tmp_path / "ds"))["energy_j"] == pytest.approx(6000)

    def test_with_updates_every_half_second_is_valid(self, tmp_path: Path) -> None:
        coarse = pl.col("energy_mj") // 100_000 * 100_000
        rewrite(defective(tmp_path), "samples_fast", column("energy_mj", coarse))
        row, _ = valid_row_and_cell(tmp_path)
        assert row["energy_source"] == "counter"

    def test_deviation_from_the_integral_is_a_warning_with_both_numbers(self, tmp_path: Path) -> None:
        rewrite(defective(tmp_path), "samples_fast", column("energy_mj", pl.col("energy_mj") // 100 * 93))
        row, _ = valid_row_and_cell(tmp_path)
        both = "-7.0 % from the integral of sampled power: 5580 J by the counter, 6000 J by the integral"
        assert f"energy counter deviates {both}" in row["warnings"]


class TestMissingSamples:
    def test_in_a_window_are_reported_as_a_gap_with_place_and_length(self, tmp_path: Path) -> None:
        defective(tmp_path, gap=(10.0, 13.0))
        assert f"GPU {A40}: gap of 3.00 s at 10.0 s of the window (limit 0.50 s)" in reason_of(tmp_path)

    def test_of_the_slow_table_make_peaks_null(self, tmp_path: Path) -> None:
        rewrite(defective(tmp_path), "samples_slow", lambda rows: rows.filter(~SECONDS.is_between(5, 20)))
        row, cell = valid_row_and_cell(tmp_path)
        assert "left out: temp_gpu_c unknown for 17.00 s (limit 3.00 s)" in row["warnings"]
        hidden = ("temp_gpu_c_max", "temp_gpu_c_mean", "vram_used_mib_peak", "vram_pct", "sm_clock_mhz_mean")
        assert [row[name] for name in hidden] == [None] * len(hidden)
        assert all(f"{name}=" in row["null_reasons"] for name in hidden)
        assert (cell["temp_gpu_c_max_n"], cell["power_w_n"]) == (1, 2)


class TestWindowCutByPreemption:
    @pytest.mark.parametrize(
        ("status", "reason", "message"),
        [
            ("interrupted", "preempted", "status interrupted (preempted)"),
            ("running", None, "status running"),
        ],
    )
    def test_in_an_interrupted_run_gives_no_figures(
        self, tmp_path: Path, status: str, reason: str | None, message: str
    ) -> None:
        defective(tmp_path, status=status, reason=reason)
        assert reason_of(tmp_path) == message
        row = row_of(open_dataset(tmp_path / "ds"))
        assert [row[name] for name in ("images_per_s", "power_w", "joules_per_image")] == [None] * 3

    @pytest.mark.parametrize("status", ["interrupted", "running", "completed"])
    def test_without_an_end_gives_no_figures(self, tmp_path: Path, status: str) -> None:
        """Check a manifest that says completed while the window has no end."""

        def cut(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            no_end = {"status": status, "t_end_mono_ns": None, "t_end_unix_ns": None}
            return [{**w, **no_end} if w["kind"] == "measure" else w for w in windows]

        rewrite_json(defective(tmp_path), schema.WINDOWS, cut)
        assert reason_of(tmp_path) == f"no completed measure window ({status}, without an end)"

    def test_is_known_from_the_saved_scheduler_state(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        (folder / schema.SCHEDULER).write_text('{"state": "PREEMPTED", "detail": ""}')
        assert reason_of(tmp_path) == "status failed (preempted)"


class TestWarmUpIncluded:
    def test_by_a_measure_window_that_starts_too_early(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        rewrite_json(folder, schema.WINDOWS, moved("measure", start=-4))
        assert "warm-up included: the measure window shares 4.00 s with warmup window w-0" in reason_of(tmp_path)

    def test_by_a_warm_up_window_inside_it(self, tmp_path: Path) -> None:
        rewrite_json(defective(tmp_path), schema.WINDOWS, moved("warmup", start=12, end=12))
        assert "warm-up included: the measure window shares 9.00 s with warmup window w-0" in reason_of(tmp_path)

    def test_by_steps_that_began_before_the_window(self, tmp_path: Path) -> None:
        early = pl.col("t_start_mono_ns") - 6 * S
        rewrite(defective(tmp_path), "steps", column("t_start_mono_ns", early, pl.col("step") < 10))
        assert "warm-up included: 10 step(s) began before the measure window opened" in reason_of(tmp_path)

    def test_and_a_validation_inside_it_are_reported(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        rewrite_json(folder, schema.WINDOWS, moved("warmup", start=12, end=12))
        rewrite_json(
            folder,
            schema.WINDOWS,
            lambda windows: [{**w, "kind": "validation"} if w["kind"] == "warmup" else w for w in windows],
        )
        assert reason_of(tmp_path) == "the measure window shares 9.00 s with validation window w-0"

    def test_is_not_reported_for_a_window_of_an_earlier_boot(self, tmp_path: Path) -> None:
        """Check that equal monotonic times of two nodes of a requeued job, which occur by chance, are no overlap."""

        def earlier(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for edge in ("start", "end"):
                windows[0][f"t_{edge}_mono_ns"] += 12 * S
                windows[0][f"t_{edge}_unix_ns"] -= 5000 * S
            return windows

        rewrite_json(defective(tmp_path, slurm={"restart_count": 1}), schema.WINDOWS, earlier)
        valid_row_and_cell(tmp_path)


class TestInstantAndAveragedPower:
    @staticmethod
    def without_counter(rows: pl.DataFrame) -> pl.DataFrame:
        return rows.with_columns(
            pl.lit(None).alias("energy_mj"), pl.lit(None).alias("power_instant_w"), pl.lit(250.0).alias("power_avg1s_w")
        )

    def test_of_two_runs_are_never_averaged(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        rewrite(folder, "samples_fast", self.without_counter)
        row, cell = valid_row_and_cell(tmp_path)
        assert (row["energy_j"], row["power_w"], row["joules_per_image"]) == (None, None, None)
        assert "no energy: only one-second averages of power are known" in row["warnings"]
        assert "energy_j=only one-second averages of power are known" in row["null_reasons"]
        assert (cell["power_w"], cell["power_w_n"]) == (pytest.approx(200), 1)

    def test_of_one_run_are_not_combined(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        rewrite(folder, "samples_fast", column("energy_mj", None))
        rewrite(folder, "samples_fast", column("power_instant_w", None, SECONDS > 15))
        rewrite(folder, "samples_fast", column("power_avg1s_w", None, SECONDS < 15))
        row, _ = valid_row_and_cell(tmp_path)
        assert (row["energy_j"], row["energy_integral_j"], row["power_w"]) == (None, None, None)
        assert "left out: power_instant_w" in row["warnings"]

    def test_are_never_both_in_the_ratio_of_counter_to_integral(self, tmp_path: Path) -> None:
        rewrite(defective(tmp_path), "samples_fast", column("power_instant_w", None))
        row, cell = valid_row_and_cell(tmp_path)
        assert (row["energy_source"], row["energy_j"]) == ("counter", pytest.approx(6000))
        assert (row["energy_ratio"], cell["energy_ratio_n"]) == (None, 1)

    def test_energy_by_counter_and_by_integral_is_a_conflict(self, tmp_path: Path) -> None:
        defective(tmp_path, counter=False)
        reason = refused_conflict(tmp_path, "power_semantics")
        assert f"power_semantics energy_mj by nvml (1 run(s): {SOUND}) and power_instant_w by nvml (1 run(s)" in reason


class TestPowerLimit:
    def test_that_differs_is_a_conflict(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        rewrite_json(folder, schema.MANIFEST, lambda m: {**m, "devices": [{**m["devices"][0], "power_limit_w": 250.0}]})
        reason = refused_conflict(tmp_path, "power_limit")
        assert f"power_limit 300 W (1 run(s): {SOUND}) and 250 W (1 run(s): {DEFECTIVE})" in reason

    def test_that_changed_during_a_run_makes_it_invalid(self, tmp_path: Path) -> None:
        write_event(defective(tmp_path), "power_limit", "300 W to 250 W")
        assert reason_of(tmp_path) == f"the power limit changed during the run on GPU {A40}: 300 W to 250 W"

    def test_below_the_mean_power_makes_the_run_invalid(self, tmp_path: Path) -> None:
        defective(tmp_path, power_w=330.0)
        assert "mean power of 330 W, over the limit of 300 W in the manifest: it was not in force" in reason_of(
            tmp_path
        )


def test_another_driver_is_a_conflict(tmp_path: Path) -> None:
    defective(tmp_path, environment={"driver": "570.172.08"})
    reason = refused_conflict(tmp_path, "driver")
    assert f"driver 580.95.05 (1 run(s): {SOUND}) and 570.172.08 (1 run(s): {DEFECTIVE})" in reason


def test_another_board_is_a_conflict(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", SOUND, gpu="a100")
    folder = write_run(tmp_path / "grace", DEFECTIVE, gpu="a100")
    sxm = {"name": "NVIDIA A100-SXM4-40GB"}
    rewrite_json(folder, schema.MANIFEST, lambda m: {**m, "devices": [m["devices"][0] | sxm]})
    reason = refused_conflict(tmp_path, "board")
    boards = f"NVIDIA A100-PCIE-40GB (1 run(s): {SOUND}) and NVIDIA A100-SXM4-40GB (1 run(s): {DEFECTIVE})"
    assert f"board {boards}" in reason


class TestThrottledRun:
    @staticmethod
    def throttle(folder: Path, name: str, share: float) -> None:
        throttled_ns = (pl.col("t_mono_ns") - 990 * S) * share
        rewrite(folder, "samples_slow", column(name, throttled_ns))

    @pytest.mark.parametrize("name", ["throttle_sw_thermal_ns", "throttle_hw_thermal_ns"])
    def test_by_temperature_has_a_warning_with_the_share_of_the_window(self, tmp_path: Path, name: str) -> None:
        self.throttle(defective(tmp_path), name, 0.12)
        row, _ = valid_row_and_cell(tmp_path)
        assert "thermally throttled for 12.0 % of the measure window" in row["warnings"]
        assert row["throttle_thermal_pct"] == pytest.approx(12)

    def test_by_temperature_for_less_than_one_percent_has_no_warning(self, tmp_path: Path) -> None:
        self.throttle(defective(tmp_path), "throttle_sw_thermal_ns", 0.009)
        row, _ = valid_row_and_cell(tmp_path)
        assert "throttled" not in (row["warnings"] or "")

    def test_is_throttled_for_at_most_its_whole_window(self, tmp_path: Path) -> None:
        """Software and hardware throttling may overlap."""
        folder = defective(tmp_path)
        self.throttle(folder, "throttle_sw_thermal_ns", 0.9)
        self.throttle(folder, "throttle_hw_thermal_ns", 0.8)
        row, _ = valid_row_and_cell(tmp_path)
        assert row["throttle_thermal_pct"] == 100


def test_run_in_two_copies_is_one_run(tmp_path: Path) -> None:
    """Check that duplicates are detected by content: the copy has another folder and another name."""
    folder = defective(tmp_path)
    copy = tmp_path / "grace" / "z-backup" / "renamed"
    shutil.copytree(folder, copy)
    dataset = merged(tmp_path)
    assert dataset.skipped.select("path", "code", "run_id").rows() == [(str(copy), "duplicate", DEFECTIVE)]
    assert str(folder) in dataset.skipped["reason"][0]
    assert cell_of(dataset)["n"] == 2


class TestTruncatedPart:
    @pytest.mark.parametrize(
        ("index", "reason"),
        [
            (0, "after the window opened"),
            (1, "gap of "),
            (2, "before the window closed"),
        ],
    )
    def test_is_listed_and_its_samples_are_missing(self, tmp_path: Path, index: int, reason: str) -> None:
        part = defective(tmp_path) / "samples_fast" / f"part-{index:06d}.parquet"
        part.write_bytes(part.read_bytes()[:-40])
        assert reason in reason_of(tmp_path)
        skip = open_dataset(tmp_path / "ds").skipped.row(0, named=True)
        assert (skip["path"], skip["code"], skip["run_id"]) == (str(part), "truncated", DEFECTIVE)
        assert "no readable Parquet footer" in skip["reason"]

    def test_of_the_step_table_gives_a_warning_with_the_missing_steps(self, tmp_path: Path) -> None:
        folder = defective(tmp_path)
        part = folder / "steps" / "part-000000.parquet"
        rows = pl.read_parquet(part)
        rewrite(folder, "steps", lambda rows: rows.head(40))
        lost = folder / "steps" / "part-000001.parquet"
        rows.tail(20).write_parquet(lost)
        lost.write_bytes(lost.read_bytes()[:-40])
        row, _ = valid_row_and_cell(tmp_path)
        assert "step table holds 40 of 60 steps" in row["warnings"]
        assert open_dataset(tmp_path / "ds").skipped["path"].to_list() == [str(lost)]


class TestClockJump:
    def test_backwards_of_the_monotonic_clock_is_detected_in_samples(self, tmp_path: Path) -> None:
        back = pl.col("t_mono_ns") - 2 * S
        rewrite(defective(tmp_path), "samples_fast", column("t_mono_ns", back, SECONDS > 15))
        assert "clock does not move forward" in reason_of(tmp_path)

    def test_backwards_is_detected_in_the_step_table(self, tmp_path: Path) -> None:
        rewrite(
            defective(tmp_path),
            "steps",
            column("t_start_mono_ns", pl.col("t_start_mono_ns") - S, pl.col("step") == 30),
        )
        assert "clock jump: the times of steps go back in 1 places" in reason_of(tmp_path)

    @pytest.mark.parametrize("seconds", [-5, 0.6])
    def test_of_the_wall_clock_is_detected_in_the_window(self, tmp_path: Path, seconds: float) -> None:
        def jump(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            windows[1]["t_end_unix_ns"] += round(seconds * S)
            return windows

        rewrite_json(defective(tmp_path), schema.WINDOWS, jump)
        reason = f"clock jump: the window lasted 30.00 s by the monotonic clock, {30 + seconds:.2f} s by the wall clock"
        assert reason in reason_of(tmp_path)

    def test_reverted_before_the_window_closes_is_detected_in_samples(self, tmp_path: Path) -> None:
        ahead = pl.col("t_unix_ns") + 8 * S
        rewrite(defective(tmp_path), "samples_fast", column("t_unix_ns", ahead, SECONDS.is_between(10, 20)))
        assert "clock jump: wall clock and monotonic clock of the samples drift 8.00 s apart" in reason_of(tmp_path)

    def test_of_less_than_half_a_second_is_tolerated(self, tmp_path: Path) -> None:
        ahead = pl.col("t_unix_ns") + S // 2 - 1_000_000
        rewrite(defective(tmp_path), "samples_fast", column("t_unix_ns", ahead, SECONDS > 10))
        valid_row_and_cell(tmp_path)


SHARE = st.floats(0, 1)


@st.composite
def valid_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the row of a sound run of any length, rate, power, load and throttling."""
    hz, seconds, num_steps = draw(st.sampled_from([5.0, 10.0, 20.0])), draw(st.floats(2, 40)), draw(st.integers(1, 80))
    batch, rng = draw(st.integers(1, 256)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    start = draw(st.integers(10**10, 10**15))
    end = start + round(seconds * S)
    times = {"started_unix_ns": start + UNIX0 - 3 * S, "ended_unix_ns": end + UNIX0}
    facts = manifest("r-1", batch=batch, telemetry={"hz": hz}, **times)
    head = {"run_id": "r-1", "gpu_uuid": A40, "source": "nvml", "read_us": 100.0}
    heads = []
    for rate in (hz, 1.0):
        tick = np.arange(int((seconds + 6) * rate) + 2)
        t = start - 3 * S + np.round((tick + rng.uniform(-0.2, 0.2, len(tick))) * S / rate).astype(np.int64)
        heads.append({**head, "tick_seq": tick, "t_mono_ns": t, "t_unix_ns": t + UNIX0})
    fast, slow = heads
    watts = rng.uniform(30, 300, len(fast["tick_seq"]))
    joules = np.concatenate([[0], np.cumsum((watts[1:] + watts[:-1]) / 2 * np.diff(fast["t_mono_ns"]) * 1e-9)])
    counter = None if draw(st.booleans()) else np.round(joules * 1000).astype(np.uint64)
    fast |= {"power_instant_w": watts, "power_avg1s_w": watts, "energy_mj": counter}
    fast |= {name: rng.uniform(0, 100, len(watts)) for name in ("gpu_util_pct", "mem_active_pct")}
    for name in ("throttle_power_cap_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns"):
        slow[name] = np.round((slow["t_mono_ns"] - slow["t_mono_ns"][0]) * draw(SHARE)).astype(np.uint64)
    slow |= {"vram_total_mib": 46068.0, "vram_reserved_mib": 600.0, "vram_used_mib": 22000 + draw(SHARE) * 23468}
    slow |= {"temp_gpu_c": 60.0, "sm_clock_mhz": 1410}
    edges = np.linspace(start, end, num_steps + 1).astype(np.int64)
    steps = {
        "run_id": "r-1",
        "window_id": "w",
        "step": np.arange(num_steps),
        "t_start_mono_ns": edges[:-1],
        "t_end_mono_ns": np.minimum(edges[1:], end),
        "data_wait_ns": (np.diff(edges) * draw(SHARE)).astype(np.int64),
        "images": batch,
    }
    window = {"window_id": "w", "kind": "measure", "status": "completed", "steps": num_steps}
    window |= {"images": num_steps * batch, "t_start_mono_ns": start, "t_end_mono_ns": end}
    window |= {"t_start_unix_ns": start + UNIX0, "t_end_unix_ns": end + UNIX0}
    tables = {"samples_fast": fast, "samples_slow": slow, "steps": steps}
    empty = {name: parts.empty_frame(name) for name in schema.TABLES}
    frames = empty | {name: frame(name, columns) for name, columns in tables.items()}
    run, windows = msgspec.convert(facts, Manifest), [msgspec.convert(window, Window)]
    return run_row.summarise(Facts(manifest=run, windows=windows, tables=frames))


def frame(table: str, columns: dict[str, Any]) -> pl.DataFrame:
    """Return rows of a table; scalars are repeated, columns that are not given are null."""
    empty = parts.empty_frame(table)
    rows = next(len(value) for value in columns.values() if isinstance(value, np.ndarray))
    series = {
        name: pl.Series(name, value) if isinstance(value, np.ndarray) else pl.Series(name, [value] * rows)
        for name in empty.columns
        for value in [columns.get(name)]
    }
    return pl.DataFrame(series).cast(dict(empty.schema))


@settings(max_examples=60, deadline=None)
@given(valid_runs())
def test_figures_of_any_valid_window_are_consistent(row: dict[str, Any]) -> None:
    assert row["valid"], row["invalid_reason"]
    assert row["joules_per_image"] * row["images_per_s_per_w"] == pytest.approx(1, rel=1e-9)
    assert row["power_w"] * row["window_s"] == pytest.approx(row["energy_j"], rel=1e-9)
    assert row["images_per_s"] / row["power_w"] == pytest.approx(row["images_per_s_per_w"], rel=1e-9)
    shares = [each.name for each in COLUMNS if each.kind == REAL and each.name.endswith("_pct")]
    shares = [name for name in shares if name not in ("step_drift_pct", "step_mean_pct")]  # these may be negative
    known = {name: row[name] for name in shares if row[name] is not None}
    assert known.keys() >= {
        "coverage_pct",
        "data_wait_pct",
        "gpu_util_pct",
        "mem_active_pct",
        "vram_pct",
        "throttle_power_pct",
        "throttle_thermal_pct",
    }
    assert {name: value for name, value in known.items() if not 0 <= value <= 100} == {}
