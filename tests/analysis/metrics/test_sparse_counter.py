"""An energy counter that is read once a second, beside power that is sampled at 10 Hz."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from analysis.metrics.energy import add_counter
from tests.analysis.build import write_run
from tests.analysis.metrics.test_run_row import changed

S = 1_000_000_000
READ_FIRST = 20
BURST_W, IDLE_W, PERIOD_S, BUSY_S = 290.0, 40.0, 2.0, 0.7  # power is a square wave
TELEMETRY = {"hz": 10, "energy_hz": 1}


def joules(seconds: pl.Expr) -> pl.Expr:
    """Return the energy of the square wave since the time 0, in J."""
    whole = (seconds / PERIOD_S).floor()
    part = seconds - whole * PERIOD_S
    per_period = BURST_W * BUSY_S + IDLE_W * (PERIOD_S - BUSY_S)
    busy = part.clip(upper_bound=BUSY_S)
    return whole * per_period + busy * BURST_W + (part - busy) * IDLE_W


def since_start() -> pl.Expr:
    """Return the time since the measure window opened, plus 10 s so that it is positive."""
    return (pl.col("t_mono_ns") - 990 * S) / 1e9


def wave(frame: pl.DataFrame) -> pl.DataFrame:
    """Give samples the power of the wave, and a counter that is exact."""
    phase = since_start() % PERIOD_S
    watts = pl.when(phase < BUSY_S - 1e-6).then(BURST_W).otherwise(IDLE_W).cast(pl.Float32)
    energy = (5_000_000 + 1000 * joules(since_start())).round().cast(pl.UInt64).alias("energy_mj")
    return frame.with_columns(energy, watts.alias("power_instant_w"), watts.alias("power_avg1s_w"))


def sparse(every: int = 10, first: int = READ_FIRST) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Leave the counter in the first rows, in one of `every` later ones, and in the last."""

    def thin(frame: pl.DataFrame) -> pl.DataFrame:
        tick = pl.col("tick_seq")
        read = (tick < first) | (tick % every == 0) | (tick == tick.max())
        nulls = pl.when(~read).then(pl.lit("energy_mj=not_due")).alias("nulls")
        return frame.with_columns(pl.when(read).then("energy_mj").alias("energy_mj"), nulls)

    return thin


def row(tmp_path: Path, *changes: Callable[[pl.DataFrame], pl.DataFrame], **facts: Any) -> dict[str, Any]:
    """Return the row of a run after the changes of its samples, which was sampled at 10 Hz and its counter at 1 Hz."""

    def change(frame: pl.DataFrame) -> pl.DataFrame:
        for one in changes:
            frame = one(frame)
        return frame

    return changed(write_run(tmp_path, **{"telemetry": TELEMETRY, **facts}), change)


def shifted(frame: pl.DataFrame) -> pl.DataFrame:
    """Number the ticks anew, so that no reading lies on an edge of the window."""
    return frame.filter(pl.col("tick_seq") >= 3).with_columns((pl.col("tick_seq") - 3).alias("tick_seq"))


def test_counter_read_once_a_second_gives_the_energy_of_one_read_in_every_row(tmp_path: Path) -> None:
    dense = row(tmp_path / "dense", shifted, telemetry={"hz": 10})
    once = row(tmp_path / "once", shifted, sparse())
    assert once["valid"], once["invalid_reason"]
    assert once["energy_source"] == "counter"
    for name in ("energy_j", "power_w", "joules_per_image", "energy_error_pct", "energy_update_ms"):
        assert once[name] == pytest.approx(dense[name], rel=1e-6), name
    assert once["warnings"] == dense["warnings"]
    assert once["coverage_pct"] == dense["coverage_pct"]


