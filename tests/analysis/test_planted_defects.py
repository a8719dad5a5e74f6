"""Defects planted in run directories: each is found, for the right reason. Some go through the real merge.

A defective run stays in the dataset with its reason, and is in no mean.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import merge
from analysis.columns import COLUMNS, REAL
from analysis.dataset import Dataset, open_dataset
from analysis.stats.cells import build_cells
from inpaint_bench.core import schema
from inpaint_bench.core.errors import UserError

from .build import A40, S, rewrite, rewrite_json, write_event, write_run
from .metrics.test_audit import judged, load

DEFECTIVE, SOUND = "r-2-defective", "r-1-sound"
SECONDS = (pl.col("t_mono_ns") - 1000 * S) / 1e9  # of the measure window
Change = Callable[[Path], object]


def column(table: str, name: str, value: Any, where: pl.Expr | None = None) -> Change:
    """Return a change of one column, in some of its rows."""
    new, inside = value if isinstance(value, pl.Expr) else pl.lit(value), pl.lit(True) if where is None else where

    def change(rows: pl.DataFrame) -> pl.DataFrame:
        return rows.with_columns(pl.when(inside).then(new).otherwise(name).cast(rows.schema[name]).alias(name))

    return lambda folder: rewrite(folder, table, change)


def fast(name: str, value: Any, where: pl.Expr | None = None) -> Change:
    return column("samples_fast", name, value, where)


def event(kind: str, detail: str, **where: Any) -> Change:
    return lambda folder: write_event(folder, kind, detail, **where)


def window(changed: str, **values: Any) -> Change:
    """Return a change of the windows of one kind: a value, or a function of the old one."""

    def change(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for one in (one for one in windows if one["kind"] == changed):
            one |= {name: value(one[name]) if callable(value) else value for name, value in values.items()}
        return windows

    return lambda folder: rewrite_json(folder, schema.WINDOWS, change)


def moved(kind: str, *clocks: str, **seconds: float) -> Change:
    """Return a change of the windows of one kind: edges moved by seconds, on both clocks if none is named."""
    edges = {f"t_{edge}_{clock}_ns": by for edge, by in seconds.items() for clock in clocks or ("mono", "unix")}
    return window(kind, **{name: lambda ns, by=by: ns + round(by * S) for name, by in edges.items()})


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def row_of(tmp_path: Path, change: Change, **built: Any) -> dict[str, Any]:
    folder = write_run(tmp_path, DEFECTIVE, **built)
    change(folder)
    return judged(load(folder))


NEIGHBOUR = "GPU-of-a-neighbour"
# An earlier boot: equal monotonic times of two nodes of a requeued job, which occur by chance, are no overlap.
EARLIER_BOOT = both(moved("warmup", "mono", start=12, end=12), moved("warmup", "unix", start=-5000, end=-5000))
DEFECTS: dict[str, tuple[Change, str]] = {
    "another GPU": (
        both(fast("gpu_uuid", NEIGHBOUR), column("samples_slow", "gpu_uuid", NEIGHBOUR)),
        f"GPUs differ: samples of {NEIGHBOUR}, which the manifest does not list; no samples of {A40}",
    ),
    "another GPU in the slow samples alone": (
        column("samples_slow", "gpu_uuid", NEIGHBOUR),
        f"slow samples of {NEIGHBOUR}, which the manifest does not list",
    ),
    "a co-tenant": (event("co_tenant", "pid 4242"), f"another process was on GPU {A40}: pid 4242"),
    "a co-tenant before the warm-up": (
        event("co_tenant", "pid 4242", at_s=-9.9),
        f"another process was on GPU {A40}: pid 4242",
    ),
    "a counter that was reset": (
        fast("energy_mj", pl.col("energy_mj") - 5_000_000, SECONDS > 12),
        f"GPU {A40}: energy counter went back (driver reloaded?)",
    ),
    "a counter that stands still": (
        fast("energy_mj", 5_000_000),
        "energy counter does not move for 30.00 s at 0.0 s of the window, while 200 W are drawn",
    ),
    "a counter that stands still half-way": (
        fast("energy_mj", pl.col("energy_mj").clip(upper_bound=5_000_000 + 25 * 200_000)),
        "energy counter does not move for 15.00 s at 15.0 s of the window",
    ),
    "samples that begin late": (
        lambda folder: rewrite(folder, "samples_fast", lambda rows: rows.filter(SECONDS > 1)),
        "after the window opened",
    ),
    "samples that end early": (
        lambda folder: rewrite(folder, "samples_fast", lambda rows: rows.filter(SECONDS < 29)),
        "before the window closed",
    ),
    "samples in reverse": (
        lambda folder: rewrite(folder, "samples_fast", lambda rows: rows.reverse()),
        "clock does not move forward",
    ),
    "equal ticks": (fast("tick_seq", 7), "tick_seq repeats"),
    "a window without an end": (
        window("measure", t_end_mono_ns=None, t_end_unix_ns=None),
        "no completed measure window (completed, without an end)",
    ),
    "a state that the scheduler saved": (
        lambda folder: (folder / schema.SCHEDULER).write_text('{"state": "PREEMPTED", "detail": ""}'),
        "status failed (preempted)",
    ),
    "a measure window that starts in the warm-up": (
        moved("measure", start=-4),
        "warm-up included: the measure window shares 4.00 s with warmup window w-0",
    ),
    "a warm-up window inside it": (
        moved("warmup", start=12, end=12),
        "warm-up included: the measure window shares 9.00 s with warmup window w-0",
    ),
    "steps that began before the window": (
        column("steps", "t_start_mono_ns", pl.col("t_start_mono_ns") - 6 * S, pl.col("step") < 10),
        "warm-up included: 10 steps began before the measure window opened",
    ),
    "a validation inside it": (
        both(moved("warmup", start=12, end=12), window("warmup", kind="validation")),
        "the measure window shares 9.00 s with validation window w-0",
    ),
    "a power limit that changed": (
        event("power_limit", "300 W to 250 W"),
        f"the power limit changed during the run on GPU {A40}: 300 W to 250 W",
    ),
    "a monotonic clock that went back": (
        fast("t_mono_ns", pl.col("t_mono_ns") - 2 * S, SECONDS > 15),
        "clock does not move forward",
    ),
    "steps that went back": (
        column("steps", "t_start_mono_ns", pl.col("t_start_mono_ns") - S, pl.col("step") == 30),
        "clock jump: the times of steps go back at 1 step",
    ),
    "a wall clock that was set back": (
        moved("measure", "unix", end=-5),
        "clock jump: the window lasted 30.00 s by the monotonic clock, 25.00 s by the wall clock",
    ),
    "a wall clock that was set forward": (
        moved("measure", "unix", end=0.6),
        "clock jump: the window lasted 30.00 s by the monotonic clock, 30.60 s by the wall clock",
    ),
    "a jump that is reverted before the window closes": (
        fast("t_unix_ns", pl.col("t_unix_ns") + 8 * S, SECONDS.is_between(10, 20)),
        "clock jump: wall clock and monotonic clock of the samples drift 8.00 s apart",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_makes_the_run_invalid(tmp_path: Path, name: str) -> None:
    change, sentence = DEFECTS[name]
    row = row_of(tmp_path, change)
    assert not row["valid"]
    assert sentence in row["invalid_reason"]


@pytest.mark.parametrize(
    ("built", "sentence"),
    [
        ({"gap": (10.0, 13.0)}, f"GPU {A40}: gap of 3.00 s at 10.0 s of the window (limit 0.50 s)"),
        ({"power_w": 330.0}, "mean power of 330 W, over the limit of 300 W in the manifest: it was not in force"),
        ({"status": "interrupted", "reason": "preempted"}, "status interrupted (preempted)"),
        ({"status": "running"}, "status running"),
    ],
)
def test_a_run_that_was_cut_or_sampled_badly_is_invalid(tmp_path: Path, built: Any, sentence: str) -> None:
    row = judged(load(write_run(tmp_path, **built)))
    assert not row["valid"]
    assert sentence in row["invalid_reason"]
    assert "status" not in built or {row[name] for name in ("images_per_s", "power_w", "joules_per_image")} == {None}


@pytest.mark.parametrize(
    ("change", "built"),
    [
        (event("co_tenant", "pid 4242", gpu_uuid="GPU-of-another-node"), {}),
        (event("co_tenant", "pid 4242", at_s=-1500), {}),  # during an earlier start
        (fast("energy_mj", pl.col("energy_mj") // 100_000 * 100_000), {}),  # updates every half second
        (fast("t_unix_ns", pl.col("t_unix_ns") + S // 2 - 1_000_000, SECONDS > 10), {}),
        (EARLIER_BOOT, {"slurm": {"restart_count": 1}}),
    ],
)
def test_what_is_no_defect_leaves_the_run_valid(tmp_path: Path, change: Change, built: Any) -> None:
    row = row_of(tmp_path, change, **built)
    assert row["valid"], row["invalid_reason"]
    assert row["energy_source"] == "counter"


def test_a_counter_that_cannot_be_trusted_gives_no_energy_or_the_integral(tmp_path: Path) -> None:
    reset, still, half = (
        row_of(tmp_path / name, DEFECTS[f"a counter that {name}"][0])
        for name in ("was reset", "stands still", "stands still half-way")
    )
    assert reset["energy_j"] is None
    assert (still["energy_source"], still["power_w"]) == ("integral", pytest.approx(200))
    assert "energy_ratio=energy counter does not move" in still["null_reasons"]
    assert half["energy_j"] == pytest.approx(6000)


def test_deviation_from_the_integral_is_a_warning_with_both_numbers(tmp_path: Path) -> None:
    row = row_of(tmp_path, fast("energy_mj", pl.col("energy_mj") // 100 * 93))
    assert row["valid"], row["invalid_reason"]
    both_numbers = "-7.0 % from the integral of sampled power: 5580 J by the counter, 6000 J by the integral"
    assert f"energy counter deviates {both_numbers}" in row["warnings"]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [({"sw": 0.12}, 12), ({"hw": 0.12}, 12), ({"sw": 0.009}, 0.9), ({"sw": 0.9, "hw": 0.8}, 100)],
)
def test_throttling_by_temperature_has_a_warning_from_one_percent_on(
    tmp_path: Path, shares: dict[str, float], expected: float
) -> None:
    times = [
        column("samples_slow", f"throttle_{name}_thermal_ns", (pl.col("t_mono_ns") - 990 * S) * share)
        for name, share in shares.items()
    ]
    row = row_of(tmp_path, both(*times))
    assert row["throttle_thermal_pct"] == pytest.approx(expected)
    text = f"thermally throttled for {expected:.1f} % of the measure window"
    assert (text in (row["warnings"] or "")) == (expected > 1)


def test_instant_and_averaged_power_are_never_combined(tmp_path: Path) -> None:
    halves = both(
        fast("energy_mj", None),
        fast("power_instant_w", None, SECONDS > 15),
        fast("power_avg1s_w", None, SECONDS < 15),
    )
    row = row_of(tmp_path, halves)
    assert (row["valid"], row["energy_j"], row["energy_integral_j"], row["power_w"]) == (True, None, None, None)
    assert "left out: power_instant_w" in row["warnings"]
    row = row_of(tmp_path / "counter", fast("power_instant_w", None))
    assert (row["energy_source"], row["energy_j"], row["energy_ratio"]) == ("counter", pytest.approx(6000), None)


# --- through the merge ------------------------------------------------------------------------------


def beside_a_sound_run(tmp_path: Path, **built: Any) -> Path:
    """Write the run to plant a defect in, beside a sound one of the same cell."""
    write_run(tmp_path / "grace", SOUND)
    return write_run(tmp_path / "grace", DEFECTIVE, **built)


def merged(tmp_path: Path) -> tuple[Dataset, dict[str, Any], dict[str, Any]]:
    """Return the dataset, the defective run's row, and the cell."""
    merge.merge([tmp_path / "grace"], tmp_path / "ds")
    dataset = open_dataset(tmp_path / "ds")
    row = dataset.runs.filter(pl.col("run_id") == DEFECTIVE).row(0, named=True)
    return dataset, row, build_cells(dataset.runs).row(0, named=True)


