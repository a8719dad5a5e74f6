"""Lies planted in run directories, told through the real merge: each is caught, and for the right reason.

A run that is caught stays in the dataset, in no mean, with its reason in words.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import merge
from analysis.columns import FLOAT
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import parts
from analysis.metrics import run_row
from analysis.stats import cells as aggregate
from inpaint_bench.core import schema
from inpaint_bench.core.errors import UserError

from .build import UNIX0, S, manifest, rewrite, rewrite_json, write_event, write_run

LIAR, HONEST = "r-liar", "r-honest"
SECONDS = (pl.col("t_mono_ns") - 1000 * S) / 1e9  # of the measure window


def liar(tmp_path: Path, **changes: Any) -> Path:
    """The run to plant a lie in, beside an honest one of the same cell."""
    write_run(tmp_path / "grace", HONEST)
    return write_run(tmp_path / "grace", LIAR, **changes)


def merged(tmp_path: Path) -> Dataset:
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds")


def row_of(dataset: Dataset, run_id: str = LIAR) -> dict[str, Any]:
    return dataset.runs.filter(pl.col("run_id") == run_id).row(0, named=True)


def cell_of(dataset: Dataset) -> dict[str, Any]:
    return aggregate.build_cells(dataset.runs).row(0, named=True)


def caught(tmp_path: Path) -> str:
    """Why the liar does not count. It is still in the dataset; the honest run alone is in the cell."""
    dataset = merged(tmp_path)
    assert row_of(dataset, HONEST)["valid"], row_of(dataset, HONEST)["invalid_reason"]
    row = row_of(dataset)
    assert row["valid"] is False
    assert cell_of(dataset)["run_ids"] == [HONEST]
    return str(row["invalid_reason"])


def counted(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The liar's row and its cell, where the lie is named and the run still counts."""
    dataset = merged(tmp_path)
    row, cell = row_of(dataset), cell_of(dataset)
    assert row["valid"], row["invalid_reason"]
    assert cell["run_ids"] == [HONEST, LIAR]
    return row, cell


def refused(tmp_path: Path, attribute: str) -> str:
    """Why the two runs are not merged. Told to take them, they are two cells, and the figures of neither change."""
    with pytest.raises(UserError, match=f"add --allow-mixed {attribute}: then they are cells of their own") as error:
        merged(tmp_path)
    assert not (tmp_path / "ds").exists()
    merge.merge([tmp_path / "grace"], tmp_path / "ds", allow_mixed=[attribute])
    cells = aggregate.build_cells(open_dataset(tmp_path / "ds").runs)
    assert sorted(cells["run_ids"].to_list()) == [[HONEST], [LIAR]]
    assert cells["series"].n_unique() == 2
    return str(error.value)


def column(name: str, value: Any, where: pl.Expr | None = None) -> Any:
    """A change of one column, in some of its rows."""
    new = value if isinstance(value, pl.Expr) else pl.lit(value)
    inside = pl.lit(True) if where is None else where
    return lambda rows: rows.with_columns(pl.when(inside).then(new).otherwise(name).cast(rows.schema[name]).alias(name))