def test_power_says_how_the_counter_grew_between_two_readings(tmp_path: Path) -> None:
    """The window opens and closes between two readings, amid changes of power: straight lines would be 82 J off."""
    exact = row(tmp_path / "dense", wave, shifted, window_s=30.5, telemetry={"hz": 10})["energy_j"]
    once = row(tmp_path / "once", wave, shifted, sparse(), window_s=30.5)
    assert once["valid"], once["invalid_reason"]
    assert once["energy_j"] == pytest.approx(exact, abs=5)
    # What power changed at the edges is part of the uncertainty.
    assert once["energy_edge_pct"] > 100 * 2 * 0.1 / 30.5 + 1


def test_without_reads_in_every_row_the_interval_of_the_readings_bounds_the_edges(tmp_path: Path) -> None:
    once = row(tmp_path, shifted, sparse(first=0))
    assert once["valid"], once["invalid_reason"]
    assert once["energy_update_ms"] == pytest.approx(1000)
    assert once["energy_edge_pct"] == pytest.approx(100 * 2 * 1.0 / 30)


def test_counter_that_stands_still_between_readings_is_found(tmp_path: Path) -> None:
    def stuck(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(pl.col("energy_mj").clip(upper_bound=5_000_000 + 25 * 200_000).alias("energy_mj"))

    once = row(tmp_path, shifted, stuck, sparse())
    assert "energy counter does not move for" in once["invalid_reason"]


def test_a_few_lost_readings_are_a_gap_and_the_integral_takes_their_place(tmp_path: Path) -> None:
    def lose(frame: pl.DataFrame) -> pl.DataFrame:
        lost = pl.col("tick_seq").is_between(200, 250)
        idle = pl.when(pl.col("tick_seq") == 0).then(60.0).otherwise("power_instant_w").cast(pl.Float32)
        return frame.with_columns(pl.when(~lost).then("energy_mj").alias("energy_mj"), power_instant_w=idle)

    once = row(tmp_path, shifted, sparse(), lose)
    assert once["energy_source"] == "integral"
    assert "energy_mj unknown for 7.00 s (limit 3.00 s)" in once["warnings"]


def test_reason_of_a_missing_energy_is_never_that_the_counter_was_not_due(tmp_path: Path) -> None:
    def hide(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(pl.lit(None).alias("energy_mj"), pl.lit(None).alias("power_instant_w"))

    hidden = row(tmp_path, shifted, sparse(), hide)
    assert hidden["energy_j"] is None
    assert "not_due" not in hidden["null_reasons"]


def test_rates_of_the_energy_counter_must_agree(tmp_path: Path) -> None:
    once = row(tmp_path, shifted, sparse(), overrides=["telemetry.energy_hz=2"])
    assert "telemetry.energy_hz=2 was requested, and the manifest says 1" in once["invalid_reason"]


def test_energy_of_calls_between_two_readings_follows_power() -> None:
    """Two calls in the second between two readings: 0.5 s of 600 W and 0.5 s of 100 W."""
    tick = np.arange(301)
    busy = tick % 20 < 10
    counter = np.concatenate([[0], np.cumsum(np.where(busy[:-1], 30_000, 5_000))])
    read = (tick < READ_FIRST) | (tick % 20 == 5)
    samples = pl.DataFrame(
        {
            "gpu_uuid": "GPU-1",
            "t_mono_ns": tick * (S // 20),
            "tick_seq": tick,
            "energy_mj": pl.Series(counter).zip_with(pl.Series(read), pl.Series([None] * len(tick), dtype=pl.Int64)),
            "power_instant_w": np.where(busy, 600.0, 100.0),
        }
    )
    calls = pl.DataFrame({"t_start_mono_ns": [5 * S, 5 * S + S // 2], "t_end_mono_ns": [5 * S + S // 2, 6 * S]})
    rows = add_counter(calls, samples)
    growth = rows["counter_end_j"] - rows["counter_start_j"]
    assert growth.to_list() == [pytest.approx(300, rel=0.06), pytest.approx(50, rel=0.35)]
    assert rows["counter_update_s"][0] == pytest.approx(0.05)