def test_missing_slow_samples_make_peaks_null(tmp_path: Path) -> None:
    rewrite(beside_a_sound_run(tmp_path), "samples_slow", lambda rows: rows.filter(~SECONDS.is_between(5, 20)))
    _, row, cell = merged(tmp_path)
    assert "left out: temp_gpu_c unknown for 17.00 s (limit 3.00 s)" in row["warnings"]
    hidden = ("temp_gpu_c_max", "temp_gpu_c_mean", "vram_used_mib_peak", "vram_pct", "sm_clock_mhz_mean")
    assert [row[name] for name in hidden] == [None] * len(hidden)
    assert all(f"{name}=" in row["null_reasons"] for name in hidden)
    assert (cell["run_ids"], cell["temp_gpu_c_max_n"], cell["power_w_n"]) == ([SOUND, DEFECTIVE], 1, 2)


def test_instant_and_averaged_power_of_two_runs_are_never_averaged(tmp_path: Path) -> None:
    both(fast("energy_mj", None), fast("power_instant_w", None), fast("power_avg1s_w", 250.0))(
        beside_a_sound_run(tmp_path)
    )
    _, row, cell = merged(tmp_path)
    assert (row["valid"], row["energy_j"], row["power_w"], row["joules_per_image"]) == (True, None, None, None)
    assert "no energy: only one-second averages of power are known" in row["warnings"]
    assert (cell["power_w"], cell["power_w_n"]) == (pytest.approx(200), 1)