def moved(kind: str, **seconds: float) -> Any:
    """A change of the windows of one kind: edges moved by seconds, by both clocks."""

    def change(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for window in windows:
            for edge, by in seconds.items() if window["kind"] == kind else ():
                for clock in ("mono", "unix"):
                    window[f"t_{edge}_{clock}_ns"] += round(by * S)
        return windows

    return change


class TestTheWrongGPU:
    def test_by_its_index_is_told_by_its_uuid(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        for table in ("samples_fast", "samples_slow"):
            rewrite(folder, table, column("gpu_uuid", "GPU-of-a-neighbour"))
        why = "GPUs differ: samples of GPU-of-a-neighbour, which the manifest does not name; no samples of GPU-a40"
        assert why in caught(tmp_path)

    def test_does_not_pass_when_only_its_temperature_and_memory_were_sampled(self, tmp_path: Path) -> None:
        rewrite(liar(tmp_path), "samples_slow", column("gpu_uuid", "GPU-of-a-neighbour"))
        assert "slow samples of GPU-of-a-neighbour, which the manifest does not name" in caught(tmp_path)


class TestACoTenant:
    def test_takes_the_run_out_of_every_mean(self, tmp_path: Path) -> None:
        write_event(liar(tmp_path), "co_tenant", "pid 4242")
        assert caught(tmp_path) == "another process was on GPU GPU-a40: pid 4242"

    def test_before_the_first_warm_up_step_counts_too(self, tmp_path: Path) -> None:
        write_event(liar(tmp_path), "co_tenant", "pid 4242", at_s=-9.9)
        assert "another process was on GPU GPU-a40: pid 4242" in caught(tmp_path)

    def test_of_a_gpu_that_a_requeued_job_left_is_no_concern(self, tmp_path: Path) -> None:
        write_event(liar(tmp_path), "co_tenant", "pid 4242", gpu_uuid="GPU-of-another-node")
        counted(tmp_path)

    def test_of_an_attempt_before_this_one_is_no_concern(self, tmp_path: Path) -> None:
        write_event(liar(tmp_path), "co_tenant", "pid 4242", at_s=-1500)
        counted(tmp_path)


class TestTheEnergyCounter:
    def test_that_was_reset_gives_no_energy(self, tmp_path: Path) -> None:
        rewrite(liar(tmp_path), "samples_fast", column("energy_mj", pl.col("energy_mj") - 5_000_000, SECONDS > 12))
        assert "GPU GPU-a40: energy counter went back (driver reloaded?)" in caught(tmp_path)
        assert row_of(open_dataset(tmp_path / "ds"))["energy_j"] is None

    def test_that_is_stuck_while_power_is_drawn_is_not_zero_joules(self, tmp_path: Path) -> None:
        rewrite(liar(tmp_path), "samples_fast", column("energy_mj", 5_000_000))
        assert "energy counter does not move for 30.00 s at 0.0 s of the window, while 200 W are drawn" in caught(
            tmp_path
        )
        row = row_of(open_dataset(tmp_path / "ds"))
        assert (row["energy_source"], row["power_w"]) == ("integral", pytest.approx(200))

    def test_that_gets_stuck_half_way_does_not_halve_the_energy(self, tmp_path: Path) -> None:
        stuck = pl.col("energy_mj").clip(upper_bound=5_000_000 + 25 * 200_000)
        rewrite(liar(tmp_path), "samples_fast", column("energy_mj", stuck))
        assert "energy counter does not move for 15.00 s at 15.0 s of the window" in caught(tmp_path)
        assert row_of(open_dataset(tmp_path / "ds"))["energy_j"] == pytest.approx(6000)

    def test_that_moves_every_half_second_is_merely_coarse(self, tmp_path: Path) -> None:
        coarse = pl.col("energy_mj") // 100_000 * 100_000
        rewrite(liar(tmp_path), "samples_fast", column("energy_mj", coarse))
        row, _ = counted(tmp_path)
        assert row["energy_source"] == "counter"

    def test_that_disagrees_with_the_integral_is_a_warning_with_both_numbers(self, tmp_path: Path) -> None:
        rewrite(liar(tmp_path), "samples_fast", column("energy_mj", pl.col("energy_mj") // 10 * 9))
        row, _ = counted(tmp_path)
        both = "-10.0 % off the integral of sampled power: 5400 J by the counter, 6000 J by the integral"
        assert f"energy counter is {both}" in row["warnings"]


class TestMissingSamples:
    def test_in_a_window_are_a_gap_with_its_place_and_length(self, tmp_path: Path) -> None:
        liar(tmp_path, gap=(10.0, 13.0))
        assert "GPU GPU-a40: gap of 3.00 s at 10.0 s of the window (limit 0.50 s)" in caught(tmp_path)

    def test_in_the_slow_lane_leave_no_peak_that_may_have_been_missed(self, tmp_path: Path) -> None:
        rewrite(liar(tmp_path), "samples_slow", lambda rows: rows.filter(~SECONDS.is_between(5, 20)))
        row, cell = counted(tmp_path)
        assert "left out: temp_gpu_c unknown for 17.00 s (limit 3.00 s)" in row["warnings"]
        hidden = ("temp_gpu_c_max", "temp_gpu_c_mean", "vram_used_mib_peak", "vram_pct", "sm_clock_mhz_mean")
        assert [row[name] for name in hidden] == [None] * len(hidden)
        assert all(f"{name}=" in row["null_reasons"] for name in hidden)
        assert (cell["temp_gpu_c_max_n"], cell["power_w_n"]) == (1, 2)


class TestAWindowCutByPreEmption:
    @pytest.mark.parametrize(
        ("status", "reason", "why"),
        [
            ("interrupted", "preempted", "status interrupted (preempted)"),
            ("running", None, "status running"),
        ],
    )
    def test_in_a_run_that_was_cut_has_no_figures(
        self, tmp_path: Path, status: str, reason: str | None, why: str
    ) -> None:
        liar(tmp_path, status=status, reason=reason)
        assert caught(tmp_path) == why
        row = row_of(open_dataset(tmp_path / "ds"))
        assert [row[name] for name in ("images_per_s", "power_w", "joules_per_image")] == [None] * 3

    @pytest.mark.parametrize("status", ["interrupted", "running", "completed"])
    def test_is_given_no_end_that_nobody_saw(self, tmp_path: Path, status: str) -> None:
        """The manifest claims that the run is complete; the window knows better."""

        def cut(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            gone = {"status": status, "t_end_mono_ns": None, "t_end_unix_ns": None}
            return [{**one, **gone} if one["kind"] == "measure" else one for one in windows]

        rewrite_json(liar(tmp_path), schema.WINDOWS, cut)
        assert caught(tmp_path) == f"no completed measure window ({status}, without an end)"

    def test_is_told_by_the_schedulers_last_word_where_the_manifest_is_silent(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        (folder / schema.SCHEDULER).write_text('{"state": "PREEMPTED", "detail": ""}')
        assert caught(tmp_path) == "status failed (preempted)"


class TestWarmUpCountedIn:
    def test_by_a_measure_window_that_opens_too_early(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        rewrite_json(folder, schema.WINDOWS, moved("measure", start=-4))
        assert "warm-up counted in: the measure window shares 4.00 s with warmup window w-0" in caught(tmp_path)

    def test_by_a_warm_up_window_inside_it(self, tmp_path: Path) -> None:
        rewrite_json(liar(tmp_path), schema.WINDOWS, moved("warmup", start=12, end=12))
        assert "warm-up counted in: the measure window shares 9.00 s with warmup window w-0" in caught(tmp_path)

    def test_by_steps_that_began_before_it(self, tmp_path: Path) -> None:
        early = pl.col("t_start_mono_ns") - 6 * S
        rewrite(liar(tmp_path), "steps", column("t_start_mono_ns", early, pl.col("step") < 10))
        assert "warm-up counted in: 10 step(s) began before the measure window opened" in caught(tmp_path)

    def test_or_a_validation_is_no_part_of_a_measurement(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        rewrite_json(folder, schema.WINDOWS, moved("warmup", start=12, end=12))
        rewrite_json(
            folder,
            schema.WINDOWS,
            lambda windows: [{**w, "kind": "validation"} if w["kind"] == "warmup" else w for w in windows],
        )
        assert caught(tmp_path) == "the measure window shares 9.00 s with validation window w-0"

    def test_is_not_suspected_of_an_earlier_boots_window(self, tmp_path: Path) -> None:
        """A requeued job: the monotonic clocks of two nodes may show the same times by chance."""

        def earlier(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for edge in ("start", "end"):
                windows[0][f"t_{edge}_mono_ns"] += 12 * S
                windows[0][f"t_{edge}_unix_ns"] -= 5000 * S
            return windows

        rewrite_json(liar(tmp_path), schema.WINDOWS, earlier)
        counted(tmp_path)


class TestInstantAndAveragedPower:
    @staticmethod
    def without_counter(rows: pl.DataFrame) -> pl.DataFrame:
        return rows.with_columns(
            pl.lit(None).alias("energy_mj"), pl.lit(None).alias("power_instant_w"), pl.lit(250.0).alias("power_avg1s_w")
        )

    def test_of_two_runs_are_never_in_one_mean(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        rewrite(folder, "samples_fast", self.without_counter)
        row, cell = counted(tmp_path)
        assert (row["energy_j"], row["power_w"], row["joules_per_image"]) == (None, None, None)
        assert "no energy: only one-second averages of power are known" in row["warnings"]
        assert "energy_j=only one-second averages of power are known" in row["null_reasons"]
        assert (cell["power_w"], cell["power_w_n"]) == (pytest.approx(200), 1)

    def test_of_one_run_are_not_sewn_together(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        rewrite(folder, "samples_fast", column("energy_mj", None))
        rewrite(folder, "samples_fast", column("power_instant_w", None, SECONDS > 15))
        rewrite(folder, "samples_fast", column("power_avg1s_w", None, SECONDS < 15))
        row, _ = counted(tmp_path)
        assert (row["energy_j"], row["energy_integral_j"], row["power_w"]) == (None, None, None)
        assert "left out: power_instant_w" in row["warnings"]

    def test_are_never_both_in_the_ratio_of_counter_to_integral(self, tmp_path: Path) -> None:
        rewrite(liar(tmp_path), "samples_fast", column("power_instant_w", None))
        row, cell = counted(tmp_path)
        assert (row["energy_source"], row["energy_j"]) == ("counter", pytest.approx(6000))
        assert (row["energy_ratio"], cell["energy_ratio_n"]) == (None, 1)

    def test_energy_by_counter_and_by_integral_is_not_merged_unasked(self, tmp_path: Path) -> None:
        liar(tmp_path, counter=False)
        why = refused(tmp_path, "power_semantics")
        assert f"power_semantics energy_mj by nvml (1 run(s): {HONEST}) and power_instant_w by nvml (1 run(s)" in why


class TestThePowerLimit:
    def test_that_differs_is_not_merged_unasked(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        rewrite_json(folder, schema.MANIFEST, lambda m: {**m, "devices": [{**m["devices"][0], "power_limit_w": 250.0}]})
        why = refused(tmp_path, "power_limit")
        assert f"power_limit 300 W (1 run(s): {HONEST}) and 250 W (1 run(s): {LIAR})" in why

    def test_that_changed_within_a_run_makes_it_invalid(self, tmp_path: Path) -> None:
        write_event(liar(tmp_path), "power_limit", "300 W to 250 W")
        assert caught(tmp_path) == "the power limit changed within the run on GPU GPU-a40: 300 W to 250 W"

    def test_that_the_power_drawn_exceeds_cannot_have_been_in_force(self, tmp_path: Path) -> None:
        liar(tmp_path, power_w=330.0)
        assert "330 W on average, over the power limit of 300 W by the manifest: it was not in force" in caught(
            tmp_path
        )


def test_another_driver_is_not_merged_unasked(tmp_path: Path) -> None:
    liar(tmp_path, environment={"driver": "570.172.08"})
    why = refused(tmp_path, "driver")
    assert f"driver 580.95.05 (1 run(s): {HONEST}) and 570.172.08 (1 run(s): {LIAR})" in why


def test_another_board_is_not_merged_unasked(tmp_path: Path) -> None:
    folder = liar(tmp_path)
    rewrite_json(folder, schema.MANIFEST, lambda m: {**m, "devices": [{**m["devices"][0], "name": "NVIDIA A40-48Q"}]})
    why = refused(tmp_path, "board")
    assert f"board NVIDIA A40 (1 run(s): {HONEST}) and NVIDIA A40-48Q (1 run(s): {LIAR})" in why


class TestAThrottledRun:
    @staticmethod
    def throttle(folder: Path, name: str, share: float) -> None:
        held = (pl.col("t_mono_ns") - 990 * S) * share
        rewrite(folder, "samples_slow", column(name, held))

    @pytest.mark.parametrize("name", ["throttle_sw_thermal_ns", "throttle_hw_thermal_ns"])
    def test_by_heat_is_marked_with_its_share_of_the_window(self, tmp_path: Path, name: str) -> None:
        self.throttle(liar(tmp_path), name, 0.12)
        row, _ = counted(tmp_path)
        assert "thermally throttled for 12.0 % of the measure window" in row["warnings"]
        assert row["throttle_thermal_pct"] == pytest.approx(12)

    def test_by_heat_for_less_than_one_percent_is_not(self, tmp_path: Path) -> None:
        self.throttle(liar(tmp_path), "throttle_sw_thermal_ns", 0.009)
        row, _ = counted(tmp_path)
        assert "throttled" not in (row["warnings"] or "")

    def test_is_throttled_for_no_more_than_all_of_its_window(self, tmp_path: Path) -> None:
        """Software and hardware may hold a card back at the same moment."""
        folder = liar(tmp_path)
        self.throttle(folder, "throttle_sw_thermal_ns", 0.9)
        self.throttle(folder, "throttle_hw_thermal_ns", 0.8)
        row, _ = counted(tmp_path)
        assert row["throttle_thermal_pct"] == 100


def test_a_run_that_comes_in_two_copies_is_one_run(tmp_path: Path) -> None:
    """Found by content, not by name: the copy lies under another folder and another name."""
    folder = liar(tmp_path)
    copy = tmp_path / "grace" / "z-backup" / "renamed"
    shutil.copytree(folder, copy)
    dataset = merged(tmp_path)
    assert dataset.skipped.select("path", "code", "run_id").rows() == [(str(copy), "duplicate", LIAR)]
    assert str(folder) in dataset.skipped["reason"][0]
    assert cell_of(dataset)["n"] == 2


class TestATruncatedPart:
    @pytest.mark.parametrize(
        ("index", "why"),
        [
            (0, "after the window opened"),
            (1, "gap of "),
            (2, "before the window closed"),
        ],
    )
    def test_is_listed_and_its_samples_are_missed(self, tmp_path: Path, index: int, why: str) -> None:
        part = liar(tmp_path) / "samples_fast" / f"part-{index:06d}.parquet"
        part.write_bytes(part.read_bytes()[:-40])
        assert why in caught(tmp_path)
        skip = open_dataset(tmp_path / "ds").skipped.row(0, named=True)
        assert (skip["path"], skip["code"], skip["run_id"]) == (str(part), "truncated", LIAR)
        assert "no readable Parquet footer" in skip["reason"]

    def test_of_the_step_table_is_told_by_the_steps_that_are_missing(self, tmp_path: Path) -> None:
        folder = liar(tmp_path)
        part = folder / "steps" / "part-000000.parquet"
        rows = pl.read_parquet(part)
        rewrite(folder, "steps", lambda rows: rows.head(40))
        lost = folder / "steps" / "part-000001.parquet"
        rows.tail(20).write_parquet(lost)
        lost.write_bytes(lost.read_bytes()[:-40])
        row, _ = counted(tmp_path)
        assert "step table holds 40 of 60 steps" in row["warnings"]
        assert open_dataset(tmp_path / "ds").skipped["path"].to_list() == [str(lost)]


class TestAClockJump:
    def test_backwards_of_the_monotonic_clock_is_no_order_of_samples(self, tmp_path: Path) -> None:
        back = pl.col("t_mono_ns") - 2 * S
        rewrite(liar(tmp_path), "samples_fast", column("t_mono_ns", back, SECONDS > 15))
        assert "clock does not move forward" in caught(tmp_path)

    def test_backwards_in_the_step_table_is_one_too(self, tmp_path: Path) -> None:
        rewrite(liar(tmp_path), "steps", column("t_start_mono_ns", pl.col("t_start_mono_ns") - S, pl.col("step") == 30))
        assert "clock jump: the times of steps go back in 1 places" in caught(tmp_path)

    @pytest.mark.parametrize("seconds", [-5, 0.6])
    def test_of_the_wall_clock_makes_the_window_two_lengths(self, tmp_path: Path, seconds: float) -> None:
        def jump(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            windows[1]["t_end_unix_ns"] += round(seconds * S)
            return windows

        rewrite_json(liar(tmp_path), schema.WINDOWS, jump)
        why = f"clock jump: the window lasted 30.00 s by the monotonic clock, {30 + seconds:.2f} s by the wall clock"
        assert why in caught(tmp_path)

    def test_that_is_undone_before_the_window_closes_shows_in_the_samples(self, tmp_path: Path) -> None:
        ahead = pl.col("t_unix_ns") + 8 * S
        rewrite(liar(tmp_path), "samples_fast", column("t_unix_ns", ahead, SECONDS.is_between(10, 20)))
        assert "clock jump: wall and monotonic clock of the samples move 8.00 s against each other" in caught(tmp_path)

    def test_of_less_than_half_a_second_is_none(self, tmp_path: Path) -> None:
        ahead = pl.col("t_unix_ns") + S // 2 - 1_000_000
        rewrite(liar(tmp_path), "samples_fast", column("t_unix_ns", ahead, SECONDS > 10))
        counted(tmp_path)


SHARE = st.floats(0, 1)


@st.composite
def valid_runs(draw: st.DrawFn) -> dict[str, Any]:
    """The row of a run with nothing wrong with it: any length, rate, power, load and throttling."""
    hz, seconds, num_steps = draw(st.sampled_from([5.0, 10.0, 20.0])), draw(st.floats(2, 40)), draw(st.integers(1, 80))
    batch, rng = draw(st.integers(1, 256)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    start = draw(st.integers(10**10, 10**15))
    end = start + round(seconds * S)
    facts = manifest("r-1", batch=batch, telemetry={"hz": hz})
    head = {"run_id": "r-1", "gpu_uuid": "GPU-a40", "source": "nvml", "read_us": 100.0}
    lanes = []
    for rate in (hz, 1.0):
        tick = np.arange(int((seconds + 6) * rate) + 2)
        t = start - 3 * S + np.round((tick + rng.uniform(-0.2, 0.2, len(tick))) * S / rate).astype(np.int64)
        lanes.append({**head, "tick_seq": tick, "t_mono_ns": t, "t_unix_ns": t + UNIX0})
    fast, slow = lanes
    watts = rng.uniform(30, 300, len(fast["tick_seq"]))
    joules = np.concatenate([[0], np.cumsum((watts[1:] + watts[:-1]) / 2 * np.diff(fast["t_mono_ns"]) * 1e-9)])
    counter = None if draw(st.booleans()) else np.round(joules * 1000).astype(np.uint64)
    fast |= {"power_instant_w": watts, "power_avg1s_w": watts, "energy_mj": counter}
    fast |= {name: rng.uniform(0, 100, len(watts)) for name in ("gpu_util_pct", "mem_active_pct")}
    for name in ("throttle_power_cap_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns"):
        slow[name] = np.round((slow["t_mono_ns"] - slow["t_mono_ns"][0]) * draw(SHARE)).astype(np.uint64)
    slow |= {"vram_total_mib": 46068.0, "vram_reserved_mib": 600.0, "vram_used_mib": draw(SHARE) * 45468}
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
    return run_row.summarise(
        facts, [window], frame("samples_fast", fast), frame("samples_slow", slow), frame("steps", steps)
    )


def frame(table: str, columns: dict[str, Any]) -> pl.DataFrame:
    """Rows by the contract; scalars are repeated, columns that are not given are null."""
    rows = next(len(value) for value in columns.values() if isinstance(value, np.ndarray))
    whole = {
        name: pl.Series(name, value) if isinstance(value, np.ndarray) else pl.Series(name, [value] * rows)
        for name in parts.polars_schema(table)
        for value in [columns.get(name)]
    }
    return pl.DataFrame(whole).cast(parts.polars_schema(table))


@settings(max_examples=60, deadline=None)
@given(valid_runs())
def test_the_figures_of_any_valid_window_agree_with_each_other(row: dict[str, Any]) -> None:
    assert row["valid"], row["invalid_reason"]
    assert row["joules_per_image"] * row["images_per_s_per_w"] == pytest.approx(1, rel=1e-9)
    assert row["power_w"] * row["window_s"] == pytest.approx(row["energy_j"], rel=1e-9)
    assert row["images_per_s"] / row["power_w"] == pytest.approx(row["images_per_s_per_w"], rel=1e-9)
    shares = [name for name in FLOAT if name.endswith("_pct") and name != "step_drift_pct"]  # a drift may be negative
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