SXM = {"name": "NVIDIA A100-SXM4-40GB"}


@pytest.mark.parametrize(
    ("attribute", "built", "values"),
    [
        ("power_semantics", {"counter": False}, ("energy_mj by nvml", "power_instant_w by nvml")),
        ("power_limit", {"devices": {"power_limit_w": 250.0}}, ("300 W", "250 W")),
        ("driver", {"environment": {"driver": "570.172.08"}}, ("580.95.05", "570.172.08")),
        ("board", {"gpu": "a100", "devices": SXM}, ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB")),
    ],
)
def test_runs_that_cannot_be_compared_are_a_conflict(
    tmp_path: Path, attribute: str, built: dict[str, Any], values: tuple[str, str]
) -> None:
    """If that is allowed, they are two cells."""
    device = built.get("devices", {})
    changes = {name: value for name, value in built.items() if name != "devices"}
    write_run(tmp_path / "grace", SOUND, **{name: changes[name] for name in ("gpu",) if name in changes})
    folder = write_run(tmp_path / "grace", DEFECTIVE, **changes)
    rewrite_json(folder, schema.MANIFEST, lambda m: {**m, "devices": [m["devices"][0] | device]})
    with pytest.raises(UserError, match=f"add --allow-mixed {attribute}: then they are cells of their own") as error:
        merge.merge([tmp_path / "grace"], tmp_path / "ds")
    text = f"{attribute} {values[0]} (1 run: {SOUND}) and {values[1]} (1 run: {DEFECTIVE})"
    assert text in str(error.value)
    assert not (tmp_path / "ds").exists()
    merge.merge([tmp_path / "grace"], tmp_path / "ds", allow_mixed=[attribute])
    cells = build_cells(open_dataset(tmp_path / "ds").runs)
    assert sorted(cells["run_ids"].to_list()) == [[SOUND], [DEFECTIVE]]
    assert cells["series"].n_unique() == 2


@pytest.mark.parametrize(
    ("index", "reason"), [(0, "after the window opened"), (1, "gap of "), (2, "before the window closed")]
)
def test_a_truncated_part_is_listed_and_its_samples_are_missing(tmp_path: Path, index: int, reason: str) -> None:
    part = beside_a_sound_run(tmp_path) / "samples_fast" / f"part-{index:06d}.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    dataset, row, _ = merged(tmp_path)
    assert reason in row["invalid_reason"]
    skip = dataset.skipped.row(0, named=True)
    assert (skip["path"], skip["code"], skip["run_id"]) == (str(part), "truncated", DEFECTIVE)
    assert "no readable Parquet footer" in skip["reason"]


def test_a_truncated_part_of_the_step_table_gives_a_warning_with_the_missing_steps(tmp_path: Path) -> None:
    folder = beside_a_sound_run(tmp_path)
    rows = pl.read_parquet(folder / "steps" / "part-000000.parquet")
    rewrite(folder, "steps", lambda rows: rows.head(40))
    lost = folder / "steps" / "part-000001.parquet"
    rows.tail(20).write_parquet(lost)
    lost.write_bytes(lost.read_bytes()[:-40])
    dataset, row, _ = merged(tmp_path)
    assert row["valid"], row["invalid_reason"]
    assert "step table holds 40 of 60 steps" in row["warnings"]
    assert dataset.skipped["path"].to_list() == [str(lost)]


# --- any valid run ----------------------------------------------------------------------------------


@pytest.mark.faults  # random runs
@settings(max_examples=60, deadline=None)
@given(
    hz=st.sampled_from([5.0, 10.0, 20.0]),
    window_s=st.integers(4, 40),
    steps_per_s=st.sampled_from([0.5, 1.0, 4.0, 10.0]),
    power_w=st.floats(30, 290),
    wait_share=st.floats(0, 1),
    batch=st.integers(1, 256),
    counter=st.booleans(),
)
def test_figures_of_any_valid_window_are_consistent(
    tmp_path_factory: pytest.TempPathFactory, hz: float, batch: int, **built: Any
) -> None:
    sampled = {"hz": hz, "telemetry": {"hz": hz}, "noise": 0.02}
    folder = write_run(tmp_path_factory.mktemp("any"), batch=batch, **sampled, **built)
    row = judged(load(folder))
    assert row["valid"], row["invalid_reason"]
    assert row["joules_per_image"] * row["images_per_s_per_w"] == pytest.approx(1, rel=1e-9)
    assert row["power_w"] * row["window_s"] == pytest.approx(row["energy_j"], rel=1e-9)
    assert row["images_per_s"] / row["power_w"] == pytest.approx(row["images_per_s_per_w"], rel=1e-9)
    shares = [each.name for each in COLUMNS if each.kind == REAL and each.name.endswith("_pct")]
    known = {name: row[name] for name in shares if row[name] is not None and not name.startswith("step_")}
    assert known.keys() >= {"coverage_pct", "data_wait_pct", "gpu_util_pct", "vram_pct", "throttle_thermal_pct"}
    assert {name: value for name, value in known.items() if not 0 <= value <= 100} == {}
